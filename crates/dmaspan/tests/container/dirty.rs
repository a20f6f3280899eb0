//! A container reports every write, and with pages and hardware's marks nothing else.

use std::sync::Arc;

use dmaspan::container::{DirtyRead, DirtySink, Error, Undelivered, Version};
use dmaspan::io_pgtable::Arena;
use dmaspan::{
    Account, Container, DmaSpace as _, Errno, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr,
    UserRange,
};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{Rights, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, faulty_domain, for_all_granules, marking_domain, range};

mod domains;
mod random;
mod threads;

for_all_granules!(
    every_second_page_is_reported_and_no_other,
    all_that_is_mapped_is_dirty_where_hardware_marks_nothing,
    what_linux_refuses_is_refused_by_the_same_errno,
    tracking_begins_anew_and_ends,
    large_leaves_are_reported_whole_and_once,
    device_memory_that_was_written_is_reported_when_it_is_gone,
    an_unmap_reports_what_was_written_until_it_was_gone,
    a_sync_that_fails_loses_nothing,
    a_failure_of_every_step_loses_nothing,
);

/// No page.
const NONE: [u64; 0] = [];

type Memory = Arc<SimMemory>;
type Contained = Container<Faulty<SimPinner>, parking_lot::RawMutex>;

/// Whether hardware says what devices write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hardware {
    Marks,
    DoesNot,
}

/// A container with a domain, and a device behind it.
struct World {
    g: u64,
    memory: Memory,
    space: Arc<SimSpace>,
    container: Contained,
    iotlb: Iotlb<ArmLpaeS1Walker, Arena>,
    faults: Faults,
}

impl World {
    fn new<const G: u32>(hardware: Hardware, pages: u64) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), pages << G, G).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let faults = Faults::none();
        let (domain, _, iotlb) = match hardware {
            Hardware::Marks => marking_domain::<G>(&faults),
            Hardware::DoesNot => faulty_domain::<G>(&faults),
        };
        let pinner = Faulty::new(SimPinner::new(Arc::clone(&memory)), &faults);
        let container = Container::with_domain(pinner, domain, Account::new(u64::MAX));
        Self { g: 1 << G, memory, space, container, iotlb, faults }
    }

    /// Memory for pages that become leaves of their own.
    fn scattered(&self, pages: u64, seed: u64) -> UserRange {
        let spans = self.memory.allocate_scattered(pages * self.g, seed).unwrap();
        self.space.map(UserAddr::new((seed + 1) << 40), &spans).unwrap()
    }

    fn map(&self, user: UserRange, page: u64) {
        self.container.map(&self.space, user, Iova::new(page * self.g), PROT).unwrap();
    }

    fn pages(&self, first: u64, count: u64) -> IovaRange {
        range(first * self.g, count * self.g)
    }

    /// Writes a page as a device does.
    fn write(&self, page: u64) {
        self.iotlb.translate(Iova::new(page * self.g + 8), Access::Write).unwrap();
    }

    fn get(&self, first: u64, count: u64, how: DirtyRead) -> Vec<u64> {
        let mut words = vec![u64::MAX; words_for(count)];
        let asked = self.pages(first, count);
        self.container.dirty_bitmap(asked, self.g, &mut words, how).unwrap();
        bits(&words)
    }

    fn syncs(&self) -> u64 {
        let counters = self.iotlb.counters();
        counters.invalidations_by_range + counters.invalidations_of_all
    }
}

fn words_for(pages: u64) -> usize {
    usize::try_from(pages.div_ceil(64)).unwrap()
}

/// The numbers of set bits.
fn bits(words: &[u64]) -> Vec<u64> {
    let set = |n: u64| words[usize::try_from(n / 64).unwrap()] >> (n % 64) & 1 == 1;
    (0..64 * words.len() as u64).filter(|&n| set(n)).collect()
}

fn bits_of_bytes(bytes: &[u8]) -> Vec<u64> {
    let set = |n: u64| bytes[usize::try_from(n / 8).unwrap()] >> (n % 8) & 1 == 1;
    (0..8 * bytes.len() as u64).filter(|&n| set(n)).collect()
}

/// A sink that takes some bytes and then no more.
struct Broken {
    takes: u64,
}

