//! Entries and commands, against the manual.

use std::sync::Arc;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{Arena, PageTable, X86_64};
use dmaspan::iommu::{AllMemory, Attachment, Domain, IommuOps as _, Prepared, ReservedRegions};
use dmaspan::iommu::{Gather, Invalidation, Scope, Tables, Target};
use dmaspan::{Iova, IovaRange};
use dmaspan_drivers::vtd::{Mode, Stage};
use dmaspan_sim::rng::Rng;

use crate::fake::{CAP, Fake, domain, map, start, stream, to, unmap};

const STREAM: u32 = 0x03_9a;

fn load(fake: &Fake, paddr: u64) -> u64 {
    fake.memory.read(paddr).expect("hardware finds it")
}

#[test]
fn legacy_entries_are_those_of_the_manual() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    let stream = stream(&iommu, STREAM);
    let root = fake.state().rtaddr;
    assert_eq!(root & 0xfff, 0);
    let entry = load(&fake, root + 3 * 16);
    assert_eq!((entry & 0xfff, load(&fake, root + 3 * 16 + 8)), (1, 0));
    let context = (entry & !0xfff) + 0x9a * 16;
    assert_eq!((load(&fake, context), load(&fake, context + 8)), (0, 0));
    stream.attach(to(&tables)).expect("it is attached");
    let number = u64::from(tables.ops().domain_id());
    assert!(number >= 2);
    assert_eq!(load(&fake, context), tables.root().get() | 1);
    assert_eq!(load(&fake, context + 8), number << 8 | 0b010);
    #[expect(unsafe_code, reason = "there is no device")]
    // SAFETY: there is no device.
    let all = unsafe { AllMemory::promise() };
    fake.told();
    stream.replace(Target::Identity(all)).expect("it can");
    // The widest addresses: 5 levels.
    assert_eq!((load(&fake, context), load(&fake, context + 8)), (0b1001, 1 << 8 | 0b011));
    let device = 0x1 | 3 << 4 | 0x39a << 32;
    let of_domain = 0x2 | 2 << 4 | 3 << 6 | number << 16;
    assert_eq!(fake.told()[..3], [[device | number << 16, 0], [device, 0], [of_domain, 0]]);
}

#[test]
fn scalable_entries_are_those_of_the_manual_and_change_at_one_moment() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Scalable).expect("it starts");
    let tables = [0, 1].map(|_| domain(&iommu).expect("there is a number"));
    let stream = stream(&iommu, STREAM);
    let root = fake.state().rtaddr;
    assert_eq!(root & 0xfff, 1 << 10);
    // Functions from 0x80 on are in the upper table.
    let entry = load(&fake, (root & !0xfff) + 3 * 16 + 8);
    assert_eq!(entry & 0xfff, 1);
    let context = (entry & !0xfff) + (0x9a - 0x80) * 32;
    let mut before = 0;
    for tables in tables.iter().chain(&tables) {
        stream.replace(to(tables)).expect("it is attached");
        let directory = load(&fake, context);
        assert_ne!(directory, before, "the other one");
        before = directory;
        assert_eq!((directory & 0xfff, load(&fake, context + 8)), (1, 0));
        let table = load(&fake, directory & !0xfff);
        assert_eq!(table & 0xfff, 1);
        let pasid = table & !0xfff;
        assert_eq!(load(&fake, pasid), tables.root().get() | 2 << 6 | 2 << 2 | 1);
        let number = u64::from(tables.ops().domain_id());
        assert_eq!(load(&fake, pasid + 8), 1 << 23 | number);
        assert_eq!((load(&fake, pasid + 16), load(&fake, pasid + 64)), (0, 0));
    }
}

#[test]
fn a_first_stage_entry_is_that_of_the_manual() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Scalable).expect("it starts");
    let format = X86_64::new(iommu.first_stage_config().expect("it has one")).expect("it fits");
    let arena = Arena::new(PhysAddr::new(0x1_0000_0000), 1 << 20);
    let table = PageTable::new(format, arena).expect("there is room");
    let ops = iommu.ops(Stage::First).expect("there is a number");
    let tables = Arc::new(Domain::new(table, ops).expect("it is empty"));
    let port = iommu.stream(8, ReservedRegions::new()).expect("nobody has it");
    let stream = Attachment::new(port).expect("it is blocked");
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&tables)))).expect("it is attached");
    let root = fake.state().rtaddr & !0xfff;
    let context = (load(&fake, root) & !0xfff) + 8 * 32;
    let pasid = load(&fake, load(&fake, context) & !0xfff) & !0xfff;
    let number = u64::from(tables.ops().domain_id());
    assert_eq!(load(&fake, pasid), 1 << 6 | 2 << 2 | 1);
    assert_eq!(load(&fake, pasid + 8), 1 << 23 | number);
    assert_eq!(load(&fake, pasid + 16), tables.root().get());
    fake.told();
    let range = IovaRange::new(Iova::new(0x4000), Iova::new(0x7fff)).expect("a range");
    let scope = Scope::Ranges(&[range]);
    let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
    tables.ops().invalidate(&what).expect("it is forgotten");
    let all = Invalidation { scope: Scope::All, ..what };
    tables.ops().invalidate(&all).expect("it is forgotten");
    let pages = [0x6 | 3 << 4 | number << 16, 0x4000 | 1 << 6 | 2];
    assert_eq!(fake.told(), [pages, [0x6 | 2 << 4 | number << 16, 0]]);
}

