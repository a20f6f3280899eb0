//! The suite on the mock format: one to four levels of 2K tables.

use dmaspan::io_pgtable::{Arena, DirtyTracking};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::format_suite;
use dmaspan_sim::mock::{MockFormat, MockRegisters};
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::mock::{MockWalkRegisters as Registers, MockWalker};
use dmaspan_sim::walker::{Checked, Switch};

/// Widths of one to four levels, with whole roots and parts of one.
struct Mock;

impl Subject for Mock {
    type Format = MockFormat;
    type Walker = MockWalker;

    fn configs() -> Vec<(String, MockFormat)> {
        [
            (19, DirtyTracking::Hardware),
            (20, DirtyTracking::Off),
            (26, DirtyTracking::Hardware),
            (27, DirtyTracking::Off),
            (35, DirtyTracking::Hardware),
            (36, DirtyTracking::Off),
            (43, DirtyTracking::Hardware),
        ]
        .map(|(bits, dirty)| (format!("{bits} bits"), MockFormat::new(bits, dirty).unwrap()))
        .into()
    }

    fn walker(format: &MockFormat, root: PhysAddr, _top_level: u32) -> MockWalker {
        let MockRegisters { root, input_bits, dirty } = format.registers(root);
        let dirty_tracking = match dirty {
            DirtyTracking::Off => Switch::Off,
            DirtyTracking::Hardware => Switch::On,
        };
        MockWalker::new(Registers { root: root.get(), input_lg2: input_bits, dirty_tracking })
            .unwrap()
    }

    fn strict(walker: &MockWalker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        walker.survey(tables, range, |_| ()).map_err(|bad| bad.to_string())
    }
}

format_suite!(mock, Mock);