impl DirtySink for Broken {
    fn room(&self) -> u64 {
        1 << 28
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Undelivered> {
        let end = offset + bytes.len() as u64;
        if end <= self.takes { Ok(()) } else { Err(Undelivered) }
    }
}

/// The cases of the iommufd selftest (`dirty_tracking`): sizes, addresses of the bitmap of any
/// alignment, reads that clear and that do not; and a delivery that fails.
fn every_second_page_is_reported_and_no_other<const G: u32>() {
    for bytes in [8 << 10, 64 << 10, 256 << 10, 640 << 10, 1 << 20, 8 << 20, 64 << 20, 128 << 20] {
        let pages = u64::max(bytes >> G, 2);
        let world = World::new::<G>(Hardware::Marks, pages);
        world.map(world.scattered(pages, 1), 3);
        world.container.start_dirty().unwrap();
        assert_eq!(world.get(3, pages, DirtyRead::Clear), NONE, "nothing was written");
        let even: Vec<u64> = (0..pages).step_by(2).collect();
        even.iter().for_each(|page| world.write(3 + page));
        let asked = world.pages(3, pages);
        let syncs = world.syncs();
        for at in 0..9 {
            let mut around = vec![0xa5; at + 8 * words_for(pages) + 3];
            let end = around.len() - 3;
            let sink = &mut around[at..end];
            world.container.dirty_bitmap_to(asked, world.g, sink, DirtyRead::Keep).unwrap();
            assert_eq!(bits_of_bytes(&around[at..end]), even, "at {at}");
            assert!(around[..at].iter().chain(&around[end..]).all(|byte| *byte == 0xa5));
        }
        assert_eq!(world.syncs(), syncs, "what clears nothing syncs nothing");
        for takes in [0, 512, 1024] {
            let mut sink = Broken { takes };
            let read = |sink: &mut Broken| {
                world.container.dirty_bitmap_to(asked, world.g, sink, DirtyRead::Clear)
            };
            if takes < 8 * words_for(pages) as u64 {
                let error = read(&mut sink).unwrap_err();
                assert!(matches!(error, Error::Undelivered { range } if range == asked));
                assert_eq!(world.container.errno(&error), Errno::EFAULT);
            }
        }
        // The marks are in the log by now, and what is written anew is marked anew.
        even.iter().for_each(|page| world.write(3 + page));
        let syncs = world.syncs();
        assert_eq!(world.get(3, pages, DirtyRead::Clear), even);
        assert_eq!(world.syncs(), syncs + 1, "one sync for any number of pages");
        assert_eq!(world.get(3, pages, DirtyRead::Clear), NONE);
        world.write(3 + pages - 1);
        assert_eq!(world.get(3, pages, DirtyRead::Clear), [pages - 1], "forgotten by hardware");
    }
}

fn device_memory_that_was_written_is_reported_when_it_is_gone<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 64);
    let bar = Span::new(PhysAddr::new(1 << 46), 4 << G).unwrap();
    let user = world.space.map_device(UserAddr::new(1 << 44), bar, Rights::ReadWrite).unwrap();
    world.map(user, 8);
    world.container.start_dirty().unwrap();
    world.write(9);
    assert_eq!(world.container.revoke(&world.space, user).unwrap(), 4 << G);
    assert_eq!(world.get(8, 4, DirtyRead::Clear), [0, 1, 2, 3], "nobody asked which");
    assert_eq!(world.get(8, 4, DirtyRead::Clear), NONE);
}

fn all_that_is_mapped_is_dirty_where_hardware_marks_nothing<const G: u32>() {
    let world = World::new::<G>(Hardware::DoesNot, 64);
    world.map(world.scattered(3, 1), 70);
    world.container.start_dirty().unwrap();
    // Also what is mapped later, what was never written and what may only be read.
    let user = world.scattered(2, 2);
    world.container.map(&world.space, user, Iova::new(75 * world.g), Prot::READ).unwrap();
    for how in [DirtyRead::Clear, DirtyRead::Keep, DirtyRead::Clear] {
        assert_eq!(world.get(60, 128, how), [10, 11, 12, 15, 16]);
    }
    let mut words = [u64::MAX; 3];
    let unmapped = world.container.unmap_dirty(world.pages(60, 128), world.g, &mut words);
    assert_eq!(unmapped.unwrap(), 5 * world.g);
    assert_eq!((bits(&words[..2]), words[2]), (vec![10, 11, 12, 15, 16], u64::MAX));
    assert_eq!(world.get(60, 128, DirtyRead::Clear), NONE);
}

