//! [`Pinner`] pins user memory, so that it stays where it is, and says as spans where that is.
//!
//! | Linux's mm/gup.c | here |
//! |---|---|
//! | `pin_user_pages_remote`, `FOLL_LONGTERM` | [`Pinner::pin`], which pushes spans and no pages |
//! | `unpin_user_page_range_dirty_lock` | [`Pinner::unpin`] |
//! | `access_process_vm` (mm/memory.c) | [`Pinner::read`], [`Pinner::write`] |

use core::fmt;

use crate::addr::sealed::Sealed;
use crate::addr::{Address, PhysAddr, UserAddr};
use crate::error::Errno;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::UserRange;
use crate::span::{Full, Span, SpanBuf};

/// Says what is behind a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Memory that the pin keeps where it is, and that is charged to its owner.
    Memory,
    /// Device registers or device memory that a user has mapped, such as a PCI BAR. Nothing pins
    /// it: it may be taken away, see [`Container::revoke`](crate::Container::revoke).
    Mmio,
}

/// Takes spans as a [`Pinner`] finds them, in the order of the user's addresses.
pub trait SpanSink<A = PhysAddr> {
    /// Takes the next span. It may be part of a longer run: sinks coalesce.
    ///
    /// # Errors
    ///
    /// [`Stopped`] where no more are wanted, this one included: the pinner returns at once.
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped>;

    /// Takes the next spans, all of one kind, as if each were [pushed](Self::push). Returns how
    /// many of them it took, the first ones: fewer than all where no more are wanted, and the
    /// pinner returns at once. A pinner that has many spans need not call for each.
    fn push_all(&mut self, spans: &[Span<A>], kind: Kind) -> usize
    where
        A: Copy,
    {
        spans.iter().take_while(|span| self.push(**span, kind).is_ok()).count()
    }
}

/// A [`SpanSink`] wants no more spans; it knows why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sink takes no more spans, and knows why")]
pub struct Stopped;

/// Kinds are not kept.
impl<A: Address> SpanSink<A> for SpanBuf<'_, A> {
    fn push(&mut self, span: Span<A>, _kind: Kind) -> Result<(), Stopped> {
        SpanBuf::push(self, span).map_err(|Full| Stopped)
    }
}

/// Kinds are not kept.
impl<A: Address> SpanSink<A> for alloc::vec::Vec<Span<A>> {
    fn push(&mut self, span: Span<A>, _kind: Kind) -> Result<(), Stopped> {
        match self.last_mut().and_then(|last| Some((last.join(span)?, last))) {
            Some((joined, last)) => *last = joined,
            None => self.push(span),
        }
        Ok(())
    }
}

/// The reason why memory was not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError<E> {
    /// The sink stopped the pinner.
    #[error("{Stopped}")]
    Stopped,
    /// The pinner's own reason.
    #[error(transparent)]
    Failed(E),
}

impl<E> PinError<E> {
    /// The same reason, by another error where it is the pinner's own: for pinners that wrap one.
    pub fn map<F>(self, f: impl FnOnce(E) -> F) -> PinError<F> {
        match self {
            Self::Stopped => PinError::Stopped,
            Self::Failed(error) => PinError::Failed(f(error)),
        }
    }
}

/// A pin that failed, perhaps in the middle.
///
/// It is an error that `?` passes on whole: with its range, its reason and the pin, which whoever
/// looks for it finds. Dropped, it leaks the pin.
#[derive(Debug, thiserror::Error)]
#[error("{range} was not pinned: {error}{}", rest(pin.as_ref()))]
pub struct PinFailed<Pin, E: core::error::Error + 'static> {
    /// What was to be pinned.
    pub range: UserRange,
    /// The reason.
    #[source]
    pub error: PinError<E>,
    /// What keeps the spans pinned that the sink took before: a device may reach them by now. The
    /// caller unpins them and releases this as after a success. `None` where the sink took none.
    pub pin: Option<Pin>,
}

/// What a message says of the pin that comes with it.
fn rest<Pin>(pin: Option<&Pin>) -> &'static str {
    pin.map_or(
        "",
        |_| "; what was found before stays pinned until the pin in this error is released",
    )
}

