//! Fault records (7.2 and 11.4.14).

use dmaspan::Iova;
use dmaspan::iommu::{FaultReport, FaultState, HardwareError};

use super::Vtd;
use super::hardware::GONE;
use super::spec::{record, register, status};
use crate::faults::Handled;
use crate::host::{Host, gone};
use crate::mmio::Mmio;

impl<R: Mmio, H: Host> Vtd<R, H> {
    /// Reports the faults that hardware has recorded to the streams that caused them, each record
    /// once, and makes room for others. Addresses are those of the pages.
    ///
    /// Hardware does not tell an absent entry of the second stage from one that does not permit the
    /// access: both are reported as [`Permission`](dmaspan::iommu::FaultReason::Permission).
    ///
    /// # Context
    ///
    /// May run in an interrupt, if the host's lock keeps interrupts off. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where the hardware has gone.
    pub fn handle_faults(&self) -> Result<Handled, HardwareError> {
        let mut handled = Handled::default();
        let before = self.hardware.read32(register::FSTS);
        if before == GONE {
            return Err(gone(GONE));
        }
        if before & status::PENDING != 0 {
            let (offset, count) = self.features.fault_records();
            for n in 0..count {
                let index = (status::first(before) + n) % count;
                let place = offset + u64::from(index) * record::BYTES;
                if self.take_record(place, &mut handled) == Taken::Gone {
                    return Err(gone(GONE));
                }
            }
        }
        if before & status::OVERFLOW != 0 {
            // Faults are recorded again from now on (7.2.1).
            handled.overflowed = true;
            self.hardware.write32(register::FSTS, status::OVERFLOW);
        }
        let after = self.hardware.read32(register::FSTS);
        handled.more = after != GONE && after & (status::PENDING | status::OVERFLOW) != 0;
        Ok(handled)
    }

    /// Takes what is in one record.
    fn take_record(&self, place: u64, handled: &mut Handled) -> Taken {
        // Not while it is reported: a handler may take its time.
        let guard = self.recording.lock();
        // First what says whether there is one: hardware may write it meanwhile, that bit last, and
        // changes nothing of it until the bit is cleared.
        let last = self.hardware.read32(place + record::LAST);
        if last & record::FAULT == 0 {
            return Taken::Nothing;
        }
        let third = self.hardware.read32(place + record::THIRD);
        let (low, high) = (self.hardware.read64(place), u64::from(last) << 32 | u64::from(third));
        if high == u64::MAX && low == u64::MAX {
            return Taken::Gone;
        }
        // Writing the bit gives the record back; the rest of it is read-only (11.4.14).
        self.hardware.write32(place + record::LAST, record::FAULT);
        drop(guard);
        match (record::access(high), record::reason(high)) {
            (Some(access), Some(reason)) => {
                let report = FaultReport {
                    stream: record::stream(high),
                    iova: Iova::new(low & record::PAGE),
                    access,
                    reason,
                    state: FaultState::Ended,
                };
                // It has ended: there is nothing to decide.
                let _ = self.streams.report(&report, handled);
            }
            _ => handled.malformed = handled.malformed.saturating_add(1),
        }
        Taken::Record
    }

    /// Drops what was recorded before anybody was there to hear of it.
    pub(super) fn clear_faults(&self) {
        let (offset, count) = self.features.fault_records();
        for index in 0..count {
            let place = offset + u64::from(index) * record::BYTES;
            self.hardware.write32(place + record::LAST, record::FAULT);
        }
        self.hardware.write32(register::FSTS, status::CLEAR);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Record,
    Nothing,
    Gone,
}
