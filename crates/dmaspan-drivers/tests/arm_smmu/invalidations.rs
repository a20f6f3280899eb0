//! The invalidations that hardware is told, counted.

use std::thread;

use dmaspan::Prot;
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmV7s, TableMemory};
use dmaspan::iommu::{Invalidation, IommuOps, Scope, Tables as Walks};
use dmaspan_drivers::arm_smmu::MAX_COMMANDS;
use dmaspan_sim::smmu_v2::{Behaviour, Commands, SyncCompletion, TakesEffect};

use super::rig::{Rig, Tables, TestDomain, granule, map, range, target, unmap};
use crate::for_all_tables;

/// What `f` makes the hardware do: invalidations, and waits.
fn told(rig: &Rig, f: impl FnOnce()) -> (Commands, u64, u64) {
    let before = rig.hardware.counters();
    f();
    let after = rig.hardware.counters();
    let commands = Commands {
        by_va: after.commands.by_va - before.commands.by_va,
        by_va_last: after.commands.by_va_last - before.commands.by_va_last,
        by_asid: after.commands.by_asid - before.commands.by_asid,
        by_ipa: after.commands.by_ipa - before.commands.by_ipa,
        by_ipa_last: after.commands.by_ipa_last - before.commands.by_ipa_last,
        by_vmid: after.commands.by_vmid - before.commands.by_vmid,
        ..Commands::default()
    };
    assert_eq!(commands.total(), after.commands.total() - before.commands.total());
    let waits = (after.bank_syncs - before.bank_syncs, after.global_syncs - before.global_syncs);
    (commands, waits.0, waits.1)
}

const NONE: Commands = Commands {
    by_va: 0,
    by_va_all_asids: 0,
    by_va_last: 0,
    by_va_all_asids_last: 0,
    by_asid: 0,
    all_of_bank: 0,
    by_ipa: 0,
    by_ipa_last: 0,
    by_vmid: 0,
    all: 0,
    all_hyp: 0,
};

#[test]
fn the_stores_of_a_map_are_ordered_before_a_device_is_told_of_them() {
    let rig = Rig::new();
    let domain = rig.domain::<ArmLpaeS1<12>>();
    let ordered = || rig.registers.ordered.load(std::sync::atomic::Ordering::Relaxed);
    let before = ordered();
    let told = told(&rig, || map(&domain, 0x1000, 0x8000_1000, 0x1000, Prot::READ));
    assert_eq!((ordered() - before, told), (1, (NONE, 0, 0)));
}

#[test]
fn a_gigabyte_of_pages_is_one_command_and_one_wait() {
    let rig = Rig::new();
    // Memory that is not aligned, so that all leaves are of 4K.
    let (s1, s2) = (rig.domain::<ArmLpaeS1<12>>(), rig.domain::<ArmLpaeS2<12>>());
    map(&s1, 1 << 30, 0x8000_1000, 1 << 30, Prot::READ);
    map(&s2, 1 << 30, 0x8000_1000, 1 << 30, Prot::READ);
    let whole = told(&rig, || unmap(&s1, 1 << 30, 1 << 30));
    assert_eq!(whole, (Commands { by_asid: 1, ..NONE }, 1, 0));
    let whole = told(&rig, || unmap(&s2, 1 << 30, 1 << 30));
    assert_eq!(whole, (Commands { by_vmid: 1, ..NONE }, 0, 1));
}

