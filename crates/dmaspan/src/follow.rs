//! [`LeafPinner`] pins what a CPU's page tables lead to, leaf by leaf.
//!
//! | Linux | here |
//! |---|---|
//! | `follow_pfnmap_start` (mm/memory.c) | [`UserTables::leaf`] |
//! | `fixup_user_fault` (mm/gup.c) | [`UserTables::fault_in`] |
//! | `try_grab_folio`, `unpin_user_page` (mm/gup.c) | [`UserTables::pin`], [`UserTables::unpin`] |

use core::fmt;

use crate::addr::{Address, PhysAddr, UserAddr};
use crate::error::Errno;
use crate::lg2;
use crate::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::UserRange;
use crate::span::Span;

/// How often an address is looked up before it is given up: with a fault between two look-ups.
pub const FOLLOW_TRIES: u32 = 16;

/// What a user's addresses lead to: a leaf of a CPU's page tables, of any size, or a memory slot of
/// a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserLeaf<A = PhysAddr> {
    /// The user's addresses that it maps, all of them.
    pub user: UserRange,
    /// Where the first one leads to. What is behind it lies in the order of the user's addresses.
    pub start: A,
    /// What is there.
    pub kind: Kind,
    /// What the user may do there: [`Prot::READ`] and [`Prot::WRITE`] count.
    pub prot: Prot,
}

impl<A: Address> UserLeaf<A> {
    /// The leaf of `2^size_lg2` bytes that maps `at`, aligned to its size as page tables have it.
    /// It leads to `start`, which is aligned likewise.
    pub fn of_size(at: UserAddr, size_lg2: u32, start: A, kind: Kind, prot: Prot) -> Self {
        let size_lg2 = size_lg2.min(63);
        let first = UserAddr::new(lg2::align_down(at.get(), size_lg2));
        let last = UserAddr::new(first.get() | lg2::mask(size_lg2));
        let user = UserRange::new(first, last).unwrap_or(UserRange::point(at));
        Self { user, start, kind, prot }
    }

    /// Where `rest` is, as far as the leaf maps it without a gap from its first address on; `None`
    /// where the leaf does not map that, or where it would lead beyond the top of the space.
    fn part(&self, rest: UserRange) -> Option<Span<A>> {
        if !self.user.contains(rest.start()) {
            return None;
        }
        let offset = rest.start().get() - self.user.start().get();
        let above = self.user.last().min(rest.last()).get() - rest.start().get();
        // A span cannot have 2^64 bytes; the last one is another part then.
        let len = above.saturating_add(1);
        Span::new(A::new(self.start.get().checked_add(offset)?), len).ok()
    }
}

/// Says what a fault came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultIn {
    /// There may be a leaf now, or one that permits the access: it is looked up again. Also where
    /// the fault asks to be tried again (`VM_FAULT_RETRY` and `VM_FAULT_NOPAGE` of Linux).
    LookAgain,
    /// There will be none.
    Refused,
}

/// The page tables of a CPU's users, by one look-up: what a kernel or a VMM supplies for a
/// [`LeafPinner`].
///
/// # Safety
///
/// 1. [`leaf`](Self::leaf) says what the user's addresses lead to at a moment of the call. Leaves
///    of memory begin and end between [frames](Self::frame_lg2), whose size never changes.
/// 2. Where [`pin`](Self::pin) answers `true`, the tables still had the leaf that it was given, at
///    one moment of the call: the addresses led to the frames, which were memory, and the user had
///    all of the access that it was given. From that moment on until the frames are passed to
///    [`unpin`](Self::unpin) they stay the user's at these addresses: neither moved, freed nor
///    given another use. A device may read them and, where the access has [`Prot::WRITE`], write
///    them at any time; no code holds a Rust reference to them that a device's write would make
///    untrue.
/// 3. A frame that is copied when somebody writes it, as fork(2) leaves it, is pinned for no access
///    at all: a device would write what others read, or read what the user no more writes.
/// 4. Device memory ([`Kind::Mmio`]) is not pinned. Its owner takes it from the user in this
///    order: look-ups and faults find nothing there any more; every container that may map it
///    has [revoked](crate::Container::revoke) it, by a handle of the same
///    [number](Self::space_id); it goes.
///
/// The caller of [`unpin`](Self::unpin) promises that no device reaches the frames any more.
#[expect(
    unsafe_code,
    reason = "a contract about memory that devices write; nothing here is unsafe"
)]
pub unsafe trait UserTables: Send + Sync {
    /// Whose addresses: a handle of an address space, of a guest.
    type Space: Clone + Send + Sync;
    /// What leaves lead to: physical addresses, or those of this process for a VMM.
    type Address: Address;
    /// Why a fault, a read or a write failed.
    type Error: core::error::Error + Send + Sync + 'static;

