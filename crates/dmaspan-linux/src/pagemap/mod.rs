//! A [`FrameSource`] says where memory is, by frame numbers from `/proc/self/pagemap`.
//!
//! The file has a 64-bit entry for each base page (Documentation/admin-guide/mm/pagemap.rst). Two
//! ways lead to the same spans. One reads every entry, in bulk. The other asks the kernel first
//! which parts huge leaves map (`PAGEMAP_SCAN`, Linux 6.7) and reads one entry for each leaf: a
//! leaf is aligned by virtual address and contiguous, so the entry of one page says where all of it
//! is.
//!
//! Frames mean something only while memory is pinned: otherwise the kernel may move it at any time.
//!
//! The kernel shows frame numbers to processes with `CAP_SYS_ADMIN` alone, and others read 0. A
//! [`FrameSource`] of [`PhysAddr`]s finds out once, when it is made. One of [`HostAddr`]s needs no
//! frame numbers: it answers with the addresses that the process itself reaches memory by, so
//! memory is as contiguous as it is for the process. That is enough for a device simulated in it,
//! and nothing that real hardware may be told: the types differ, so that a
//! [`Container`](dmaspan::Container) over a driver's domain does not take it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use dmaspan::pin::{Kind, PinError, SpanSink};
use dmaspan::{Address, Errno, HostAddr, PhysAddr, Span, UserAddr, UserRange};

use crate::mem::{Memory, OutsideMemory};
use crate::os;
use crate::sys;
use crate::sys::scan::{self, PageRegion};

mod walk;

use walk::{Scratch, Walk};

/// The bits of a pagemap entry.
mod entry {
    /// Bits 0 to 54: the frame number of a page that is in memory.
    pub(super) const FRAME: u64 = (1 << 55) - 1;
    /// Bit 63: the page is in memory.
    pub(super) const PRESENT: u64 = 1 << 63;
    /// The bytes of an entry.
    pub(super) const BYTES: u64 = 8;
}

/// Says what the addresses of spans are: the kind of a [`FrameAddress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameMode {
    /// Physical addresses.
    Physical,
    /// Virtual addresses of this process in place of physical ones.
    Virtual,
}

/// An address that memory of this process has: a [`PhysAddr`] or a [`HostAddr`].
pub trait FrameAddress: Address + sealed::Sealed {
    /// Which of the two.
    const MODE: FrameMode;
}

impl FrameAddress for PhysAddr {
    const MODE: FrameMode = FrameMode::Physical;
}

impl FrameAddress for HostAddr {
    const MODE: FrameMode = FrameMode::Virtual;
}

mod sealed {
    use dmaspan::{HostAddr, PhysAddr};

    pub trait Sealed {}

    impl Sealed for PhysAddr {}

    impl Sealed for HostAddr {}
}

/// Says how frames are looked up. The spans are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lookup {
    /// By huge leaves where the memory may have some and the kernel tells, else page by page.
    #[default]
    Auto,
    /// One entry for each base page.
    EveryPage,
    /// One entry for each huge leaf, and for each base page elsewhere.
    HugeLeaves,
}

/// The reason why frame numbers are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum NoFrames {
    /// The kernel shows 0 for every frame number.
    #[error(
        "the kernel hides frame numbers from this process: run it with CAP_SYS_ADMIN{}",
        os::outside()
    )]
    NotPermitted,
    /// There is no pagemap to read.
    #[error("/proc/self/pagemap cannot be read: {}", os::words(*errno))]
    Unreadable {
        /// What the kernel answered.
        errno: Errno,
    },
    /// The memory is only locked, and the kernel may move it.
    #[error("the kernel may move memory that is locked with mlock to other frames: allow io_uring")]
    MayMove,
}

impl NoFrames {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NotPermitted => Errno::EPERM,
            Self::Unreadable { errno } => *errno,
            Self::MayMove => Errno::EINVAL,
        }
    }
}

