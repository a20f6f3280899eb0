//! A container, its users, and what is done with them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use dmaspan::container::{DomainId, EmulatedId, Error, ExternalPin, UnmapNotifier, VaddrUpdate};
use dmaspan::pin::{Dirty, Pinner};
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, IovaRange, PhysAddr, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::{Faults, Faulty, Fired};
use dmaspan_sim::memory::{MapOptions, Rights, SimMemory, SimPinner, SimSpace};
use parking_lot::Mutex;

use super::model::{Behind, MAX_MAPPINGS, Mapped, Model, OWNERS, Pages};
use super::script::{Script, Select, Trouble};
use super::views::View;
use super::watched::{Watch, Watched};
use crate::common::PROT;

pub(crate) type Tried<const BATCH: usize> = Container<Watched, parking_lot::RawMutex, BATCH>;
pub(crate) type Id = DomainId;
pub(crate) type Failed = Error<<Watched as Pinner>::Error>;

/// Pages of a user's memory, of all kinds; behind them is a hole.
const AREA: u64 = 144;
/// Where contiguous memory is, in pages, and how much of it.
pub(crate) const LARGE: u64 = 1 << 19;
const LARGE_PAGES: u64 = 520;
/// Device memory: first page and number.
pub(crate) const BARS: [(u64, u64); 2] = [(64, 16), (128, 8)];
const BAR_PADDR: u64 = 1 << 42;

/// An emulated device that unpins what it is told of.
#[derive(Default)]
pub(crate) struct Device<const BATCH: usize> {
    container: Mutex<Weak<Tried<BATCH>>>,
    pub(crate) pins: Mutex<Vec<ExternalPin>>,
}

impl<const BATCH: usize> UnmapNotifier for Device<BATCH> {
    fn unmapping(&self, range: IovaRange) {
        let Some(container) = self.container.lock().upgrade() else { return };
        let is_in = |pin: &mut ExternalPin| range.intersection(pin.range()).is_some();
        let gone: Vec<_> = self.pins.lock().extract_if(.., is_in).collect();
        gone.into_iter().for_each(|pin| container.unpin_external(pin, Dirty::Written).unwrap());
    }
}

/// What went wrong while something was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Excuse {
    /// A step failed, or hardware did not answer.
    pub(crate) failed: bool,
    pub(crate) cancelled: bool,
}

pub(crate) struct World<const BATCH: usize> {
    pub(crate) faults: Faults,
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) spaces: Vec<Arc<SimSpace>>,
    pub(crate) accounts: Vec<Arc<Account>>,
    pub(crate) container: Arc<Tried<BATCH>>,
    pub(crate) device: Arc<Device<BATCH>>,
    pub(crate) emulated: Option<EmulatedId>,
    pub(crate) watch: Arc<Watch>,
    /// In the order of the model's domains.
    pub(crate) attached: Vec<(DomainId, Arc<dyn View>)>,
    pub(crate) model: Model,
    /// What was written where.
    pub(crate) contents: BTreeMap<u64, u64>,
    pub(crate) writes: u64,
    /// Pages that were mapped and are no more.
    pub(crate) graves: BTreeSet<u64>,
    pub(crate) excuse: Excuse,
    /// A failure may have leaked tables.
    pub(crate) leaky: bool,
}

/// First pages of a user, and what is to be there.
type Spans = Vec<(u64, Vec<Span>, Rights)>;

fn span(paddr: u64, bytes: u64) -> Span {
    Span::new(PhysAddr::new(paddr), bytes).unwrap()
}