    /// The leaf that maps `at` now: one walk from the root, or a look-up of a slot. `None` where
    /// there is none.
    ///
    /// # Context
    ///
    /// May take the lock of the tables, and gives it back before it returns. Called once for each
    /// leaf under a range, and again after each fault.
    fn leaf(&self, space: &Self::Space, at: UserAddr) -> Option<UserLeaf<Self::Address>>;

    /// Pins `frames`, to which `leaf` leads from `at` on, for a device that is to have `access`:
    /// all of them or none. The leaf is as a look-up said before, of memory that permits the
    /// access. `false` where the tables no more have this leaf, and where the frames are copied
    /// when they are written: the address is [faulted in](Self::fault_in) and looked up again then.
    ///
    /// A kernel takes the lock of the tables, compares the whole entry, and raises the counts of
    /// the frames; or it raises them first, and takes them back where the entry has changed in any
    /// bit or `gup_must_unshare` says that others share the page (`gup_fast_pte_range` of Linux,
    /// mm/gup.c). Memory that neither moves nor is copied needs nothing.
    fn pin(
        &self,
        space: &Self::Space,
        leaf: &UserLeaf<Self::Address>,
        at: UserAddr,
        frames: Span<Self::Address>,
        access: Prot,
    ) -> bool;

    /// Unpins frames of memory: those of former pins, as often as they were pinned, cut and joined
    /// anew between frames. Cannot fail and does not allocate.
    fn unpin(&self, promise: Promise<'_>, frames: Span<Self::Address>, dirty: Dirty);

    /// Faults `at` in for an access as `prot` says, as if its user had accessed it: where there is
    /// no leaf, or one that permits less, and where it was not [pinned](Self::pin). A frame that is
    /// copied when it is written becomes the user's own, also for a device that only reads (Linux:
    /// `FAULT_FLAG_WRITE`, `FAULT_FLAG_UNSHARE`).
    ///
    /// # Context
    ///
    /// May sleep. Called a bounded number of times, [`FOLLOW_TRIES`], for one address.
    ///
    /// # Errors
    ///
    /// Where the fault failed for good, and the reason is to be told.
    fn fault_in(
        &self,
        _space: &Self::Space,
        _at: UserAddr,
        _prot: Prot,
    ) -> Result<FaultIn, Self::Error> {
        Ok(FaultIn::Refused)
    }

    /// log2 of the bytes of a frame, the smallest unit that is pinned: ranges that are not of whole
    /// frames are refused. Always the same; by default 12, for frames of 4 KiB.
    fn frame_lg2(&self) -> u32 {
        12
    }

    /// As [`Pinner::space_id`], whose promise it is part of.
    fn space_id(&self, space: &Self::Space) -> u64;

    /// How many bytes of `range` are memory, as far as that is known without looking at each leaf,
    /// such as by the VMAs: what a limit refuses before anything is pinned. An estimate; the limit
    /// is checked again when the leaves are known. By default 0.
    fn memory_bytes(&self, _space: &Self::Space, _range: UserRange) -> u64 {
        0
    }

    /// As [`Pinner::read`].
    ///
    /// # Errors
    ///
    /// Where the user could not read all of it.
    fn read(&self, space: &Self::Space, at: UserAddr, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// As [`Pinner::write`].
    ///
    /// # Errors
    ///
    /// Where the user could not write all of it.
    fn write(&self, space: &Self::Space, at: UserAddr, bytes: &[u8]) -> Result<(), Self::Error>;

    /// The errno of an error.
    fn errno(&self, error: &Self::Error) -> Errno;
}

/// The reason why a user's range was not followed. `E` is the error of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeafError<E: core::error::Error> {
    /// It does not begin and end between frames.
    #[error("{range} is not of whole frames of {frame:#x} bytes")]
    Misaligned {
        /// What was to be pinned.
        range: UserRange,
        /// The bytes of a frame.
        frame: u64,
    },
    /// Nothing is mapped there.
    #[error("nothing is mapped at {at} of {range}")]
    Hole {
        /// What was to be pinned.
        range: UserRange,
        /// The first address of it without a leaf.
        at: UserAddr,
    },
    /// The user may do less there than the device is to do.
    #[error("{at} of {range} permits {permitted:?}, and the device is to have {wanted:?}")]
    Access {
        /// What was to be pinned.
        range: UserRange,
        /// The first address of it that permits less.
        at: UserAddr,
        /// What the device is to do.
        wanted: Prot,
        /// What the user may do.
        permitted: Prot,
    },
    /// It changed after each look-up, no fault brought it, or it is shared and stays so.
    #[error("{at} of {range} was looked up and faulted in {tries} times, and was never pinned")]
    Unsettled {
        /// What was to be pinned.
        range: UserRange,
        /// Where.
        at: UserAddr,
        /// How often: the limit.
        tries: u32,
    },
    /// The tables' own reason.
    #[error("{at} of {range}: {error}")]
    Tables {
        /// What was to be pinned, read or written.
        range: UserRange,
        /// Where.
        at: UserAddr,
        /// Why.
        #[source]
        error: E,
        /// Its errno.
        errno: Errno,
    },
}

impl<E: core::error::Error> LeafError<E> {
    /// `EFAULT`, `EINVAL` for a range that cuts a frame, or that of the tables (`vaddr_get_pfns` of
    /// Linux, drivers/vfio/vfio_iommu_type1.c).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Misaligned { .. } => Errno::EINVAL,
            Self::Hole { .. } | Self::Access { .. } | Self::Unsettled { .. } => Errno::EFAULT,
            Self::Tables { errno, .. } => *errno,
        }
    }
}