/// The reason why the frames of a range were not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagemapError {
    /// The range is not all in the memory.
    #[error(transparent)]
    Outside(#[from] OutsideMemory),
    /// A page is not in memory: it was swapped, or given back to the kernel.
    #[error("the page at {address} is not in memory: pin it before looking its frame up")]
    NotPresent {
        /// The page's address.
        address: UserAddr,
    },
    /// The kernel shows no frame for a page that is in memory.
    #[error(
        "the kernel shows no frame of the page at {address}: this process has lost CAP_SYS_ADMIN"
    )]
    Hidden {
        /// The page's address.
        address: UserAddr,
    },
    /// The kernel does not say where huge leaves are.
    #[error(
        "this kernel has no PAGEMAP_SCAN ({}; Linux 6.7 has it): look every page up",
        os::words(*errno)
    )]
    NoScan {
        /// What the kernel answered.
        errno: Errno,
    },
    /// Reading the pagemap failed.
    #[error("reading the pagemap of {range} failed: {}", os::words(*errno))]
    Read {
        /// The range that was read.
        range: UserRange,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl PagemapError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Outside(outside) => outside.errno(),
            Self::NotPresent { .. } => Errno::EFAULT,
            Self::Hidden { .. } => Errno::EPERM,
            Self::NoScan { errno } | Self::Read { errno, .. } => *errno,
        }
    }
}

/// Says what a look-up cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LookupCost {
    /// Nanoseconds, without those that the sink took.
    pub ns: u64,
    /// Pagemap entries that were read.
    pub entries: u64,
}

/// Finds where memory of this process is: its frames, or as a `FrameSource<HostAddr>` the addresses
/// that the process has for it.
///
/// Look-ups run in parallel through `&self`.
#[derive(Debug)]
pub struct FrameSource<A: FrameAddress = PhysAddr> {
    /// `None` where addresses are virtual.
    pagemap: Option<Pagemap>,
    /// Buffers of look-ups that ended, to use again.
    scratch: Mutex<Vec<Scratch<A>>>,
}

#[derive(Debug)]
struct Pagemap {
    file: File,
    /// Why it cannot be scanned for huge leaves.
    no_scan: Option<Errno>,
}

impl Pagemap {
    fn open() -> Result<Self, NoFrames> {
        let unreadable = |error: std::io::Error| NoFrames::Unreadable { errno: os::errno(&error) };
        let pagemap = File::open("/proc/self/pagemap").map_err(unreadable)?;
        // A page that was just written is in memory.
        let probe = Box::new(std::hint::black_box(1_u64));
        let address = u64::try_from((&raw const *probe).addr()).unwrap_or(0);
        let page = sys::page_size();
        let mut bytes = [0; 8];
        pagemap.read_exact_at(&mut bytes, address / page * entry::BYTES).map_err(unreadable)?;
        if u64::from_ne_bytes(bytes) & entry::FRAME == 0 {
            return Err(NoFrames::NotPermitted);
        }
        let start = os::align_down(address, page);
        let no_scan =
            scan::huge_regions(&pagemap, start, start + page, &mut [PageRegion::default()]).err();
        Ok(Self { file: pagemap, no_scan })
    }
}

/// Finds where memory of another process is, now: the kernel may move what nothing pins.
#[derive(Debug)]
pub struct ProcessFrames(Pagemap);

impl ProcessFrames {
    /// The frames of a process, by its number.
    ///
    /// # Errors
    ///
    /// [`NoFrames`] where the process may not be looked at, or frames are hidden from this one.
    pub fn of(pid: u32) -> Result<Self, NoFrames> {
        let unreadable = |error: std::io::Error| NoFrames::Unreadable { errno: os::errno(&error) };
        let own = Pagemap::open()?;
        let file = File::open(format!("/proc/{pid}/pagemap")).map_err(unreadable)?;
        Ok(Self(Pagemap { file, ..own }))
    }

    /// Pushes the spans of `range`, an address range of that process, in order, each maximal: by
    /// hugetlb pages of `hugetlb` bytes, or by the huge leaves that the kernel finds.
    ///
    /// # Errors
    ///
    /// [`PagemapError`], which is [`NotPresent`](PagemapError::NotPresent) for memory that the
    /// process has not touched, or `Stopped` by the sink. Some spans may have been pushed.
    pub fn spans(
        &self,
        range: UserRange,
        hugetlb: Option<u64>,
        sink: &mut dyn SpanSink<PhysAddr>,
    ) -> Result<(), PinError<PagemapError>> {
        let leaves = match (hugetlb, self.0.no_scan) {
            (Some(size), _) => walk::Leaves::Everywhere(size),
            (None, None) => walk::Leaves::Scan(os::thp_size()),
            (None, Some(_)) => walk::Leaves::None,
        };
        Walk::new(&self.0.file, range, leaves, &mut Scratch::default()).run(sink)
    }
}

