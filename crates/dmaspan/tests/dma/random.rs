//! Random operations on the devices of one domain, against a map of pages and an IOTLB that forgets
//! nothing by itself.
//!
//! After each operation, and whatever fails of it, a walk of the tables finds exactly what the map
//! has; what is stale in the IOTLB was unmapped and is not synced yet; and what is mapped anew is
//! reached at once, so that its IOVAs were handed out after their sync.

use std::collections::{BTreeMap, BTreeSet};

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DeviceLimits, Flush, ListMapping, Mapping, Reservation,
    ReserveRequest, Segment, Trust, Unmapped,
};
use dmaspan::{Direction, DmaAddr, Iova, IovaRange};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::fault::Faulty;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::Access;
use proptest::prelude::*;

use crate::common::{range, walker};
use crate::rig::RAM;
use crate::sweep::{Dev, Dma, FAR, PAGE, Rig};

type Pool = Faulty<SimPool>;

/// Where IOVAs come from, in pages: the device with the fewest has so many.
const PAGES: u64 = 128;
/// The pages of a reservation.
const RESERVED: u64 = 8;
/// The boundary and the longest segment of the lists' device.
const BOUNDARY: u64 = 16 * PAGE;
const MAX_SEGMENT: u64 = 6 * PAGE;

/// What is done next. Numbers are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
enum Step {
    Single {
        device: usize,
        offset: u64,
        len: u64,
        flush: Flush,
    },
    List {
        device: usize,
        seed: u64,
        flush: Flush,
    },
    Reserve {
        device: usize,
        links: u8,
    },
    Unlink {
        page: u64,
    },
    End {
        which: usize,
    },
    Flush,
    /// The n-th step from here on fails.
    Fail {
        n: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let flush = || prop_oneof![Just(Flush::Strict), Just(Flush::Lazy)];
    prop_oneof![
        4 => (0..3usize, 0..PAGE, 1..3 * PAGE, flush())
            .prop_map(|(device, offset, len, flush)| Step::Single { device, offset, len, flush }),
        3 => (0..3usize, any::<u64>(), flush())
            .prop_map(|(device, seed, flush)| Step::List { device, seed, flush }),
        2 => (0..3usize, any::<u8>()).prop_map(|(device, links)| Step::Reserve { device, links }),
        1 => (0..RESERVED).prop_map(|page| Step::Unlink { page }),
        6 => any::<usize>().prop_map(|which| Step::End { which }),
        1 => Just(Step::Flush),
        2 => (1..8u32).prop_map(|n| Step::Fail { n }),
    ]
}

enum Live {
    Single(Mapping<Dma, Pool>),
    List(ListMapping<Dma, Pool>),
    Reservation(Reservation<Dma, Pool>),
}

struct World {
    rig: Rig,
    devices: Vec<Dev>,
    live: Vec<(usize, Live, Vec<u64>)>,
    /// The page that each mapped page leads to; of what is bounced, as it was found at first.
    model: BTreeMap<u64, u64>,
    /// Pages that were unmapped and of which no sync is known.
    unsynced: BTreeSet<u64>,
    next_paddr: u64,
}

impl World {
    fn new() -> Self {
        let rig = Rig::new();
        let device = |bits, trust| {
            let limits = DeviceLimits {
                boundary: Some(BOUNDARY),
                max_segment: MAX_SEGMENT,
                ..DeviceLimits::bits(bits)
            };
            let config = DeviceConfig { limits, trust, ..DeviceConfig::bits(bits) };
            let pool = Faulty::new(rig.pool.clone(), &rig.faults);
            Device::new(rig.domain.clone(), pool, config).unwrap()
        };
        let devices = vec![
            device(19, Trust::Trusted),
            device(40, Trust::Trusted),
            device(19, Trust::Untrusted),
        ];
        let (live, model, unsynced) = Default::default();
        Self { rig, devices, live, model, unsynced, next_paddr: 0 }
    }