impl<const BATCH: usize> World<BATCH> {
    pub(crate) fn new(script: &Script) -> Self {
        let Script { g, version, counting, limit, holes, .. } = *script;
        let faults = Faults::none();
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 4096 << g, g).unwrap());
        let (behind, spans) = physical(&memory, g);
        let spaces: Vec<_> = (0..2).map(|_| Arc::new(SimSpace::new(Arc::clone(&memory)))).collect();
        let account = |_| Account::with_counting(limit << g, counting);
        let accounts: Vec<_> = (0..OWNERS).map(account).collect();
        let watch = Arc::new(Watch::default());
        let inner = Faulty::new(SimPinner::new(Arc::clone(&memory)).with_holes(holes), &faults);
        let pinner = Watched { inner, watch: Arc::clone(&watch) };
        let container = Container::of_batch(pinner, Arc::clone(&accounts[0]))
            .with_page_size(1 << g)
            .with_max_mappings(MAX_MAPPINGS)
            .with_version(version);
        let container = Arc::new(container);
        let device = Arc::new(Device::default());
        *device.container.lock() = Arc::downgrade(&container);
        let model = Model {
            g,
            version,
            counting,
            limit,
            users: vec![behind; 2],
            mapped: BTreeMap::new(),
            gone: BTreeMap::new(),
            domains: Vec::new(),
            tracking: false,
            held: Vec::new(),
            emulated: false,
        };
        let world = Self {
            faults,
            memory,
            spaces,
            accounts,
            container,
            device,
            emulated: None,
            watch,
            attached: Vec::new(),
            model,
            contents: BTreeMap::new(),
            writes: 0,
            graves: BTreeSet::new(),
            excuse: Excuse { failed: false, cancelled: false },
            leaky: false,
        };
        world.populate(&spans);
        world
    }

    /// Puts memory and devices into both spaces.
    fn populate(&self, spans: &Spans) {
        for (n, space) in self.spaces.iter().enumerate() {
            for (first, spans, rights) in spans {
                let options = MapOptions { rights: *rights, ..MapOptions::default() };
                space.map_with(self.user_addr(n, *first), spans, options).unwrap();
            }
            (0..BARS.len()).for_each(|bar| self.plug(n, bar));
        }
    }

    pub(crate) fn plug(&self, space: usize, bar: usize) {
        let ((first, count), g) = (BARS[bar], self.model.g);
        let device = span(bar_paddr(bar, 0, g), count << g);
        let at = self.user_addr(space, first);
        self.spaces[space].map_device_with(at, device, MapOptions::default()).unwrap();
    }

    fn user_addr(&self, space: usize, page: u64) -> UserAddr {
        UserAddr::new(((space as u64 + 1) << 44) + (page << self.model.g))
    }

    pub(crate) fn user(&self, pages: Pages) -> UserRange {
        let at = self.user_addr(pages.space, pages.first);
        UserRange::from_len(at, pages.count << self.model.g).unwrap()
    }

    pub(crate) fn iovas(&self, first: u64, count: u64) -> IovaRange {
        let g = self.model.g;
        IovaRange::from_len(Iova::new(first << g), count << g).unwrap()
    }

    pub(crate) fn nth(&self, n: u8) -> Option<u64> {
        let count = self.model.mapped.len().max(1);
        self.model.mapped.keys().nth(usize::from(n) % count).copied()
    }

    /// First page and number of pages.
    pub(crate) fn select(&self, select: Select) -> Option<(u64, u64)> {
        let pages = |n| self.nth(n).map(|at| (at, self.model.mapped[&at].user.count));
        match select {
            Select::Nth(n) => pages(n),
            Select::FromTo(a, b) => {
                let ((a, first), (b, second)) = (pages(a)?, pages(b)?);
                let start = a.min(b);
                Some((start, (a + first).max(b + second) - start))
            }
            Select::Cut(n, cut) => {
                let (at, count) = pages(n)?;
                let cut_by = 1 + u64::from(cut / 2) % count;
                let left = count.saturating_sub(cut_by).max(1);
                Some(if cut % 2 == 0 { (at, left) } else { (at + count - left, left + 3) })
            }
            Select::Pages(at, count) => Some((place(at, self.model.g), 1 + u64::from(count))),
        }
    }

    /// The same, or a mapping where that would be many bits.
    pub(crate) fn select_few(&self, select: Select) -> Option<(u64, u64)> {
        let pages = self.select(select)?;
        if pages.1 <= 4096 { Some(pages) } else { self.select(Select::Nth(0)) }
    }

    /// Does something with what goes wrong, and says what that was.
    pub(crate) fn troubled<T>(
        &mut self,
        trouble: Trouble,
        act: impl FnOnce(&mut Self, &dyn Fn() -> bool) -> T,
    ) -> T {
        let asked = std::cell::Cell::new(0);
        let cancel = trouble.cancel.map(u64::from);
        let cancelled = std::cell::Cell::new(false);
        let ask = || {
            let now = cancel.is_some_and(|cancel| asked.get() >= cancel);
            asked.set(asked.get() + 1);
            cancelled.set(cancelled.get() || now);
            now
        };
        let views = self.watch.views.lock().clone();
        let deaf = trouble.deaf.filter(|_| !views.is_empty());
        let deaf = deaf.map(|n| &views[usize::from(n) % views.len()]);
        deaf.iter().for_each(|view| view.deafen(u64::MAX));
        if trouble.step > 0 {
            self.faults.arm(trouble.step.into());
        }
        let result = act(self, &ask);
        let fired = trouble.step > 0 && self.faults.disarm() == Fired::Yes;
        deaf.iter().for_each(|view| view.deafen(0));
        let failed = fired || deaf.is_some();
        self.excuse = Excuse { failed, cancelled: cancelled.get() };
        self.leaky |= failed;
        result
    }

    pub(crate) fn errno(&self, error: &Failed) -> Errno {
        self.container.errno(error)
    }

    /// Success and failure are the model's. Returns whether it succeeded.
    pub(crate) fn judge<T>(&self, result: &Result<T, Failed>, refusals: &[Errno]) -> bool {
        let unsure = self.model.gone.values().any(|gone| !gone.whole);
        match result {
            Ok(_) => {
                let unsure = unsure && refusals.iter().all(|errno| *errno == Errno::ENOMEM);
                assert!(refusals.is_empty() || unsure, "{refusals:?} was to be answered");
                assert!(!self.excuse.cancelled, "it was cancelled");
            }
            Err(error) => {
                let errno = self.errno(error);
                let known = refusals.contains(&errno)
                    || self.excuse.failed
                    || (self.excuse.cancelled && errno == Errno::EINTR);
                assert!(known, "{error} ({errno:?}), and not {refusals:?}");
            }
        }
        result.is_ok()
    }

    /// What is at a page of IOVAs: whether it is free, mapped, or out of use for ever.
    pub(crate) fn probe(&self, page: u64) -> Place {
        let hole = self.user(Pages { space: 0, first: AREA + 100, count: 1 });
        let iova = Iova::new(page << self.model.g);
        match self.container.map(&self.spaces[0], hole, iova, PROT) {
            Err(Error::Exists { .. }) => Place::Mapped,
            Err(Error::Quarantined { .. }) => Place::Gone,
            Err(_) => Place::Free,
            Ok(_) => {
                self.container.unmap(self.iovas(page, 1)).unwrap();
                Place::Free
            }
        }
    }

    /// Tells the watch where devices may get, `more` included.
    pub(crate) fn watch(&self, more: Option<(u64, &Mapped)>) {
        let mut leading = BTreeMap::<u64, Vec<u64>>::new();
        let all = self.model.mapped.iter().map(|(&first, mapped)| (first, mapped));
        let gone = self.model.gone.iter().map(|(&first, gone)| (first, &gone.was));
        for (first, mapped) in all.chain(gone).chain(more) {
            let behind = self.model.behind(mapped.user);
            let behind = mapped.pinned.as_ref().unwrap_or(&behind);
            for (page, behind) in (first..).zip(behind) {
                if let Some(frame) = behind.memory() {
                    leading.entry(frame).or_default().push(page << self.model.g);
                }
            }
        }
        *self.watch.leading.lock() = leading;
    }

    pub(crate) fn update(&self, first: u64, user: Pages, owner: usize) -> Result<(), Failed> {
        let (space, iova) = (&self.spaces[user.space], Iova::new(first << self.model.g));
        let update = VaddrUpdate::new(space, self.user(user), iova);
        self.container.update_vaddr(&update.owner(&self.accounts[owner]))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Free,
    Mapped,
    Gone,
}

