//! [`LinuxPinner`] pins ranges of [`Memory`] for real, and says as spans where they are.

use std::mem::{self, ManuallyDrop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::regbuf::{Buffer, PinBufferError, Pinned};
use dmaspan::{Account, Errno, PhysAddr, Promise, Prot, RangeError, Span, UserAddr, UserRange};

use crate::log;
use crate::mem::{AccessError, Memory, OutsideMemory};
use crate::pagemap::{FrameAddress, FrameMode, FrameSource, Lookup, NoFrames, PagemapError};
use crate::registration::{PinMethod, RegisterError, Registrar, Registration};
use crate::sys;

/// The reason why memory was not pinned, or a pinner not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinuxPinError {
    /// The range is not all in the memory.
    #[error(transparent)]
    Outside(#[from] OutsideMemory),
    /// No range begins there and is so long.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// It could not be read or written.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The kernel did not pin it.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// It was pinned, and its frames not found.
    #[error(transparent)]
    Frames(#[from] PagemapError),
    /// Physical addresses were asked for, and there are none.
    #[error("no physical addresses: {0}")]
    NoFrames(#[from] NoFrames),
}

impl LinuxPinError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Outside(error) => error.errno(),
            Self::Range(error) => error.errno(),
            Self::Access(error) => error.errno(),
            Self::Register(error) => error.errno(),
            Self::Frames(error) => error.errno(),
            Self::NoFrames(error) => error.errno(),
        }
    }
}

/// Says what a [`LinuxPinner`] shall use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnerOptions {
    /// How to pin. `None`: by io_uring, or by mlock where io_uring is forbidden.
    pub method: Option<PinMethod>,
    /// How frames are looked up.
    pub lookup: Lookup,
}

/// Says what pinning cost so far, over all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnerStats {
    /// Nanoseconds that the kernel took to pin.
    pub pin_ns: u64,
    /// Nanoseconds that looking frames up took, without those of the sinks.
    pub lookup_ns: u64,
    /// Nanoseconds that the kernel took to unpin.
    pub unpin_ns: u64,
    /// Pagemap entries that were read, or requests that said where memory is.
    pub lookups: u64,
}

#[derive(Debug, Default)]
struct Counters {
    pin_ns: AtomicU64,
    lookup_ns: AtomicU64,
    unpin_ns: AtomicU64,
    lookups: AtomicU64,
}

/// Pins ranges of [`Memory`], each of which is an address space to it: mappings of a container may
/// be of several, and a registry of buffers is of one.
///
/// Addresses of spans are physical, or as a `LinuxPinner<HostAddr>` those of the process, which
/// need no privilege. Pins by io_uring stay at their frames. Locked memory may move, so where
/// memory is locked there are only virtual addresses, which always hold.
///
/// What has virtual addresses can be mapped by an IOMMU of software, and no driver of hardware
/// takes it. Here `Driver` has the hooks of one:
///
/// ```
/// use dmaspan::io_pgtable::{Format, TableMemory};
/// use dmaspan::iommu::{Domain, IommuOps};
/// use dmaspan::{Account, Container, PhysAddr};
/// use dmaspan_linux::LinuxPinner;
///
/// fn over_hardware<F: Format, M: TableMemory<F::Word> + 'static, Driver>(
///     domain: Domain<F, M, Driver>,
///     pinner: LinuxPinner<PhysAddr>,
/// ) -> Container<LinuxPinner<PhysAddr>, parking_lot::RawMutex>
/// where
///     Driver: IommuOps<Address = PhysAddr> + 'static,
/// {
///     Container::with_domain(pinner, domain, Account::new(1 << 30))
/// }
/// ```
///
/// With virtual addresses it does not compile:
///
/// ```compile_fail,E0271
/// use dmaspan::io_pgtable::{Format, TableMemory};
/// use dmaspan::iommu::{Domain, IommuOps};
/// use dmaspan::{Account, Container, HostAddr, PhysAddr};
/// use dmaspan_linux::LinuxPinner;
///
/// fn over_hardware<F: Format, M: TableMemory<F::Word> + 'static, Driver>(
///     domain: Domain<F, M, Driver>,
///     pinner: LinuxPinner<HostAddr>,
/// ) -> Container<LinuxPinner<HostAddr>, parking_lot::RawMutex>
/// where
///     Driver: IommuOps<Address = PhysAddr> + 'static,
/// {
///     Container::with_domain(pinner, domain, Account::new(1 << 30))
/// }
/// ```
///
/// # Context
///
/// Any number of threads pin and release at once. A process that forks keeps its pins in the
/// parent.
///
/// Further rings are opened for long ranges, and where those that there are have no slots, with the
/// rights that the process has then: one that gives up `CAP_IPC_LOCK` is charged for what it pins
/// by them, and one that may open no more pins by those that it has.
///
/// A clone is the same pinner: it has the same rings and counts the same statistics.
#[derive(Debug)]
pub struct LinuxPinner<A: FrameAddress = PhysAddr> {
    registrar: Arc<Registrar>,
    frames: Arc<FrameSource<A>>,
    lookup: Lookup,
    why_mlock: Option<RegisterError>,
    counters: Arc<Counters>,
}

