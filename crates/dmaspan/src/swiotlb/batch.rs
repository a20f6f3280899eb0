//! Taking, filling and releasing many slots at a time, by one lock for all that one area has.

use alloc::vec::Vec;
use core::array;

use super::chunk::Taken;
use super::error::Error;
use super::memory::{Original, PoolMemory};
use super::pool::{Pool, SlotOf};
use super::request::SlotRequest;
use crate::platform::Platform;
use crate::span::Span;

/// How many slots are taken under one lock at most: interrupts may be off that long, and their
/// places are on the stack.
const BATCH: usize = 32;

impl<M: PoolMemory, P: Platform> Pool<M, P> {
    /// Slots for many originals, all like `request`, which are pushed to `slots` in their order;
    /// as [`take`](Self::take) for each, but for one lock instead of one for each.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take), for the first original that has no slot, and [`Error::NoMemory`]
    /// where `slots` has no room: nothing is taken, and `slots` is as before.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take), and up to 32 slots are taken under a lock. Allocates where `slots`
    /// has no room for them. The iterator runs without a lock.
    pub fn take_all(
        &self,
        originals: impl IntoIterator<Item = Original<M::Address>>,
        request: &SlotRequest,
        slots: &mut Vec<SlotOf<P, M::Address>>,
    ) -> Result<(), Error> {
        let before = slots.len();
        let mut originals = originals.into_iter().map(|original| original.span().output()).fuse();
        loop {
            let batch: [_; BATCH] = array::from_fn(|_| originals.next());
            if batch[0].is_none() {
                return Ok(());
            }
            if let Err(error) = self.take_batch(&batch, request, slots) {
                for slot in slots.drain(before..) {
                    // It is of this pool.
                    let _ = self.release(slot);
                }
                return Err(error);
            }
        }
    }

    /// Slots of the CPU's own area as far as it has them, then from elsewhere.
    fn take_batch(
        &self,
        batch: &[Option<Span>; BATCH],
        request: &SlotRequest,
        slots: &mut Vec<SlotOf<P, M::Address>>,
    ) -> Result<(), Error> {
        let count = batch.iter().flatten().count();
        slots.try_reserve(count).map_err(|_| {
            let lens = batch.iter().flatten().map(|span| span.len());
            Error::NoMemory { bytes: lens.fold(0, u64::saturating_add) }
        })?;
        request.check()?;
        let no_copies = |original: &&Span| !self.memory().can_copy(original.of_output());
        if let Some(&original) = batch.iter().flatten().find(no_copies) {
            return Err(Error::NoCopies { original });
        }
        let (node, cpu) = (self.node(), self.platform.cpu());
        let mut taken: [Option<Taken>; BATCH] = [None; BATCH];
        if let Some(chunk) = self.base().get(node) {
            chunk.take_many(batch, request, cpu, &mut taken);
        }
        for (taken, span) in taken.into_iter().zip(batch.iter().flatten()) {
            slots.push(match taken {
                Some(taken) => self.slot(node, taken, span.of_output()),
                None => self.take(Original::promised(span.of_output()), request)?,
            });
        }
        Ok(())
    }
}