fn what_linux_refuses_is_refused_by_the_same_errno<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 64);
    let World { container, g, .. } = &world;
    world.map(world.scattered(4, 1), 4);
    let read = |asked, page, words: usize| {
        let mut words = vec![0; words];
        let read = container.dirty_bitmap(asked, page, &mut words, DirtyRead::Keep);
        let unmapped = container.unmap_dirty(asked, page, &mut words);
        let errno = |error| container.errno(&error);
        (read.map_err(errno).err(), unmapped.map_err(errno).err())
    };
    let both = (Some(Errno::EINVAL), Some(Errno::EINVAL));
    let all = world.pages(0, 65);
    assert_eq!(read(all, *g, 2), both, "nothing is tracked");
    container.start_dirty().unwrap();
    container.start_dirty().unwrap();
    for (asked, page, words, what) in [
        (all, *g, 1, "too few words"),
        (all, *g, 0, "no words"),
        (all, *g, (1 << 25) + 1, "more than 256 MiB"),
        (all, 2 * g, 2, "a larger page"),
        (all, g / 2, 4, "a smaller page"),
        (all, 0, 2, "no page"),
        (range(1, 64 * g), *g, 2, "a start within a page"),
        (range(0, 64 * g + 1), *g, 2, "an end within a page"),
        (world.pages(5, 64), *g, 2, "a start within a mapping"),
        (world.pages(0, 7), *g, 2, "an end within a mapping"),
        (world.pages(5, 2), *g, 2, "both"),
    ] {
        assert_eq!(read(asked, page, words), both, "{what}");
    }
    assert_eq!(container.mappings(), 1);
    // As many words as there may be, gaps, and the last page.
    assert_eq!(read(world.pages(0, 2), *g, 1 << 25), (None, None));
    assert_eq!(read(world.pages(2, 2), *g, 1), (None, None));
    let last = IovaRange::new(Iova::new(0u64.wrapping_sub(*g)), Iova::new(u64::MAX)).unwrap();
    assert_eq!(read(last, *g, 1), (None, None));
    assert_eq!(container.mappings(), 1);
    assert_eq!(read(all, *g, 2), (None, None));
    assert_eq!(container.mappings(), 0);
    container.stop_dirty().unwrap();
    container.stop_dirty().unwrap();
    assert_eq!(read(all, *g, 2), both, "nothing is tracked any more");

    let (domain, _, _) = marking_domain::<G>(&Faults::none());
    let pinner = SimPinner::new(Arc::clone(&world.memory));
    let old: Container<_, parking_lot::RawMutex> =
        Container::with_domain(pinner, domain, Account::new(u64::MAX)).with_version(Version::V1);
    let denied = |result: Result<(), Error<_>>| {
        assert_eq!(old.errno(&result.unwrap_err()), Errno::EACCES);
    };
    denied(old.start_dirty());
    denied(old.stop_dirty());
    denied(old.dirty_bitmap(all, *g, &mut [0; 2], DirtyRead::Clear));
}

