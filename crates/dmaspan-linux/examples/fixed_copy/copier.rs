//! Copying with fixed buffers: each block is read into a slice and written from it.

use std::io;

use dmaspan_linux::fixed::{
    AttachMethod, Completion, FixedBuf, FixedPool, FixedRing, RefusedOperation,
};
use indicatif::ProgressBar;

use crate::error::CopyError;
use crate::files::{Source, Target};

/// What is done with the block that is in a slice.
#[derive(Clone, Copy, Debug)]
enum Step {
    Read,
    Write,
}

/// The block that is in a slice.
#[derive(Clone, Copy, Debug)]
struct Block {
    step: Step,
    /// Where it is in both files.
    offset: u64,
    /// Its bytes.
    len: usize,
    /// How many are read or written.
    done: usize,
}

pub(crate) struct Copier {
    pool: FixedPool,
    ring: FixedRing,
    /// By the slices' numbers.
    blocks: Vec<Option<Block>>,
}

impl Copier {
    pub(crate) fn new(pool: &FixedPool, depth: u32) -> Result<Self, CopyError> {
        let ring = FixedRing::new(pool, depth)?;
        let blocks = (0..pool.slices()).map(|_| None).collect();
        Ok(Self { pool: pool.clone(), ring, blocks })
    }

    /// How the ring got its buffers.
    pub(crate) fn method(&self) -> AttachMethod {
        self.ring.attachment().method()
    }

    /// Copies all bytes. The target may have some more then, to be cut off.
    pub(crate) fn copy(
        &mut self,
        source: &Source,
        target: &Target,
        bar: &ProgressBar,
    ) -> Result<(), CopyError> {
        let mut next = 0;
        loop {
            while next < source.len
                && let Some(buffer) = self.pool.take()
            {
                let len = usize::try_from(source.len - next).unwrap_or(usize::MAX);
                let len = len.min(self.pool.slice_len());
                let block = Block { step: Step::Read, offset: next, len, done: 0 };
                self.begin(buffer, block, source, target)?;
                next += as_u64(len);
            }
            if self.ring.in_flight() == 0 {
                return Ok(());
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(CopyError::Ring(error));
                }
                _ => {}
            }
            while let Some(done) = self.ring.completion() {
                self.go_on(done, source, target, bar)?;
            }
        }
    }

    /// Begins what is left of a block's step.
    fn begin(
        &mut self,
        buffer: FixedBuf,
        block: Block,
        source: &Source,
        target: &Target,
    ) -> Result<(), CopyError> {
        let index = buffer.index();
        let caching = match block.step {
            Step::Read => source.caching,
            Step::Write => target.caching,
        };
        let from = caching.resume_at(block.done);
        let bytes = from..caching.transfer_len(block.len);
        let (offset, token) = (block.offset + as_u64(from), u64::from(index));
        let result = match block.step {
            Step::Read => self.ring.read(buffer, bytes, &source.file, offset, token),
            Step::Write => self.ring.write(buffer, bytes, &target.file, offset, token),
        };
        result.map_err(|RefusedOperation { error, .. }| error)?;
        if let Some(place) = usize::try_from(index).ok().and_then(|n| self.blocks.get_mut(n)) {
            *place = Some(Block { done: from, ..block });
        }
        Ok(())
    }

    /// A block's step is done, or a part of it.
    fn go_on(
        &mut self,
        done: Completion,
        source: &Source,
        target: &Target,
        bar: &ProgressBar,
    ) -> Result<(), CopyError> {
        let place = usize::try_from(done.token).ok().and_then(|n| self.blocks.get_mut(n));
        let Some(mut block) = place.and_then(Option::take) else { return Ok(()) };
        let mut buffer = done.buffer;
        let moved = match (block.step, done.result) {
            (_, Ok(moved)) => moved,
            (Step::Read, Err(error)) => return Err(source.error(error)),
            (Step::Write, Err(error)) => return Err(target.error(error, source.len)),
        };
        if moved == 0 {
            return Err(match block.step {
                Step::Read => CopyError::Shrank { path: source.path.clone() },
                Step::Write => target.error(io::ErrorKind::WriteZero.into(), source.len),
            });
        }
        let before = block.done;
        block.done += moved;
        if block.done < block.len {
            // A file that grew shorter ends between two sectors, at which nothing goes on.
            let is_stuck = source.caching.resume_at(block.done) == before;
            if matches!(block.step, Step::Read) && is_stuck {
                return Err(CopyError::Shrank { path: source.path.clone() });
            }
            return self.begin(buffer, block, source, target);
        }
        match block.step {
            Step::Read => {
                // What is written behind the last byte is cut off in the end.
                buffer[block.len..].fill(0);
                let block = Block { step: Step::Write, done: 0, ..block };
                self.begin(buffer, block, source, target)
            }
            Step::Write => {
                bar.inc(as_u64(block.len));
                Ok(())
            }
        }
    }
}

/// `usize` has 64 bits wherever the library builds.
fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
