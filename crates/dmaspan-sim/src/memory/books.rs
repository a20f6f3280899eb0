//! The books have a record of each frame, where they are exact.

use dmaspan::pin::Dirty;

use super::buddy::BLOCK_FRAMES;
use super::folio::Marks;

/// Says how exactly memory keeps books of pins and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Books {
    /// By frame, for tests: each mistake names its frame. Every pin costs a lock, and a step for
    /// each frame.
    #[default]
    Exact,
    /// By folio, as a kernel does and for terabytes: a pin costs one atomic operation for each
    /// folio and takes no lock. An unpin too many is noticed where the folio has no other pins.
    Folios,
}

/// Pins and writes frame by frame.
#[derive(Debug)]
pub(super) struct FrameBooks {
    /// By frame number, a block at a time from the first entry in it on.
    blocks: Vec<Option<Box<[Frame]>>>,
    pinned: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Frame {
    pub(super) pins: u32,
    pub(super) marks: Marks,
}

/// What was wrong with an unpin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    NotPinned,
    WrittenButClean,
}

impl FrameBooks {
    pub(super) fn new(frames: usize) -> Self {
        Self { blocks: vec![None; frames.div_ceil(BLOCK_FRAMES)], pinned: 0 }
    }

    pub(super) fn frame(&self, number: usize) -> Frame {
        let block = self.blocks[number / BLOCK_FRAMES].as_deref();
        block.map_or(Frame::default(), |block| block[number % BLOCK_FRAMES])
    }

    /// How many frames are pinned.
    pub(super) fn pinned(&self) -> u64 {
        self.pinned
    }

    pub(super) fn pin(&mut self, number: usize) {
        let frame = self.frame_mut(number);
        let before = frame.pins;
        frame.pins = before.saturating_add(1);
        self.pinned += u64::from(before == 0);
    }

    pub(super) fn unpin(&mut self, number: usize, dirty: Dirty) -> Result<(), Wrong> {
        let frame = self.frame_mut(number);
        frame.pins = frame.pins.checked_sub(1).ok_or(Wrong::NotPinned)?;
        let last = frame.pins == 0;
        let hidden = last && dirty == Dirty::Clean && frame.marks == Marks::Written;
        if dirty == Dirty::Written {
            frame.marks = Marks::Dirty;
        }
        self.pinned -= u64::from(last);
        if hidden { Err(Wrong::WrittenButClean) } else { Ok(()) }
    }

    pub(super) fn mark(&mut self, number: usize, marks: Marks) {
        if self.frame(number).marks != marks {
            self.frame_mut(number).marks = marks;
        }
    }

    fn frame_mut(&mut self, number: usize) -> &mut Frame {
        let empty = || vec![Frame::default(); BLOCK_FRAMES].into_boxed_slice();
        &mut self.blocks[number / BLOCK_FRAMES].get_or_insert_with(empty)[number % BLOCK_FRAMES]
    }
}