impl<A: FrameAddress> FrameSource<A> {
    /// A source of such addresses.
    ///
    /// # Errors
    ///
    /// [`NoFrames`] where they are physical and the process may not see them.
    pub fn new() -> Result<Self, NoFrames> {
        let pagemap = match A::MODE {
            FrameMode::Physical => Some(Pagemap::open()?),
            FrameMode::Virtual => None,
        };
        Ok(Self { pagemap, scratch: Mutex::new(Vec::new()) })
    }

    /// Pushes the spans of `range` of `memory`, in order, each maximal.
    ///
    /// # Errors
    ///
    /// [`PagemapError`], or `Stopped` by the sink. Some spans may have been pushed.
    pub fn frames(
        &self,
        memory: &Memory,
        range: UserRange,
        lookup: Lookup,
        sink: &mut dyn SpanSink<A>,
    ) -> Result<LookupCost, PinError<PagemapError>> {
        memory.offset_of(range).map_err(|outside| PinError::Failed(outside.into()))?;
        let Some(Pagemap { file, no_scan }) = &self.pagemap else {
            let span = |len| Span::new(A::new(range.start().get()), len);
            // A range within memory is never the whole space, so it is a span.
            if let Some(Ok(span)) = range.checked_len().map(span) {
                sink.push(span, Kind::Memory)?;
            }
            return Ok(LookupCost::default());
        };
        let leaves = walk::Leaves::choose(memory.kind(), lookup, *no_scan)
            .map_err(|errno| PinError::Failed(PagemapError::NoScan { errno }))?;
        let mut scratch = self.take_scratch();
        let mut walk = Walk::new(file, range, leaves, &mut scratch);
        let result = walk.run(sink).map(|()| walk.cost());
        self.give_back(scratch);
        result
    }

    /// Appends the address of every base page that `range` of `memory` touches, in order: what code
    /// that works page by page starts from. Returns how many there are.
    ///
    /// # Errors
    ///
    /// [`PagemapError`]; `pages` is then as before.
    pub fn page_frames(
        &self,
        memory: &Memory,
        range: UserRange,
        pages: &mut Vec<A>,
    ) -> Result<u64, PagemapError> {
        memory.offset_of(range)?;
        let before = pages.len();
        let result = match &self.pagemap {
            None => {
                pages.extend(walk::pages(range).map(A::new));
                Ok(())
            }
            Some(Pagemap { file, .. }) => {
                let mut scratch = self.take_scratch();
                let mut walk = Walk::new(file, range, walk::Leaves::None, &mut scratch);
                let result = walk.every_page(pages);
                self.give_back(scratch);
                result
            }
        };
        if let Err(error) = result {
            pages.truncate(before);
            return Err(error);
        }
        Ok(u64::try_from(pages.len() - before).unwrap_or(u64::MAX))
    }

    fn take_scratch(&self) -> Scratch<A> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give_back(&self, scratch: Scratch<A>) {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

/// Returns how many bytes of `memory` huge leaves map now, of whatever size (`PAGEMAP_SCAN`). Needs
/// no privilege.
///
/// # Errors
///
/// [`PagemapError::NoScan`] where the kernel does not tell.
pub fn huge_bytes(memory: &Memory) -> Result<u64, PagemapError> {
    let failed = |errno| PagemapError::NoScan { errno };
    let pagemap = File::open("/proc/self/pagemap").map_err(|error| failed(os::errno(&error)))?;
    let mut regions = [PageRegion::default(); 64];
    let mut at = memory.user_range().start().get();
    let end = at + memory.len();
    let mut sum = 0;
    while at < end {
        let scanned = scan::huge_regions(&pagemap, at, end, &mut regions).map_err(failed)?;
        sum +=
            regions[..scanned.regions].iter().map(|region| region.end - region.start).sum::<u64>();
        if scanned.end <= at {
            return Err(failed(os::ENOTTY));
        }
        at = scanned.end;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests;
