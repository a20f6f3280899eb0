//! The invalidation queue (6.5.2): a [`Ring`] whose hardware says in memory how far it is and by
//! FSTS why it stopped.
//!
//! A fence is a wait, which stores a number to memory: the lower half of the position of its end. A
//! wait ends behind all before it, so that numbers are stored in their order: the one that is there
//! says that all batches up to it are done.

use dmaspan::iommu::HardwareError;
use dmaspan::{PhysAddr, lg2};

use super::Mode;
use super::hardware::{GONE, Hardware};
use super::spec::{self, Command, register, status};
use crate::host::{Host, NoMemory, gone};
use crate::log;
use crate::mmio::Mmio;
use crate::ring::{Asking, Consumer, Full, Locked, Need, Ring, Stuck};
use crate::structure::Words;

/// log2 of the least and the most bytes of a queue (IQA.QS).
pub(super) const LG2_BYTES: (u32, u32) = (12, 19);

/// log2 of the bytes of a command: 128 bits in legacy mode, 256 in scalable mode.
const fn lg2_command(mode: Mode) -> u32 {
    match mode {
        Mode::Legacy => 4,
        Mode::Scalable => 5,
    }
}

/// The ring. Behind its places are the word in which hardware stores numbers, and a word for
/// nothing.
pub(super) struct Queue<H: Host>(Ring<H>);

impl<H: Host> Queue<H> {
    /// A queue that hardware is not told of yet.
    pub(super) fn new(
        host: &H,
        lg2_bytes: u32,
        mode: Mode,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let words = Words::new(host, lg2_bytes + 1, max_paddr)?;
        let lg2_place = lg2_command(mode);
        let lg2 = lg2_bytes - lg2_place;
        Ok(Self(Ring::new(words, lg2, lg2_place - 3, Full::EmptyPlace)))
    }

    /// What IQA is told.
    pub(super) fn address(&self) -> u64 {
        let scalable = self.0.lg2_place() == lg2_command(Mode::Scalable);
        let wide = if scalable { spec::WIDE } else { 0 };
        self.0.words.paddr().get() | wide | u64::from(lg2_bytes(&self.0) - LG2_BYTES.0)
    }

    /// Has hardware carry out `commands`, and waits until it has. Each batch is placed whole.
    pub(super) fn run<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        commands: &[Command],
    ) -> Result<(), HardwareError> {
        // One place is for the wait.
        let most = usize::try_from(self.0.capacity() - 1).unwrap_or(1);
        commands.chunks(most).try_for_each(|batch| {
            let needed = batch.len() as u64 + 1;
            self.0.run(hardware, needed, batch.iter().copied().map(Command::words))
        })
    }
}

/// log2 of the bytes of the places.
fn lg2_bytes<H: Host>(ring: &Ring<H>) -> u32 {
    ring.lg2() + ring.lg2_place()
}

/// A wait that stores to the word with that index behind the places.
fn wait<H: Host>(ring: &Ring<H>, word: u64, position: u64) -> [u64; 2] {
    let store = ring.words.paddr().get() + lg2::size(lg2_bytes(ring)) + word * 8;
    // The lower half tells it from those that can be there: see `Ring::stored`.
    let data = u32::try_from(position & u64::from(u32::MAX)).unwrap_or(0);
    Command::wait(store, data).words()
}

/// Errors after which hardware has to be told to go on.
const STOPPED: u32 = status::QUEUE | status::COMPLETION | status::TIMEOUT;

impl<R: Mmio, H: Host> Consumer<H> for Hardware<R, H> {
    fn host(&self) -> &H {
        &self.host
    }

    #[inline]
    fn fence(&self, ring: &Ring<H>, end: u64) -> [u64; 2] {
        wait(ring, 0, end)
    }

    #[inline]
    fn tell(&self, ring: &Ring<H>, tail: u64) {
        self.write64(register::IQT, ring.index(tail) << ring.lg2_place());
    }

    #[inline]
    fn done(&self, ring: &Ring<H>) -> u64 {
        ring.stored(|| ring.words.get(1 << (lg2_bytes(ring) - 3)), u32::BITS)
    }

    fn ask(&self, asking: &Asking<'_, H>, need: Need) -> Result<Option<u32>, HardwareError> {
        if need == Need::Room {
            // A garbled head makes it neither more nor less.
            let head = self.head(asking.ring)?;
            asking.advance(head);
        }
        match self.read32(register::FSTS) {
            GONE => Err(gone(GONE)),
            status => Ok((status & STOPPED != 0).then_some(status)),
        }
    }

    /// Makes hardware go on that stopped with an error (7.2.3 and 11.4.9).
    fn recover(&self, locked: &mut Locked<'_, H>, status: u32) -> Result<(), HardwareError> {
        let errors = status & STOPPED;
        if errors & (status::COMPLETION | status::TIMEOUT) != 0 {
            log::warn!("a device did not answer an invalidation (fault status {status:#x})");
        }
        if errors & (status::QUEUE | status::TIMEOUT) != 0 {
            locked.spoil(status);
        }
        let (ring, tail) = (locked.ring(), locked.ring().tail());
        if errors & status::QUEUE != 0 {
            // The head stays at the command that hardware did not take. It and all behind it have
            // failed, and may be as bad: waits that store to where nobody looks take their places.
            let behind = locked.left(self.head(ring)?);
            log::warn!(
                "the IOMMU refused the command {} (fault status \
                 {status:#x}): all that was placed before has failed, and what it was to make \
                 hardware forget stays out of use",
                ring.shown(tail.saturating_sub(behind))
            );
            for position in tail.saturating_sub(behind)..tail {
                ring.set(position, wait(ring, 1, 0));
            }
        }
        self.write32(register::FSTS, errors);
        // A model fetches again only when it is told a tail; hardware ignores one that it has.
        self.tell(ring, tail);
        Ok(())
    }

    fn failed(&self, status: u32) -> HardwareError {
        HardwareError { what: "an invalidation failed", status: status.into() }
    }

    fn stuck(&self, at: Stuck, _start: Option<u64>) -> HardwareError {
        let what = match at {
            Stuck::Full => "the invalidation queue stayed full",
            Stuck::Late => "the IOMMU did not complete an invalidation in time",
        };
        HardwareError { what, status: self.read32(register::FSTS).into() }
    }
}

impl<R: Mmio, H: Host> Hardware<R, H> {
    /// The place that hardware fetches from next.
    fn head(&self, ring: &Ring<H>) -> Result<u64, HardwareError> {
        match self.read64(register::IQH) {
            u64::MAX => Err(gone(GONE)),
            value => Ok(value >> ring.lg2_place()),
        }
    }
}