impl<E> From<Stopped> for PinError<E> {
    fn from(Stopped: Stopped) -> Self {
        Self::Stopped
    }
}

/// Says whether a device may have written pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dirty {
    /// No device could write it.
    Clean,
    /// A device could write it: what backs the memory must be told before it goes.
    Written,
}

impl Dirty {
    /// Returns what a mapping with this `prot` leaves behind.
    pub const fn after(prot: Prot) -> Self {
        if prot.contains(Prot::WRITE) { Self::Written } else { Self::Clean }
    }
}

/// Supplies memory that devices may use: pins a user's range and says where it is.
///
/// A kernel pins pages and releases them frame by frame; io_uring pins a registration and releases
/// only the whole. Both fit: [`unpin`](Self::unpin) names frames that no device reaches any more,
/// and [`release`](Self::release) ends the pin.
///
/// # Safety
///
/// From the moment that a span is pushed until it is passed to [`unpin`](Self::unpin), or the pin
/// to [`release`](Self::release), every byte of it
///
/// 1. stays the memory of the user's range: neither moved, freed nor given another use. Device
///    memory ([`Kind::Mmio`]) is not pinned: whoever takes it away first has every container that
///    maps it revoke it; and
/// 2. may be read and, where `prot` has [`Prot::WRITE`], written by a device at any time. No code
///    holds a Rust reference to it that a device's write would make untrue.
///
/// Pushed spans cover the range exactly, in its order, by addresses of the kind that
/// [`Address`](Self::Address) names.
///
/// [`space_id`](Self::space_id) is the same number for all handles of an address space, at each
/// call, and as long as a handle of it exists no other's: by this number a
/// [revocation](crate::Container::revoke) finds who maps device memory.
///
/// The caller of [`unpin`](Self::unpin) and [`release`](Self::release) promises that no device
/// reaches the memory any more, and hands in the [`Promise`]: safe code, which may well have a
/// container's [pinner](crate::Container::pinner), cannot unpin what a device uses.
///
/// # Context
///
/// Pinning and copying is done without a lock of the container's, and may sleep; but a mapping is
/// under construction then, or in use: a pinner that unmaps it waits for itself.
/// [`unpin`](Self::unpin) and [`space_id`](Self::space_id) may be called with a lock of the
/// container held: they call nothing of it.
///
/// # Panics
///
/// Where a pinner, a [`BusyHook`](crate::container::BusyHook), a sink or the closure that is asked
/// about cancellation panics, nothing is unpinned or given back that a device may use. The range
/// that was worked on then stays [`Busy`](crate::container::Error::Busy) for ever, and domains [can
/// no longer change](crate::container::Error::Changing).
#[expect(
    unsafe_code,
    reason = "a contract about memory that devices write; nothing here is unsafe"
)]
pub unsafe trait Pinner: Send + Sync {
    /// Whose memory: a handle of an address space, a guest, a client's memory regions. Mappings
    /// keep it, for what is read, written and pinned through them later.
    type Space: Clone + Send + Sync;
    /// What the addresses of spans are: [`PhysAddr`], or where memory is reached by other addresses
    /// than hardware's, those. A [`Container`](crate::Container) maps into
    /// [domains](crate::iommu::IommuOps::Address) of the same alone.
    ///
    /// ```
    /// use dmaspan::container::{Attach, Interrupts};
    /// use dmaspan::io_pgtable::{Format, TableMemory};
    /// use dmaspan::iommu::{Domain, IommuOps};
    /// use dmaspan::pin::Pinner;
    /// use dmaspan::{Container, PhysAddr};
    ///
    /// fn attach<P, F, M: TableMemory<F::Word> + 'static, O>(
    ///     container: &Container<P, parking_lot::RawMutex>,
    ///     hardware: Domain<F, M, O>,
    /// ) where
    ///     P: Pinner<Address = PhysAddr>,
    ///     F: Format,
    ///     O: IommuOps<Address = PhysAddr> + 'static,
    /// {
    ///     container.attach(hardware, Attach::new(Interrupts::Isolated)).unwrap();
    /// }
    /// ```
    ///
    /// Addresses of a process are none that hardware can be told:
    ///
    /// ```compile_fail,E0271
    /// use dmaspan::container::{Attach, Interrupts};
    /// use dmaspan::io_pgtable::{Format, TableMemory};
    /// use dmaspan::iommu::{Domain, IommuOps};
    /// use dmaspan::pin::Pinner;
    /// use dmaspan::{Container, HostAddr, PhysAddr};
    ///
    /// fn attach<P, F, M: TableMemory<F::Word> + 'static, O>(
    ///     container: &Container<P, parking_lot::RawMutex>,
    ///     hardware: Domain<F, M, O>,
    /// ) where
    ///     P: Pinner<Address = HostAddr>,
    ///     F: Format,
    ///     O: IommuOps<Address = PhysAddr> + 'static,
    /// {
    ///     container.attach(hardware, Attach::new(Interrupts::Isolated)).unwrap();
    /// }
    /// ```
    type Address: Address;
    /// What must be kept while the memory is pinned. Dropping it leaks the pin, never ends it.
    type Pin: Send + fmt::Debug;
    /// Why pinning failed.
    type Error: core::error::Error + Send + Sync + 'static;