#[test]
fn blocks_are_aligned_within_what_hardware_names_and_cover_less_than_twice_the_range() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    fake.told();
    let invalidate = |start: u64, last: u64| {
        let range = IovaRange::new(Iova::new(start), Iova::new(last)).expect("a range");
        let scope = Scope::Ranges(&[range]);
        let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
        tables.ops().invalidate(&what).expect("it is forgotten");
        fake.told()
    };
    let mut rng = Rng::new(1);
    let random = |_| {
        let (lg2, most) = (12 + rng.below(40), 1 << rng.below(11));
        let first = rng.below(1 << lg2);
        (first, first + rng.below(most))
    };
    let shapes = [(0u64, 0u64), (1, 1), (1, 6), (0, 511), (3, 700), (511, 1030), (0, 1535)];
    let top = u64::MAX >> 12;
    for (first, last) in shapes.into_iter().chain([(top, top)]).chain((0..300).map(random)) {
        let (mut next, mut pages) = (first, 0);
        let told = invalidate(first << 12, last << 12 | 0xfff);
        for &[low, high] in &told {
            let (page, mask) = (high >> 12, high & 0x3f);
            assert_eq!((low & 0xf, low >> 4 & 3), (2, 3));
            assert!(mask <= 9 && page.is_multiple_of(1 << mask));
            assert!(page <= next && next < page + (1 << mask), "{page:#x} of {first:#x}");
            assert!(page <= last, "{page:#x} is behind {last:#x}");
            next = page + (1 << mask);
            pages += 1 << mask;
        }
        assert!(last < next && pages < 2 * (last - first + 1), "{first:#x} {last:#x}");
        let most = 2 + (last - first) / 512;
        assert!(told.len() as u64 <= most, "{first:#x} {last:#x}");
    }
    // As many ranges as are asked for at once are named, each by both of its blocks.
    let ranges: Vec<_> = (0..tables.ops().max_ranges() as u64)
        .map(|n| IovaRange::from_len(Iova::new((n << 40) + 0x1000), 0x2000).expect("a range"))
        .collect();
    assert_eq!(ranges.len(), Gather::<()>::MAX_RANGES);
    let scope = Scope::Ranges(&ranges);
    let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
    tables.ops().invalidate(&what).expect("it is forgotten");
    assert_eq!(fake.told().len(), 2 * ranges.len());
    // 16 blocks of 2 MiB are named one by one, and more are the domain.
    assert_eq!(invalidate(0, (32 << 20) - 1).len(), 16);
    let told = invalidate(0, 32 << 20);
    assert_eq!((told.len(), told[0][0] >> 4 & 3), (1, 2));
    assert_eq!(invalidate(0, u64::MAX).len(), 1);
}

#[test]
fn a_domain_that_is_detached_is_forgotten_whole_though_no_stream_has_it_any_more() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    let number = u64::from(tables.ops().domain_id());
    fake.told();
    tables.ops().detach().expect("it answers");
    assert_eq!(fake.told(), [[0x2 | 2 << 4 | 3 << 6 | number << 16, 0]]);
}

#[test]
fn nothing_is_told_of_a_mapping_of_the_first_stage_in_caching_mode() {
    let fake = Fake::new();
    fake.state().cap |= 1 << 7;
    let iommu = start(&fake, Mode::Scalable).expect("it starts");
    let range = IovaRange::new(Iova::new(0x4000), Iova::new(0x7fff)).expect("a range");
    for (stage, told) in [(Stage::First, 0), (Stage::Second, 1)] {
        let ops = iommu.ops(stage).expect("there is a number");
        fake.told();
        ops.sync_map(range).expect("it answers");
        assert_eq!(fake.told().len(), told, "{stage:?}");
    }
}

#[test]
fn hardware_without_blocks_forgets_the_domain_and_a_write_buffer_is_flushed() {
    let fake = Fake::new();
    fake.state().cap = (CAP & !(1 << 39)) | 1 << 4;
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    fake.told();
    let flushes = fake.state().flushes;
    assert!(map(&tables, 0x1000, 0x1000));
    assert_eq!(fake.state().flushes, flushes + 1);
    assert!(unmap(&tables, 0x1000, 0x1000));
    let told = fake.told();
    assert_eq!((told.len(), told[0][0] >> 4 & 3), (1, 2));
}
