//! The driver's access to the controller in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dmaspan::DmaAddr;
use dmaspan::regbuf::Buffer;
use dmaspan_nvme::access::{Access, AllocateError, Pause};
use dmaspan_nvme::{Controller, Error, IoQueue, Namespace, QueueConfig};
use dmaspan_sim::allocator::uncounted;
use parking_lot::Mutex;

use crate::fake::{Fake, Habit, Model};
use crate::ram::{Block, Ram, RegisteredBuffer};

/// After how many polls the driver is told to give up.
const POLLS: u32 = 3000;

/// A controller in memory; a clone is the same one, to look at it from outside.
#[derive(Clone)]
pub(crate) struct Machine {
    pub(crate) ram: Arc<Ram>,
    pub(crate) fake: Arc<Mutex<Fake>>,
    pub(crate) polls: Arc<AtomicU32>,
}

/// A buffer that is mapped for a machine.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    machine: usize,
    pub(crate) buffer: RegisteredBuffer,
}

impl Machine {
    pub(crate) fn new(model: Model) -> Self {
        let ram = Ram::new();
        let fake = Arc::new(Mutex::new(Fake::new(Arc::clone(&ram), model)));
        Self { ram, fake, polls: Arc::default() }
    }

    pub(crate) fn map(&self, buffer: RegisteredBuffer) -> Mapped {
        Mapped { machine: Arc::as_ptr(&self.ram).addr(), buffer }
    }

    pub(crate) fn set_habit(&self, habit: Habit) {
        self.fake.lock().habit = habit;
    }

    /// Counts polls anew.
    pub(crate) fn forget_polls(&self) {
        self.polls.store(0, Ordering::Relaxed);
    }

    /// Lets the controller do what it was told.
    pub(crate) fn run(&self) {
        uncounted(|| self.fake.lock().run());
    }

    pub(crate) fn start(&self) -> Result<Controller<Self>, Error> {
        Controller::new(self.clone(), 4)
    }

    /// A controller that was started, its namespace, and a queue.
    pub(crate) fn ready(
        &self,
        config: QueueConfig,
    ) -> (Controller<Self>, Namespace, IoQueue<Self>) {
        let mut controller = self.start().unwrap();
        let namespace = controller.namespace(1).unwrap();
        let queue = controller.create_queue(config).unwrap();
        (controller, namespace, queue)
    }
}

#[expect(unsafe_code, reason = "a controller in memory")]
// SAFETY: tests operate the controller by the driver only, unless they make it misbehave in memory
// that no Rust reference but to atomics exists of; what is mapped is checked.
unsafe impl Access for Machine {
    type Memory = Block;
    type Buffer = Mapped;

    fn registers_len(&self) -> u64 {
        0x2000
    }

    fn read32(&self, offset: u64) -> u32 {
        self.fake.lock().read(offset) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        self.fake.lock().read(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.fake.lock().write(offset, value.into());
    }

    fn write64(&self, offset: u64, value: u64) {
        self.fake.lock().write(offset, value);
    }

    fn allocate(&self, bytes: u64, align: u64) -> Result<Block, AllocateError> {
        Ok(Block::new(&self.ram, bytes, align))
    }

    fn buffer<'b>(&self, buffer: &'b Mapped) -> Option<&'b Buffer<DmaAddr>> {
        (buffer.machine == Arc::as_ptr(&self.ram).addr()).then_some(&*buffer.buffer)
    }

    fn pause(&self, polls: u32, _limit: Duration) -> Pause {
        self.run();
        self.polls.fetch_max(polls, Ordering::Relaxed);
        if polls < POLLS { Pause::Again } else { Pause::GiveUp }
    }
}

/// No more than it was told to.
pub(crate) fn gave_up_in_time(machine: &Machine) -> bool {
    machine.polls.load(Ordering::Relaxed) == POLLS
}