impl<A: FrameAddress> Clone for LinuxPinner<A> {
    fn clone(&self) -> Self {
        Self {
            registrar: Arc::clone(&self.registrar),
            frames: Arc::clone(&self.frames),
            counters: Arc::clone(&self.counters),
            ..*self
        }
    }
}

impl<A: FrameAddress> LinuxPinner<A> {
    /// A pinner with the best that this system has.
    ///
    /// # Errors
    ///
    /// [`LinuxPinError::NoFrames`] where there are no such addresses, and
    /// [`LinuxPinError::Register`] where io_uring fails for another reason than that it is missing
    /// or forbidden.
    pub fn new() -> Result<Self, LinuxPinError> {
        Self::with(PinnerOptions::default())
    }

    /// A pinner with these options.
    ///
    /// # Errors
    ///
    /// [`LinuxPinError`] where the machine does not give what was asked for. There are no physical
    /// addresses of memory that is only locked.
    pub fn with(options: PinnerOptions) -> Result<Self, LinuxPinError> {
        let (registrar, why_mlock) = match options.method {
            Some(PinMethod::Mlock) => (Registrar::Mlock, None),
            Some(PinMethod::IoUring) => (Registrar::io_uring()?, None),
            None => match Registrar::io_uring() {
                Ok(registrar) => (registrar, None),
                Err(error) if error.is_missing() => (Registrar::Mlock, Some(error)),
                Err(error) => return Err(error.into()),
            },
        };
        if A::MODE == FrameMode::Physical && registrar.method() == PinMethod::Mlock {
            return Err(NoFrames::MayMove.into());
        }
        if A::MODE == FrameMode::Virtual {
            log::info!(
                "virtual addresses are used in the place of physical ones: only devices of \
                 software reach what this pinner pins"
            );
        }
        Ok(Self {
            registrar: Arc::new(registrar),
            frames: Arc::new(FrameSource::new()?),
            lookup: options.lookup,
            why_mlock,
            counters: Arc::default(),
        })
    }

    /// Returns how memory is pinned.
    pub fn method(&self) -> PinMethod {
        self.registrar.method()
    }

    /// Returns why memory is locked though io_uring would be better; `None` where it is not, or
    /// where locking was asked for.
    pub fn why_mlock(&self) -> Option<RegisterError> {
        self.why_mlock
    }

    /// Returns where the spans come from, for look-ups without pinning.
    pub fn frames(&self) -> &FrameSource<A> {
        &self.frames
    }

    /// Returns what pinning cost since the pinner was made or the statistics were reset.
    pub fn stats(&self) -> PinnerStats {
        self.read_counters(|counter| counter.load(Ordering::Relaxed))
    }

    /// As [`stats`](Self::stats), and begins anew.
    pub fn reset_stats(&self) -> PinnerStats {
        self.read_counters(|counter| counter.swap(0, Ordering::Relaxed))
    }

    fn read_counters(&self, read: impl Fn(&AtomicU64) -> u64) -> PinnerStats {
        let Counters { pin_ns, lookup_ns, unpin_ns, lookups } = &*self.counters;
        PinnerStats {
            pin_ns: read(pin_ns),
            lookup_ns: read(lookup_ns),
            unpin_ns: read(unpin_ns),
            lookups: read(lookups),
        }
    }

