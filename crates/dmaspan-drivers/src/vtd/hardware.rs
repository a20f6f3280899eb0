//! The registers of a VT-d unit, and the host behind them.

use dmaspan::iommu::HardwareError;
use lock_api::Mutex;

use super::spec::{global, register};
use crate::host::{Host, gone, settle};
use crate::mmio::Mmio;

/// What all registers of a device that has gone read as.
pub(super) const GONE: u32 = u32::MAX;

/// What becomes of a bit of the global status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Becomes {
    Set,
    Clear,
}

pub(super) struct Hardware<R, H: Host> {
    pub(super) registers: R,
    pub(super) host: H,
    /// Around the global command, which is made of the status.
    command: Mutex<H::Lock, ()>,
}

impl<R: Mmio, H: Host> Hardware<R, H> {
    pub(super) fn new(registers: R, host: H) -> Self {
        Self { registers, host, command: Mutex::new(()) }
    }

    pub(super) fn read32(&self, register: u64) -> u32 {
        self.registers.read32(register)
    }

    pub(super) fn read64(&self, register: u64) -> u64 {
        self.registers.read64(register)
    }

    pub(super) fn write32(&self, register: u64, value: u32) {
        self.registers.write32(register, value);
    }

    pub(super) fn write64(&self, register: u64, value: u64) {
        self.registers.write64(register, value);
    }

    /// Gives a global command, one bit of which changes, and waits until the status says so
    /// (11.4.4).
    fn command(&self, set: u32, clear: u32, done: (u32, Becomes)) -> Result<(), HardwareError> {
        let _guard = self.command.lock();
        let status = self.read32(register::GSTS);
        if status == GONE {
            return Err(gone(GONE));
        }
        self.write32(register::GCMD, (status & global::STATES & !clear) | set);
        let (bit, becomes) = done;
        self.wait32(
            register::GSTS,
            bit,
            becomes,
            "the IOMMU did not carry out a global command in time",
        )
    }

    /// Sets a state, or does a one-time action, that the status shows by the same bit.
    pub(super) fn enable(&self, bit: u32) -> Result<(), HardwareError> {
        self.command(bit, 0, (bit, Becomes::Set))
    }

    /// Clears a state.
    pub(super) fn disable(&self, bit: u32) -> Result<(), HardwareError> {
        self.command(0, bit, (bit, Becomes::Clear))
    }

    /// Writes back what is in the write buffer (6.8).
    pub(super) fn flush_write_buffer(&self) -> Result<(), HardwareError> {
        self.command(global::WRITE_BUFFER, 0, (global::WRITE_BUFFER, Becomes::Clear))
    }

    /// Waits for a bit of a register.
    pub(super) fn wait32(
        &self,
        register: u64,
        bit: u32,
        becomes: Becomes,
        what: &'static str,
    ) -> Result<(), HardwareError> {
        let is_settled = |value: u32| (value & bit != 0) == (becomes == Becomes::Set);
        settle(&self.host, || self.read32(register), is_settled, what).map(drop)
    }
}
