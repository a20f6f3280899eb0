//! AMD's host tables: every power of two, trees that begin with any number of levels and grow.

use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, DirtyTracking};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};

use super::checked;

pub(crate) struct Amd;

impl Subject for Amd {
    type Format = AmdV1;
    type Walker = AmdV1Walker;

    fn configs() -> Vec<(String, AmdV1)> {
        let dirty = DirtyTracking::Hardware;
        let three = Some(1 << 12 | 1 << 21 | 1 << 30);
        let plain = AmdV1Config::new(48, 48);
        let configs = [
            ("48 bits", plain),
            ("48 bits, three sizes", AmdV1Config { page_sizes: three, ..plain }),
            ("64 bits, dirty", AmdV1Config { dirty, ..AmdV1Config::new(64, 52) }),
            ("64 bits from 1 level", AmdV1Config { first_levels: 1, ..AmdV1Config::new(64, 52) }),
            ("48 bits at once", AmdV1Config { first_levels: 4, dirty, ..plain }),
            ("30 to 32 bits", AmdV1Config { first_levels: 2, ..AmdV1Config::new(30, 32) }),
        ];
        configs.map(|(name, config)| (name.to_owned(), AmdV1::new(config).unwrap())).into()
    }

    fn walker(format: &AmdV1, root: PhysAddr, top_level: u32) -> AmdV1Walker {
        let dte = format.registers(root, top_level).dte;
        AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap()
    }

    fn strict(walker: &AmdV1Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(suite, Amd);
