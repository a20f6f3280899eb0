//! Simulated physical memory, in folios that are allocated, pinned and touched by devices.
//!
//! It works as a kernel's memory: a buddy allocator has what is free, a [`Folio`] of any order is
//! one allocation with one count of references and one of pins, and from each frame its folio is
//! found in one step. [`SimMemory::fragment`] makes memory as it is after a long time.
//!
//! Memory keeps books and never refuses a wrong act: it does what a real machine would silently
//! corrupt, and records it as a [`Violation`]. A test asserts at its end that
//! [`SimMemory::violations`] is empty. [`Books`] says how exact the books are.
//!
//! A frame's bytes exist from the first write on, and records of single frames where memory was cut
//! into small folios, so that terabytes can be simulated.
//!
//! [`SimSpace`] is a user's view of such memory and [`SimPinner`] pins it.
//!
//! # Example
//!
//! How a kernel pins for a [`Container`](dmaspan::Container): by a
//! [`LeafPinner`](dmaspan::follow::LeafPinner), which follows the user's tables leaf by leaf.
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::container::{Attach, Interrupts};
//! use dmaspan::follow::LeafPinner;
//! use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
//! use dmaspan::iommu::Domain;
//! use dmaspan::{Account, Container, Iova, PhysAddr, Prot, Span, UserAddr, UserRange};
//! use dmaspan_sim::iotlb::Iotlb;
//! use dmaspan_sim::memory::{Rights, SimMemory, SimSpace, SimTables};
//! use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
//! use parking_lot::RawMutex;
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     // Tables that hardware walks, as a walker written from Arm's manual does.
//!     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//!     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
//!     let table = PageTable::new(format, tables.clone())?;
//!     let registers = table.format().registers(table.root());
//!     let iommu = Iotlb::new(ArmLpaeS1Walker::new(registers.into())?, tables);
//!     let domain = Domain::new(table, iommu)?;
//!
//!     // 3 MiB of memory, and a BAR of 2 MiB behind it.
//!     let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 32), 16 << 20, 12)?);
//!     let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
//!     let frames = memory.allocate(3 << 20, 21)?;
//!     let user = space.map(UserAddr::new(0x7f00_0010_0000), &[frames]).ok_or("no room")?;
//!     let bar = Span::new(PhysAddr::new(0x20_0000_0000), 2 << 20)?;
//!     let behind = UserAddr::new(0x7f00_0040_0000);
//!     space.map_device(behind, bar, Rights::ReadWrite).ok_or("no room")?;
//!     let both = UserRange::from_len(user.start(), 5 << 20)?;
//!
//!     let pinner = LeafPinner::new(SimTables::new(Arc::clone(&memory)));
//!     let container: Container<_, RawMutex> = Container::new(pinner, Account::new(3 << 20));
//!     container.attach(domain, Attach::new(Interrupts::Isolated))?;
//!     let found = container.map(&space, both, Iova::new(0), Prot::READ_WRITE)?;
//!     assert_eq!((found.memory, found.mmio), (3 << 20, 2 << 20));
//!     assert_eq!((memory.pinned_frames(), container.account().used()), (768, 3 << 20));
//!     assert_eq!(container.unmap_all()?, 5 << 20);
//!     assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
//!     Ok(())
//! }
//! ```

use std::ops::Range;

use dmaspan::{PhysAddr, Span, lg2};
use parking_lot::Mutex;

use self::books::FrameBooks;
use self::buddy::{Buddy, at};
use self::bytes::SparseBytes;
use self::device::DeviceMemory;
use self::folio::Records;
use crate::bus::{Bus, BusError};
use crate::walker::Access;

mod allocate;
mod books;
mod buddy;
mod bytes;
mod cpu_table;
mod device;
mod folio;
mod gup;
mod held;
mod mm;
mod pinner;
mod pins;
mod real;
mod space;
mod tables;
#[cfg(test)]
mod tests;
mod vma;

pub(crate) use self::real::RealBytes;
pub use books::Books;
pub use folio::{Folio, FolioCounts};
pub use gup::PinnedPages;
pub use held::SimPin;
pub use mm::FaultError;
pub use pinner::{Holes, SimPinError, SimPinner};
pub use space::{FAULT_TRIES, ListenerId, SimSpace, UserSpan};
pub use tables::SimTables;
pub use vma::{MapOptions, Population, Rights};

