//! The registers of an SMMUv3, and waiting for them.

use dmaspan::iommu::HardwareError;
use lock_api::Mutex;

use super::spec::{gerror, reg};
use crate::host::{Host, poll};
use crate::mmio::Mmio;

/// The registers of an SMMU, and who runs it.
pub(super) struct Hardware<R, H: Host> {
    pub(super) registers: R,
    pub(super) host: H,
    /// Around changes of GERRORN.
    errors: Mutex<H::Lock, ()>,
}

impl<R: Mmio, H: Host> Hardware<R, H> {
    pub(super) fn new(registers: R, host: H) -> Self {
        Self { registers, host, errors: Mutex::new(()) }
    }

    /// Writes a register and waits for the one that says that it has taken effect (6.3.10, 6.3.17).
    pub(super) fn update(
        &self,
        offset: u64,
        value: u32,
        acknowledged: u64,
        what: &'static str,
    ) -> Result<(), HardwareError> {
        self.registers.write32(offset, value);
        let look = || (self.registers.read32(acknowledged) == value).then_some(());
        poll(&self.host, look).ok_or_else(|| self.why(what))
    }

    /// The errors that are active (6.3.19).
    pub(super) fn active_errors(&self) -> u32 {
        self.registers.read32(reg::GERROR) ^ self.registers.read32(reg::GERRORN)
    }

    /// Acknowledges those of `errors` that are active, and says which were.
    pub(super) fn acknowledge(&self, errors: u32) -> u32 {
        let _one_at_a_time = self.errors.lock();
        let acknowledged = self.registers.read32(reg::GERRORN);
        let active = (self.registers.read32(reg::GERROR) ^ acknowledged) & errors;
        if active != 0 {
            self.registers.write32(reg::GERRORN, acknowledged ^ active);
        }
        active
    }

    /// Why hardware did not do `what` in the time it had, as far as it says.
    pub(super) fn why(&self, what: &'static str) -> HardwareError {
        let error = self.registers.read32(reg::GERROR);
        if error == u32::MAX {
            return gone(error);
        }
        let active = error ^ self.registers.read32(reg::GERRORN);
        let what = match active & gerror::SFM_ERR {
            0 => what,
            _ => "the SMMU is in its service failure mode",
        };
        HardwareError { what, status: active.into() }
    }
}

/// Registers that read as all ones: there is no device any more.
pub(super) fn gone(value: u32) -> HardwareError {
    HardwareError { what: "the SMMU is gone: its registers read as all ones", status: value.into() }
}