/// A pinner for kernels and VMMs: follows a user's page tables by leaf, whatever its size, so that
/// a BAR of 32 GiB that is mapped by leaves of 1 GiB takes 32 look-ups (`follow_fault_pfn` of
/// Linux, drivers/vfio/vfio_iommu_type1.c).
///
/// A range may mix memory, which is pinned, and device memory, which is not: that is
/// [revoked](crate::Container::revoke) by whoever takes it from its user, after look-ups find it no
/// more. A map that found it before is in its container's tree by then, and the revocation waits
/// for it.
///
/// Here a VMM's guest has two memory slots, one of which is a BAR that the VMM maps through:
///
/// ```
/// use std::sync::RwLock;
///
/// use dmaspan::follow::{LeafPinner, UserLeaf, UserTables};
/// use dmaspan::pin::{Dirty, Kind, Pinner};
/// use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
///
/// #[derive(Debug, thiserror::Error)]
/// #[error("the guest has no bytes of its own here")]
/// struct NoBytes;
///
/// struct Slots(RwLock<Vec<UserLeaf>>);
///
/// // SAFETY: the memory of slots is locked in place for as long as the guest lives, and is reached
/// // by copies alone. A BAR that goes leaves the slots first, and then its containers.
/// unsafe impl UserTables for Slots {
///     type Space = ();
///     type Address = PhysAddr;
///     type Error = NoBytes;
///
///     fn leaf(&self, (): &(), at: UserAddr) -> Option<UserLeaf> {
///         self.0.read().ok()?.iter().find(|slot| slot.user.contains(at)).copied()
///     }
///     fn pin(&self, (): &(), _: &UserLeaf, _at: UserAddr, _frames: Span, _: Prot) -> bool {
///         true
///     }
///     fn unpin(&self, _: Promise<'_>, _frames: Span, _dirty: Dirty) {}
///     fn space_id(&self, (): &()) -> u64 {
///         0
///     }
///     fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), NoBytes> {
///         Err(NoBytes)
///     }
///     fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), NoBytes> {
///         Err(NoBytes)
///     }
///     fn errno(&self, _: &NoBytes) -> Errno {
///         Errno::EFAULT
///     }
/// }
///
/// let ram = UserLeaf {
///     user: UserRange::from_len(UserAddr::new(0), 3 << 30)?,
///     start: PhysAddr::new(64 << 30),
///     kind: Kind::Memory,
///     prot: Prot::READ_WRITE,
/// };
/// let bar = UserLeaf {
///     user: UserRange::from_len(UserAddr::new(3 << 30), 1 << 30)?,
///     start: PhysAddr::new(1 << 42),
///     kind: Kind::Mmio,
///     ..ram
/// };
/// let pinner = LeafPinner::new(Slots(RwLock::new(vec![ram, bar])));
/// let mut spans: Vec<Span> = Vec::new();
/// let both = UserRange::from_len(UserAddr::new(0), 4 << 30)?;
/// pinner.pin(&(), both, Prot::READ_WRITE, &mut spans)?;
/// assert_eq!(spans[0], Span::new(PhysAddr::new(64 << 30), 3 << 30)?);
/// assert_eq!(spans[1], Span::new(PhysAddr::new(1 << 42), 1 << 30)?);
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct LeafPinner<T> {
    tables: T,
}

