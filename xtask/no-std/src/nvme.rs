//! NVMe controllers that are not there, and that do not start.

use alloc::sync::Arc;
use core::time::Duration;

use dmaspan::DmaAddr;
use dmaspan::regbuf::Buffer;
use dmaspan_nvme::access::{Access, AllocateError, Pause};
use dmaspan_nvme::{Controller, Error};

use crate::hardware::Words;

/// CAP with 256 entries and the NVM command set, and CSTS (NVM Express 2.0, 3.1.3).
const CAP: u64 = 0x0;
const CAPABILITIES: u64 = 255 | 1 << 37;
const CSTS: u64 = 0x1c;

/// A controller whose status never changes.
struct Fixed(u32);

// SAFETY: 1. There is no controller. 2. No buffer is given. 3. As `Words` promise.
unsafe impl Access for Fixed {
    type Memory = Words;
    type Buffer = Arc<Buffer<DmaAddr>>;

    fn registers_len(&self) -> u64 {
        0x2000
    }

    fn read32(&self, offset: u64) -> u32 {
        if offset == CSTS { self.0 } else { 0 }
    }

    fn read64(&self, offset: u64) -> u64 {
        if offset == CAP { CAPABILITIES } else { 0 }
    }

    fn write32(&self, _: u64, _: u32) {}

    fn write64(&self, _: u64, _: u64) {}

    fn allocate(&self, bytes: u64, align: u64) -> Result<Words, AllocateError> {
        Words::new(bytes, align).ok_or_else(|| "the heap is full".into())
    }

    fn buffer<'b>(&self, _: &'b Self::Buffer) -> Option<&'b Buffer<DmaAddr>> {
        None
    }

    fn pause(&self, polls: u32, _: Duration) -> Pause {
        if polls < 100 { Pause::Again } else { Pause::GiveUp }
    }
}

/// `None` where anything is not as it should be.
pub fn exercise() -> Option<()> {
    matches!(Controller::new(Fixed(u32::MAX), 1), Err(Error::Gone)).then_some(())?;
    matches!(Controller::new(Fixed(0), 1), Err(Error::Timeout { .. })).then_some(())
}
