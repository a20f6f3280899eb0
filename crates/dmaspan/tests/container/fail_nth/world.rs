//! A container in which every step can fail, and all that a failure must leave alone.

use std::sync::{Arc, Weak};

use dmaspan::container::{
    Attach, DirtyRead, DomainId, EmulatedId, Error, ExternalPin, Info, Interrupts, UnmapNotifier,
    Version,
};
use dmaspan::io_pgtable::Arena;
use dmaspan::pin::Dirty;
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::fault::{Faults, Faulty, FaultyPinError, Fired};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinError, SimPinner, SimSpace};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::{Access, Walker as _};
use parking_lot::Mutex;

use crate::common::{FaultyDomain, PROT, marking_domain, range};

pub(super) const PAGE: u64 = 4096;
/// Where the user has memory in pieces: pages for mappings that are there, and for one more.
pub(super) const USER: u64 = 0x7f00_0000_0000;
/// Where it has memory with a BAR in the middle, so many pages in all.
pub(super) const MIXED: u64 = 0x7e00_0000_0000;
pub(super) const MIXED_PAGES: u64 = 24;
/// Where another process has the first user's memory.
pub(super) const MOVED: u64 = 0x5500_0000_0000;
/// Mappings that are there: first page, pages, first page of the user.
pub(super) const MAPPED: [(u64, u64, u64); 3] = [(16, 12, 0), (28, 4, 20), (40, 12, 30)];
/// What the next one may get: IOVAs on both sides of a table's end.
pub(super) const NEXT: (u64, u64, u64) = (502, 20, 50);
const USER_PAGES: u64 = 80;
/// IOVAs that are looked at, in pages.
const WINDOW: u64 = 600;

/// Batches of few spans, so that a mapping has several.
pub(super) type Tried = Container<Faulty<SimPinner>, parking_lot::RawMutex, 4>;
pub(super) type Refused = Error<FaultyPinError<SimPinError>>;

/// What devices behind a domain see.
pub(super) struct View {
    pub(super) tables: Arena,
    pub(super) iotlb: Iotlb<ArmLpaeS1Walker, Arena>,
}

impl View {
    /// Where an IOVA leads by the tables.
    fn walk(&self, page: u64, access: Access) -> Option<PhysAddr> {
        let iova = Iova::new(page * PAGE);
        self.iotlb.walker().walk(&self.tables, iova, access).ok().map(|leaf| leaf.paddr)
    }

    /// Has a device use all that is mapped, so that its IOTLB knows it, and write every third page.
    fn warm(&self) {
        for page in 0..WINDOW {
            let access = if page % 3 == 0 { Access::Write } else { Access::Read };
            let _ = self.iotlb.translate(Iova::new(page * PAGE), access);
        }
    }

    /// Where devices get, by what hardware has cached and by the tables.
    fn reached(&self) -> Vec<PhysAddr> {
        let reach = |page| self.iotlb.translate(Iova::new(page * PAGE), Access::Read).ok();
        (0..WINDOW).filter_map(reach).map(|hit| hit.paddr).collect()
    }
}

/// An emulated device that unpins what it is told of.
pub(super) struct Device {
    container: Weak<Tried>,
    pins: Mutex<Vec<IovaRange>>,
    told: Mutex<u32>,
}

impl UnmapNotifier for Device {
    fn unmapping(&self, range: IovaRange) {
        *self.told.lock() += 1;
        let Some(container) = self.container.upgrade() else { return };
        let mut pins = self.pins.lock();
        pins.retain(|pin| {
            let goes = pin.intersection(range).is_some();
            if goes {
                container.unpin_range(*pin, Dirty::Written).unwrap();
            }
            !goes
        });
    }
}

pub(super) struct World {
    pub(super) faults: Faults,
    pub(super) memory: Arc<SimMemory>,
    pub(super) space: Arc<SimSpace>,
    pub(super) moved: Arc<SimSpace>,
    /// Of the container, and of whoever takes a mapping over.
    pub(super) accounts: [Arc<Account>; 2],
    pub(super) container: Arc<Tried>,
    pub(super) ids: Vec<DomainId>,
    pub(super) views: Vec<View>,
    /// One to attach.
    next: Option<(FaultyDomain<12>, View)>,
    pub(super) device: Option<(EmulatedId, Arc<Device>)>,
    pub(super) pins: Vec<ExternalPin>,
    /// Words of a bitmap that an operation read or unmapped with.
    pub(super) words: Vec<u64>,
    frames: Vec<PhysAddr>,
}

/// All that an operation that failed leaves as it was.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Snapshot {
    /// For each domain where pages lead, for reads and for writes.
    translations: Vec<Vec<[Option<PhysAddr>; 2]>>,
    tables: Vec<usize>,
    pins: Vec<Option<u32>>,
    /// In pages: what was written is noted in less.
    charged: [u64; 2],
    info: Info,
    leaves: Vec<(u32, u64)>,
    mappings: usize,
    tracking: bool,
    dirty: Option<Vec<u64>>,
    told: u32,
}

