//! Devices reach the mapped memory and nothing else, with every format.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use dmaspan::io_pgtable::{Arena, TableMemory};
use dmaspan::iommu::{
    AllMemory, FaultAccess, FaultReason, FaultReport, FaultState, Synced, Target,
};
use dmaspan::{Iova, PhysAddr, Prot, SpanBuf};
use dmaspan_drivers::Handled;
use dmaspan_sim::device::DmaError;
use dmaspan_sim::walker::Access;

use super::rig::{Recorder, Rig, Tables, granule, map, range, target, unmap};
use crate::for_all_tables;

const ONE: Handled =
    Handled { reported: 1, unclaimed: 0, malformed: 0, overflowed: false, more: false };

fn lands_or_faults<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (page, stream) = (granule::<F>(), rig.stream::<F>(0x17));
    let domain = rig.domain::<F>();
    let faults = Recorder::on(&stream);
    stream.attach(target(&domain)).unwrap();
    // Two pages that lie apart in memory, the second one read-only.
    let (iova, first, second) = (0x1230_0000, 0x8000_0000, 0x9000_0000);
    map(&domain, iova, first, page, Prot::READ_WRITE | Prot::CACHE);
    map(&domain, iova + page, second, page, Prot::READ);
    let at = |offset| Iova::new(iova + offset);
    rig.hardware.write(&rig.ram, 0x17, at(page - 4), b"data").unwrap();
    assert_eq!(rig.ram.bytes(PhysAddr::new(first + page - 4)), *b"data", "{}", F::NAME);
    let mut both = [1; 8];
    rig.hardware.read(&rig.ram, 0x17, at(page - 4), &mut both).unwrap();
    assert_eq!(both, *b"data\0\0\0\0");

    let refused = |result: Result<(), DmaError>, offset, access, reason| {
        assert!(matches!(result, Err(DmaError::Fault { done: 0, .. })), "{}: {result:?}", F::NAME);
        let state = FaultState::Ended;
        let expected = FaultReport { stream: 0x17, iova: at(offset), access, reason, state };
        assert_eq!(rig.driver.handle_faults(), Ok(ONE));
        assert_eq!(faults.take(), [expected], "{}", F::NAME);
    };
    let write = |offset| rig.hardware.write(&rig.ram, 0x17, at(offset), b"x");
    refused(write(page + 8), page + 8, FaultAccess::Write, FaultReason::Permission);
    assert_eq!(rig.ram.bytes(PhysAddr::new(second + 8)), [0]);
    refused(write(2 * page), 2 * page, FaultAccess::Write, FaultReason::Translation);
    let read = rig.hardware.read(&rig.ram, 0x17, at(3 * page + 1), &mut [0]);
    refused(read, 3 * page + 1, FaultAccess::Read, FaultReason::Translation);
    assert_eq!(rig.driver.handle_faults(), Ok(Handled::default()));
    let counters = rig.hardware.counters();
    assert_eq!((counters.misconfigured, counters.undefined_writes), (0, 0), "{}", F::NAME);
    assert_eq!(counters.undefined_reads, 0, "{}", F::NAME);
}

#[test]
fn what_is_mapped_lands_and_all_else_faults_with_its_address_and_stream() {
    for_all_tables!(lands_or_faults);
}

fn leaves_are_honoured<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<F>(1), rig.domain::<F>());
    stream.attach(target(&domain)).unwrap();
    let geometry = *domain.geometry();
    for lg2 in (12..64).filter(|lg2| geometry.page_sizes >> lg2 & 1 != 0) {
        let size = 1u64 << lg2;
        // The last leaf of the aperture, and of memory, if there is another one.
        let iova = geometry.aperture.last().get() - (size - 1);
        let paddr = (1u64 << geometry.output_bits) - size;
        map(&domain, iova, paddr, size, Prot::READ_WRITE);
        for offset in [0, size / 2, size - 1] {
            let hit = rig.hardware.access(1, Iova::new(iova + offset), Access::Write).unwrap();
            assert_eq!(hit.paddr.get(), paddr + offset, "{} 2^{lg2}", F::NAME);
            assert_eq!(hit.block.len_less_one(), size - 1, "{} 2^{lg2}", F::NAME);
        }
        if let Some(before) = iova.checked_sub(1) {
            assert_eq!(rig.reads(1, before), None);
        }
        let commands = rig.hardware.counters().commands.total();
        unmap(&domain, iova, size);
        assert_eq!(rig.reads(1, iova), None, "{} 2^{lg2}", F::NAME);
        assert_eq!(rig.reads(1, iova + size - 1), None, "{} 2^{lg2}", F::NAME);
        assert_eq!(rig.hardware.counters().commands.total() - commands, 1, "{}", F::NAME);
    }
}