    /// Pins `range` of `space`, for a device that may use it as `prot` says, and pushes its spans.
    ///
    /// # Errors
    ///
    /// [`PinFailed`]. The pin in it keeps at least what the sink took pinned; without one nothing
    /// is.
    fn pin(
        &self,
        space: &Self::Space,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink<Self::Address>,
    ) -> Result<Self::Pin, PinFailed<Self::Pin, Self::Error>>;

    /// Says that no device reaches `spans` of this pin any more, all of which are of one kind: the
    /// caller promises it. Cannot fail and does not allocate.
    ///
    /// Called batch by batch, each span of the pin once, cut and joined as the page table gives
    /// them.
    fn unpin(
        &self,
        promise: Promise<'_>,
        pin: &mut Self::Pin,
        spans: &[Span<Self::Address>],
        kind: Kind,
        dirty: Dirty,
    );

    /// Ends the pin, all of whose spans were unpinned: the caller promises it. Cannot fail.
    fn release(&self, promise: Promise<'_>, pin: Self::Pin);

    /// Tells address spaces apart: the same number for handles of the same one, and for clones.
    fn space_id(&self, space: &Self::Space) -> u64;

    /// How many bytes of `range` count against its owner's limit: those of memory, not those of
    /// devices. Asked before anything is pinned, so that a limit refuses early; an estimate that
    /// is too high is put right when the spans are known.
    fn chargeable(&self, _space: &Self::Space, range: UserRange) -> u64 {
        range.checked_len().unwrap_or(u64::MAX)
    }

    /// Whether the addresses of spans tell frames apart, so that memory that is mapped twice can be
    /// charged once.
    fn knows_frames(&self) -> bool {
        false
    }

    /// Copies memory of `space` from `at` on, as its user would read it.
    ///
    /// # Errors
    ///
    /// Where the user could not read all of it.
    fn read(&self, space: &Self::Space, at: UserAddr, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// Copies `bytes` to memory of `space` from `at` on, as its user would write it.
    ///
    /// # Errors
    ///
    /// Where the user could not write all of it.
    fn write(&self, space: &Self::Space, at: UserAddr, bytes: &[u8]) -> Result<(), Self::Error>;

    /// The errno of an error, for front ends that answer as Linux does.
    fn errno(&self, error: &Self::Error) -> Errno;
}

/// [`Pinner::unpin`] for spans as page tables have them, which no device reaches any more.
pub(crate) fn unpin_outputs<P: Pinner>(
    pinner: &P,
    pin: &mut P::Pin,
    spans: &[Span],
    kind: Kind,
    dirty: Dirty,
) {
    P::Address::of_outputs(spans, &mut |spans| {
        pinner.unpin(Promise::kept(), pin, spans, kind, dirty);
    });
}