fn tracking_begins_anew_and_ends<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 64);
    let World { container, .. } = &world;
    world.map(world.scattered(8, 1), 0);
    world.write(1);
    assert!(!container.tracks_dirty());
    container.start_dirty().unwrap();
    assert!(container.tracks_dirty());
    assert_eq!(world.get(0, 8, DirtyRead::Clear), NONE, "written before it began");
    world.write(1);
    world.write(2);
    container.start_dirty().unwrap();
    assert_eq!(world.get(0, 8, DirtyRead::Keep), [1, 2], "it has begun already");
    container.stop_dirty().unwrap();
    assert!(!container.tracks_dirty());
    world.write(5);
    container.start_dirty().unwrap();
    assert_eq!(world.get(0, 8, DirtyRead::Clear), NONE);
    // A log that cannot be had leaves all without: also those that had theirs already.
    let (memory, pinner) = (Arc::clone(&world.memory), SimPinner::new(Arc::clone(&world.memory)));
    let empty: Container<_, parking_lot::RawMutex> = Container::new(pinner, Account::new(u64::MAX));
    let space = Arc::new(SimSpace::new(memory));
    let at = |start: u64, len: u64| UserRange::from_len(UserAddr::new(start), len).unwrap();
    empty.map(&space, at(0, 1 << 20), Iova::new(0), PROT).unwrap();
    empty.map(&space, at(0, 1 << 43), Iova::new(1 << 43), PROT).unwrap();
    let error = empty.start_dirty().unwrap_err();
    let huge = range(1 << 43, 1 << 43);
    assert!(matches!(error, Error::TooLargeToTrack { mapping, .. } if mapping == huge));
    assert_eq!(empty.errno(&error), Errno::EINVAL);
    assert!(!empty.tracks_dirty());
    empty.unmap(huge).unwrap();
    empty.start_dirty().unwrap();
    let error = empty.map(&space, at(0, 1 << 43), Iova::new(1 << 43), PROT).unwrap_err();
    assert!(matches!(error, Error::TooLargeToTrack { .. }));
    assert_eq!(empty.mappings(), 1);
    // Nobody writes through it.
    let mut words = [u64::MAX; 4];
    empty.dirty_bitmap(range(0, 1 << 20), 4096, &mut words, DirtyRead::Clear).unwrap();
    assert_eq!(words, [0; 4]);
}

/// Leaves that reach over many parts of a walk.
fn large_leaves_are_reported_whole_and_once<const G: u32>() {
    let (leaf, pages) = (1u64 << (2 * G - 3), 1u64 << (G - 3));
    let world = World::new::<G>(Hardware::Marks, 4 * pages);
    let span = world.memory.allocate(2 * leaf, 2 * G - 3).unwrap();
    let user = world.space.map(UserAddr::new(leaf), &[span]).unwrap();
    world.map(user, 2 * pages);
    assert_eq!(world.container.census().total(), 2);
    world.container.start_dirty().unwrap();
    world.write(3 * pages + 5);
    let second: Vec<u64> = (2 * pages..3 * pages).collect();
    let first: Vec<u64> = (pages..2 * pages).collect();
    assert_eq!(world.get(pages, 4 * pages, DirtyRead::Keep), second);
    assert_eq!(world.get(pages, 4 * pages, DirtyRead::Clear), second);
    world.write(2 * pages);
    assert_eq!(world.get(pages, 4 * pages, DirtyRead::Clear), first);
    assert_eq!(world.get(pages, 4 * pages, DirtyRead::Clear), NONE);
}

fn an_unmap_reports_what_was_written_until_it_was_gone<const G: u32>() {
    // More spans than a batch has, and several mappings.
    let world = World::new::<G>(Hardware::Marks, 4096);
    let World { container, memory, .. } = &world;
    container.start_dirty().unwrap();
    for (n, at) in [(1u64, 10u64), (2, 1000), (3, 1700)] {
        world.map(world.scattered(600, n), at);
    }
    let written: Vec<u64> = (10..610).chain(1000..1600).step_by(7).chain([2299]).collect();
    written.iter().for_each(|page| world.write(*page));
    // Reported once, written again: and kept for a delivery that failed.
    assert_eq!(world.get(0, 2300, DirtyRead::Clear), written);
    written.iter().for_each(|page| world.write(*page));
    let mut sink = Broken { takes: 0 };
    let whole = world.pages(0, 2300);
    container.dirty_bitmap_to(whole, world.g, &mut sink, DirtyRead::Clear).unwrap_err();
    world.write(1999);
    let syncs = world.syncs();
    let mut words = vec![u64::MAX; words_for(2300)];
    let bytes = container.unmap_dirty(whole, world.g, &mut words).unwrap();
    assert_eq!(bytes, 1800 * world.g);
    let mut expected = written.clone();
    expected.insert(expected.len() - 1, 1999);
    assert_eq!(bits(&words), expected);
    // 1800 spans by 256.
    assert!(world.syncs() - syncs <= 8 + 3, "{} syncs", world.syncs() - syncs);
    assert_eq!((container.mappings(), memory.pinned_frames()), (0, 0));
    assert_eq!(memory.violations(), []);
    // As if nothing had been there.
    world.map(world.scattered(8, 9), 10);
    assert_eq!(world.get(0, 100, DirtyRead::Clear), NONE);
}

