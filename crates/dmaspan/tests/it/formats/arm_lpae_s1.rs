//! Arm's stage 1: widths of every number of levels, both halves, with and without groups.

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, DirtyTracking, Half};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use super::{WIDTHS, checked};

struct ArmS1<const G: u32>;

impl<const G: u32> Subject for ArmS1<G> {
    type Format = ArmLpaeS1<G>;
    type Walker = ArmLpaeS1Walker;

    fn configs() -> Vec<(String, Self::Format)> {
        let most = if G == 16 { 52 } else { 48 };
        let plain = ArmLpaeS1Config::new(48, 48);
        let sizes = ArmLpaeS1::<G>::PAGE_SIZES & ((1 << 42) - 1);
        let groups = Some(sizes | ArmLpaeS1::<G>::CONTIGUOUS_SIZES);
        let dirty = DirtyTracking::Hardware;
        let config = |name: &str, config| (name.to_owned(), ArmLpaeS1::new(config).unwrap());
        let mut configs = vec![
            config("48 bits with groups", ArmLpaeS1Config { page_sizes: groups, ..plain }),
            config("dirty", ArmLpaeS1Config { dirty, page_sizes: groups, ..plain }),
            config("the most bits", ArmLpaeS1Config::new(most, most)),
            config("25 to 32 bits", ArmLpaeS1Config::new(25, 32)),
            config("upper half", ArmLpaeS1Config { half: Half::Upper, ..plain }),
        ];
        // Those of Linux's self-test.
        for (ias, oas) in WIDTHS {
            configs.push(config(&format!("{ias} to {oas} bits"), ArmLpaeS1Config::new(ias, oas)));
        }
        configs
    }

    fn walker(format: &Self::Format, root: PhysAddr, _top_level: u32) -> Self::Walker {
        crate::common::walker(format, root)
    }

    fn strict(walker: &Self::Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(granule_4k, ArmS1<12>);
format_suite!(granule_16k, ArmS1<14>);
format_suite!(granule_64k, ArmS1<16>);
