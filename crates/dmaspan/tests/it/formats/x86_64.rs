//! x86-64's tables: four and five levels, both halves, with and without optional bits.

use dmaspan::io_pgtable::{
    Arena, DirtyTracking, ExecuteDisable, Format, Half, X86_64, X86_64Config,
};
use dmaspan::{IovaRange, PhysAddr, lg2};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::x86_64::{X86_64WalkRegisters, X86Walker};
use dmaspan_sim::walker::{Requester, Switch};

use super::checked;

pub(crate) struct FirstStage;

impl Subject for FirstStage {
    type Format = X86_64;
    type Walker = X86Walker;

    fn configs() -> Vec<(String, X86_64)> {
        let (dirty, half) = (DirtyTracking::Hardware, Half::Upper);
        let execute_disable = ExecuteDisable::Enabled;
        let encryption_bit = Some(51);
        let configs = [
            ("48 bits", X86_64Config::new(48, 52)),
            (
                "48 bits, dirty",
                X86_64Config { dirty, execute_disable, ..X86_64Config::new(48, 46) },
            ),
            ("upper 48 bits", X86_64Config { half, dirty, ..X86_64Config::new(48, 40) }),
            ("57 bits", X86_64Config { execute_disable, ..X86_64Config::new(57, 52) }),
            ("upper 57 bits", X86_64Config { half, ..X86_64Config::new(57, 52) }),
            ("encrypted", X86_64Config { encryption_bit, dirty, ..X86_64Config::new(48, 48) }),
        ];
        configs.map(|(name, config)| (name.to_owned(), X86_64::new(config).unwrap())).into()
    }

    fn walker(format: &X86_64, root: PhysAddr, _top_level: u32) -> X86Walker {
        let registers = format.registers(root);
        let entry = registers.pasid_entry;
        let switch = |on: bool| if on { Switch::On } else { Switch::Off };
        X86Walker::new(X86_64WalkRegisters {
            root: entry & !lg2::mask(12),
            // FSPM.
            levels: if entry >> 2 & 0b11 == 1 { 5 } else { 4 },
            physical_lg2: format.geometry().output_bits,
            encryption_mask: (registers.gcr3_entry ^ entry) & !lg2::mask(12),
            pat: X86_64WalkRegisters::PAT_AT_RESET,
            nxe: switch(entry & 1 << 5 != 0),
            wp: Switch::On,
            pages_1g: Switch::On,
            updates: switch(format.tracks_dirty()),
            requester: Requester::User,
        })
        .unwrap()
    }

    fn strict(walker: &X86Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(suite, FirstStage);