/// Something that no correct user of memory does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A frame was freed while it was pinned. Where books are not exact, a folio was.
    FreedWhilePinned {
        /// The frame, or the folio's first.
        frame: PhysAddr,
        /// How many pins it had.
        pins: u32,
    },
    /// A folio was freed, all of it or in part, that somebody else has references to.
    FreedWhileReferenced {
        /// The folio's first frame.
        frame: PhysAddr,
        /// How many references others had.
        refs: u32,
    },
    /// A frame was freed that was free. Where books are not exact, only the first of a row.
    FreedTwice {
        /// The frame.
        frame: PhysAddr,
    },
    /// Frames were pinned, or a reference taken to a frame, that are free.
    HeldFree {
        /// The first of them.
        frame: PhysAddr,
    },
    /// A reference was given back that nobody had.
    PutTwice {
        /// The frame.
        frame: PhysAddr,
    },
    /// A folio would have had more than 2^24 - 1 references, and has not.
    TooManyReferences {
        /// The frame.
        frame: PhysAddr,
    },
    /// A frame was unpinned that was not pinned. Where books are not exact, a folio was that did
    /// not have so many pins.
    UnpinnedTwice {
        /// The frame, or the folio's first that was unpinned.
        frame: PhysAddr,
    },
    /// A span was unpinned that the pin does not have.
    UnpinnedForeign {
        /// The span.
        span: Span,
    },
    /// A pin was released while bytes of it were pinned.
    ReleasedWhilePinned {
        /// How many bytes.
        bytes_left: u64,
    },
    /// A device wrote a frame that was then unpinned as clean. Where books are not exact, a folio.
    WrittenButClean {
        /// The frame, or the folio's first.
        frame: PhysAddr,
    },
    /// A device touched a frame that was not pinned.
    TouchedUnpinned {
        /// The first address of the access in the frame.
        paddr: PhysAddr,
        /// What the device did.
        access: Access,
        /// What the frame was then.
        state: FrameState,
    },
    /// A span of frames does not lie in this memory, or does not begin and end with a frame.
    NotFrames {
        /// The span.
        span: Span,
    },
}

/// Says what a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum FrameState {
    /// It belongs to nobody.
    #[default]
    Free,
    /// It belongs to somebody.
    Owned,
}

/// The reason why memory was not allocated. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Not enough frames are free, or not where and as they are asked for.
    #[error("no {bytes} bytes aligned to 2^{align_lg2} are free")]
    Full {
        /// Bytes asked for.
        bytes: u64,
        /// log2 of the alignment asked for.
        align_lg2: u32,
    },
    /// A size or an address is not a multiple of the granule, or zero.
    #[error("{value:#x} is not a positive multiple of 2^{granule_lg2}")]
    Unaligned {
        /// The size or address.
        value: u64,
        /// log2 of the granule.
        granule_lg2: u32,
    },
    /// The granule has more than 2^20 bytes, or less than one of 8.
    #[error("frames of 2^{granule_lg2} bytes are not simulated")]
    Granule {
        /// log2 of the granule.
        granule_lg2: u32,
    },
    /// Memory does not end below the top of the space, or has too many frames.
    #[error("{bytes:#x} bytes at {base} are too much")]
    TooLarge {
        /// Where it would begin.
        base: PhysAddr,
        /// How many bytes it would have.
        bytes: u64,
    },
}

/// Simulated physical memory.
#[derive(Debug)]
pub struct SimMemory {
    base: PhysAddr,
    granule_lg2: u32,
    frame_count: usize,
    /// Read without a lock: the caller that looks a folio up holds it.
    records: Records,
    /// A change of what is free, or of a folio, holds this. Taken before the locks below.
    buddy: Mutex<Buddy>,
    /// Where books are exact.
    books: Option<Mutex<FrameBooks>>,
    /// By frame of the physical space.
    contents: Mutex<SparseBytes>,
    violations: Mutex<Vec<Violation>>,
    /// What answers at addresses that are not of frames.
    devices: DeviceMemory,
}

