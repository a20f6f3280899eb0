//! [`NoIommuPinner`] pins memory for a device without an IOMMU, and says where it is.

use std::mem::{self, ManuallyDrop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::regbuf::{Buffer, PinBufferError, Pinned};
use dmaspan::{
    Account, Errno, Iova, PhysAddr, Promise, Prot, RangeError, Span, UserAddr, UserRange, lg2,
};

use super::Requests;
use super::backend::Backend;
use super::device::VfioDevice;
use super::error::{Error, OpenError};
use super::ioas::{Ioas, Iommufd};
use super::opening::Candidate;
use crate::mem::{AccessError, Memory, OutsideMemory};
use crate::os;
use crate::pci::Bdf;
use crate::pinner::{DropNote, PinnerStats, Took, Watched, ns_since, offset_of};
use crate::plan::{MapError, MappedRegions, Mapper, PlanError, Region};
use crate::sys;

/// Pins ranges of [`Memory`] by iommufd, for a device that no IOMMU translates for, and says by
/// physical addresses where they are: one request for each span (Linux 7.3, drivers/iommu/iommufd,
/// `IOMMU_IOAS_NOIOMMU_GET_PA`).
///
/// Beside a [`LinuxPinner`](crate::LinuxPinner) it needs no pagemap, nor the `CAP_SYS_ADMIN` that
/// pagemap takes, but `CAP_SYS_RAWIO`; the kernel counts its pins as iommufd's (`VmPin` of
/// proc(5)), against `RLIMIT_MEMLOCK` of the user. The function has to be VFIO's, in its mode
/// without IOMMU: `dmaspan devices` lists the commands.
///
/// The pins last as long as the device is open, which each pin sees to. A clone is the same pinner.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use dmaspan::Prot;
/// use dmaspan_linux::vfio::NoIommuPinner;
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let pinner = NoIommuPinner::new("0000:00:05.0".parse()?)?;
/// let memory = Arc::new(Memory::new(MemoryKind::Thp, 4 << 20)?);
/// let buffer = pinner.pin_whole(&memory, Prot::READ_WRITE)?;
/// for span in buffer.segments().iter() {
///     println!("{} bytes at {}", span.len(), span.start());
/// }
/// // It is unpinned when the buffer is dropped.
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Context
///
/// Any number of threads pin and release at once.
#[derive(Clone, Debug)]
pub struct NoIommuPinner {
    opened: Arc<Opened>,
}

/// The device and the address space that it is attached to, whose table no hardware reads.
#[derive(Debug)]
struct Opened {
    mapper: Mapper<Ioas>,
    /// Kept open: without a device there, iommufd pins nothing.
    device: VfioDevice,
    pin_ns: AtomicU64,
    lookup_ns: AtomicU64,
    unpin_ns: AtomicU64,
    lookups: AtomicU64,
}

impl NoIommuPinner {
    /// Opens `bdf`, which accesses no memory: to pin for it, or for another device.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn new(bdf: Bdf) -> Result<Self, OpenError> {
        let candidate = Candidate::find(Backend::NoIommu, bdf)?;
        let failed = |request, errno| OpenError::System { request, bdf, errno };
        let iommufd = Iommufd::open().map_err(|error| candidate.explain(error))?;
        let space = iommufd.ioas().map_err(|error| failed("IOMMU_IOAS_ALLOC", error.errno()))?;
        // No other address space takes it from this one.
        let (device, _) = space.attach_unbound(&candidate)?;
        let mapper = Mapper::new(space);
        let mapper =
            mapper.map_err(|error: PlanError| failed("IOMMU_IOAS_IOVA_RANGES", error.errno()))?;
        let [pin_ns, lookup_ns, unpin_ns, lookups] = [0; 4].map(AtomicU64::new);
        let opened = Opened { mapper, device, pin_ns, lookup_ns, unpin_ns, lookups };
        Ok(Self { opened: Arc::new(opened) })
    }

    /// The address of the device.
    pub fn bdf(&self) -> Bdf {
        self.opened.device.bdf()
    }

    /// The device, to drive it. Every call returns the same one: it stops accessing memory when
    /// any of them is dropped, and is closed with the pinner and the last pin.
    ///
    /// # Safety
    ///
    /// A device that is a bus master ([`VfioDevice::set_bus_master`]) accesses all memory of the
    /// machine, this process's and the kernel's too. The caller promises that it tells the device
    /// no other addresses than those of memory that is pinned, and that it releases nothing that
    /// the device may still access; after a device is dropped or reset it accesses nothing.
    #[expect(unsafe_code, reason = "declares what hands out a device that reaches all memory")]
    pub unsafe fn device(&self) -> VfioDevice {
        self.opened.device.again()
    }

    /// Pins all of a memory for as long as the buffer that is returned exists, which says where it
    /// is. The kernel counts it, and nobody else does; [`Pinned`] charges an account.
    ///
    /// # Errors
    ///
    /// [`PinBufferError::Pinner`] with what the kernel refused; nothing is pinned then.
    pub fn pin_whole(
        &self,
        memory: &Arc<Memory>,
        prot: Prot,
    ) -> Result<Buffer<PhysAddr>, PinBufferError<NoIommuPinError>> {
        let (pinner, page_lg2) = (Arc::new(self.clone()), sys::page_size().trailing_zeros());
        let pinned = Pinned::new(pinner, Arc::clone(memory), Account::unlimited(), page_lg2);
        pinned.buffer(memory.user_range(), prot)
    }

    /// The requests that pinned and unpinned so far.
    pub fn requests(&self) -> Requests {
        self.space().requests()
    }

    /// Returns what pinning cost so far. `lookups` are requests, each of which found a span or a
    /// part of one.
    pub fn stats(&self) -> PinnerStats {
        let Opened { pin_ns, lookup_ns, unpin_ns, lookups, .. } = &*self.opened;
        let [pin_ns, lookup_ns, unpin_ns, lookups] =
            [pin_ns, lookup_ns, unpin_ns, lookups].map(|counter| counter.load(Ordering::Relaxed));
        PinnerStats { pin_ns, lookup_ns, unpin_ns, lookups }
    }

    /// Returns how many pins there are.
    pub fn pins(&self) -> u64 {
        self.space().mappings()
    }

    fn space(&self) -> &Ioas {
        self.opened.mapper.space()
    }

    /// Pins the pages of a range.
    fn map(
        &self,
        memory: &Arc<Memory>,
        range: UserRange,
        prot: Prot,
    ) -> Result<MappedRegions<Ioas>, NoIommuPinError> {
        let (offset, len) = (memory.offset_of(range)?, range.len_less_one().saturating_add(1));
        let page_lg2 = sys::page_size().trailing_zeros();
        let start = lg2::align_down(offset, page_lg2);
        // The end of a memory is one of a page.
        let end = lg2::align_up(offset.saturating_add(len), page_lg2).unwrap_or(memory.len());
        let region = Region::part(memory, start, end - start, prot)?;
        Ok(self.opened.mapper.map([region])?)
    }

    /// Says where the range is that was mapped.
    fn push_spans(
        &self,
        mapped: &MappedRegions<Ioas>,
        range: UserRange,
        sink: &mut dyn SpanSink<PhysAddr>,
    ) -> Result<(), PinError<NoIommuPinError>> {
        let failed = |errno| PinError::Failed(NoIommuPinError::Physical { range, errno });
        let mut found: Option<Span> = None;
        for map in mapped.plan().maps() {
            let Some(part) = map.user().intersection(range) else { continue };
            let mut at = map.iova().start().get() + (part.start().get() - map.user().start().get());
            let mut left = part.len_less_one().saturating_add(1);
            while left > 0 {
                self.opened.lookups.fetch_add(1, Ordering::Relaxed);
                let (start, len) =
                    self.space().id().physical(Iova::new(at), left).map_err(failed)?;
                // Of less than nothing no kernel speaks, nor of more than it was asked for.
                let Some(rest) = left.checked_sub(len).filter(|_| len > 0) else {
                    return Err(failed(Errno::EIO));
                };
                let next = Span::new(PhysAddr::new(start), len);
                let next = next.map_err(|_| failed(Errno::EOVERFLOW))?;
                (at, left) = (at + len, rest);
                found = match found.map(|found| (found, found.join(next))) {
                    Some((_, Some(joined))) => Some(joined),
                    Some((found, None)) => {
                        sink.push(found, Kind::Memory)?;
                        Some(next)
                    }
                    None => Some(next),
                };
            }
        }
        match found {
            Some(found) => Ok(sink.push(found, Kind::Memory)?),
            None => Err(failed(Errno::EFAULT)),
        }
    }

    /// Ends a pin that the caller made itself. Where the kernel does not, the memory is leaked with
    /// it.
    ///
    /// Spans let nobody at their memory: to tell them to a device takes unsafe code, which promises
    /// there that the pin lasts longer.
    pub fn give_back(&self, pin: NoIommuPin) {
        let begin = Instant::now();
        mem::forget(pin.note);
        // What the kernel does not unmap keeps its memory, which is said.
        drop(ManuallyDrop::into_inner(pin.mapped));
        drop(ManuallyDrop::into_inner(pin.opened));
        self.opened.unpin_ns.fetch_add(ns_since(begin), Ordering::Relaxed);
    }
}

