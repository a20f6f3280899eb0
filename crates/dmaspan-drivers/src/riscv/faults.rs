//! The fault queue ("Fault/Event-Queue"), and what its records say.

use dmaspan::iommu::{FaultAccess, FaultReason, FaultReport, FaultState, HardwareError};
use dmaspan::{Iova, PhysAddr};
use lock_api::{Mutex, RawMutex};

use super::RiscvIommu;
use super::spec::{
    CSR_BUSY, CSR_ENABLE, CSR_INTERRUPT, CSR_MEMORY_FAULT, CSR_ON, FAULT_LG2, FQB, FQCSR,
    FQCSR_OVERFLOW, FQH, FQT, FaultRecord, IPSR, IPSR_FAULT,
};
use super::start::{lg2_bytes, queue_base, turn_on};
use crate::Mmio;
use crate::error::Error;
use crate::faults::Handled;
use crate::host::{Host, NoMemory, Structure, gone};
use crate::structure::Words;

/// Words of a record.
const RECORD_WORDS: usize = 4;
/// The word of a record that has the address.
const IOTVAL: usize = 2;

/// The ring, and how far it was read.
pub(super) struct FaultQueue<S, L> {
    records: Words<S>,
    lg2: u32,
    /// `fqcsr` with nothing to be cleared.
    control: u32,
    /// Several CPUs may look at the faults.
    state: Mutex<L, State>,
}

/// Indices into the ring.
struct State {
    /// The record that is read next.
    head: u32,
    /// Behind the last record, when hardware was looked at last.
    tail: u32,
}

impl<S: Structure, L: RawMutex> FaultQueue<S, L> {
    /// A ring of `2^lg2` records, whose hardware raises interrupts where `interrupt` has
    /// [`CSR_INTERRUPT`].
    pub(super) fn new<H: Host<Structure = S>>(
        host: &H,
        lg2: u32,
        interrupt: u32,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let records = Words::new(host, lg2_bytes(lg2, FAULT_LG2), max_paddr)?;
        let control = CSR_ENABLE | interrupt & CSR_INTERRUPT;
        Ok(Self { records, lg2, control, state: Mutex::new(State { head: 0, tail: 0 }) })
    }

    /// Gives hardware the ring and turns the queue on, which is off.
    pub(super) fn start<R: Mmio>(&self, registers: &R, host: &impl Host) -> Result<(), Error> {
        queue_base(registers, FQB, &self.records, self.lg2, "fault queue of that size")?;
        registers.write32(FQH, 0);
        turn_on(registers, host, FQCSR, self.control, "the fault queue did not start")?;
        Ok(())
    }

    /// Gives the memory back of a queue that is off.
    pub(super) fn free(&mut self) {
        self.records.free_in_place();
    }

    /// The next record, if there is one.
    fn next<R: Mmio>(&self, registers: &R) -> Result<Option<FaultRecord>, HardwareError> {
        let mut state = self.state.lock();
        if state.head == state.tail {
            state.tail = self.tail(registers)?;
        }
        if state.head == state.tail {
            return Ok(None);
        }
        let first = state.head as usize * RECORD_WORDS;
        let record = FaultRecord::new(self.records.get(first), self.records.get(first + IOTVAL));
        state.head = (state.head + 1) & self.mask();
        Ok(Some(record))
    }

    /// Where hardware writes next.
    fn tail<R: Mmio>(&self, registers: &R) -> Result<u32, HardwareError> {
        let tail = registers.read32(FQT);
        if tail > self.mask() {
            let what = "fqt points outside of the fault queue";
            return Err(match tail {
                u32::MAX => gone(tail),
                _ => HardwareError { what, status: tail.into() },
            });
        }
        Ok(tail)
    }

    /// Gives hardware the places of the records that were read, and says whether there are more.
    fn consume<R: Mmio>(&self, registers: &R) -> Result<bool, HardwareError> {
        let state = self.state.lock();
        registers.write32(FQH, state.head);
        Ok(self.tail(registers)? != state.head)
    }

    fn mask(&self) -> u32 {
        (1 << self.lg2) - 1
    }
}