impl Snapshot {
    /// All is the same, but what counts as written may be more. Domains that are not among the
    /// expected ones are gone, with their tables.
    pub(super) fn assert_same(&self, expected: &Self, fired: Fired, what: &str) {
        let domains = expected.translations.len();
        assert_eq!(self.tables[domains..].iter().sum::<usize>(), 0, "{what}: tables leak");
        for (n, translations) in self.translations.iter().enumerate() {
            for (page, translation) in translations.iter().enumerate() {
                let expected = expected.translations.get(n).map_or([None; 2], |all| all[page]);
                assert_eq!(*translation, expected, "{what}: page {page} in domain {n}");
            }
        }
        let fewer = self.dirty.iter().flatten().zip(expected.dirty.iter().flatten());
        assert!(fewer.clone().all(|(now, then)| now & then == *then), "{what}: written pages");
        let dirty = if fired == Fired::Yes { &self.dirty } else { &expected.dirty };
        let (translations, tables) = (self.translations.clone(), self.tables.clone());
        let expected = Self { translations, tables, dirty: dirty.clone(), ..expected.clone() };
        assert_eq!(self.rest(), expected.rest(), "{what}");
    }

    /// All but translations and tables.
    fn rest(&self) -> impl PartialEq + std::fmt::Debug + use<'_> {
        let counts = (self.mappings, self.tracking, self.told);
        (&self.pins, self.charged, &self.info, &self.leaves, counts, &self.dirty)
    }

    /// There are as many tables as there were.
    pub(super) fn assert_tables(&self, expected: &Self, what: &str) {
        assert_eq!(self.tables[..expected.tables.len()], expected.tables, "{what}");
    }

    /// Some mappings are as if unmapped, and others are pinned, charged and counted as before.
    pub(super) fn assert_kept(&self, before: &Self, after: &Self, what: &str) {
        assert!((after.mappings..=before.mappings).contains(&self.mappings), "{what}");
        assert!(after.charged[0] <= self.charged[0], "{what}");
        assert!(self.charged[0] <= before.charged[0], "{what}");
        // External pins go in any case, those of domains where hardware has forgotten the page.
        let pins = self.pins.iter().zip(&before.pins).zip(&after.pins);
        for ((now, before), after) in pins {
            assert!(after <= now && now <= before, "{what}");
        }
        let pages = self.translations.iter().flatten();
        let pages = pages.zip(before.translations.iter().flatten());
        for ((now, before), after) in pages.zip(after.translations.iter().flatten()) {
            assert!(now == before || now == after, "{what}");
        }
        assert_eq!(self.info.domains, after.info.domains, "{what}");
        assert_eq!(self.told, after.told, "{what}");
    }

    /// What hardware may still use is pinned, charged and in the way.
    pub(super) fn holds_more_than(&self, after: &Self) -> bool {
        self.mappings > after.mappings && self.charged > after.charged && self.pins != after.pins
    }
}