    /// A place for so many bytes that nothing else of this run has or had; such of devices that are
    /// not trusted are in RAM, where they can be copied.
    fn place(&mut self, device: usize, offset: u64, len: u64) -> (u64, u64) {
        let pages = (offset + len).div_ceil(PAGE) + 1;
        let first = self.next_paddr;
        self.next_paddr += pages;
        let base = if device == 2 { 0x4_0000 + first % 150 * PAGE } else { FAR + first * PAGE };
        (base + offset, len)
    }

    /// Where the tables lead, walked without any cache.
    fn walk(&self) -> BTreeMap<u64, u64> {
        let domain = self.rig.domain.domain();
        let walker = walker(domain.format(), domain.root());
        let fresh = Iotlb::new(walker, self.rig.arena.clone());
        let leads = |page: u64| {
            let hit = fresh.translate(Iova::new(page * PAGE), Access::Read).ok()?;
            Some((page, hit.paddr.get() / PAGE))
        };
        (0..2 * PAGES).filter_map(leads).collect()
    }

    /// What is mapped there now, for the device of that number: at `addr`, in the order of the
    /// bytes, leads where the list says. Its device uses all of it at once.
    fn add(&mut self, device: usize, live: Live, iovas: IovaRange, expected: &[(u64, u64)]) {
        let limit = self.devices[device].config().limits.last;
        assert!(iovas.start().get() >= PAGE && iovas.last().get() <= limit);
        let (first, last) = (iovas.start().get() / PAGE, iovas.last().get() / PAGE);
        let walked = self.walk();
        let pages: Vec<u64> = walked.range(first..=last).map(|(page, _)| *page).collect();
        for &page in &pages {
            assert_eq!(self.model.insert(page, walked[&page]), None, "mapped already");
            // The IOTLB knows nothing of what was here before.
            let hit = self.rig.tlb.translate(Iova::new(page * PAGE), Access::Read).unwrap();
            assert_eq!(hit.paddr.get() / PAGE, walked[&page], "what was there is stale");
            self.unsynced.remove(&page);
        }
        for &(iova, paddr) in expected.iter().filter(|_| device != 2) {
            assert_eq!(walked.get(&(iova / PAGE)), Some(&(paddr / PAGE)));
            assert_eq!(iova % PAGE, paddr % PAGE);
        }
        self.live.push((device, live, pages));
    }

    fn forget(&mut self, pages: &[u64], synced: Synced) {
        for page in pages {
            assert!(self.model.remove(page).is_some());
            if synced == Synced::Perhaps {
                self.unsynced.insert(*page);
            }
        }
    }

    fn single(&mut self, device: usize, offset: u64, len: u64, flush: Flush) {
        let place = self.place(device, offset, len);
        let memory = self.rig.memory(&[place]);
        let attrs = Attrs { flush: Some(flush), ..Attrs::default() };
        let mapped = self.devices[device].map_single_with(memory, Direction::Bidirectional, attrs);
        let Ok(mapping) = mapped else { return };
        let addr = mapping.addr().get();
        let first = addr / PAGE * PAGE;
        let iovas = IovaRange::new(Iova::new(first), Iova::new((addr + (len - 1)) | (PAGE - 1)));
        let iovas = iovas.unwrap();
        // Aligned to its size.
        let pages = (iovas.len_less_one() + 1) / PAGE;
        assert_eq!(first / PAGE % pages.next_power_of_two(), 0);
        let expected: Vec<_> =
            (0..len).step_by(64).map(|n| (addr + n, RAM + place.0 + n)).collect();
        self.add(device, Live::Single(mapping), iovas, &expected);
    }

