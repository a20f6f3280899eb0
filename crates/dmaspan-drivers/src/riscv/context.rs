//! A stream has a device context. This fills it, and changes it while the device is active.
//!
//! Hardware may read the words of a context in any order ("Leaf DDT entry"), and may use the old or
//! the new value of each until an invalidation was processed ("Changing device directory table
//! entry"). So a change of one word is seen whole, and one of several words is not: that goes
//! through a context that is not valid, with a fence on either side of it.

use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use dmaspan::iommu::HardwareError;

use super::RiscvIommu;
use super::ops::{AddressSpace, Tag};
use super::spec::{
    Command, DC_FSC, DC_IOHGATP, DC_TA, DC_TC, DC_WORDS, INVAL_DDT_ALL, INVAL_GVMA_ALL,
    INVAL_VMA_ALL, TC_LEFT, TC_VALID, gscid_of, inval_device, inval_vma_of_guest, pscid_of,
    translates,
};
use crate::Mmio;
use crate::host::Host;

/// The words of a context: `tc`, `iohgatp`, `ta`, `fsc`.
pub(super) type Context = [u64; DC_WORDS];

/// A context that lets nothing through.
pub(super) const BLOCKED: Context = [0; DC_WORDS];
/// A context that lets everything through: both stages are Bare.
pub(super) const PASSING: Context = [TC_VALID, 0, 0, 0];

/// What hardware has of a stream.
pub(super) struct StreamState {
    /// What memory has.
    words: Context,
    /// Whether hardware has that and nothing else.
    certain: bool,
    /// Address spaces that hardware may translate the stream through: the one that it has, and the
    /// one that it is to have.
    spaces: [Option<Arc<AddressSpace>>; 2],
}

impl StreamState {
    /// Of a stream whose context is `words`. What is not zero was somebody else's, of whom nobody
    /// knows how far hardware followed: a stream that was blocked for certain has zeros, and one
    /// that hardware was only told to block has [`TC_LEFT`].
    pub(super) fn new(words: Context) -> Self {
        Self { words, certain: words == BLOCKED, spaces: [None, None] }
    }
}

impl<R: Mmio, H: Host> RiscvIommu<R, H> {
    /// Gives a stream another context, which translates through `space` if through any.
    ///
    /// Where it fails, hardware has the old context, the new one, or none that is valid, and the
    /// next call begins with forgetting everything.
    pub(super) fn switch(
        &self,
        device: u32,
        state: &mut StreamState,
        new: &Context,
        space: Option<&Arc<AddressSpace>>,
    ) -> Result<(), HardwareError> {
        if !state.certain {
            self.block_unknown(device, state)?;
        }
        if let Some(space) = space {
            space.streams.fetch_add(1, Ordering::AcqRel);
        }
        let [_, next] = &mut state.spaces;
        *next = space.cloned();
        state.certain = false;
        self.change(device, &mut state.words, new)?;
        state.certain = true;
        let [now, next] = &mut state.spaces;
        let old = core::mem::replace(now, next.take());
        release(old);
        Ok(())
    }

    /// Blocks a stream whose context in hardware is unknown.
    fn block_unknown(&self, device: u32, state: &mut StreamState) -> Result<(), HardwareError> {
        self.store(device, &mut state.words, DC_TC, TC_LEFT);
        let mut all = [INVAL_DDT_ALL; 3];
        let mut len = 1;
        for command in self.forget_all() {
            if let Some(place) = all.get_mut(len) {
                *place = command;
                len += 1;
            }
        }
        self.run(all.get(..len).unwrap_or(&all))?;
        self.clear(device, &mut state.words);
        state.certain = true;
        let [now, next] = &mut state.spaces;
        release(now.take());
        release(next.take());
        Ok(())
    }

    /// The commands that make hardware forget all translations, as far as it has them.
    pub(super) fn forget_all(&self) -> impl Iterator<Item = Command> {
        let features = self.features();
        let first = features.has_first_stage().then_some(INVAL_VMA_ALL);
        let second = features.has_second_stage().then_some(INVAL_GVMA_ALL);
        first.into_iter().chain(second)
    }

    /// Changes a context from what memory has to `new`; nothing of the old one is used afterwards.
    fn change(&self, device: u32, words: &mut Context, new: &Context) -> Result<(), HardwareError> {
        let old = *words;
        let valid = |context: &Context| context[DC_TC] & TC_VALID != 0;
        if !valid(new) {
            if valid(&old) {
                self.store(device, words, DC_TC, TC_LEFT);
                self.forget(device, &old)?;
                self.clear(device, words);
            }
            return Ok(());
        }
        if valid(&old) {
            let mut changed = (0..DC_WORDS).filter(|&word| old[word] != new[word]);
            match (changed.next(), changed.next()) {
                (None, _) => return Ok(()),
                (Some(word), None) => {
                    self.store(device, words, word, new[word]);
                    return self.forget(device, &old);
                }
                _ => {
                    // Hardware that read some words before and some after would walk new tables
                    // under an old number, which is other devices' too.
                    self.store(device, words, DC_TC, TC_LEFT);
                    self.forget(device, &old)?;
                }
            }
        }
        for word in [DC_IOHGATP, DC_TA, DC_FSC] {
            self.store(device, words, word, new[word]);
        }
        // "IODIR.INVAL_DDT guarantees that any previous stores made by a RISC-V hart to the DDT are
        // observed before all subsequent implicit reads": without it hardware could read a word
        // before it was stored, and `tc` after that. Old words that are zero let everything pass.
        self.run(&[inval_device(device)])?;
        // A context that is not valid is not cached, so hardware needs not be told.
        self.store(device, words, DC_TC, new[DC_TC]);
        Ok(())
    }

    /// Makes hardware forget a context, and what it translated through it ("Changing device
    /// directory table entry").
    fn forget(&self, device: u32, old: &Context) -> Result<(), HardwareError> {
        let context = inval_device(device);
        let first = self.features().has_first_stage();
        if translates(old[DC_IOHGATP]) {
            let gscid = gscid_of(old[DC_IOHGATP]);
            let second = Tag::Second(gscid).forget();
            return match first {
                true => self.run(&[context, inval_vma_of_guest(gscid), second]),
                false => self.run(&[context, second]),
            };
        }
        if translates(old[DC_FSC]) {
            return self.run(&[context, Tag::First(pscid_of(old[DC_TA])).forget()]);
        }
        match first {
            true => self.run(&[context, INVAL_VMA_ALL]),
            false => self.run(&[context]),
        }
    }

    /// Zeroes a context that hardware knows to be not valid, so that whoever claims the stream next
    /// sees that it is blocked.
    fn clear(&self, device: u32, words: &mut Context) {
        for word in 0..DC_WORDS {
            self.store(device, words, word, 0);
        }
    }

    fn store(&self, device: u32, words: &mut Context, word: usize, value: u64) {
        words[word] = value;
        self.directory.set(device, word, value);
    }
}

/// Hardware does not translate a stream through an address space any more.
fn release(space: Option<Arc<AddressSpace>>) {
    if let Some(space) = space {
        space.streams.fetch_sub(1, Ordering::AcqRel);
    }
}