#[test]
fn each_leaf_size_is_honoured_at_the_top_of_both_address_spaces() {
    for_all_tables!(leaves_are_honoured);
}

fn stale_until_synced<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (page, stream, domain) = (granule::<F>(), rig.stream::<F>(1), rig.domain::<F>());
    stream.attach(target(&domain)).unwrap();
    map(&domain, 0, 0x8000_0000, 4 * page, Prot::READ_WRITE);
    for offset in 0..4 {
        assert!(rig.reads(1, offset * page).is_some());
    }
    let mut room = SpanBuf::room::<2>();
    let mut spans = SpanBuf::new(&mut room);
    #[expect(unsafe_code, reason = "simulated memory, one thread")]
    // SAFETY: nobody else works on the range.
    let unsynced = unsafe { domain.unmap(range(page, 2 * page), &mut spans) }.unwrap();
    // It is in no table any more, and used nevertheless.
    assert_eq!(rig.reads(1, page), Some(0x8000_0000 + page), "{}", F::NAME);
    let (synced, _): (Synced, _) = unsynced.sync().unwrap();
    assert!(synced.covers(range(page, 2 * page)));
    assert_eq!([rig.reads(1, page), rig.reads(1, 3 * page - 1)], [None; 2], "{}", F::NAME);
    // What lies beside it was not touched.
    assert_eq!(rig.reads(1, 3 * page), Some(0x8000_0000 + 3 * page));
    // The same addresses lead elsewhere now.
    map(&domain, page, 0xa000_0000, page, Prot::READ);
    assert_eq!(rig.reads(1, page), Some(0xa000_0000));
}

#[test]
fn a_stale_entry_is_used_before_the_sync_and_never_after_it() {
    for_all_tables!(stale_until_synced);
}

fn tables_are_forgotten<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (page, stream, domain) = (granule::<F>(), rig.stream::<F>(1), rig.domain::<F>());
    stream.attach(target(&domain)).unwrap();
    // All that one table has. The memory is not aligned, so no larger leaf fits.
    let reach = page << F::LG2_ENTRIES;
    map(&domain, reach, 0x8000_0000 + page, reach, Prot::READ_WRITE);
    assert!(rig.reads(1, reach).is_some());
    let links = rig.hardware.cached_links();
    assert_ne!(links, 0, "{}", F::NAME);
    let in_use = rig.tables.tables();
    unmap(&domain, reach, reach);
    assert!(rig.tables.tables() < in_use, "{}: no table was freed", F::NAME);
    assert!(rig.hardware.cached_links() < links, "{}", F::NAME);
    // Through a cached link the table that was freed would be read, which the arena refuses, or
    // another one that is there now.
    map(&domain, reach + 2 * page, 0x9000_0000, page, Prot::READ);
    assert_eq!(rig.reads(1, reach + 2 * page), Some(0x9000_0000), "{}", F::NAME);
    assert_eq!(rig.reads(1, reach), None, "{}", F::NAME);
}

#[test]
fn walks_through_tables_that_were_freed_are_forgotten() {
    for_all_tables!(tables_are_forgotten);
}