    fn list(&mut self, device: usize, mut seed: u64, flush: Flush) {
        let mut places = Vec::new();
        for _ in 0..1 + seed % 4 {
            seed = seed.rotate_right(13).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // Half of them begin and end on pages.
            let (offset, len) = match seed % 2 {
                0 => (0, PAGE * (1 + seed / 2 % 8)),
                _ => (seed / 2 % PAGE, 1 + seed / 7 % (3 * PAGE)),
            };
            places.push(self.place(device, offset, len));
        }
        let memory = self.rig.memory(&places);
        let mut room = [Segment { addr: DmaAddr::new(0), len: 0 }; 64];
        let attrs = Attrs { flush: Some(flush), ..Attrs::default() };
        let direction = Direction::Bidirectional;
        let mapped = self.devices[device].map_list_with(memory, direction, &mut room, attrs);
        let Ok(mapping) = mapped else { return };
        let segments = &room[..mapping.segment_count()];
        for segment in segments {
            let (first, last) = (segment.addr.get(), segment.addr.get() + segment.len - 1);
            assert_eq!(first / BOUNDARY, last / BOUNDARY);
            assert!(segment.len <= MAX_SEGMENT);
        }
        let bytes = |(at, len): (u64, u64)| at..at + len;
        let of_segments = segments.iter().flat_map(|s| bytes((s.addr.get(), s.len)));
        let of_list = places.iter().flat_map(|place| bytes((RAM + place.0, place.1)));
        assert_eq!(of_segments.clone().count(), of_list.clone().count());
        let expected: Vec<_> = of_segments.zip(of_list).step_by(32).collect();
        let iovas = mapping.iovas().unwrap();
        self.add(device, Live::List(mapping), iovas, &expected);
    }

    fn reserve(&mut self, device: usize, links: u8) {
        let (len, direction) = (RESERVED * PAGE, Direction::Bidirectional);
        let request = ReserveRequest { len, offset: 0, pieces: 8, direction };
        let Ok(mut reservation) = self.devices[device].reserve(request) else { return };
        let mut expected = Vec::new();
        for page in (0..RESERVED).filter(|page| links >> page & 1 == 1) {
            let place = self.place(device, 0, PAGE);
            let memory = self.rig.memory(&[place]);
            let device = &self.devices[device];
            if device.link(&mut reservation, page * PAGE, memory).is_ok() {
                expected.push((reservation.addr().get() + page * PAGE, RAM + place.0));
            }
        }
        let iovas = range(reservation.addr().get(), len);
        if self.devices[device].announce(&mut reservation).is_err() {
            expected.clear();
        }
        self.add(device, Live::Reservation(reservation), iovas, &expected);
    }

    fn unlink(&mut self, page: u64) {
        let reservations = self.live.iter().position(|live| matches!(live.1, Live::Reservation(_)));
        let Some(at) = reservations else { return };
        let (device, live, mut pages) = self.live.swap_remove(at);
        let Live::Reservation(mut reservation) = live else { unreachable!("it was looked for") };
        let device_ref = &self.devices[device];
        let unlinked = device_ref.unlink(&mut reservation, page * PAGE, PAGE, drop);
        let iova = reservation.addr().get() / PAGE + page;
        if pages.contains(&iova) {
            pages.retain(|page| *page != iova);
            self.forget(&[iova], Synced::after(&unlinked));
        }
        self.live.push((device, Live::Reservation(reservation), pages));
    }

    fn end(&mut self, which: usize) {
        if self.live.is_empty() {
            return;
        }
        let (device, live, pages) = self.live.swap_remove(which % self.live.len());
        let unmapped = match live {
            Live::Single(mapping) => {
                self.devices[device].unmap(mapping).map_err(|failed| failed.mapping.is_none())
            }
            Live::List(mapping) => {
                self.devices[device].unmap_list(mapping).map_err(|failed| failed.mapping.is_none())
            }
            Live::Reservation(reservation) => {
                let mut released = false;
                let destroyed = self.devices[device].destroy(reservation, |memory| {
                    released = true;
                    drop(memory);
                });
                // Lazily the memory is the queue's.
                self.forget(&pages, if released { Synced::Yes } else { Synced::Perhaps });
                if let Err(failed) = destroyed {
                    // It is unmapped, and is destroyed another time, unless it is in quarantine.
                    let left = failed.reservation.map(Live::Reservation);
                    self.live.extend(left.map(|left| (device, left, vec![])));
                }
                return;
            }
        };
        if let Err(held) = unmapped {
            assert!(held);
        }
        let synced = match unmapped {
            Ok(Unmapped::Released(_)) => Synced::Yes,
            Ok(Unmapped::Queued) | Err(_) => Synced::Perhaps,
        };
        self.forget(&pages, synced);
    }

