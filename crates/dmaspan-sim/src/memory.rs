//! Simulated physical memory, in frames that are allocated, pinned and touched by devices.
//!
//! Memory keeps books and never refuses a wrong act: what a real machine would silently corrupt is
//! done and recorded as a [`Violation`]. A test asserts at its end that [`SimMemory::violations`]
//! is empty.
//!
//! A frame's bytes exist from the first write on, so that terabytes can be simulated.
//!
//! [`SimSpace`] is a user's view of such memory and [`SimPinner`] pins it.

use std::collections::HashMap;

use dmaspan::pin::Dirty;
use dmaspan::{PhysAddr, Span, lg2};
use parking_lot::Mutex;

use crate::bus::{Bus, BusError};
use crate::walker::Access;

mod allocate;
mod pinner;
mod space;
#[cfg(test)]
mod tests;

pub use pinner::{Holes, SimPin, SimPinError, SimPinner};
pub use space::{Segment, SimSpace};

/// Something that no correct user of memory does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A frame was freed while it was pinned.
    FreedWhilePinned {
        /// The frame.
        frame: PhysAddr,
        /// How many pins it had.
        pins: u32,
    },
    /// A frame was freed that was free.
    FreedTwice {
        /// The frame.
        frame: PhysAddr,
    },
    /// A frame was unpinned that was not pinned.
    UnpinnedTwice {
        /// The frame.
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
    /// A device wrote a frame that was then unpinned as clean.
    WrittenButClean {
        /// The frame.
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

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum FrameState {
    /// It belongs to nobody.
    #[default]
    Free,
    /// It belongs to somebody.
    Owned,
}

/// Why memory was not allocated. Nothing was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
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
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    frames: Vec<Frame>,
    /// By frame number; a frame without bytes reads as zeros.
    contents: HashMap<usize, Box<[u8]>>,
    violations: Vec<Violation>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Frame {
    pins: u32,
    state: FrameState,
    marks: Marks,
}

/// What is known of writes by devices to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum Marks {
    #[default]
    Clean,
    /// A device wrote it and nobody said so yet.
    Written,
    /// It was unpinned as written.
    Dirty,
}

/// Part of a frame: its number, the first byte in it and how many.
#[derive(Clone, Copy, Debug)]
struct Part {
    frame: usize,
    offset: usize,
    len: usize,
}

impl SimMemory {
    /// `bytes` of memory from `base` on, in frames of `2^granule_lg2` bytes, all of them free.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] for sizes that are not simulated.
    pub fn new(base: PhysAddr, bytes: u64, granule_lg2: u32) -> Result<Self, MemoryError> {
        if !(3..=20).contains(&granule_lg2) {
            return Err(MemoryError::Granule { granule_lg2 });
        }
        for (value, may_be_zero) in [(base.get(), true), (bytes, false)] {
            if !lg2::is_aligned(value, granule_lg2) || (value == 0 && !may_be_zero) {
                return Err(MemoryError::Unaligned { value, granule_lg2 });
            }
        }
        // More than 2^32 frames would need more memory than it simulates is worth.
        let count = usize::try_from(bytes >> granule_lg2).ok().filter(|count| *count <= 1 << 32);
        let (Some(count), Ok(_)) = (count, Span::new(base, bytes)) else {
            return Err(MemoryError::TooLarge { base, bytes });
        };
        let frames = vec![Frame::default(); count];
        let state = State { frames, contents: HashMap::new(), violations: Vec::new() };
        Ok(Self { base, granule_lg2, frame_count: count, state: Mutex::new(state) })
    }

    /// log2 of the size of a frame.
    pub fn granule_lg2(&self) -> u32 {
        self.granule_lg2
    }

    /// What went wrong so far, in order.
    pub fn violations(&self) -> Vec<Violation> {
        self.state.lock().violations.clone()
    }

    /// What the frame of `paddr` is; `None` outside this memory.
    pub fn frame_state(&self, paddr: PhysAddr) -> Option<FrameState> {
        self.frame(paddr, |frame| frame.state)
    }

    /// How many pins the frame of `paddr` has; `None` outside this memory.
    pub fn pins(&self, paddr: PhysAddr) -> Option<u32> {
        self.frame(paddr, |frame| frame.pins)
    }

    /// Whether the frame of `paddr` was unpinned as written; `None` outside this memory.
    pub fn is_dirty(&self, paddr: PhysAddr) -> Option<bool> {
        self.frame(paddr, |frame| frame.marks == Marks::Dirty)
    }

    /// How many frames are pinned now.
    pub fn pinned_frames(&self) -> u64 {
        let state = self.state.lock();
        state.frames.iter().map(|frame| u64::from(frame.pins > 0)).sum()
    }

    /// Pins whole frames, besides what a [`SimPinner`] pins: for memory that a driver owns and
    /// gives to its device.
    pub fn pin_frames(&self, spans: &[Span]) {
        let mut state = self.state.lock();
        for span in spans {
            match self.frames_of(*span) {
                Some(frames) => frames.for_each(|frame| state.pin(frame)),
                None => state.violations.push(Violation::NotFrames { span: *span }),
            }
        }
    }

    /// Undoes [`pin_frames`](Self::pin_frames).
    pub fn unpin_frames(&self, spans: &[Span], dirty: Dirty) {
        let mut state = self.state.lock();
        for span in spans {
            match self.frames_of(*span) {
                Some(frames) => frames.for_each(|frame| self.unpin_frame(&mut state, frame, dirty)),
                None => state.violations.push(Violation::NotFrames { span: *span }),
            }
        }
    }

    /// Reads as a CPU does: whether frames are pinned does not matter.
    ///
    /// # Errors
    ///
    /// [`BusError`] outside this memory; nothing was read.
    pub fn cpu_read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        let state = self.state.lock();
        self.check_inside(paddr, buf.len())?;
        let mut rest = buf;
        for part in self.parts(paddr, rest.len()) {
            let (here, behind) = rest.split_at_mut(part.len);
            match state.contents.get(&part.frame) {
                Some(bytes) => here.copy_from_slice(&bytes[part.offset..part.offset + part.len]),
                None => here.fill(0),
            }
            rest = behind;
        }
        Ok(())
    }

    /// Writes as a CPU does: whether frames are pinned does not matter.
    ///
    /// # Errors
    ///
    /// [`BusError`] outside this memory; nothing was written.
    pub fn cpu_write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        let mut state = self.state.lock();
        self.check_inside(paddr, buf.len())?;
        let mut rest = buf;
        for part in self.parts(paddr, rest.len()) {
            let (here, behind) = rest.split_at(part.len);
            let empty = || vec![0; 1 << self.granule_lg2].into_boxed_slice();
            let bytes = state.contents.entry(part.frame).or_insert_with(empty);
            bytes[part.offset..part.offset + part.len].copy_from_slice(here);
            rest = behind;
        }
        Ok(())
    }

    fn frame<R>(&self, paddr: PhysAddr, f: impl FnOnce(&Frame) -> R) -> Option<R> {
        let offset = paddr.get().checked_sub(self.base.get())?;
        let number = usize::try_from(offset >> self.granule_lg2).ok()?;
        self.state.lock().frames.get(number).map(f)
    }

    fn frame_paddr(&self, number: usize) -> PhysAddr {
        let number = u64::try_from(number).unwrap_or(u64::MAX);
        self.base.wrapping_add(number << self.granule_lg2)
    }

    /// The last address of this memory, which may be the top of the space.
    fn last(&self) -> PhysAddr {
        self.frame_paddr(self.frame_count - 1).wrapping_add(lg2::mask(self.granule_lg2))
    }

    /// The numbers of the frames that a span consists of; `None` where it does not.
    fn frames_of(&self, span: Span) -> Option<std::ops::Range<usize>> {
        let aligned = lg2::is_aligned(span.paddr().get() | span.len(), self.granule_lg2);
        aligned.then(|| self.frames_under(span)).flatten()
    }

    /// The numbers of the frames that a span touches; `None` where it leaves this memory.
    fn frames_under(&self, span: Span) -> Option<std::ops::Range<usize>> {
        let number = |paddr: PhysAddr| {
            let offset = paddr.get().checked_sub(self.base.get())?;
            usize::try_from(offset >> self.granule_lg2).ok()
        };
        let (first, last) = (number(span.paddr())?, number(span.last())?);
        (last < self.frame_count).then_some(first..last + 1)
    }

    fn check_inside(&self, paddr: PhysAddr, len: usize) -> Result<(), BusError> {
        let Ok(span) = Span::new(paddr, u64::try_from(len).unwrap_or(u64::MAX)) else {
            return if len == 0 { Ok(()) } else { Err(BusError::Nobody { paddr }) };
        };
        if self.frames_under(span).is_some() {
            return Ok(());
        }
        // A span that begins inside and ends outside has an address behind the last frame.
        let begins_inside = (self.base..=self.last()).contains(&paddr);
        let end = self.frame_paddr(self.frame_count);
        Err(BusError::Nobody { paddr: if begins_inside { end } else { paddr } })
    }

    /// An access that lies in this memory, frame by frame.
    fn parts(&self, paddr: PhysAddr, len: usize) -> impl Iterator<Item = Part> + use<> {
        let granule = 1usize << self.granule_lg2;
        // An access of no bytes may be anywhere.
        let offset = paddr.get().saturating_sub(self.base.get());
        let mut start = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut left = len;
        std::iter::from_fn(move || {
            let (frame, offset) = (start / granule, start % granule);
            let len = left.min(granule - offset);
            (start, left) = (start + len, left - len);
            (len > 0).then_some(Part { frame, offset, len })
        })
    }

    fn unpin_frame(&self, state: &mut State, number: usize, dirty: Dirty) {
        let paddr = self.frame_paddr(number);
        let frame = &mut state.frames[number];
        let Some(fewer) = frame.pins.checked_sub(1) else {
            state.violations.push(Violation::UnpinnedTwice { frame: paddr });
            return;
        };
        frame.pins = fewer;
        match (dirty, frame.marks) {
            (Dirty::Written, _) => frame.marks = Marks::Dirty,
            (Dirty::Clean, Marks::Written) if fewer == 0 => {
                state.violations.push(Violation::WrittenButClean { frame: paddr });
            }
            (Dirty::Clean, _) => {}
        }
    }

    fn touch(&self, paddr: PhysAddr, len: usize, access: Access) {
        let mut state = self.state.lock();
        for part in self.parts(paddr, len) {
            let frame = &mut state.frames[part.frame];
            if frame.pins == 0 {
                let offset = u64::try_from(part.offset).unwrap_or(u64::MAX);
                let paddr = self.frame_paddr(part.frame).wrapping_add(offset);
                let touched = Violation::TouchedUnpinned { paddr, access, state: frame.state };
                state.violations.push(touched);
            } else if access == Access::Write {
                frame.marks = Marks::Written;
            }
        }
    }
}

impl State {
    fn pin(&mut self, number: usize) {
        let frame = &mut self.frames[number];
        frame.pins = frame.pins.saturating_add(1);
    }
}

/// Accesses by devices: of a frame that is not pinned they are violations, and done.
impl Bus for SimMemory {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.cpu_read(paddr, buf)?;
        self.touch(paddr, buf.len(), Access::Read);
        Ok(())
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.cpu_write(paddr, buf)?;
        self.touch(paddr, buf.len(), Access::Write);
        Ok(())
    }
}