/// A part of a range that one leaf maps, and what it is.
type Followed<T> =
    Result<(Span<<T as UserTables>::Address>, Kind), LeafError<<T as UserTables>::Error>>;

/// A pin of a [`LeafPinner`]. The tables' own counts keep the frames; this says how many bytes of
/// memory are pinned still.
#[derive(Debug)]
#[must_use = "dropping a pin leaks it: the frames stay pinned"]
pub struct LeafPin {
    range: UserRange,
    pinned: u64,
}

impl LeafPin {
    /// Returns what was to be pinned.
    pub fn user_range(&self) -> UserRange {
        self.range
    }

    /// Returns how many bytes of memory are pinned and were not unpinned yet.
    pub fn pinned(&self) -> u64 {
        self.pinned
    }
}

impl<T: UserTables> LeafPinner<T> {
    /// A pinner of what these tables lead to.
    pub const fn new(tables: T) -> Self {
        Self { tables }
    }

    /// The tables.
    pub const fn tables(&self) -> &T {
        &self.tables
    }

    /// Where `rest` of `range` is, as far as its first leaf goes; pinned if it is memory.
    fn follow(
        &self,
        space: &T::Space,
        range: UserRange,
        rest: UserRange,
        wanted: Prot,
    ) -> Followed<T> {
        let at = rest.start();
        for _ in 0..FOLLOW_TRIES {
            let found = self.tables.leaf(space, at);
            let found = found.and_then(|leaf| Some((leaf, leaf.part(rest)?)));
            let permits = found.is_some_and(|(leaf, _)| leaf.prot.contains(wanted));
            if let Some((leaf, frames)) = found
                && permits
                && (leaf.kind == Kind::Mmio || self.tables.pin(space, &leaf, at, frames, wanted))
            {
                return Ok((frames, leaf.kind));
            }
            match self.tables.fault_in(space, at, wanted) {
                Ok(FaultIn::LookAgain) => {}
                // Of what is there and was not pinned a fault may have nothing to say.
                Ok(FaultIn::Refused) if permits => {}
                Ok(FaultIn::Refused) => {
                    return Err(match found {
                        None => LeafError::Hole { range, at },
                        Some((leaf, _)) => {
                            let permitted = leaf.prot & Prot::READ_WRITE;
                            LeafError::Access { range, at, wanted, permitted }
                        }
                    });
                }
                Err(error) => return Err(self.failed(range, at, error)),
            }
        }
        Err(LeafError::Unsettled { range, at, tries: FOLLOW_TRIES })
    }

    #[cold]
    fn failed(&self, range: UserRange, at: UserAddr, error: T::Error) -> LeafError<T::Error> {
        let errno = self.tables.errno(&error);
        LeafError::Tables { range, at, error, errno }
    }