    /// Pins all of a memory for as long as the buffer that is returned exists, which says where it
    /// is: of a `LinuxPinner<PhysAddr>`, what a device without an IOMMU is told. The kernel counts
    /// it against the limit of locked memory, and nobody else does;
    /// [`Pinned`] charges an account.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::{HostAddr, Prot};
    /// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
    ///
    /// // Of virtual addresses, which need no privilege; those of hardware are `PhysAddr`s.
    /// let pinner = LinuxPinner::<HostAddr>::new()?;
    /// let memory = Arc::new(Memory::new(MemoryKind::Base, 1 << 20)?);
    /// let buffer = pinner.pin_whole(&memory, Prot::READ_WRITE)?;
    /// for span in buffer.segments().iter() {
    ///     println!("{} bytes at {}", span.len(), span.start());
    /// }
    /// // It keeps the memory, and is unpinned when it is dropped.
    /// drop((memory, buffer));
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PinBufferError::Pinner`] with what the kernel refused; nothing is pinned then.
    pub fn pin_whole(
        &self,
        memory: &Arc<Memory>,
        prot: Prot,
    ) -> Result<Buffer<A>, PinBufferError<LinuxPinError>> {
        let (pinner, page_lg2) = (Arc::new(self.clone()), sys::page_size().trailing_zeros());
        let pinned = Pinned::new(pinner, Arc::clone(memory), Account::unlimited(), page_lg2);
        pinned.buffer(memory.user_range(), prot)
    }

    /// Ends a pin that the caller made itself. Where the kernel does not, the memory is leaked with
    /// it.
    ///
    /// Spans let nobody at their memory: to map them for a device takes unsafe code, which promises
    /// there that the pin lasts longer.
    pub fn give_back(&self, pin: LinuxPin) {
        let begin = Instant::now();
        mem::forget(pin.note);
        let RegisteredMemory { memory, registrar, registration } =
            ManuallyDrop::into_inner(pin.held);
        if registrar.unregister(&memory, registration).is_err() {
            mem::forget((memory, registrar));
        }
        self.counters.unpin_ns.fetch_add(ns_since(begin), Ordering::Relaxed);
    }
}

/// A pin of a [`LinuxPinner`]: it keeps the memory.
///
/// Dropping it leaks the memory and the pin, as a device may still use them; only
/// [`release`](Pinner::release) ends it. A pin that comes with an error keeps the whole range
/// pinned too, not only what the sink took of it.
#[derive(Debug)]
#[must_use = "dropping a pin leaks the memory and keeps it pinned"]
pub struct LinuxPin {
    held: ManuallyDrop<RegisteredMemory>,
    range: UserRange,
    note: DropNote,
}

/// Says that a pin was dropped, unless it is forgotten.
#[derive(Debug)]
pub(crate) struct DropNote(pub(crate) UserRange);

impl Drop for DropNote {
    fn drop(&mut self) {
        log::warn!(
            "the pin of {} was dropped: its memory stays pinned and is never freed; release pins \
             by their pinner",
            self.0
        );
    }
}

impl LinuxPin {
    /// The range that is pinned.
    pub fn user_range(&self) -> UserRange {
        self.range
    }

    /// The memory that it keeps.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.held.memory
    }
}

/// What a pin keeps. The rings as well: they would end their registrations with themselves.
#[derive(Debug)]
struct RegisteredMemory {
    memory: Arc<Memory>,
    registrar: Arc<Registrar>,
    registration: Registration,
}

// SAFETY:
// 1. Pushed spans are memory of the user's range until the pin is released: the pin keeps the
//    `Memory`, which nothing unmaps, and dropping the pin leaks it. Physical addresses are pushed
//    only of memory that is registered with io_uring, which keeps its frames until its slot is
//    emptied (`release` does that) or its ring is closed (the pin keeps it): `with` makes no other
//    pinner with physical ones. Virtual addresses, which `HostAddr` says they are, do not change
//    when the frames do.
// 2. A device may write the memory: all of `Memory` is readable and writable, and Rust code reaches
//    it through atomic bytes alone.
// 3. Spans cover the range exactly and in order, which the walk of `pagemap` sees to: each step
//    begins where the last one ended, and the first and last spans are cut to the range.
#[expect(unsafe_code, reason = "promises that pinned memory stays where it is")]
unsafe impl<A: FrameAddress> Pinner for LinuxPinner<A> {
    type Space = Arc<Memory>;
    type Address = A;
    type Pin = LinuxPin;
    type Error = LinuxPinError;

    fn pin(
        &self,
        space: &Arc<Memory>,
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink<A>,
    ) -> Result<LinuxPin, PinFailed<LinuxPin, LinuxPinError>> {
        let refused =
            |error: LinuxPinError| PinFailed { range, error: PinError::Failed(error), pin: None };
        let offset = space.offset_of(range).map_err(|error| refused(error.into()))?;
        let begin = Instant::now();
        let registration = self.registrar.register(space, range, offset);
        self.counters.pin_ns.fetch_add(ns_since(begin), Ordering::Relaxed);
        let registration = registration.map_err(|error| refused(error.into()))?;
        let held = RegisteredMemory {
            memory: Arc::clone(space),
            registrar: Arc::clone(&self.registrar),
            registration,
        };
        // From here on a sink that panics leaks the pin, as a device may reach what it took.
        let pin = LinuxPin { held: ManuallyDrop::new(held), range, note: DropNote(range) };
        let mut sink = Watched { sink, took: Took::Nothing };
        let error = match self.frames.frames(space, range, self.lookup, &mut sink) {
            Ok(cost) => {
                self.counters.lookup_ns.fetch_add(cost.ns, Ordering::Relaxed);
                self.counters.lookups.fetch_add(cost.entries, Ordering::Relaxed);
                return Ok(pin);
            }
            Err(error) => error.map(LinuxPinError::from),
        };
        Err(sink.took.failed(range, error, pin, |pin| self.give_back(pin)))
    }

    /// Nothing to do: the kernel releases only the whole pin, and marks every page of it written.
    fn unpin(
        &self,
        _promise: Promise<'_>,
        _pin: &mut LinuxPin,
        _spans: &[Span<A>],
        _kind: Kind,
        _dirty: Dirty,
    ) {
    }

    fn release(&self, _promise: Promise<'_>, pin: LinuxPin) {
        self.give_back(pin);
    }

    fn space_id(&self, space: &Arc<Memory>) -> u64 {
        Arc::as_ptr(space).addr() as u64
    }

    fn knows_frames(&self) -> bool {
        A::MODE == FrameMode::Physical
    }

    fn read(
        &self,
        space: &Arc<Memory>,
        at: UserAddr,
        bytes: &mut [u8],
    ) -> Result<(), LinuxPinError> {
        Ok(space.read(offset_of::<LinuxPinError>(space, at, bytes.len())?, bytes)?)
    }

    fn write(&self, space: &Arc<Memory>, at: UserAddr, bytes: &[u8]) -> Result<(), LinuxPinError> {
        Ok(space.write(offset_of::<LinuxPinError>(space, at, bytes.len())?, bytes)?)
    }

    fn errno(&self, error: &LinuxPinError) -> Errno {
        error.errno()
    }
}

/// Where `len` bytes from `at` on are in the memory.
pub(crate) fn offset_of<E>(memory: &Memory, at: UserAddr, len: usize) -> Result<u64, E>
where
    E: From<RangeError> + From<OutsideMemory>,
{
    let len = u64::try_from(len).unwrap_or(u64::MAX).max(1);
    Ok(memory.offset_of(UserRange::from_len(at, len)?)?)
}

/// Whether a sink took a span, which a device may reach from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Took {
    Nothing,
    Something,
}

impl Took {
    /// The error of a pin of `range` whose spans were not all pushed. Where the sink took nothing,
    /// the pin is given back.
    pub(crate) fn failed<P, E: std::error::Error + 'static>(
        self,
        range: UserRange,
        error: PinError<E>,
        pin: P,
        give_back: impl FnOnce(P),
    ) -> PinFailed<P, E> {
        let pin = match self {
            Self::Something => Some(pin),
            Self::Nothing => {
                give_back(pin);
                None
            }
        };
        PinFailed { range, error, pin }
    }
}

pub(crate) struct Watched<'a, A> {
    pub(crate) sink: &'a mut dyn SpanSink<A>,
    pub(crate) took: Took,
}

impl<A> SpanSink<A> for Watched<'_, A> {
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        self.sink.push(span, kind)?;
        self.took = Took::Something;
        Ok(())
    }

    fn push_all(&mut self, spans: &[Span<A>], kind: Kind) -> usize
    where
        A: Copy,
    {
        let taken = self.sink.push_all(spans, kind);
        if taken > 0 {
            self.took = Took::Something;
        }
        taken
    }
}

pub(crate) fn ns_since(begin: Instant) -> u64 {
    u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
