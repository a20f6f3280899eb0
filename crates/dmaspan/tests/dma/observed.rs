//! An observer hears who mapped what, and a recorder keeps it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, Flush, Mapping, NoPool, Piece, RawMemory,
    ReserveRequest, Segment, Unmapped,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::{Domain, Event, MappedBy, Observed, Observer, Recorder};
use dmaspan::platform::OneThread;
use dmaspan::{Caller, Direction, Iova, IovaRange, Label, PhysAddr, Prot};
use dmaspan_sim::coherent::SimCoherent;
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{arena, format, range, span, walker};

type Ops<W> = Observed<Iotlb<ArmLpaeS1Walker, Arena>, W>;
type Watched<W> = Device<DmaDomain<ArmLpaeS1<12>, Arena, Ops<W>, OneThread, Memory>>;
type Who = Arc<Recorder<parking_lot::RawMutex>>;

/// Memory of one piece or of several, which nobody touches.
type Memory = Box<dyn dmaspan::dma::DmaMemory>;

fn memory(at: u64, len: u64) -> Memory {
    // SAFETY: no device uses it.
    Box::new(unsafe { RawMemory::new(Piece::memory(span(at, len))) })
}

struct Pieces(Vec<Piece>);

// SAFETY: no device uses them.
unsafe impl dmaspan::dma::DmaMemory for Pieces {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

fn domain<W: Observer>(observer: W) -> (Domain<ArmLpaeS1<12>, Arena, Ops<W>>, u64) {
    let tables = arena();
    let table = PageTable::new(format::<12>(48, 48), tables.clone()).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), tables);
    (Domain::new(table, Observed::new(iotlb, observer)).unwrap(), 0x1000)
}

fn device<W: Observer>(observer: W, flush: Flush) -> Watched<W> {
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let domain = DmaDomain::new(domain(observer).0, config, OneThread).unwrap();
    Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(40).named("nic0")).unwrap()
}

fn lines(who: &Who) -> Vec<(IovaRange, u32)> {
    let line = |by: Caller| match by.label {
        Label::Place(place) if place.file() == file!() => place.line(),
        other => panic!("{other} is not in this file"),
    };
    who.list().map(|record| (record.range, line(record.by.unwrap()))).collect()
}

fn iovas(mapping: &Mapping<impl dmaspan::dma::Translation>, len: u64) -> IovaRange {
    range(mapping.addr().get() & !0xfff, len)
}

#[test]
fn each_way_to_map_is_known_by_its_device_and_the_line_that_asked() {
    let who = Who::default();
    let nic = device(Arc::clone(&who), Flush::Strict);
    let single = nic.map_single(memory(0x8000_0800, 0x1000), Direction::ToDevice).unwrap();
    let at = (iovas(&single, 0x2000), line!() - 1);
    assert_eq!(lines(&who), [at]);
    let record = who.find(Iova::new(single.addr().get())).unwrap();
    assert_eq!((record.by.unwrap().device, record.prot), (Some("nic0"), Prot::READ | Prot::CACHE));
    let picture = who.dump().to_string();
    assert!(picture.contains("r-xc #1 nic0 at ") && picture.contains(file!()), "{picture}");
    drop(nic.unmap(single).unwrap());
    assert_eq!(who.list().count(), 0);

    let pieces = [0x9000_0000, 0x9100_0000].map(|at| Piece::memory(span(at, 0x3000)));
    let mut segments = [Segment::default(); 4];
    let list =
        nic.map_list(Box::new(Pieces(pieces.to_vec())), Direction::FromDevice, &mut segments);
    let (list, line) = (list.unwrap(), line!() - 1);
    let whole = list.iovas().unwrap().start();
    assert_eq!(lines(&who), [(range(whole.get(), 0x6000), line)]);
    drop(nic.unmap_list(list).unwrap());

    let (addr, len) = nic
        .into_raw(nic.map_single(memory(0x8000_0000, 0x1000), Direction::ToDevice).unwrap())
        .unwrap();
    assert_eq!(lines(&who), [(range(addr.get(), len), line!() - 2)]);
    drop(nic.unmap_raw(addr, len, Direction::ToDevice).unwrap());

    nic.with_mapped(memory(0xa000, 0x1000), Direction::ToDevice, Attrs::default(), |mapping| {
        assert_eq!(lines(&who), [(iovas(mapping, 0x1000), line!() - 1)]);
    })
    .unwrap();

    let direction = Direction::ToDevice;
    let request = ReserveRequest { len: 0x4000, offset: 0, pieces: 2, direction };
    let mut reservation = nic.reserve(request).unwrap();
    assert_eq!(who.list().count(), 0, "IOVAs that lead nowhere");
    nic.link(&mut reservation, 0x2000, memory(0xb000, 0x1000)).unwrap();
    assert_eq!(who.list().count(), 0, "what is mapped when it is announced");
    nic.announce(&mut reservation).unwrap();
    let linked = range(reservation.addr().get() + 0x2000, 0x1000);
    assert_eq!(lines(&who), [(linked, line!() - 2)]);
    nic.destroy(reservation, drop).unwrap();
    assert_eq!((who.list().count(), who.missed()), (0, 0));
}