    fn flush(&mut self) {
        if self.rig.domain.flush().is_ok() {
            self.unsynced.clear();
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Single { device, offset, len, flush } => self.single(device, offset, len, flush),
            Step::List { device, seed, flush } => self.list(device, seed, flush),
            Step::Reserve { device, links } => self.reserve(device, links),
            Step::Unlink { page } => self.unlink(page),
            Step::End { which } => self.end(which),
            Step::Flush => self.flush(),
            Step::Fail { n } => self.rig.faults.arm(n),
        }
        assert_eq!(self.walk(), self.model);
        for leaf in self.rig.tlb.stale_leaves(range(0, 1 << 40)) {
            assert!(self.unsynced.contains(&(leaf.iova.get() / PAGE)), "stale: {leaf:?}");
        }
    }

    /// Ends everything, and finds nothing left.
    fn check_end(mut self, tables: usize) {
        self.rig.faults.disarm();
        while !self.live.is_empty() {
            self.run(Step::End { which: 0 });
        }
        self.run(Step::Flush);
        assert!(self.unsynced.is_empty() && self.model.is_empty());
        assert_eq!(self.rig.domain.waiting(), (0, 0));
        assert_eq!(self.rig.domain.iovas().stats().live, 0);
        assert_eq!(self.rig.alive(), 0);
        assert!(self.rig.arena.tables() <= tables + 3, "tables of one leaf table's reach at most");
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Synced {
    Yes,
    Perhaps,
}

impl Synced {
    /// After an operation that is all over where it succeeds.
    fn after<T, E>(ended: &Result<T, E>) -> Self {
        if ended.is_ok() { Self::Yes } else { Self::Perhaps }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn devices_of_one_domain_reach_what_is_mapped_and_nothing_stale(
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let mut world = World::new();
        let tables = world.rig.arena.tables();
        steps.into_iter().for_each(|step| world.run(step));
        world.check_end(tables);
    }

    #[test]
    fn a_list_maps_what_its_pages_map_one_by_one(pages in prop::collection::vec(0..64u64, 1..9)) {
        let rig = Rig::new();
        let places: Vec<_> = pages.iter().map(|page| (FAR + page * PAGE, PAGE)).collect();
        let mut room = [Segment { addr: DmaAddr::new(0), len: 0 }; 8];
        let direction = Direction::Bidirectional;
        let list = rig.device.map_list(rig.memory(&places), direction, &mut room).unwrap();
        let (len, offset) = (places.len() as u64 * PAGE, 0);
        let request = ReserveRequest { len, offset, pieces: places.len(), direction };
        let mut reservation = rig.device.reserve(request).unwrap();
        for (n, place) in (0..).zip(&places) {
            let memory = rig.memory(&[*place]);
            rig.device.link(&mut reservation, n * PAGE, memory).unwrap();
        }
        rig.device.announce(&mut reservation).unwrap();
        let bases = [list.iovas().unwrap().start().get(), reservation.addr().get()];
        let reached = |base: u64| {
            let hit = |n: u64| rig.tlb.translate(Iova::new(base + n), Access::Write);
            let paddr = |n| hit(n).ok().map(|hit| hit.paddr);
            (0..len).step_by(0x800).map(paddr).collect::<Vec<_>>()
        };
        let [of_list, of_pages] = bases.map(reached);
        prop_assert_eq!(of_list, of_pages);
        prop_assert!(matches!(rig.device.unmap_list(list), Ok(Unmapped::Released(_))));
        prop_assert!(rig.device.destroy(reservation, drop).is_ok());
        prop_assert!(bases.map(reached).iter().flatten().all(Option::is_none));
        prop_assert_eq!(rig.domain.iovas().stats().live, 0);
    }
}