fn a_sync_that_fails_loses_nothing<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 64);
    let World { container, iotlb, .. } = &world;
    world.map(world.scattered(8, 1), 0);
    world.map(world.scattered(8, 2), 32);
    container.start_dirty().unwrap();
    world.write(3);
    world.write(33);
    let mut words = [0];
    let asked = world.pages(0, 64);
    iotlb.fail_next_invalidations(1);
    let error = container.dirty_bitmap(asked, world.g, &mut words, DirtyRead::Clear).unwrap_err();
    assert!(matches!(error, Error::MarksUnsynced { range, .. } if range == asked), "{error}");
    assert_eq!(container.errno(&error), Errno::EIO);
    assert_eq!(bits(&words), [3, 33], "reported all the same");
    // Hardware still has these leaves cached as marked, and does not mark them anew.
    world.write(3);
    assert_eq!(world.get(0, 64, DirtyRead::Keep), [3, 33]);
    assert_eq!(world.get(0, 32, DirtyRead::Clear), [3]);
    world.write(3);
    world.write(33);
    assert_eq!(world.get(0, 64, DirtyRead::Clear), [3, 33], "told again, and marked again");
    assert_eq!(world.get(0, 64, DirtyRead::Clear), NONE);
    // A start that hardware does not confirm reports too much, and not too little.
    container.stop_dirty().unwrap();
    world.write(4);
    iotlb.fail_next_invalidations(1);
    container.start_dirty().unwrap();
    world.write(4);
    let all: Vec<u64> = (0..8).chain(32..40).collect();
    assert_eq!(world.get(0, 64, DirtyRead::Clear), all);
    world.write(4);
    assert_eq!(world.get(0, 64, DirtyRead::Clear), [4]);
    // An unmap that hardware does not confirm: it may go on writing.
    iotlb.fail_next_invalidations(u64::MAX);
    let error = container.unmap_dirty(world.pages(0, 8), world.g, &mut words).unwrap_err();
    assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
    assert_eq!(bits(&words), (0..8).collect::<Vec<u64>>());
    assert_eq!(world.get(0, 64, DirtyRead::Keep), (0..8).collect::<Vec<u64>>());
    iotlb.fail_next_invalidations(0);
    assert_eq!(world.container.unmap_all().unwrap(), 16 * world.g);
    assert_eq!((world.memory.pinned_frames(), world.container.mappings()), (0, 0));
}

fn a_failure_of_every_step_loses_nothing<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 4096);
    let World { container, faults, .. } = &world;
    let users = [world.scattered(3, 1), world.scattered(300, 2)];
    world.map(users[0], 0);
    container.start_dirty().unwrap();
    let mut lost = 0;
    let steps = faults.sweep(|n| {
        let mut words = vec![0; words_for(1024)];
        let asked = world.pages(0, 1024);
        let mapped = container.map(&world.space, users[1], Iova::new(500 * world.g), PROT).is_ok();
        if mapped {
            world.write(700);
        }
        world.write(1);
        let expected: &[u64] = if mapped { &[1, 700] } else { &[1] };
        match container.dirty_bitmap(asked, world.g, &mut words, DirtyRead::Clear) {
            Ok(()) => {}
            Err(Error::MarksUnsynced { .. }) => {
                // Not marked anew, and known all the same.
                world.write(1);
                let again = container.dirty_bitmap(asked, world.g, &mut words, DirtyRead::Clear);
                again.unwrap();
            }
            Err(error) => panic!("step {n}: {error}"),
        }
        let found = bits(&words);
        assert!(expected.iter().all(|page| found.contains(page)), "step {n}: {found:?}");
        if mapped {
            world.write(501);
            let mut words = vec![0; words_for(300)];
            match container.unmap_dirty(world.pages(500, 300), world.g, &mut words) {
                Ok(bytes) => assert_eq!((bytes, bits(&words)), (300 * world.g, vec![1])),
                Err(Error::NotForgotten { .. }) => {
                    assert_eq!(bits(&words), (0..300).collect::<Vec<u64>>());
                    lost += 1;
                }
                Err(error) => panic!("step {n}: {error}"),
            }
        }
        assert_eq!(world.memory.violations(), [], "step {n}");
    });
    assert!(steps > 10, "{steps} steps");
    assert!(lost >= 1, "an unmap's sync is one of the steps");
    container.unmap_all().unwrap();
    assert_eq!(world.memory.pinned_frames(), 0, "hardware answers again");
}