impl World {
    pub(super) fn new(domains: usize, version: Version) -> Self {
        let faults = Faults::none();
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 256 * PAGE, 12).unwrap());
        let [space, moved] = [0, 1].map(|_| Arc::new(SimSpace::new(Arc::clone(&memory))));
        let spans = memory.allocate_scattered(USER_PAGES * PAGE, 5).unwrap();
        let user = space.map(UserAddr::new(USER), &spans).unwrap();
        space.share(user, &moved, UserAddr::new(MOVED)).unwrap();
        let mixed = memory.allocate_scattered(MIXED_PAGES / 3 * PAGE, 6).unwrap();
        space.map(UserAddr::new(MIXED), &mixed).unwrap();
        let bar = Span::new(PhysAddr::new(1 << 45), MIXED_PAGES / 3 * PAGE).unwrap();
        let tail: Vec<Span> = memory.allocate_scattered(bar.len(), 7).unwrap();
        let at = |third| UserAddr::new(MIXED + third * bar.len());
        space.map_device_with(at(1), bar, MapOptions::default()).unwrap();
        space.map(at(2), &tail).unwrap();
        let accounts = [Account::new(u64::MAX), Account::new(u64::MAX)];
        let pinner = Faulty::new(SimPinner::new(Arc::clone(&memory)), &faults);
        let container = Tried::of_batch(pinner, Arc::clone(&accounts[0])).with_version(version);
        let pages = spans.iter().chain(&mixed).chain(&tail).flat_map(|span| {
            (0..span.len()).step_by(4096).map(|offset| span.paddr().wrapping_add(offset))
        });
        let frames = pages.collect();
        let container = Arc::new(container);
        let (ids, views, next, device, pins, words) = Default::default();
        let mut world = Self {
            faults,
            memory,
            space,
            moved,
            accounts,
            container,
            ids,
            views,
            next,
            device,
            pins,
            words,
            frames,
        };
        world.new_domain();
        for _ in 0..domains {
            world.attach().unwrap();
            world.new_domain();
        }
        world
    }

    /// The mappings that are there, used by devices.
    pub(super) fn mapped(self) -> Self {
        for (iova, pages, user) in MAPPED {
            self.map(iova, USER + user * PAGE, pages, PROT).unwrap();
        }
        self.views.iter().for_each(View::warm);
        self
    }

    /// Three more, with device memory in the middle.
    pub(super) fn with_mixed(self) -> Self {
        self.map(64, MIXED, MIXED_PAGES, PROT).unwrap();
        self.views.iter().for_each(View::warm);
        self
    }

    pub(super) fn tracking(self) -> Self {
        self.container.start_dirty().unwrap();
        self.views.iter().for_each(View::warm);
        self
    }

    pub(super) fn emulated(mut self) -> Self {
        let container = Arc::downgrade(&self.container);
        let device = Device { container, pins: Mutex::default(), told: Mutex::default() };
        let device = Arc::new(device);
        let id = self.container.attach_emulated(Arc::clone(&device) as _).unwrap();
        self.device = Some((id, device));
        self
    }

    /// Pages that the emulated device has pinned, over the edge between two mappings.
    pub(super) fn pinning(self) -> Self {
        self.pin_range(26, 4).unwrap();
        self
    }

    pub(super) fn pin_range(&self, page: u64, pages: u64) -> Result<(), Refused> {
        let asked = pages_at(page, pages);
        self.container.pin_range(asked, PROT, &mut Vec::new())?;
        let (_, device) = self.device.as_ref().unwrap();
        device.pins.lock().push(asked);
        Ok(())
    }

    pub(super) fn map(&self, iova: u64, at: u64, pages: u64, prot: Prot) -> Result<(), Refused> {
        let user = UserRange::from_len(UserAddr::new(at), pages * PAGE).unwrap();
        self.container.map(&self.space, user, Iova::new(iova * PAGE), prot).map(|_| ())
    }

    /// Also that of a domain to come.
    pub(super) fn all_views(&self) -> impl Iterator<Item = &View> {
        self.views.iter().chain(self.next.iter().map(|(_, view)| view))
    }

    fn new_domain(&mut self) {
        let (domain, tables, iotlb) = marking_domain::<12>(&self.faults);
        self.next = Some((domain, View { tables, iotlb }));
    }

    /// Attaches the next domain, whose view stays, also where it is refused.
    pub(super) fn attach(&mut self) -> Result<(), Refused> {
        let (domain, view) = self.next.take().unwrap();
        self.views.push(view);
        let id = self.container.attach(domain, Attach::new(Interrupts::Isolated))?;
        self.ids.push(id);
        Ok(())
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let page = |view: &View, page| [Access::Read, Access::Write].map(|to| view.walk(page, to));
        let translations =
            self.views.iter().map(|view| (0..WINDOW).map(|n| page(view, n)).collect());
        let container = &self.container;
        let told = self.device.as_ref().map_or(0, |(_, device)| *device.told.lock());
        Snapshot {
            translations: translations.collect(),
            tables: self.views.iter().map(|view| view.tables.tables()).collect(),
            pins: self.frames.iter().map(|frame| self.memory.pins(*frame)).collect(),
            charged: [0, 1].map(|n: usize| self.accounts[n].used() / PAGE),
            info: container.info(),
            leaves: container.census().sizes().collect(),
            mappings: container.mappings(),
            tracking: container.tracks_dirty(),
            dirty: container.tracks_dirty().then(|| self.dirty()),
            told,
        }
    }

    /// What was written, which stays so.
    fn dirty(&self) -> Vec<u64> {
        let mut words = vec![0; usize::try_from(WINDOW.div_ceil(64)).unwrap()];
        let asked = range(0, WINDOW * PAGE);
        self.container.dirty_bitmap(asked, PAGE, &mut words, DirtyRead::Keep).unwrap();
        words
    }

    /// No device gets at memory that is not pinned, and nothing was unpinned before its time.
    pub(super) fn assert_safe(&self, what: &str) {
        assert_eq!(self.memory.violations(), [], "{what}");
        for view in &self.views {
            for paddr in view.reached() {
                assert_ne!(self.memory.pins(paddr), Some(0), "{what}: {paddr} is in reach");
            }
        }
    }
}

pub(super) fn pages_at(page: u64, pages: u64) -> IovaRange {
    range(page * PAGE, pages * PAGE)
}
