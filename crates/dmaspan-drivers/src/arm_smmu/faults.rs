//! Faults: each context bank records one, and the global registers record one of all other
//! accesses.

use alloc::sync::Arc;

use dmaspan::Iova;
use dmaspan::iommu::{
    FaultAccess, FaultReason, FaultReport, FaultResponse, FaultState, HardwareError,
};

use super::spec::{STREAM_ID, bank, fsr, fsynr0, gfsr, gfsynr0, gr0, resume};
use super::{GONE, SmmuV2};
use crate::faults::{self, Handled};
use crate::host::Host;
use crate::mmio::Mmio;

/// What a bank's FSR says of why an access was refused.
const REASONS: u32 = fsr::TF | fsr::PF | TABLES | OTHERS;
const TABLES: u32 = fsr::AFF | fsr::EF | fsr::ASF;
const OTHERS: u32 = fsr::TLBMCF | fsr::TLBLKF | fsr::UUT;

impl<R: Mmio, H: Host> SmmuV2<R, H> {
    /// Reports the faults that hardware has recorded: one for each context bank at the most, and
    /// one of streams that have none.
    ///
    /// # Context
    ///
    /// May run in an interrupt, if the host's lock keeps them off, and concurrently with itself.
    /// Does not allocate. Called by whoever has no interrupts from time to time.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where the SMMU does not answer.
    pub fn handle_faults(&self) -> Result<Handled, HardwareError> {
        let mut handled = Handled::default();
        for index in 0..self.features.banks {
            self.handle_bank(index, &mut handled)?;
        }
        self.handle_global(&mut handled)?;
        Ok(handled)
    }

    fn handle_bank(&self, index: u32, handled: &mut Handled) -> Result<(), HardwareError> {
        let Some((faults, report)) = self.take_from_bank(index, handled)? else { return Ok(()) };
        let response = match report {
            Some(report) => self.report(&report, handled),
            None => FaultResponse::Terminate,
        };
        let registers = self.registers.bank(index);
        // The stream may have been taken away from its bank meanwhile, which ends the access.
        if faults & fsr::SS != 0 && registers.read(bank::FSR) & fsr::SS != 0 {
            let resume = match response {
                FaultResponse::Retry => resume::RETRY,
                FaultResponse::Terminate => resume::TERMINATE,
            };
            registers.write(bank::RESUME, resume);
        }
        Ok(())
    }

    /// Takes the fault out of a bank: its FSR, and what that means. While FSR has one, no other is
    /// recorded. An access that stalls goes on to, until it is resumed.
    fn take_from_bank(
        &self,
        index: u32,
        handled: &mut Handled,
    ) -> Result<Option<(u32, Option<FaultReport>)>, HardwareError> {
        let registers = self.registers.bank(index);
        let _one = self.faults.lock();
        let faults = registers.read(bank::FSR);
        if faults == u32::MAX {
            return Err(GONE);
        }
        if faults & !(fsr::FORMAT | fsr::SS) == 0 {
            return Ok(None);
        }
        let iova = Iova::new(registers.read64(bank::FAR));
        let access = registers.read(bank::FSYNR0);
        let stream = self.registers.faulting_stream(index) & STREAM_ID;
        registers.write(bank::FSR, faults);
        handled.overflowed |= faults & fsr::MULTI != 0;
        handled.more |= registers.read(bank::FSR) & REASONS != 0;
        let reason = match faults {
            faults if faults & fsr::TF != 0 => FaultReason::Translation,
            faults if faults & fsr::PF != 0 => FaultReason::Permission,
            faults if faults & TABLES != 0 => FaultReason::Tables,
            faults if faults & OTHERS != 0 => FaultReason::Other(faults),
            _ => {
                handled.malformed = handled.malformed.saturating_add(1);
                return Ok(Some((faults, None)));
            }
        };
        let access = match access {
            access if access & fsynr0::INSTRUCTION != 0 => FaultAccess::Execute,
            access if access & fsynr0::WRITE != 0 => FaultAccess::Write,
            _ => FaultAccess::Read,
        };
        let state = if faults & fsr::SS == 0 { FaultState::Ended } else { FaultState::Stalled };
        Ok(Some((faults, Some(FaultReport { stream, iova, access, reason, state }))))
    }

    fn handle_global(&self, handled: &mut Handled) -> Result<(), HardwareError> {
        let registers = &self.registers;
        let one = self.faults.lock();
        let faults = registers.read(gr0::GFSR);
        match faults {
            0 => return Ok(()),
            u32::MAX => return Err(GONE),
            _ => {}
        }
        let iova = Iova::new(registers.read64(gr0::GFAR));
        let access = registers.read(gr0::GFSYNR0);
        let stream = registers.read(gr0::GFSYNR1) & STREAM_ID;
        registers.write(gr0::GFSR, faults);
        handled.overflowed |= faults & gfsr::MULTI != 0;
        handled.more |= registers.read(gr0::GFSR) != 0;
        drop(one);
        let reason = match faults {
            faults if faults & gfsr::BLOCKED != 0 => FaultReason::Blocked,
            faults if faults & gfsr::PF != 0 => FaultReason::Permission,
            faults if faults & gfsr::EF != 0 => FaultReason::Other(faults),
            // Accesses to registers, and what no stream did.
            _ => {
                handled.malformed = handled.malformed.saturating_add(1);
                return Ok(());
            }
        };
        let access = match access {
            access if access & gfsynr0::INSTRUCTION != 0 => FaultAccess::Execute,
            access if access & gfsynr0::WRITE != 0 => FaultAccess::Write,
            _ => FaultAccess::Read,
        };
        let state = FaultState::Ended;
        self.report(&FaultReport { stream, iova, access, reason, state }, handled);
        Ok(())
    }

    /// Tells whoever has the stream.
    fn report(&self, fault: &FaultReport, handled: &mut Handled) -> FaultResponse {
        let owner = self.state.lock().map.owner(fault.stream).map(Arc::clone);
        faults::report(owner, fault, handled)
    }
}