impl SimMemory {
    /// `bytes` of memory from `base` on, in frames of `2^granule_lg2` bytes, all of them free, with
    /// exact books.
    ///
    /// # Errors
    ///
    /// [`AllocError`] for sizes that are not simulated.
    pub fn new(base: PhysAddr, bytes: u64, granule_lg2: u32) -> Result<Self, AllocError> {
        Self::with_books(base, bytes, granule_lg2, Books::Exact)
    }

    /// The same with books of this kind.
    ///
    /// # Errors
    ///
    /// [`AllocError`] for sizes that are not simulated.
    pub fn with_books(
        base: PhysAddr,
        bytes: u64,
        granule_lg2: u32,
        books: Books,
    ) -> Result<Self, AllocError> {
        if !(3..=20).contains(&granule_lg2) {
            return Err(AllocError::Granule { granule_lg2 });
        }
        for (value, may_be_zero) in [(base.get(), true), (bytes, false)] {
            if !lg2::is_aligned(value, granule_lg2) || (value == 0 && !may_be_zero) {
                return Err(AllocError::Unaligned { value, granule_lg2 });
            }
        }
        // Lists of free blocks name frames by 32 bits, counted from some way before the first.
        let count = bytes >> granule_lg2;
        if count > lg2::size(32) - 1024 || Span::new(base, bytes).is_err() {
            return Err(AllocError::TooLarge { base, bytes });
        }
        let first = base.get() >> granule_lg2;
        let pfns = first..first + count;
        let frame_count = at(count);
        Ok(Self {
            base,
            granule_lg2,
            frame_count,
            records: Records::new(&pfns),
            buddy: Mutex::new(Buddy::new(pfns)),
            books: (books == Books::Exact).then(|| Mutex::new(FrameBooks::new(frame_count))),
            contents: Mutex::new(SparseBytes::new(granule_lg2)),
            violations: Mutex::default(),
            devices: DeviceMemory::default(),
        })
    }

    /// log2 of the size of a frame.
    pub fn granule_lg2(&self) -> u32 {
        self.granule_lg2
    }

    /// Returns how exact the books are.
    pub fn books(&self) -> Books {
        if self.books.is_some() { Books::Exact } else { Books::Folios }
    }

    /// Returns what went wrong so far, in order.
    pub fn violations(&self) -> Vec<Violation> {
        self.violations.lock().clone()
    }

    /// Returns what the frame of `paddr` is; `None` outside this memory.
    pub fn frame_state(&self, paddr: PhysAddr) -> Option<FrameState> {
        Some(self.state_of(self.pfn(paddr)?))
    }

    /// Returns how many bytes the records of folios and free blocks have now, without contents and
    /// exact books: 56 or so for each block of 512 frames, and 14 KiB more for one that was cut up.
    pub fn metadata_bytes(&self) -> usize {
        self.records.bytes() + self.buddy.lock().bytes()
    }

