//! VT-d's second stage: three to five levels, with and without dirty and snoop bits.

use dmaspan::io_pgtable::{
    Arena, DirtyTracking, Format, ReadOnlyLeaves, SnoopControl, VtdSs, VtdSsConfig,
};
use dmaspan::{IovaRange, PhysAddr, Prot, lg2};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::Switch;
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};

use super::checked;

struct SecondStage;

impl Subject for SecondStage {
    type Format = VtdSs;
    type Walker = VtdSsWalker;

    fn configs() -> Vec<(String, VtdSs)> {
        let (dirty, read_only) = (DirtyTracking::Hardware, ReadOnlyLeaves::Refused);
        let snoop = SnoopControl::Cached;
        let forced = SnoopControl::Forced;
        let configs = [
            ("39 bits", VtdSsConfig::new(39, 39)),
            ("39 to 32 bits", VtdSsConfig { dirty, ..VtdSsConfig::new(39, 32) }),
            ("48 bits", VtdSsConfig { dirty, snoop, ..VtdSsConfig::new(48, 46) }),
            ("48 bits that snoop", VtdSsConfig { snoop: forced, ..VtdSsConfig::new(48, 52) }),
            ("57 bits", VtdSsConfig { dirty, ..VtdSsConfig::new(57, 52) }),
            ("writable", VtdSsConfig { read_only, snoop, ..VtdSsConfig::new(48, 52) }),
        ];
        configs.map(|(name, config)| (name.to_owned(), VtdSs::new(config).unwrap())).into()
    }

    fn walker(format: &VtdSs, root: PhysAddr, _top_level: u32) -> VtdSsWalker {
        let [entry, _] = format.registers(root).pasid_entry;
        let switch = |on: bool| if on { Switch::On } else { Switch::Off };
        // Without snoop control bit 11 is reserved.
        let snoops = format.template(0, 12, Prot::READ_WRITE | Prot::CACHE) & 1 << 11;
        VtdSsWalker::new(VtdSsWalkRegisters {
            ssptptr: entry & !lg2::mask(12),
            aw: u8::try_from(entry >> 2 & 0b111).unwrap(),
            ssade: switch(entry & 1 << 9 != 0),
            host_lg2: format.geometry().output_bits,
            sslps: 0b11,
            snoop_control: switch(snoops != 0),
        })
        .unwrap()
    }

    fn strict(walker: &VtdSsWalker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(suite, SecondStage);
