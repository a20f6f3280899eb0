//! A pinner that does something of a test's in the middle of its next step.

use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{Account, Container, Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimMemory, SimPin, SimPinner, SimSpace};
use parking_lot::Mutex;

use crate::common::{as_inner, faulty_domain};

pub(crate) const USER: u64 = 0x7f00_0000_0000;

type Hook = Mutex<Option<Box<dyn FnOnce() + Send>>>;

pub(crate) struct Hooked {
    inner: SimPinner,
    /// What is done when memory is about to be pinned.
    pub(crate) on_pin: Hook,
    pub(crate) on_unpin: Hook,
    pub(crate) on_copy: Hook,
    /// Frames that are said to be a device's: those whose number is odd.
    pub(crate) odd: Kind,
    /// Bytes that were unpinned of each kind: of memory, and of devices.
    pub(crate) unpinned: Mutex<(u64, u64)>,
    /// How many pins were released.
    pub(crate) released: Mutex<u64>,
}

fn fire(hook: &Hook) {
    let hook = hook.lock().take();
    if let Some(hook) = hook {
        hook();
    }
}

fn is_odd(span: Span) -> bool {
    span.paddr().get() >> 12 & 1 == 1
}

/// Cuts spans into frames, each with its kind.
struct Kinds<'s>(&'s mut dyn SpanSink, Kind);

impl SpanSink for Kinds<'_> {
    fn push(&mut self, span: Span, _kind: Kind) -> Result<(), Stopped> {
        if self.1 == Kind::Memory {
            return self.0.push(span, Kind::Memory);
        }
        let frames = (0..span.len()).step_by(1 << 12);
        let mut frames = frames.map(|at| Span::new(span.paddr().wrapping_add(at), 1 << 12));
        frames.try_for_each(|frame| {
            let frame = frame.map_err(|_| Stopped)?;
            self.0.push(frame, if is_odd(frame) { self.1 } else { Kind::Memory })
        })
    }
}

// SAFETY: pins and spans are the inner pinner's.
unsafe impl Pinner for Hooked {
    type Address = PhysAddr;
    type Space = Arc<SimSpace>;
    type Pin = SimPin;
    type Error = <SimPinner as Pinner>::Error;

    fn pin(
        &self,
        space: &Arc<SimSpace>,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, Self::Error>> {
        fire(&self.on_pin);
        self.inner.pin(space, range, prot, &mut Kinds(sink, self.odd))
    }

    fn unpin(
        &self,
        promise: Promise<'_>,
        pin: &mut SimPin,
        spans: &[Span],
        kind: Kind,
        dirty: Dirty,
    ) {
        fire(&self.on_unpin);
        let bytes: u64 = spans.iter().map(|span| span.len()).sum();
        let mut unpinned = self.unpinned.lock();
        match kind {
            Kind::Memory => unpinned.0 += bytes,
            Kind::Mmio => unpinned.1 += bytes,
        }
        let is_kind = |span: &Span| is_odd(*span) == (kind == Kind::Mmio);
        assert!(self.odd == Kind::Memory || spans.iter().all(is_kind), "{spans:?} are {kind:?}");
        // It takes them for memory.
        self.inner.unpin(promise, pin, spans, Kind::Memory, dirty);
    }

    fn read(
        &self,
        space: &Arc<SimSpace>,
        at: UserAddr,
        bytes: &mut [u8],
    ) -> Result<(), Self::Error> {
        fire(&self.on_copy);
        self.inner.read(space, at, bytes)
    }

    fn write(&self, space: &Arc<SimSpace>, at: UserAddr, bytes: &[u8]) -> Result<(), Self::Error> {
        fire(&self.on_copy);
        self.inner.write(space, at, bytes)
    }

    fn release(&self, promise: Promise<'_>, pin: SimPin) {
        *self.released.lock() += 1;
        self.inner.release(promise, pin);
    }

    as_inner!(inner: space_id errno);
}

pub(crate) type Hooking = Container<Hooked, parking_lot::RawMutex>;

/// As a length in memory.
pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

/// A user's memory, whose pages are scattered, and who pays for it.
pub(crate) struct Owner {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) space: Arc<SimSpace>,
    pub(crate) account: Arc<Account>,
    pub(crate) user: UserRange,
    /// The frame of each page.
    pub(crate) frames: Vec<PhysAddr>,
}

impl Owner {
    pub(crate) fn new(pages: u64) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 4096 << 12, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let spans = memory.allocate_scattered(pages << 12, 5).unwrap();
        let user = space.map(UserAddr::new(USER), &spans).unwrap();
        let pages = |span: &Span| {
            let start = span.paddr();
            (0..span.len()).step_by(1 << 12).map(move |at| start.wrapping_add(at))
        };
        let frames = spans.iter().flat_map(pages).collect();
        Self { memory, space, account: Account::new(u64::MAX), user, frames }
    }

    /// The part of the user's memory from a page on.
    pub(crate) fn pages(&self, first: u64, count: u64) -> UserRange {
        UserRange::from_len(self.user.start().wrapping_add(first << 12), count << 12).unwrap()
    }

    pub(crate) fn pinner(&self) -> Hooked {
        Hooked {
            inner: SimPinner::new(Arc::clone(&self.memory)),
            on_pin: Mutex::default(),
            on_unpin: Mutex::default(),
            on_copy: Mutex::default(),
            odd: Kind::Memory,
            unpinned: Mutex::default(),
            released: Mutex::default(),
        }
    }

    /// A container without domains.
    pub(crate) fn container(&self) -> Hooking {
        Container::new(self.pinner(), Arc::clone(&self.account))
    }

    /// A container with one.
    pub(crate) fn with_domain(&self) -> Hooking {
        let (domain, ..) = faulty_domain::<12>(&Faults::none());
        Container::with_domain(self.pinner(), domain, Arc::clone(&self.account))
    }

    pub(crate) fn assert_untouched(&self) {
        assert_eq!(self.memory.pinned_frames(), 0);
        assert_eq!(self.account.used(), 0);
        assert_eq!(self.memory.violations(), []);
    }
}
