//! A kernel or a process that runs a driver implements [`Host`]: memory, a lock, and
//! how long a driver waits for hardware.

use alloc::sync::Arc;
use core::fmt;
use core::hint;
use core::ops::Not;
use core::sync::atomic::AtomicU64;

use dmaspan::io_pgtable::{FrameAlloc, FrameTables, FrameWords};
use dmaspan::iommu::HardwareError;
use dmaspan::{Coherency, PhysAddr};
use lock_api::RawMutex;

/// There is no memory for a structure of hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no 2^{lg2_size} bytes of contiguous memory up to {max_paddr} for the IOMMU's structures")]
pub struct NoMemory {
    /// log2 of the bytes asked for.
    pub lg2_size: u32,
    /// The last address that the hardware reaches.
    pub max_paddr: PhysAddr,
}

/// Says whether to look at hardware once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// Look again.
    Poll,
    /// It had the time it needs: it will not answer.
    GiveUp,
}

/// Memory that an IOMMU reads and writes itself: a queue, or a table of devices. Freed on drop.
///
/// # Safety
///
/// While the value exists, also after it has been moved,
///
/// 1. [`words`](Self::words) are the memory at [`paddr`](Self::paddr), all of it, always the same,
///    and nobody else's; and
/// 2. the CPU and the IOMMU see each other's stores to it in their order, without anything being
///    done to caches (Linux: `dma_alloc_coherent`).
#[expect(unsafe_code, reason = "a contract about memory that hardware reads")]
pub unsafe trait Structure: Send + Sync {
    /// Returns where hardware finds it.
    fn paddr(&self) -> PhysAddr;

    /// Its memory, in words of 8 bytes that are little-endian.
    fn words(&self) -> &[AtomicU64];
}

/// Supplies what a driver runs on: memory, a lock and waiting.
///
/// # Safety
///
/// A [`Structure`] that [`allocate`](Self::allocate) returns is zeroed, of the size asked for,
/// aligned to it, and ends at `max_paddr` or below: hardware may be told of it as it is.
#[expect(unsafe_code, reason = "a contract about memory that hardware reads")]
pub unsafe trait Host: Send + Sync {
    /// The lock around a queue or a table of devices. Where faults are handled in interrupts, it
    /// keeps them off. A driver also tries it, and has two of them at a time: the one that it took
    /// last is given back first.
    type Lock: RawMutex + Send + Sync;
    /// Memory that hardware reads and writes.
    type Structure: Structure;

    /// Memory of `2^lg2_size` bytes, zeroed, of which hardware reaches addresses up to `max_paddr`.
    ///
    /// # Errors
    ///
    /// [`NoMemory`].
    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<Self::Structure, NoMemory>;

    /// Is called after each look at hardware that has not answered yet, and says whether to look
    /// again; `polls` were made already. A host with a clock goes by time, as Linux does (1 s for
    /// the queues of SMMUv3, 10 s for VT-d).
    ///
    /// # Context
    ///
    /// Interrupts may be off, and a driver's lock is held.
    fn again(&self, polls: u32) -> Again {
        if polls < 1_000_000 {
            hint::spin_loop();
            Again::Poll
        } else {
            Again::GiveUp
        }
    }
}

#[expect(unsafe_code, reason = "what is behind a reference keeps the contract")]
// SAFETY: as the host that it points to promises.
unsafe impl<H: Host + ?Sized> Host for Arc<H> {
    type Lock = H::Lock;
    type Structure = H::Structure;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<H::Structure, NoMemory> {
        (**self).allocate(lg2_size, max_paddr)
    }

    fn again(&self, polls: u32) -> Again {
        (**self).again(polls)
    }
}

/// A [`Host`] of the frames that a kernel's page tables are made of: what a kernel with a
/// [`FrameAlloc`] needs no host of its own for.
///
/// Its lock is that of the frames, and it polls a million times. Hardware that does not see the
/// CPU's caches gets no memory of it: its structures are in memory that is not cached.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::io_pgtable::{FrameAlloc, FrameTables};
/// use dmaspan_drivers::vtd::{Vtd, VtdConfig};
/// use dmaspan_drivers::{Error, FrameHost, MmioRegion};
///
/// fn start<A: FrameAlloc>(
///     registers: MmioRegion,
///     tables: &Arc<FrameTables<A>>,
/// ) -> Result<Arc<Vtd<MmioRegion, FrameHost<A>>>, Error> {
///     let host = FrameHost::new(Arc::clone(tables));
///     // SAFETY: nobody else drives the unit, and it sees the frames at their addresses.
///     unsafe { Vtd::new(registers, host, VtdConfig::new(46)) }
/// }
/// ```
pub struct FrameHost<A: FrameAlloc>(Arc<FrameTables<A>>);