    /// Reads as a CPU does: whether frames are pinned does not matter.
    ///
    /// # Errors
    ///
    /// [`BusError`] outside this memory; nothing was read.
    pub fn cpu_read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.check_inside(paddr, buf.len())?;
        self.contents.lock().read(paddr, buf);
        Ok(())
    }

    /// Writes as a CPU does: whether frames are pinned does not matter.
    ///
    /// # Errors
    ///
    /// [`BusError`] outside this memory; nothing was written.
    pub fn cpu_write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.check_inside(paddr, buf.len())?;
        self.contents.lock().write(paddr, buf);
        Ok(())
    }

    /// [`cpu_read`](Self::cpu_read) of what is known to lie in this memory.
    pub(crate) fn get_bytes(&self, paddr: PhysAddr, buf: &mut [u8]) {
        self.cpu_read(paddr, buf).expect("a pool's slots and originals are in its memory");
    }

    /// [`cpu_write`](Self::cpu_write) of what is known to lie in this memory.
    pub(crate) fn put_bytes(&self, paddr: PhysAddr, buf: &[u8]) {
        self.cpu_write(paddr, buf).expect("a pool's slots and originals are in its memory");
    }

    /// Writes a byte all over a span.
    pub(crate) fn fill(&self, span: Span, byte: u8) {
        self.put_bytes(span.paddr(), &vec![byte; at(span.len())]);
    }

    /// Puts frames, one behind the other, where the program reaches them by a pointer, as zeros.
    pub(crate) fn lend(&self, spans: &[Span]) -> RealBytes {
        self.contents.lock().lend(self.blocks(spans))
    }

    /// Ends [`lend`](Self::lend): the pointer leads nowhere from now on.
    pub(crate) fn take_back(&self, spans: &[Span]) {
        self.contents.lock().take_back(self.blocks(spans));
    }

    fn blocks<'a>(&'a self, spans: &'a [Span]) -> impl Iterator<Item = u64> + Clone + 'a {
        spans.iter().filter_map(|span| self.frames_of(*span)).flatten()
    }

    fn state_of(&self, pfn: u64) -> FrameState {
        if self.records.find(pfn).is_some() { FrameState::Owned } else { FrameState::Free }
    }

    fn violate(&self, violation: Violation) {
        self.violations.lock().push(violation);
    }

    /// The frame of an address in the physical space; `None` outside this memory.
    #[inline]
    fn pfn(&self, paddr: PhysAddr) -> Option<u64> {
        let offset = paddr.get().checked_sub(self.base.get())?;
        let inside = at(offset >> self.granule_lg2) < self.frame_count;
        inside.then_some(paddr.get() >> self.granule_lg2)
    }

    /// The frames under a span in the physical space; `None` where it leaves this memory.
    #[inline]
    fn pfns_under(&self, span: Span) -> Option<Range<u64>> {
        Some(self.pfn(span.paddr())?..self.pfn(span.last())? + 1)
    }

    /// The number of a frame of this memory.
    fn number(&self, pfn: u64) -> usize {
        at(pfn - (self.base.get() >> self.granule_lg2))
    }

    fn numbers(&self, pfns: &Range<u64>) -> Range<usize> {
        self.number(pfns.start)..self.number(pfns.end)
    }

    /// All frames of this memory in the physical space.
    fn all_pfns(&self) -> Range<u64> {
        let first = self.base.get() >> self.granule_lg2;
        first..first + u64::try_from(self.frame_count).unwrap_or(u64::MAX)
    }

    fn pfn_paddr(&self, pfn: u64) -> PhysAddr {
        PhysAddr::new(pfn << self.granule_lg2)
    }

    /// The last address of this memory, which may be the top of the space.
    fn last(&self) -> PhysAddr {
        self.pfn_paddr(self.all_pfns().end - 1).wrapping_add(lg2::mask(self.granule_lg2))
    }

    /// The frames that a span consists of; `None` where it does not.
    fn frames_of(&self, span: Span) -> Option<Range<u64>> {
        let aligned = lg2::is_aligned(span.paddr().get() | span.len(), self.granule_lg2);
        aligned.then(|| self.pfns_under(span)).flatten()
    }

    /// Whether a byte of a span belongs to a frame.
    fn touches(&self, span: Span) -> bool {
        span.paddr() <= self.last() && self.base <= span.last()
    }

    fn check_inside(&self, paddr: PhysAddr, len: usize) -> Result<(), BusError> {
        let Ok(span) = Span::new(paddr, u64::try_from(len).unwrap_or(u64::MAX)) else {
            return if len == 0 { Ok(()) } else { Err(BusError::Nobody { paddr }) };
        };
        if self.pfns_under(span).is_some() {
            return Ok(());
        }
        // A span that begins inside and ends outside has an address behind the last frame.
        let begins_inside = (self.base..=self.last()).contains(&paddr);
        let end = self.pfn_paddr(self.all_pfns().end);
        Err(BusError::Nobody { paddr: if begins_inside { end } else { paddr } })
    }
}

/// Accesses by devices: of a frame that is not pinned they are violations, and done. Device memory
/// that a space has mapped answers outside of frames.
impl Bus for SimMemory {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        match self.cpu_read(paddr, buf) {
            Ok(()) => self.touch(paddr, buf.len(), Access::Read),
            Err(nobody) => self.devices.read(paddr, buf).map_err(|_| nobody)?,
        }
        Ok(())
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        match self.cpu_write(paddr, buf) {
            Ok(()) => self.touch(paddr, buf.len(), Access::Write),
            Err(nobody) => self.devices.write(paddr, buf).map_err(|_| nobody)?,
        }
        Ok(())
    }
}
