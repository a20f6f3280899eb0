//! Many slots at a time: one lock for all that one area has.

use alloc::vec::Vec;
use core::iter::Peekable;

use super::error::Error;
use super::memory::{Original, PoolMemory};
use super::pool::{Pool, SlotOf};
use super::request::{Fit, SlotRequest};
use crate::platform::Platform;

/// How many slots are taken under one lock at most: interrupts may be off that long.
const BATCH: usize = 64;

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
    /// As [`take`](Self::take), and up to 64 slots are taken under a lock. Allocates where `slots`
    /// has no room for them.
    pub fn take_all(
        &self,
        originals: impl IntoIterator<Item = Original>,
        request: &SlotRequest,
        slots: &mut Vec<SlotOf<P>>,
    ) -> Result<(), Error> {
        let before = slots.len();
        let mut originals = originals.into_iter().peekable();
        while originals.peek().is_some() {
            if let Err(error) = self.take_batch(&mut originals, request, slots) {
                // Nobody else has them, and no device.
                for slot in slots.drain(before..) {
                    let _ = self.release(slot);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Slots of the CPU's own area for the next originals, or a slot for the next one from
    /// elsewhere.
    fn take_batch(
        &self,
        originals: &mut Peekable<impl Iterator<Item = Original>>,
        request: &SlotRequest,
        slots: &mut Vec<SlotOf<P>>,
    ) -> Result<(), Error> {
        request.check()?;
        let len = originals.peek().map_or(0, |original| original.span().len());
        slots.try_reserve(BATCH).map_err(|_| Error::NoMemory { bytes: len })?;
        let begin = slots.len();
        let node = self.node();
        if let Some(chunk) = self.base().get(node) {
            chunk.take_many(self.platform.cpu(), |take| {
                while slots.len() < begin + BATCH
                    && let Some(original) = originals.peek().map(Original::span)
                    && let Some(fit) = Fit::new(chunk.grid(), original, request)
                    && let Some(taken) = take(&fit)
                {
                    originals.next();
                    slots.push(self.unpadded(node, taken, original));
                }
            });
        }
        for slot in &slots[begin..] {
            self.pad(&slot.taken, slot.len());
        }
        if slots.len() == begin
            && let Some(original) = originals.next()
        {
            slots.push(self.take(original, request)?);
        }
        Ok(())
    }
}
