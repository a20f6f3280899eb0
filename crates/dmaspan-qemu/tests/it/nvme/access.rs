//! The driver's access to a controller of a machine.
//!
//! All that the controller is to reach, queues and buffers, is registered and mapped by a
//! [`Device`], so what lies between the controller and memory is that device's business.
#![expect(unsafe_code, reason = "memory that a device writes is promised")]

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use dmaspan::dma::{Device, FromRegistered, NoPool, Translation};
use dmaspan::regbuf::{Buffer, Keep, Segments, SegmentsBuilder};
use dmaspan::{DmaAddr, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_drivers::Mmio as _;
use dmaspan_nvme::access::{Access, AllocateError, Pause, SharedMemory};
use dmaspan_qemu::{Buffer as RamBuffer, Machine, QtestMmio};
use parking_lot::Mutex;

/// Registers and doorbells of QEMU's controller.
const REGISTERS: u64 = 0x2000;
/// Virtual time between two polls.
const STEP: u64 = 10_000;
/// How often a poll looks whether the controller has failed: what it had to do, it never does then.
const LOOK: u32 = 100;
/// What a busy machine may take besides.
const BUSY: Duration = Duration::from_secs(60);
/// The status of the controller, and that it has failed (NVM Express, 3.1.4.6).
const CSTS: u64 = 0x1c;
const FATAL: u32 = 1 << 1;

/// A controller of a machine, and the device that maps memory for it.
pub(crate) struct Nvme<T: Translation> {
    machine: Machine,
    registers: QtestMmio,
    device: Arc<Device<T, NoPool>>,
    /// All that was allocated.
    blocks: Mutex<Vec<Arc<Mapping>>>,
    /// When the driver began to wait.
    began: Cell<Instant>,
}

/// What is mapped of a block, until a test takes it away.
type Mapping = Mutex<Option<Mapped>>;

/// A buffer that is mapped for a controller.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    device: usize,
    pub(crate) buffer: Arc<Buffer<DmaAddr>>,
}

impl<T: Translation<Memory: FromRegistered> + 'static> Nvme<T> {
    pub(crate) fn new(machine: &Machine, registers: QtestMmio, device: Device<T, NoPool>) -> Self {
        let (machine, device, blocks) = (machine.clone(), Arc::new(device), Mutex::default());
        Self { machine, registers, device, blocks, began: Cell::new(Instant::now()) }
    }

    /// Unmaps a block that the controller uses, and tells where it was mapped: the last that was
    /// allocated, or one of those before it.
    pub(crate) fn unmap_block(&self, before_last: usize) -> Span<DmaAddr> {
        let blocks = self.blocks.lock();
        let mapped = blocks[blocks.len() - 1 - before_last].lock().take().unwrap();
        mapped.buffer.segments().iter().next().unwrap()
    }

    /// Pieces of the machine's RAM as one buffer, mapped for as long as that exists.
    pub(crate) fn map(&self, ram: Arc<RamBuffer>, spans: &[Span]) -> Result<Mapped, AllocateError> {
        let mut builder = SegmentsBuilder::new();
        spans.iter().try_for_each(|span| builder.push(*span))?;
        let segments = builder.build()?;
        let user = UserRange::from_len(UserAddr::new(0x1_0000), segments.len())?;
        // SAFETY: the spans are of the RAM that is kept, which is accessed by atomics alone.
        let buffer = unsafe { Buffer::new(segments, user, Prot::READ_WRITE, Box::new(Kept(ram))) };
        let buffer = self.device.map_buffer(Arc::new(buffer?), Prot::READ_WRITE)?;
        Ok(Mapped { device: self.id(), buffer: Arc::new(buffer) })
    }

    /// What was mapped at these addresses and may be so no more, as a driver names it that forgot
    /// what it gave back.
    pub(crate) fn forgotten(&self, spans: &[Span<DmaAddr>]) -> Mapped {
        let mut builder = SegmentsBuilder::new();
        spans.iter().try_for_each(|span| builder.push(*span)).unwrap();
        let segments = builder.build().unwrap();
        let user = UserRange::from_len(UserAddr::new(0x1_0000), segments.len()).unwrap();
        // SAFETY: the controller is kept out of what is mapped no more: that is what is tested.
        // Nothing but the machine's RAM, which is accessed by atomics alone, is at risk.
        let buffer = unsafe { Buffer::new(segments, user, Prot::READ_WRITE, Box::new(Forgotten)) };
        Mapped { device: self.id(), buffer: Arc::new(buffer.unwrap()) }
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.device).addr()
    }
}

/// Keeps nothing.
struct Forgotten;

impl Keep<DmaAddr> for Forgotten {
    fn end(&mut self, _segments: &Segments<DmaAddr>) {}
}

/// Keeps RAM for a buffer.
struct Kept(#[expect(dead_code, reason = "it is kept")] Arc<RamBuffer>);

impl Keep<PhysAddr> for Kept {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

/// RAM for queues, mapped for the controller.
pub(crate) struct Block {
    #[expect(dead_code, reason = "it is kept mapped")]
    mapping: Arc<Mapping>,
    addr: DmaAddr,
    ram: Arc<RamBuffer>,
}

// SAFETY: the RAM is the block's alone and stays where it is; the mapping makes it contiguous for
// the controller from `addr` on, which `allocate` has checked. A test that takes the mapping away
// reads what becomes of the RAM, and nothing else relies on it.
unsafe impl SharedMemory for Block {
    fn addr(&self) -> DmaAddr {
        self.addr
    }

    fn words(&self) -> &[AtomicU64] {
        self.ram.words()
    }
}

// SAFETY: 1. The machine has no CPU, so nobody else operates the controller. 2. A buffer is given
// only if the controller's device has mapped it, which lasts as long as the buffer. 3. As above.
unsafe impl<T> Access for Nvme<T>
where
    T: Translation<Memory: FromRegistered> + 'static,
{
    type Memory = Block;
    type Buffer = Mapped;

    fn registers_len(&self) -> u64 {
        REGISTERS
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

    fn allocate(&self, bytes: u64, align: u64) -> Result<Block, AllocateError> {
        // RAM is aligned to its size, and the mapping keeps that.
        let ram = Arc::new(self.machine.ram().allocate(bytes.max(align))?);
        let mapped = self.map(Arc::clone(&ram), &[ram.span()])?;
        let mut segments = mapped.buffer.segments().iter();
        match (segments.next().map(Span::start), segments.next()) {
            (Some(addr), None) if addr.get().is_multiple_of(align) => {
                let mapping = Arc::new(Mutex::new(Some(mapped)));
                self.blocks.lock().push(Arc::clone(&mapping));
                Ok(Block { mapping, addr, ram })
            }
            _ => Err("the mapping is not contiguous and aligned".into()),
        }
    }

    fn buffer<'b>(&self, buffer: &'b Mapped) -> Option<&'b Buffer<DmaAddr>> {
        (buffer.device == self.id()).then_some(&*buffer.buffer)
    }

    /// Disk I/O takes real time, whatever virtual time is, and more of it on a busy machine: each
    /// limit is a minute longer.
    fn pause(&self, polls: u32, limit: Duration) -> Pause {
        if polls == 1 {
            self.began.set(Instant::now());
        }
        let failed = polls.is_multiple_of(LOOK) && self.read32(CSTS) & FATAL != 0;
        if failed || self.machine.is_gone() || self.began.get().elapsed() > limit + BUSY {
            return Pause::GiveUp;
        }
        self.machine.clock_step(STEP);
        Pause::Again
    }
}