fn domains_are_apart<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let page = granule::<F>();
    let domains = [rig.domain::<F>(), rig.domain::<F>()];
    let streams = [rig.stream::<F>(1), rig.stream::<F>(2)];
    let paddrs = [0x8000_0000, 0x9000_0000];
    for ((domain, stream), paddr) in domains.iter().zip(&streams).zip(paddrs) {
        stream.attach(target(domain)).unwrap();
        map(domain, 0, paddr, page, Prot::READ_WRITE);
    }
    map(&domains[0], page, 0xa000_0000, page, Prot::READ_WRITE);
    // Twice: through the tables, and through what is cached.
    for _ in 0..2 {
        assert_eq!([1, 2].map(|id| rig.reads(id, 0)), paddrs.map(Some), "{}", F::NAME);
        assert_eq!([1, 2].map(|id| rig.reads(id, page)), [Some(0xa000_0000), None]);
    }
    // Both changes of domains take effect at once, with all that is cached.
    streams[1].replace(target(&domains[0])).unwrap();
    assert_eq!([1, 2].map(|id| rig.reads(id, 0)), [Some(paddrs[0]); 2], "{}", F::NAME);
    streams[0].replace(target(&domains[1])).unwrap();
    assert_eq!([1, 2].map(|id| rig.reads(id, 0)), [Some(paddrs[1]), Some(paddrs[0])]);
    assert_eq!([1, 2].map(|id| rig.reads(id, page)), [None, Some(0xa000_0000)]);
    // An unmap in a domain is heard by the stream that came to it.
    unmap(&domains[0], 0, page);
    assert_eq!([1, 2].map(|id| rig.reads(id, 0)), [Some(paddrs[1]), None], "{}", F::NAME);
}

#[test]
fn domains_do_not_reach_each_other_and_switching_takes_effect_at_once() {
    for_all_tables!(domains_are_apart);
}

fn detached_is_blocked<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    // Nobody has claimed it.
    assert_eq!(rig.reads(1, 0x8000_0000), None);
    let stream = rig.stream::<F>(1);
    assert_eq!(rig.reads(1, 0x8000_0000), None);
    let domain = rig.domain::<F>();
    stream.attach(target(&domain)).unwrap();
    map(&domain, 0, 0x8000_0000, granule::<F>(), Prot::READ_WRITE);
    assert!(rig.reads(1, 0).is_some());
    stream.detach().unwrap();
    assert_eq!([rig.reads(1, 0), rig.reads(1, 0x8000_0000)], [None; 2], "{}", F::NAME);
    #[expect(unsafe_code, reason = "the identity is asked for")]
    // SAFETY: the simulated device touches no memory.
    stream.attach(Target::Identity(unsafe { AllMemory::promise() })).unwrap();
    assert_eq!(rig.reads(1, 0x8000_0000), Some(0x8000_0000));
    stream.replace(target(&domain)).unwrap();
    assert_eq!([rig.reads(1, 0), rig.reads(1, 0x8000_0000)], [Some(0x8000_0000), None]);
    drop(stream);
    assert_eq!([rig.reads(1, 0), rig.reads(1, 0x8000_0000)], [None; 2], "{}", F::NAME);
    // Nobody has the domain any more: its tables and its bank go.
    drop(domain);
    assert_eq!((rig.tables.tables(), rig.hardware.cached_leaves()), (0, 0), "{}", F::NAME);
    assert_eq!(rig.hardware.cached_links(), 0);
}

#[test]
fn a_stream_is_blocked_before_it_is_attached_and_after_it_was_detached() {
    for_all_tables!(detached_is_blocked);
}

fn switches_at_one_moment<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (stream, page) = (rig.stream::<F>(1), granule::<F>());
    let domains = [rig.domain::<F>(), rig.domain::<F>()];
    let paddrs = [0x8000_0000, 0x9000_0000];
    for (domain, paddr) in domains.iter().zip(paddrs) {
        map(domain, 0, paddr, page, Prot::READ);
    }
    stream.attach(target(&domains[0])).unwrap();
    let (over, accesses) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let reached = rig.reads(1, 0);
                assert!(paddrs.map(Some).contains(&reached), "{}: {reached:x?}", F::NAME);
                accesses.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut turn = 0;
        while turn < 200 || accesses.load(Ordering::Relaxed) < 200 {
            turn += 1;
            stream.replace(target(&domains[turn % 2])).unwrap();
            assert_eq!(rig.reads(1, 0), Some(paddrs[turn % 2]), "{}", F::NAME);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(rig.driver.handle_faults(), Ok(Handled::default()));
}

#[test]
fn an_access_during_a_switch_sees_the_one_domain_or_the_other() {
    for_all_tables!(switches_at_one_moment);
}
