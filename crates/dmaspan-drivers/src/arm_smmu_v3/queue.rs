//! The command queue (IHI 0070, 3.5 and 4.1): a [`Ring`] whose hardware says by CMDQ_CONS how far
//! it is and why it stopped.

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;

use super::command::Command;
use super::hardware::{self, Hardware};
use super::spec::{gerror, queue, reg};
use crate::error::Error;
use crate::host::Host;
use crate::log;
use crate::mmio::Mmio;
use crate::ring::{Asking, Behind, Consumer, Full, Locked, Need, Ring, Stuck};
use crate::structure::Words;

/// log2 of a command's bytes.
const LG2_COMMAND: u32 = 4;

/// Where commands are placed.
pub(super) struct CommandQueue<H: Host>(Ring<H>);

impl<H: Host> CommandQueue<H> {
    /// A queue of `2^lg2` places, which hardware has not been told of.
    pub(super) fn new(host: &H, lg2: u32, max_paddr: PhysAddr) -> Result<Self, Error> {
        let places = Words::new(host, lg2 + LG2_COMMAND, max_paddr)?;
        Ok(Self(Ring::new(places, lg2, LG2_COMMAND - 3, Full::RoundBit)))
    }

    /// Tells hardware of it. CMDQEN is clear.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let base = queue::ALLOCATE | self.0.words.paddr().get() | u64::from(self.0.lg2());
        registers.write64(reg::CMDQ_BASE, base);
        registers.write32(reg::CMDQ_PROD, 0);
        registers.write32(reg::CMDQ_CONS, 0);
    }

    /// Gives the memory back. CMDQEN is clear.
    pub(super) fn free(&mut self) {
        self.0.words.free_in_place();
    }

    /// Places commands and a sync behind them, and waits until that is complete. They stand
    /// together in the queue if there is room.
    pub(super) fn run<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<(), HardwareError> {
        self.0.run(hardware, 1, commands.into_iter().map(|Command(words)| words))
    }

    /// Places a command whose completion nobody waits for.
    pub(super) fn place<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        Command(words): Command,
    ) -> Result<(), HardwareError> {
        self.0.place(hardware, 1, [words], Behind::Nothing).map(|_| ())
    }

    /// Lets hardware go on if it has stopped.
    pub(super) fn look<R: Mmio>(&self, hardware: &Hardware<R, H>) -> Result<(), HardwareError> {
        self.0.look(hardware, Need::Done)
    }
}

impl<R: Mmio, H: Host> Consumer<H> for Hardware<R, H> {
    fn host(&self) -> &H {
        &self.host
    }

    #[inline]
    fn fence(&self, _ring: &Ring<H>, _end: u64) -> [u64; 2] {
        Command::SYNC.0
    }

    #[inline]
    fn tell(&self, ring: &Ring<H>, tail: u64) {
        self.registers.write32(reg::CMDQ_PROD, ring.index32(tail));
    }

    #[inline]
    fn done(&self, ring: &Ring<H>) -> u64 {
        ring.head()
    }

    fn ask(&self, asking: &Asking<'_, H>, _need: Need) -> Result<Option<u32>, HardwareError> {
        let consumer = self.registers.read32(reg::CMDQ_CONS);
        if consumer == u32::MAX {
            return Err(hardware::gone(consumer));
        }
        if !asking.advance(consumer.into()) {
            let what = "the SMMU reports as consumed commands that were never placed";
            return Err(HardwareError { what, status: consumer.into() });
        }
        // ERR says why it stopped last, also when it has gone on since.
        let stopped = error(consumer) != 0 && self.active_errors() & gerror::CMDQ_ERR != 0;
        Ok(stopped.then_some(consumer))
    }

    /// Makes hardware go on that has stopped at a command. A command that is illegal is replaced by
    /// one that does nothing. Where hardware could not read it, it tries again (7.1).
    fn recover(&self, locked: &mut Locked<'_, H>, consumer: u32) -> Result<(), HardwareError> {
        let ring = locked.ring();
        log::warn!(
            "the SMMU stopped at the command {} (error {}): all that was \
             placed before has failed, and what it was to make hardware forget stays out of use",
            ring.shown(ring.head()),
            error(consumer)
        );
        if error(consumer) == queue::CERROR_ILL {
            ring.set(ring.head(), Command::SYNC.0);
        }
        locked.spoil(consumer);
        self.acknowledge(gerror::CMDQ_ERR);
        Ok(())
    }

    /// Hardware stopped at a command of the batch, or at one near it.
    fn failed(&self, status: u32) -> HardwareError {
        HardwareError { what: "the SMMU refused a command", status: status.into() }
    }

    fn stuck(&self, at: Stuck, _start: Option<u64>) -> HardwareError {
        self.why(match at {
            Stuck::Full => "the SMMU's command queue stayed full",
            Stuck::Late => "the SMMU did not complete its commands in time",
        })
    }
}

/// Why hardware stopped last, by CMDQ_CONS.
fn error(consumer: u32) -> u32 {
    consumer >> queue::ERR_SHIFT & queue::ERR_MASK
}