#[test]
fn leaves_are_named_once_each_whatever_their_size() {
    let rig = Rig::new();
    let (s1, s2) = (rig.domain::<ArmLpaeS1<12>>(), rig.domain::<ArmLpaeS2<12>>());
    let v7s = rig.domain::<ArmV7s>();
    map(&s1, 0, 0, 1 << 30, Prot::READ);
    map(&s2, 0, 0, 1 << 30, Prot::READ);
    map(&v7s, 0, 0, 1 << 30, Prot::READ);
    // A block of 1G; 64 supersections.
    let one = told(&rig, || unmap(&s1, 0, 1 << 30));
    assert_eq!(one, (Commands { by_va_last: 1, ..NONE }, 1, 0));
    let one = told(&rig, || unmap(&s2, 0, 1 << 30));
    assert_eq!(one, (Commands { by_ipa_last: 1, ..NONE }, 1, 0));
    let many = told(&rig, || unmap(&v7s, 0, 1 << 30));
    assert_eq!(many, (Commands { by_va_last: 64, ..NONE }, 1, 0));
    // Three pages, whose table stays.
    map(&s1, 0x5000, 0x5000, 0x3000, Prot::READ);
    let pages = told(&rig, || unmap(&s1, 0x5000, 0x3000));
    assert_eq!(pages, (Commands { by_va_last: 3, ..NONE }, 1, 0));
    // 2M of pages, whose table goes: walks are forgotten too.
    map(&s1, 1 << 21, 0x1000, 1 << 21, Prot::READ);
    let table = told(&rig, || unmap(&s1, 1 << 21, 1 << 21));
    assert_eq!(table, (Commands { by_va: 512, ..NONE }, 1, 0));
}

fn contiguous<F: Tables>(format: F, group: u32)
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<F>(1), rig.domain_of(format));
    stream.attach(target(&domain)).unwrap();
    let size = 1u64 << group;
    map(&domain, 0, 0, size, Prot::READ);
    assert!((0..size).step_by(0x1000).all(|iova| rig.reads(1, iova).is_some()));
    // Each entry of the group may be cached by itself.
    let (commands, ..) = told(&rig, || unmap(&domain, 0, size));
    assert_eq!(commands.total(), size / granule::<F>());
    assert!((0..size).step_by(0x1000).all(|iova| rig.reads(1, iova).is_none()));
}

#[test]
fn all_entries_of_a_contiguous_group_are_named() {
    let features = *Rig::new().driver.features();
    let config = features.stage_1_config();
    let sizes = ArmLpaeS1::<12>::PAGE_SIZES | ArmLpaeS1::<12>::CONTIGUOUS_SIZES;
    let config = ArmLpaeS1Config { page_sizes: Some(sizes), ..config };
    contiguous(ArmLpaeS1::<12>::new(config).unwrap(), 16);
    let sizes = 1 << 16 | 1 << 29 | ArmLpaeS1::<16>::CONTIGUOUS_SIZES;
    let config = ArmLpaeS1Config { page_sizes: Some(sizes), ..config };
    contiguous(ArmLpaeS1::<16>::new(config).unwrap(), 21);
}

#[test]
fn past_the_bound_all_of_the_domain_is_forgotten() {
    let rig = Rig::new();
    let domain = rig.domain::<ArmLpaeS1<12>>();
    let invalidate = |scope: Scope<'_>, tables| {
        let what = Invalidation { scope, leaf_sizes: 1 << 12, tables };
        told(&rig, || domain.ops().invalidate(&what).unwrap()).0
    };
    // As many ranges as are asked for at once, and one more.
    let pages: Vec<_> = (0..=MAX_COMMANDS).map(|page| range(page << 30, 0x1000)).collect();
    let most = domain.ops().max_ranges();
    let commands = invalidate(Scope::Ranges(&pages[..most]), Walks::Kept);
    assert_eq!(commands, Commands { by_va_last: MAX_COMMANDS, ..NONE });
    assert_eq!(invalidate(Scope::Ranges(&pages), Walks::Kept), Commands { by_asid: 1, ..NONE });
    let most = [range(0x1000, MAX_COMMANDS << 12)];
    let commands = invalidate(Scope::Ranges(&most), Walks::Kept);
    assert_eq!(commands, Commands { by_va_last: MAX_COMMANDS, ..NONE });
    let more = [range(0, MAX_COMMANDS << 11), range(1 << 40, (MAX_COMMANDS << 11) + 1)];
    assert_eq!(invalidate(Scope::Ranges(&more), Walks::Kept), Commands { by_asid: 1, ..NONE });
    assert_eq!(invalidate(Scope::All, Walks::Detached), Commands { by_asid: 1, ..NONE });
    // Ranges as large as can be are no arithmetic problem.
    let all = [range(0, u64::MAX); 8];
    assert_eq!(invalidate(Scope::Ranges(&all), Walks::Kept), Commands { by_asid: 1, ..NONE });
    // Empty tables, without leaves: walks are met at least once in each table.
    let what = Invalidation {
        scope: Scope::Ranges(&[range(0, 1 << 30)]),
        leaf_sizes: 1 << 30,
        tables: Walks::Detached,
    };
    let (commands, ..) = told(&rig, || domain.ops().invalidate(&what).unwrap());
    assert_eq!(commands, Commands { by_va: 512, ..NONE });
}