    /// Pushes leaf after leaf. `pin` has what the sink took.
    fn push_all(
        &self,
        space: &T::Space,
        pin: &mut Option<LeafPin>,
        (range, prot): (UserRange, Prot),
        sink: &mut dyn SpanSink<T::Address>,
    ) -> Result<(), PinError<LeafError<T::Error>>> {
        let frame_lg2 = self.tables.frame_lg2().min(63);
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        if !lg2::is_aligned(ends, frame_lg2) {
            let frame = lg2::size(frame_lg2);
            return Err(PinError::Failed(LeafError::Misaligned { range, frame }));
        }
        let (mut next, wanted) = (Some(range.start()), prot & Prot::READ_WRITE);
        while let Some(rest) = next.and_then(|at| UserRange::new(at, range.last())) {
            let followed = self.follow(space, range, rest, wanted);
            let (span, kind) = followed.map_err(PinError::Failed)?;
            if let Err(stopped) = sink.push(span, kind) {
                // Nobody was told of it.
                if kind == Kind::Memory {
                    self.tables.unpin(Promise::kept(), span, Dirty::Clean);
                }
                return Err(stopped.into());
            }
            let pin = pin.get_or_insert(LeafPin { range, pinned: 0 });
            if kind == Kind::Memory {
                pin.pinned = pin.pinned.saturating_add(span.len());
            }
            next = rest.start().checked_add(span.len());
        }
        Ok(())
    }

    fn access(
        &self,
        at: UserAddr,
        len: usize,
        result: Result<(), T::Error>,
    ) -> Result<(), LeafError<T::Error>> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let range = UserRange::from_len(at, len).unwrap_or(UserRange::point(at));
        result.map_err(|error| self.failed(range, at, error))
    }
}

// SAFETY:
// 1. A span is pushed when the tables have said that its frames are pinned for the access that was
//    asked for, which they keep until the span is passed to their `unpin`: `UserTables` promises
//    both. Device memory is pushed as such.
// 2. Parts follow each other from the first address of the range to its last, each cut to what is
//    left of it, so they cover it exactly and in order.
// 3. What the caller of `unpin` promises is passed on.
#[expect(unsafe_code, reason = "passes on what the tables promise")]
unsafe impl<T: UserTables> Pinner for LeafPinner<T> {
    type Space = T::Space;
    type Address = T::Address;
    type Pin = LeafPin;
    type Error = LeafError<T::Error>;

    fn pin(
        &self,
        space: &T::Space,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink<T::Address>,
    ) -> Result<LeafPin, PinFailed<LeafPin, Self::Error>> {
        let mut pin = None;
        match (self.push_all(space, &mut pin, (range, prot), sink), pin) {
            (Ok(()), Some(pin)) => Ok(pin),
            // No range is empty.
            (Ok(()), None) => Err(PinFailed { range, error: PinError::Stopped, pin: None }),
            (Err(error), pin) => Err(PinFailed { range, error, pin }),
        }
    }

    fn unpin(
        &self,
        promise: Promise<'_>,
        pin: &mut LeafPin,
        spans: &[Span<T::Address>],
        kind: Kind,
        dirty: Dirty,
    ) {
        if kind == Kind::Mmio {
            return;
        }
        for span in spans {
            pin.pinned = pin.pinned.saturating_sub(span.len());
            self.tables.unpin(promise, *span, dirty);
        }
    }

    fn release(&self, _promise: Promise<'_>, pin: LeafPin) {
        debug_assert_eq!(pin.pinned, 0, "{} was released and not unpinned", pin.range);
    }

    fn space_id(&self, space: &T::Space) -> u64 {
        self.tables.space_id(space)
    }

    fn chargeable(&self, space: &T::Space, range: UserRange) -> u64 {
        self.tables.memory_bytes(space, range)
    }

    fn knows_frames(&self) -> bool {
        true
    }

    fn read(&self, space: &T::Space, at: UserAddr, bytes: &mut [u8]) -> Result<(), Self::Error> {
        let len = bytes.len();
        self.access(at, len, self.tables.read(space, at, bytes))
    }

    fn write(&self, space: &T::Space, at: UserAddr, bytes: &[u8]) -> Result<(), Self::Error> {
        self.access(at, bytes.len(), self.tables.write(space, at, bytes))
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        error.errno()
    }
}

impl<T> fmt::Debug for LeafPinner<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeafPinner").finish_non_exhaustive()
    }
}
