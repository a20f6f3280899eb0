//! An NVMe controller, for the driver in `examples/nvme`.

use alloc::string::ToString;
use alloc::sync::Arc;
use core::mem;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use dmaspan::dma::{Device, Mapping};
use dmaspan::regbuf::Buffer;
use dmaspan::{Direction, DmaAddr};
use dmaspan_drivers::{Mmio, MmioRegion};
use dmaspan_nvme::access::{Access, AllocateError, Pause, SharedMemory};
use dmaspan_nvme::{Controller, IoQueue, Namespace, QueueConfig, Transfer};
use sha2::{Digest, Sha256};

use crate::glue::Tables;
use crate::memory::{Shared, registers};
use crate::{DISK_BYTES, Result, cpu};

/// How a controller is reached.
pub(crate) struct Nvme {
    registers: MmioRegion,
    registers_len: u64,
    device: Arc<Device>,
    tables: Tables,
    /// Since when somebody waits.
    began: AtomicU64,
}

/// A queue of the driver, mapped.
pub(crate) struct Mapped {
    shared: Shared,
    device: Arc<Device>,
    mapping: Option<Mapping>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // What hardware does not forget stays mapped, and keeps the frames.
        if let Some(mapping) = self.mapping.take() {
            self.device.unmap(mapping).map_or_else(mem::forget, drop);
        }
    }
}

// SAFETY: the frames are mapped until this is dropped, and kept where they cannot be unmapped.
unsafe impl SharedMemory for Mapped {
    fn addr(&self) -> DmaAddr {
        self.mapping.as_ref().map_or(DmaAddr::new(0), Mapping::addr)
    }

    fn words(&self) -> &[AtomicU64] {
        self.shared.words()
    }
}

// SAFETY: 1. The kernel drives each controller by one driver. 2. A buffer is registered for the one
// controller that there is. 3. As above.
unsafe impl Access for Nvme {
    type Memory = Mapped;
    type Buffer = Arc<Buffer<DmaAddr>>;

    fn registers_len(&self) -> u64 {
        self.registers_len
    }

    fn read32(&self, offset: u64) -> u32 {
        self.registers.read32(offset)
    }

    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.registers.write32(offset, value);
    }

    fn write64(&self, offset: u64, value: u64) {
        self.registers.write64(offset, value);
    }

    fn allocate(&self, bytes: u64, align: u64) -> core::result::Result<Mapped, AllocateError> {
        let lg2_size = bytes.max(align).next_power_of_two().ilog2().max(12);
        let shared = Shared::new(&self.tables, lg2_size).map_err(|error| error.to_string())?;
        let mapping = self.device.map_single(shared.memory(), Direction::Bidirectional);
        let mapping = Some(mapping.map_err(|refused| refused.error)?);
        Ok(Mapped { shared, device: Arc::clone(&self.device), mapping })
    }

    fn buffer<'b>(&self, buffer: &'b Self::Buffer) -> Option<&'b Buffer<DmaAddr>> {
        Some(buffer)
    }

    fn pause(&self, polls: u32, limit: Duration) -> Pause {
        let now = cpu::nanoseconds();
        if polls <= 1 {
            self.began.store(now, Ordering::Relaxed);
        }
        let waited = Duration::from_nanos(now.saturating_sub(self.began.load(Ordering::Relaxed)));
        if waited > limit { Pause::GiveUp } else { Pause::Again }
    }
}

/// A disk behind a controller.
pub(crate) struct Disk {
    controller: Controller<Nvme>,
    namespace: Namespace,
    queue: IoQueue<Nvme>,
    shared: Shared,
    buffer: Arc<Buffer<DmaAddr>>,
}

/// The bytes of the buffer, and of a command.
const BUFFER_LG2: u32 = 20;
const COMMAND: u64 = 1 << 18;

impl Disk {
    pub(crate) fn new((at, len): (u64, u64), device: Arc<Device>, tables: &Tables) -> Result<Self> {
        let shared = Shared::new(tables, BUFFER_LG2)?;
        let buffer = shared.register(&device)?;
        let (registers, tables) = (registers(at, len), Arc::clone(tables));
        let began = AtomicU64::new(0);
        let access = Nvme { registers, registers_len: len, device, tables, began };
        let mut controller = Controller::new(access, 1)?;
        let namespace = controller.namespace(1)?;
        let queue = controller.create_queue(QueueConfig::new(32))?;
        Ok(Self { controller, namespace, queue, shared, buffer })
    }

    /// Reads the disk and returns what its bytes hash to; `meanwhile` runs while commands are in
    /// flight.
    pub(crate) fn hash(&mut self, mut meanwhile: impl FnMut() -> Result<()>) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        for start in (0..DISK_BYTES).step_by(1 << BUFFER_LG2) {
            for at in (0..1 << BUFFER_LG2).step_by(COMMAND as usize) {
                let lba = (start + at) / self.namespace.block_bytes();
                let (namespace, buffer) = (&self.namespace, &self.buffer);
                self.queue.push(Transfer::Read, namespace, lba, buffer, at..at + COMMAND)?;
            }
            self.queue.ring();
            while self.queue.in_flight() > 0 {
                meanwhile()?;
                let mut failed = None;
                self.queue.reap(|done| failed = done.result.err().or(failed))?;
                if let Some(status) = failed {
                    return Err(alloc::format!("the NVMe disk was not read: {status:?}").into());
                }
            }
            for words in self.shared.words().chunks(512) {
                let mut page = [0; 4096];
                for (bytes, word) in page.chunks_exact_mut(8).zip(words) {
                    bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
                }
                hash.update(page);
            }
        }
        Ok(hash.finalize().into())
    }

    pub(crate) fn shut_down(self) -> Result<()> {
        Ok(self.controller.shutdown([self.queue])?)
    }
}