impl<R: Mmio, H: Host> RiscvIommu<R, H> {
    /// Reports the faults that hardware recorded to the streams that caused them: at most as many
    /// as the queue has places. To be called in the interrupt of the fault queue, or now and then.
    ///
    /// Hardware does not say whether an address is not mapped or what is mapped does not permit the
    /// access: both are [`FaultReason::Translation`]. Nor does it hold accesses, so all have ended.
    ///
    /// # Context
    ///
    /// May run with interrupts off and concurrently with itself. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where the registers make no sense, the queue is off or its memory could
    /// not be reached. What could be read was reported.
    pub fn handle_faults(&self) -> Result<Handled, HardwareError> {
        let queue = &self.faults;
        let mut handled = Handled::default();
        // Before the records are looked at: what comes later raises the interrupt again.
        self.registers.write32(IPSR, IPSR_FAULT);
        for _ in 0..=queue.mask() {
            let Some(record) = queue.next(&self.registers)? else { break };
            match decode(&record) {
                Decoded::Fault(report) => {
                    self.streams.report(&report, &mut handled);
                }
                Decoded::NoStream => handled.unclaimed = handled.unclaimed.saturating_add(1),
                Decoded::Malformed => handled.malformed = handled.malformed.saturating_add(1),
            }
        }
        handled.more = queue.consume(&self.registers)?;
        let csr = self.registers.read32(FQCSR);
        if csr == u32::MAX {
            return Err(gone(csr));
        }
        handled.overflowed = csr & FQCSR_OVERFLOW != 0;
        let lost = csr & (FQCSR_OVERFLOW | CSR_MEMORY_FAULT);
        if lost != 0 && csr & CSR_BUSY == 0 {
            // There is room now: recording goes on.
            self.registers.write32(FQCSR, queue.control | lost);
        }
        if csr & CSR_MEMORY_FAULT != 0 {
            let what = "the IOMMU could not write its fault queue";
            return Err(HardwareError { what, status: csr.into() });
        }
        if csr & (CSR_ON | CSR_BUSY) == 0 {
            return Err(HardwareError { what: "the fault queue is off", status: csr.into() });
        }
        Ok(handled)
    }
}

/// What a record is.
enum Decoded {
    Fault(FaultReport),
    /// Something that no access of a device caused.
    NoStream,
    /// Nothing that the manual knows.
    Malformed,
}

/// What a record says ("Fault record CAUSE field encodings" and the next table).
fn decode(record: &FaultRecord) -> Decoded {
    let Some(reason) = reason(record.cause) else { return Decoded::Malformed };
    let by_transaction = match record.transaction {
        0 => return Decoded::NoStream,
        // Untranslated and translated: to fetch an instruction, to read, to write. A translation
        // request of the device is for reading, a message is written.
        1 | 5 => FaultAccess::Execute,
        2 | 6 | 8 => FaultAccess::Read,
        3 | 7 | 9 => FaultAccess::Write,
        _ => return Decoded::Malformed,
    };
    // The cause knows the access, too, and wins: QEMU's model calls each transaction a write.
    let access = match record.cause {
        1 | 12 | 20 => FaultAccess::Execute,
        4 | 5 | 13 | 21 => FaultAccess::Read,
        6 | 7 | 15 | 23 => FaultAccess::Write,
        _ => by_transaction,
    };
    let iova = Iova::new(record.iotval);
    let state = FaultState::Ended;
    Decoded::Fault(FaultReport { stream: record.device, iova, access, reason, state })
}

/// Why an access was refused; `None` for a cause that is reserved.
const fn reason(cause: u32) -> Option<FaultReason> {
    Some(match cause {
        // Page faults, and page faults of guests: to execute, to read, to write.
        12 | 13 | 15 | 20 | 21 | 23 => FaultReason::Translation,
        // All inbound transactions are disallowed; the context is not valid.
        256 | 258 => FaultReason::Blocked,
        // Tables: an access fault of a walk; directories of devices and of processes that could not
        // be read, are not valid or are wrong; corrupt data of each kind.
        1 | 5 | 7 | 257 | 259 | 265..=269 | 274 => FaultReason::Tables,
        // Misaligned accesses; a type of transaction that is disallowed; translation of MSIs; an
        // error of a data path; the IOMMU's own MSI.
        4 | 6 | 260..=264 | 270..=273 => FaultReason::Other(cause),
        // For custom use.
        2048..=4095 => FaultReason::Other(cause),
        _ => return None,
    })
}