/// Keeps who asked for what.
#[derive(Default)]
struct Heard(Mutex<Vec<(&'static str, Option<&'static Location<'static>>)>>);

impl Observer for Heard {
    fn event(&self, event: &Event<'_>) {
        let (what, by) = match *event {
            Event::Mapping { by, .. } => ("mapping", Some(by)),
            Event::Bytes { range, granule_lg2: 12 } if range.len_less_one() == 0xfff => {
                ("bytes", None)
            }
            Event::Mapped { .. } => ("mapped", None),
            Event::Unmapping { by, .. } => ("unmapping", Some(by)),
            Event::Unmapped { .. } => ("unmapped", None),
            Event::Sync { by, .. } => ("sync", Some(by)),
            Event::RefusedUnmap { by, .. } => ("refused", Some(by)),
            _ => ("else", None),
        };
        let place = by.map(|by| match by.label {
            Label::Place(place) => place,
            Label::Name(name) => panic!("{name} is no place"),
        });
        self.0.lock().push((what, place));
    }
}

#[test]
fn a_device_without_type_parameters_says_the_line_that_asked_too() {
    let heard = Arc::new(Heard::default());
    let domain = domain(Arc::clone(&heard)).0;
    let domain = DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap();
    let nic = Device::erased(Arc::new(domain), NoPool, DeviceConfig::bits(40)).unwrap();
    // SAFETY: no device uses it.
    let memory = unsafe { RawMemory::new(Piece::memory(span(0x8000_0000, 0x1000))) };
    let mapping = nic.map_single(memory.into(), Direction::ToDevice).unwrap();
    let mapped = line!() - 1;
    drop(nic.unmap(mapping).unwrap());
    let unmapped = line!() - 1;
    let heard = heard.0.lock();
    let asked = heard.iter().filter_map(|(what, place)| Some((*what, (*place)?)));
    let lines: Vec<_> = asked.map(|(what, place)| (what, place.file(), place.line())).collect();
    assert_eq!(lines, [("mapping", file!(), mapped), ("unmapping", file!(), unmapped)]);
}

/// Panics when a mapping is about to be ended.
#[derive(Default)]
struct Panics(AtomicBool);

impl Observer for Panics {
    fn event(&self, event: &Event<'_>) {
        let is_end = matches!(event, Event::Unmapping { .. });
        assert!(!(is_end && self.0.load(Ordering::Relaxed)), "on purpose");
    }
}

/// Memory that counts how many of its kind there are.
struct Counted(Vec<Piece>, #[expect(dead_code, reason = "it counts")] Arc<()>);

// SAFETY: no device uses it.
unsafe impl dmaspan::dma::DmaMemory for Counted {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

#[test]
fn where_an_observer_panics_no_memory_is_freed_that_is_still_mapped() {
    for flush in [Flush::Strict, Flush::Lazy] {
        let panics = Arc::new(Panics::default());
        let nic = device(Arc::clone(&panics), flush);
        let alive = Arc::new(());
        let memory = |at| -> Memory {
            Box::new(Counted(vec![Piece::memory(span(at, 0x1000))], Arc::clone(&alive)))
        };
        let mut room = [Segment::default(); 1];
        let single = nic.map_single(memory(0x8000), Direction::FromDevice).unwrap();
        let list = nic.map_list(memory(0x9000), Direction::FromDevice, &mut room).unwrap();
        let mapped = |at: u64| nic.translation().domain().iova_to_phys(Iova::new(at & !0xfff));
        let ats = [single.addr().get(), list.iovas().unwrap().start().get()];
        panics.0.store(true, Ordering::Relaxed);
        let unmap = || nic.unmap(single).map(drop);
        assert!(catch_unwind(AssertUnwindSafe(unmap)).is_err());
        let unmap = || nic.unmap_list(list).map(drop);
        assert!(catch_unwind(AssertUnwindSafe(unmap)).is_err());
        assert!(ats.iter().all(|at| mapped(*at).is_some()));
        assert_eq!(Arc::strong_count(&alive), 3, "a device reaches freed memory");
    }
}

#[test]
fn coherent_memory_is_announced_once_when_it_comes_and_when_it_goes() {
    let heard = Arc::new(Heard::default());
    let memory = Arc::new(SimMemory::new(PhysAddr::new(0x8000_0000), 1 << 20, 12).unwrap());
    let source = Arc::new(SimCoherent::new(memory, &Faults::default()));
    let nic = device(Arc::clone(&heard), Flush::Strict).with_coherent(source);
    let from = line!();
    let coherent = nic.alloc(0x2000, 1).unwrap();
    nic.free(coherent).unwrap();
    let heard = heard.0.lock();
    let said: Vec<_> =
        heard.iter().map(|(what, at)| (*what, at.map(|at| at.line() - from))).collect();
    let expected =
        [("mapping", Some(1)), ("mapped", None), ("unmapping", Some(2)), ("unmapped", None)];
    assert_eq!(said, expected);
}

#[test]
fn who_asks_is_said_before_what_is_done_and_of_syncs_and_refusals_too() {
    let heard = Arc::new(Heard::default());
    let nic = device(Arc::clone(&heard), Flush::Lazy);
    let from = line!();
    let mapping = nic.map_single(memory(0x8000, 0x1000), Direction::Bidirectional).unwrap();
    nic.sync_for_cpu(&mapping, 0, 8).unwrap();
    nic.sync_for_device(&mapping, 0, 8).unwrap();
    let Unmapped::Queued = nic.unmap(mapping).unwrap() else { panic!("not lazy") };
    let none = nic.unmap_raw(dmaspan::DmaAddr::new(0x5000), 8, Direction::ToDevice);
    assert!(none.is_err());
    let heard = heard.0.lock();
    let said: Vec<_> =
        heard.iter().map(|(what, at)| (*what, at.map(|at| at.line() - from))).collect();
    assert_eq!(
        said,
        [
            ("mapping", Some(1)),
            ("bytes", None),
            ("mapped", None),
            ("sync", Some(2)),
            ("sync", Some(3)),
            ("unmapping", Some(4)),
            ("unmapped", None),
            ("refused", Some(5)),
        ]
    );
    assert!(heard.iter().filter_map(|(_, at)| *at).all(|at| at.file() == file!()));
}

#[test]
fn a_recorder_knows_what_is_mapped_whatever_comes_and_goes() {
    let who = Who::default();
    let nic = device(Arc::clone(&who), Flush::Strict);
    let mut rng = Rng::new(7);
    let mut live = BTreeMap::new();
    for n in 0..3000 {
        if rng.below(5) < 2 && !live.is_empty() {
            let index = rng.index(live.len());
            let key = *live.keys().nth(index).unwrap();
            drop(nic.unmap(live.remove(&key).unwrap()).unwrap());
        } else {
            let len = (1 + rng.below(9)) * 0x1000;
            let mapping = nic.map_single(memory(n << 20, len), Direction::ToDevice).unwrap();
            live.insert(mapping.addr().get(), mapping);
        }
        if n % 50 == 0 {
            let listed = who.list().map(|record| (record.range.start().get(), record.range));
            let known = live.iter().map(|(at, mapping)| (*at, iovas(mapping, mapping.len())));
            assert!(listed.eq(known), "{n}");
        }
    }
    assert!(live.len() > 300, "blocks were split");
    live.into_values().for_each(|mapping| drop(nic.unmap(mapping).unwrap()));
    assert_eq!((who.list().count(), who.missed()), (0, 0));
    assert!(format!("{who:?}").contains("mappings: 0"));
}

#[test]
fn a_failed_map_is_not_known_and_a_later_one_there_is() {
    let who = Who::default();
    let nic = device(Arc::clone(&who), Flush::Strict);
    let iommu = nic.translation().domain().ops().inner().clone();
    iommu.fail_next_sync_maps(1);
    let refused = nic.map_single(memory(0x8000, 0x1000), Direction::ToDevice).unwrap_err();
    assert!(refused.memory.is_some());
    assert_eq!(who.list().count(), 0);
    let mapping = nic.map_single(memory(0x8000, 0x1000), Direction::ToDevice).unwrap();
    assert_eq!(lines(&who), [(iovas(&mapping, 0x1000), line!() - 1)]);
    drop(nic.unmap(mapping).unwrap());
}

#[test]
fn what_a_domain_maps_by_itself_is_known_without_a_caller() {
    let who = Who::default();
    let (domain, page) = domain(Arc::clone(&who));
    let three = [span(0x8000_0000, 3 * page)];
    // SAFETY: one thread maps, and no device uses the memory.
    unsafe { domain.map_spans(Iova::new(page), &three, Prot::READ) }.unwrap();
    // SAFETY: one thread changes it.
    let middle = unsafe { domain.remove(range(2 * page, page)) }.unwrap();
    let _synced = middle.sync().unwrap();
    let found: Vec<MappedBy> = who.list().collect();
    let ranges: Vec<_> = found.iter().map(|record| (record.range, record.by)).collect();
    assert_eq!(ranges, [(range(page, page), None), (range(3 * page, page), None)]);
    assert_eq!(who.list_in(range(3 * page, 1)).count(), 1);
}

#[test]
fn a_live_listing_of_a_recorder_shows_what_stays_once_and_nothing_else() {
    let who = Who::default();
    let nic = device(Arc::clone(&who), Flush::Strict);
    let map = |n: u64| nic.map_single(memory(n << 12, 0x1000), Direction::ToDevice).unwrap();
    let mut stay: Vec<_> = (0..100).map(map).collect();
    stay.sort_by_key(Mapping::addr);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..4000 {
                drop(nic.unmap(map(n)).unwrap());
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let listed: Vec<_> = who.list().map(|record| record.range.start().get()).collect();
            assert!(listed.is_sorted() && listed.len() <= 101);
            let missing = stay.iter().filter(|m| !listed.contains(&m.addr().get()));
            assert_eq!(missing.count(), 0);
        }
    });
    stay.into_iter().for_each(|mapping| drop(nic.unmap(mapping).unwrap()));
}
