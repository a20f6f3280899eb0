//! Hardware that keeps walks until a command takes them.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, PageTable, VtdSs, X86_64};
use dmaspan::iommu::Domain;
use dmaspan::{PhysAddr, lg2};
use dmaspan_drivers::vtd::{Mode, Stage};
use dmaspan_sim::iotlb::{AbsentEntries, IotlbConfig};
use dmaspan_sim::walker::Switch;
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use dmaspan_sim::walker::x86_64::{X86_64WalkRegisters, X86Walker};

use crate::fake::{CAP, Fake, start};
use crate::walked::{CacheCommand, Walked};

/// Features: of the capabilities, those cleared and those set.
fn second_stage(cleared: u64, set: u64, absent: AbsentEntries, seed: u64) {
    let fake = Fake::new();
    fake.state().cap = CAP & !cleared | set;
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let format = VtdSs::new(iommu.second_stage_config().expect("it has one")).expect("it fits");
    let arena = Arena::new(PhysAddr::new(0x1_0000_0000), 16 << 20);
    let table = PageTable::new(format, arena).expect("there is room");
    let ops = iommu.ops(Stage::Second).expect("there is a number");
    let domain = Arc::new(Domain::new(table, ops).expect("it is empty"));
    let [low, high] = domain.format().registers(domain.root()).context_entry;
    let walker = VtdSsWalker::new(VtdSsWalkRegisters {
        ssptptr: low & !lg2::mask(12),
        aw: (high & 7).try_into().unwrap(),
        ssade: Switch::Off,
        host_lg2: domain.geometry().output_bits,
        sslps: 3,
        snoop_control: Switch::On,
    });
    let config = IotlbConfig { absent, ..IotlbConfig::default() };
    let commands = || fake.told().into_iter().filter_map(CacheCommand::vtd).collect();
    let space = domain.ops().domain_id().into();
    Walked::new(&domain, (walker.expect("it is one"), config), space, &commands, seed).storm(150);
}

#[test]
fn nothing_is_kept_of_a_second_stage_that_its_tables_contradict() {
    for seed in 0..4 {
        second_stage(0, 0, AbsentEntries::NotCached, seed);
        // Blocks of 2^3 pages at most, and none at all.
        second_stage(0x3f << 48, 3 << 48, AbsentEntries::NotCached, seed);
        second_stage(1 << 39, 0, AbsentEntries::NotCached, seed);
    }
}

#[test]
fn entries_of_any_level_that_were_absent_are_seen_in_caching_mode_once_they_are_mapped() {
    for seed in 0..4 {
        second_stage(0, 1 << 7, AbsentEntries::Cached, seed);
        second_stage(1 << 39, 1 << 7, AbsentEntries::Cached, seed);
    }
}

#[test]
fn nothing_is_kept_of_a_first_stage_that_its_tables_contradict() {
    for seed in 0..4 {
        let fake = Fake::new();
        let iommu = start(&fake, Mode::Scalable).expect("it starts");
        let format = X86_64::new(iommu.first_stage_config().expect("it has one")).expect("it fits");
        let arena = Arena::new(PhysAddr::new(0x1_0000_0000), 16 << 20);
        let table = PageTable::new(format, arena).expect("there is room");
        let ops = iommu.ops(Stage::First).expect("there is a number");
        let domain = Domain::new(table, ops).expect("it is empty");
        let levels = domain.geometry().top_level + 1;
        let walker = X86Walker::new(X86_64WalkRegisters {
            root: domain.root().get(),
            levels: u8::try_from(levels).unwrap(),
            physical_lg2: domain.geometry().output_bits,
            ..X86_64WalkRegisters::default()
        });
        let commands = || fake.told().into_iter().filter_map(CacheCommand::vtd).collect();
        let space = domain.ops().domain_id().into();
        let config = IotlbConfig::default();
        Walked::new(&domain, (walker.expect("it is one"), config), space, &commands, seed)
            .storm(150);
    }
}