/// A pin of a [`NoIommuPinner`]: it keeps the memory, and the device open.
///
/// Dropping it leaks the memory and the pin, as a device may still use them; only
/// [`release`](Pinner::release) ends it.
#[derive(Debug)]
#[must_use = "dropping a pin leaks the memory and keeps it pinned"]
pub struct NoIommuPin {
    mapped: ManuallyDrop<MappedRegions<Ioas>>,
    opened: ManuallyDrop<Arc<Opened>>,
    note: DropNote,
}

/// The reason why memory was not pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoIommuPinError {
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
    Map(#[from] MapError<Error>),
    /// The kernel pinned it, and did not say where.
    #[error(
        "the kernel does not say where {range} is (IOMMU_IOAS_NOIOMMU_GET_PA): {}{}",
        os::words(*errno), advice(*errno)
    )]
    Physical {
        /// The range asked for.
        range: UserRange,
        /// What it answered.
        errno: Errno,
    },
}

/// What a user can change where the kernel does not tell.
const fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM => "; this takes CAP_SYS_RAWIO",
        Errno::ENOTTY | Errno::EOPNOTSUPP => "; Linux 7.3 with CONFIG_VFIO_NOIOMMU does",
        _ => "",
    }
}

impl NoIommuPinError {
    /// The errno.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Outside(error) => error.errno(),
            Self::Range(error) => error.errno(),
            Self::Access(error) => error.errno(),
            Self::Map(error) => error.errno_by(Error::errno),
            Self::Physical { errno, .. } => *errno,
        }
    }
}