impl<A: FrameAlloc> FrameHost<A> {
    /// A host of those frames.
    pub fn new(tables: Arc<FrameTables<A>>) -> Self {
        Self(tables)
    }
}

/// A structure of a [`FrameHost`].
///
/// # Invariant
///
/// The frames are of an allocator that says that hardware sees the CPU's caches.
#[derive(Debug)]
pub struct FrameStructure<A: FrameAlloc>(FrameWords<A>);

#[expect(unsafe_code, reason = "the allocator of frames keeps the contract")]
// SAFETY: 1. The frames are at that address, and nobody else's until the value is dropped. 2. The
// invariant.
unsafe impl<A: FrameAlloc> Structure for FrameStructure<A> {
    fn paddr(&self) -> PhysAddr {
        self.0.paddr()
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

#[expect(unsafe_code, reason = "the allocator of frames keeps the contract")]
// SAFETY: `FrameTables::words` zeroes what the allocator promises to be so large, aligned and low.
unsafe impl<A: FrameAlloc> Host for FrameHost<A> {
    type Lock = A::Lock;
    type Structure = FrameStructure<A>;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<FrameStructure<A>, NoMemory> {
        let is_seen = self.0.frames().coherency() == Coherency::Coherent;
        let words = is_seen.then(|| self.0.words(lg2_size, max_paddr)).flatten();
        words.map(FrameStructure).ok_or(NoMemory { lg2_size, max_paddr })
    }
}

impl<A: FrameAlloc> fmt::Debug for FrameHost<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameHost").finish_non_exhaustive()
    }
}

/// The error of registers that read as all ones: there is no device any more.
pub(crate) fn gone(status: impl Into<u64>) -> HardwareError {
    let what = "the IOMMU is gone: its registers read as all ones";
    HardwareError { what, status: status.into() }
}

/// Reads a register until it is as it should be.
///
/// # Errors
///
/// [`gone`], and `what` where the host gives up before.
pub(crate) fn settle<T>(
    host: &impl Host,
    read: impl Fn() -> T,
    is_settled: impl Fn(T) -> bool,
    what: &'static str,
) -> Result<T, HardwareError>
where
    T: Copy + Default + PartialEq + Not<Output = T> + Into<u64>,
{
    let settled = poll(host, || match read() {
        ones if ones == !T::default() => Some(Err(gone(ones))),
        value => is_settled(value).then_some(Ok(value)),
    });
    settled.unwrap_or_else(|| Err(HardwareError { what, status: read().into() }))
}

/// What a look at hardware found.
pub(crate) enum Look<T> {
    /// Hardware has answered.
    Answer(T),
    /// Hardware has not answered yet.
    Nothing,
    /// Another caller looks at it meanwhile, so that this was no look.
    Elsewhere,
}

impl<T> From<Option<T>> for Look<T> {
    fn from(answer: Option<T>) -> Self {
        answer.map_or(Self::Nothing, Self::Answer)
    }
}

/// Looks at hardware until it has answered or the host gives up.
pub(crate) fn poll<T>(host: &impl Host, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    poll_in_turn(host, || look().into())
}

/// As [`poll`], where several callers look in turn. A look of another one is a poll for the host,
/// too, which may leave it the CPU; a caller gives up when its own looks are as many as the host
/// has patience for.
pub(crate) fn poll_in_turn<T>(host: &impl Host, mut look: impl FnMut() -> Look<T>) -> Option<T> {
    let (mut polls, mut own) = (0u32, 0u32);
    loop {
        match look() {
            Look::Answer(answer) => return Some(answer),
            Look::Nothing => own = own.saturating_add(1),
            Look::Elsewhere => {}
        }
        polls = polls.saturating_add(1);
        if host.again(polls) == Again::GiveUp {
            // The time may have passed while nobody looked.
            if let Look::Answer(answer) = look() {
                return Some(answer);
            }
            if own >= polls {
                return None;
            }
            polls = 0;
        }
    }
}