fn others_keep_theirs<F: Tables>(invalidations: TakesEffect)
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    rig.hardware.set_behaviour(Behaviour { invalidations, ..Default::default() });
    let domains = [rig.domain::<F>(), rig.domain::<F>()];
    let streams = [rig.stream::<F>(1), rig.stream::<F>(2)];
    for (domain, stream) in domains.iter().zip(&streams) {
        stream.attach(target(domain)).unwrap();
        map(domain, 0, 1 << 30, granule::<F>(), Prot::READ);
    }
    assert!([1, 2].map(|id| rig.reads(id, 0)).iter().all(Option::is_some));
    // Cached entries of the other domain stay: nobody else's are forgotten.
    let everything =
        Invalidation { scope: Scope::All, leaf_sizes: u64::MAX, tables: Walks::Detached };
    domains[0].ops().invalidate(&everything).unwrap();
    assert_eq!(rig.hardware.cached_leaves(), 1, "{}", F::NAME);
    let walks = rig.hardware.counters().walks;
    assert!(rig.reads(2, 0).is_some());
    assert_eq!(rig.hardware.counters().walks, walks, "{}", F::NAME);
}

#[test]
fn no_domain_loses_what_another_one_forgets() {
    for_all_tables!(others_keep_theirs, TakesEffect::AtSync);
    for_all_tables!(others_keep_theirs, TakesEffect::AtOnce);
}

#[test]
fn nothing_is_told_of_a_new_mapping() {
    let rig = Rig::new();
    let domain = rig.domain::<ArmLpaeS1<12>>();
    let writes = || rig.registers.writes.load(std::sync::atomic::Ordering::Relaxed);
    let before = writes();
    map(&domain, 0, 0, 64 << 20, Prot::READ);
    assert_eq!(writes(), before);
}

#[test]
fn threads_that_unmap_at_once_all_wait_for_their_own() {
    let rig = Rig::new();
    let slow = Behaviour { sync: SyncCompletion::AfterPolls(5), ..Default::default() };
    rig.hardware.set_behaviour(slow);
    let domain = rig.domain::<ArmLpaeS1<12>>();
    let other = rig.domain::<ArmLpaeS2<12>>();
    let (stream, second) = (rig.stream(1), rig.stream(2));
    stream.attach(target(&domain)).unwrap();
    second.attach(target(&other)).unwrap();
    let rig = &rig;
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let (domain, other) = (&domain, &other);
            scope.spawn(move || {
                for turn in 0..200 {
                    work::<ArmLpaeS1<12>>(rig, domain, 1, thread << 30 | turn << 12);
                    work::<ArmLpaeS2<12>>(rig, other, 2, thread << 30 | turn << 12);
                }
            });
        }
    });
    assert_eq!(rig.hardware.pending_invalidations(), 0);
}

fn work<F: Tables>(rig: &Rig, domain: &TestDomain<F>, stream: u16, iova: u64)
where
    Arena: TableMemory<F::Word>,
{
    map(domain, iova, 1 << 31 | iova, granule::<F>(), Prot::READ);
    assert_eq!(rig.reads(stream, iova), Some(1 << 31 | iova));
    unmap(domain, iova, granule::<F>());
    assert_eq!(rig.reads(stream, iova), None);
}