fn bar_paddr(bar: usize, page: u64, g: u32) -> u64 {
    BAR_PADDR + ((bar as u64) << 30) + (page << g)
}

/// The pages of IOVAs that are used: somewhere, around reserved ones, and at the end of 39 bits.
pub(crate) fn place(at: u16, g: u32) -> u64 {
    let n = u64::from(at / 8);
    match at % 8 {
        0..=4 => 0x200 + n % 40 * 12,
        5 => (super::views::MSI.0 >> g) - 40 + n % 4 * 20,
        6 => (1 << (39 - g)) - 60 + n % 4 * 20,
        _ => n % 4 * 20,
    }
}

/// All kinds of memory: what is behind the pages of a user, and spans to put there.
fn physical(memory: &SimMemory, g: u32) -> (BTreeMap<u64, Behind>, Spans) {
    let large = memory.allocate(LARGE_PAGES << g, 21).unwrap();
    let folios = memory.allocate_folios(&[0, 1, 2, 0, 3], 3).unwrap();
    let contiguous = memory.allocate(32 << g, g + 4).unwrap();
    let scattered = |count: u64, seed| memory.allocate_scattered(count << g, seed).unwrap();
    let spans = vec![
        (0, scattered(64, 1), Rights::ReadWrite),
        (80, vec![contiguous], Rights::ReadWrite),
        (112, folios, Rights::ReadWrite),
        (136, scattered(8, 2), Rights::ReadOnly),
        (LARGE, vec![large], Rights::ReadWrite),
    ];
    let mut behind = BTreeMap::new();
    for (first, spans, rights) in &spans {
        let frames = spans.iter().flat_map(|span| {
            let (start, pages) = (span.paddr().get(), span.len() >> g);
            (0..pages).map(move |page| start + (page << g))
        });
        behind.extend((*first..).zip(frames).map(|(page, frame)| match rights {
            Rights::ReadOnly => (page, Behind::ReadOnly(frame)),
            Rights::ReadWrite => (page, Behind::Memory(frame)),
        }));
    }
    for bar in 0..BARS.len() {
        behind.extend(bar_pages(bar, g));
    }
    (behind, spans)
}

pub(crate) fn bar_pages(bar: usize, g: u32) -> impl Iterator<Item = (u64, Behind)> {
    let (first, count) = BARS[bar];
    (0..count).map(move |page| (first + page, Behind::Device(bar_paddr(bar, page, g))))
}