// SAFETY:
// 1. Pushed spans are memory of the user's range until the pin is released: they are what iommufd
//    has pinned for the long term, and wrote into the table of a device without an IOMMU
//    (drivers/iommu/iommufd/pages.c, io_pagetable.c: `iopt_get_phys`). It unpins them where the
//    range is unmapped, which dropping `mapped` alone does, whose address space nobody else has; or
//    where no device is attached any more, and the pin keeps the device's file open, which no
//    other address space takes (it has no `Binding`). Dropping a pin leaks all of that.
// 2. A device may write the memory: all of `Memory` is readable and writable, and Rust code reaches
//    it through atomic bytes alone.
// 3. Spans cover the range exactly and in order: the maps of one region are those of its parts in
//    order, and each step begins where the last one ended.
#[expect(unsafe_code, reason = "promises that pinned memory stays where it is")]
unsafe impl Pinner for NoIommuPinner {
    type Space = Arc<Memory>;
    type Address = PhysAddr;
    type Pin = NoIommuPin;
    type Error = NoIommuPinError;

    fn pin(
        &self,
        space: &Arc<Memory>,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink<PhysAddr>,
    ) -> Result<NoIommuPin, PinFailed<NoIommuPin, NoIommuPinError>> {
        let refused = |error| PinFailed { range, error: PinError::Failed(error), pin: None };
        let begin = Instant::now();
        let mapped = self.map(space, range, prot).map_err(refused)?;
        self.opened.pin_ns.fetch_add(ns_since(begin), Ordering::Relaxed);
        // From here on a sink that panics leaks the pin, as a device may reach what it took.
        let pin = NoIommuPin {
            mapped: ManuallyDrop::new(mapped),
            opened: ManuallyDrop::new(Arc::clone(&self.opened)),
            note: DropNote(range),
        };
        let mut sink = Watched { sink, took: Took::Nothing };
        let begin = Instant::now();
        let pushed = self.push_spans(&pin.mapped, range, &mut sink);
        self.opened.lookup_ns.fetch_add(ns_since(begin), Ordering::Relaxed);
        let Err(error) = pushed else { return Ok(pin) };
        Err(sink.took.failed(range, error, pin, |pin| self.give_back(pin)))
    }

    /// Nothing to do: the kernel unpins only the whole, and marks every page of it written.
    fn unpin(
        &self,
        _promise: Promise<'_>,
        _pin: &mut NoIommuPin,
        _spans: &[Span],
        _kind: Kind,
        _dirty: Dirty,
    ) {
    }

    fn release(&self, _promise: Promise<'_>, pin: NoIommuPin) {
        self.give_back(pin);
    }

    fn space_id(&self, space: &Arc<Memory>) -> u64 {
        Arc::as_ptr(space).addr() as u64
    }

    fn knows_frames(&self) -> bool {
        true
    }

    fn read(
        &self,
        space: &Arc<Memory>,
        at: UserAddr,
        bytes: &mut [u8],
    ) -> Result<(), NoIommuPinError> {
        Ok(space.read(offset_of::<NoIommuPinError>(space, at, bytes.len())?, bytes)?)
    }

    fn write(
        &self,
        space: &Arc<Memory>,
        at: UserAddr,
        bytes: &[u8],
    ) -> Result<(), NoIommuPinError> {
        Ok(space.write(offset_of::<NoIommuPinError>(space, at, bytes.len())?, bytes)?)
    }

    fn errno(&self, error: &NoIommuPinError) -> Errno {
        error.errno()
    }
}
