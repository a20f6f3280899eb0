//! The command queue ("Command-Queue"): a [`Ring`] whose hardware says by `cqh` how far it is and
//! by `cqcsr` why it stopped.

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;

use super::spec::{
    COMMAND_LG2, CQB, CQCSR, CQCSR_ERRORS, CQCSR_ILLEGAL, CQCSR_TIMEOUT, CQH, CQT, CSR_BUSY,
    CSR_ENABLE, CSR_ON, Command, FENCE, NOTHING,
};
use super::start::{lg2_bytes, queue_base, turn_on};
use crate::Mmio;
use crate::error::Error;
use crate::host::{Host, NoMemory, gone};
use crate::log;
use crate::ring::{Asking, Batch, Behind, Consumer, Full, Locked, Need, Ring, Stuck};
use crate::structure::Words;

/// The ring of commands.
pub(super) struct CommandQueue<H: Host>(Ring<H>);

impl<H: Host> CommandQueue<H> {
    /// A ring of `2^lg2` commands.
    pub(super) fn new(host: &H, lg2: u32, max_paddr: PhysAddr) -> Result<Self, NoMemory> {
        let words = Words::new(host, lg2_bytes(lg2, COMMAND_LG2), max_paddr)?;
        Ok(Self(Ring::new(words, lg2, COMMAND_LG2 - 3, Full::EmptyPlace)))
    }

    /// Gives hardware the ring and turns the queue on, which is off.
    pub(super) fn start<R: Mmio>(&self, registers: &R, host: &H) -> Result<(), Error> {
        let Self(ring) = self;
        queue_base(registers, CQB, &ring.words, ring.lg2(), "command queue of that size")?;
        // It has whatever value, and hardware starts with what is before it.
        registers.write32(CQT, 0);
        turn_on(registers, host, CQCSR, CSR_ENABLE, "the command queue did not start")?;
        Ok(())
    }

    /// Gives the memory back of a queue that is off.
    pub(super) fn free(&mut self) {
        self.0.words.free_in_place();
    }

    /// Makes hardware execute `commands`, and waits until it has, and until every access that it
    /// processed before is seen by everybody.
    pub(super) fn run<R: Mmio>(
        &self,
        registers: &R,
        host: &H,
        commands: &[Command],
    ) -> Result<(), HardwareError> {
        let (Self(ring), hardware) = (self, Hardware { registers, host });
        // One place is the fence's.
        let most = usize::try_from(ring.capacity() - 1).unwrap_or(usize::MAX).max(1);
        let mut rest = commands;
        let mut start = None;
        loop {
            let (now, later) = rest.split_at(rest.len().min(most));
            let behind = if later.is_empty() { Behind::Fence } else { Behind::Nothing };
            let needed = now.len() as u64 + u64::from(later.is_empty());
            let placed = ring.place(&hardware, needed, now.iter().copied(), behind)?;
            let start = *start.get_or_insert(placed.start);
            if later.is_empty() {
                return ring.wait(&hardware, Batch { start, ..placed });
            }
            rest = later;
        }
    }
}

/// The hardware, for one caller.
struct Hardware<'a, R, H> {
    registers: &'a R,
    host: &'a H,
}

impl<R: Mmio, H: Host> Consumer<H> for Hardware<'_, R, H> {
    fn host(&self) -> &H {
        self.host
    }

    #[inline]
    fn fence(&self, _ring: &Ring<H>, _end: u64) -> [u64; 2] {
        FENCE
    }

    #[inline]
    fn tell(&self, ring: &Ring<H>, tail: u64) {
        self.registers.write32(CQT, ring.index32(tail));
    }

    #[inline]
    fn done(&self, ring: &Ring<H>) -> u64 {
        // "A IOFENCE.C command completion, as determined by cqh advancing past the index".
        ring.head()
    }

    fn ask(&self, asking: &Asking<'_, H>, _need: Need) -> Result<Option<u32>, HardwareError> {
        let index = self.registers.read32(CQH);
        let ring = asking.ring;
        if ring.index32(index.into()) != index || !asking.advance(index.into()) {
            let what = "cqh points to no command that was placed";
            return Err(match index {
                u32::MAX => gone(index),
                _ => HardwareError { what, status: index.into() },
            });
        }
        if ring.head() == ring.tail() {
            return Ok(None);
        }
        let csr = self.registers.read32(CQCSR);
        if csr == u32::MAX {
            return Err(gone(csr));
        }
        if csr & (CSR_ON | CSR_BUSY) == 0 {
            let what = "the command queue is off";
            return Err(HardwareError { what, status: csr.into() });
        }
        // A register that is busy is not to be written.
        Ok((csr & CQCSR_ERRORS != 0 && csr & CSR_BUSY == 0).then_some(csr))
    }

    /// Makes a queue usable again that stopped at its head. All in it count as failed, so none of
    /// them is executed any more.
    fn recover(&self, locked: &mut Locked<'_, H>, csr: u32) -> Result<(), HardwareError> {
        let ring = locked.ring();
        log::warn!(
            "the IOMMU stopped at the command {} (cqcsr {csr:#x}): all \
             that was placed before has failed, and what it was to make hardware forget stays out \
             of use",
            ring.shown(ring.head())
        );
        (ring.head()..ring.tail()).for_each(|place| ring.set(place, NOTHING));
        locked.spoil(csr);
        self.registers.write32(CQCSR, CSR_ENABLE | csr & CQCSR_ERRORS);
        // Hardware may look at the queue only when the tail is written.
        self.tell(ring, ring.tail());
        Ok(())
    }

    fn failed(&self, status: u32) -> HardwareError {
        let what = if status & CQCSR_ILLEGAL != 0 {
            "the IOMMU refused a command"
        } else if status & CQCSR_TIMEOUT != 0 {
            "a command of the IOMMU took too long"
        } else {
            "the IOMMU could not reach the memory of its command queue"
        };
        HardwareError { what, status: status.into() }
    }

    fn stuck(&self, at: Stuck, _start: Option<u64>) -> HardwareError {
        let what = match at {
            Stuck::Full => "the command queue stayed full",
            Stuck::Late => "the IOMMU did not complete its commands in time",
        };
        HardwareError { what, status: self.registers.read32(CQCSR).into() }
    }
}
