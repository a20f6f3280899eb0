//! A controller with its disk, and buffers for it.

use std::sync::Arc;

use dmaspan::Span;
use dmaspan::dma::{Device, FromRegistered, NoPool, Translation};
use dmaspan_nvme::{Controller, IoQueue, Namespace, QueueConfig};
use dmaspan_qemu::{Buffer as RamBuffer, Machine, Pci};
use dmaspan_sim::bus::Bus as _;
use dmaspan_sim::rng::Rng;

use crate::nvme::access::{Mapped, Nvme};
use crate::nvme::disk::Disk;

/// Where [`NVME`] puts the controller.
pub(crate) const SLOT: u8 = 4;
/// What QEMU's controller says that it is.
const ID: u32 = 0x0010_1b36;
/// Up to 2 MiB a command, the most that QEMU takes: a full page of a list.
pub(crate) const NVME: &str = "nvme,addr=4,serial=dmaspan-7,drive=disk,mdts=9";
pub(crate) const DISK_BYTES: usize = 16 << 20;

/// A buffer with the RAM that it is in.
pub(crate) struct Scattered {
    pub(crate) mapped: Mapped,
    pub(crate) memory: InRam,
}

/// Pieces of RAM, which is kept.
pub(crate) struct InRam {
    spans: Vec<Span>,
    #[expect(dead_code, reason = "it is kept")]
    ram: Arc<RamBuffer>,
}

/// What a test has.
pub(crate) struct Rig<'m, T: Translation<Memory: FromRegistered> + 'static> {
    pub(crate) machine: &'m Machine,
    pub(crate) disk: &'m Disk,
    pub(crate) controller: Controller<Nvme<T>>,
    pub(crate) namespace: Namespace,
    pub(crate) queue: IoQueue<Nvme<T>>,
    pub(crate) rng: Rng,
}

impl<'m, T: Translation<Memory: FromRegistered> + 'static> Rig<'m, T> {
    /// The controller that [`NVME`] is, with one pair of I/O queues.
    pub(crate) fn new(
        machine: &'m Machine,
        pci: &Pci,
        disk: &'m Disk,
        device: Device<T, NoPool>,
    ) -> Self {
        let registers = pci.enable_known(SLOT, ID).unwrap();
        let nvme = Nvme::new(machine, registers, device);
        let mut controller = Controller::new(nvme, 2).unwrap();
        let namespace = controller.namespace(1).unwrap();
        let queue = controller.create_queue(QueueConfig::new(33)).unwrap();
        Self { machine, disk, controller, namespace, queue, rng: Rng::new(5) }
    }

    /// A buffer in pieces of these lengths, the first of which begins `offset` bytes into a page.
    /// Pieces are in one block of RAM, the last one first, a page apart.
    pub(crate) fn scattered(&self, offset: u64, lens: &[u64]) -> Scattered {
        let room = lens.iter().map(|len| len.next_multiple_of(4096) + 8192).sum();
        let ram: RamBuffer = self.machine.ram().allocate(room).unwrap();
        let mut end = room;
        let mut spans = Vec::new();
        for (n, len) in lens.iter().enumerate() {
            let lead = if n == 0 { offset } else { 0 };
            let start = (end - len - lead) & !4095;
            spans.push(Span::new(ram.paddr().wrapping_add(start + lead), *len).unwrap());
            end = start - 4096;
        }
        let ram = Arc::new(ram);
        let mapped = self.controller.access().map(Arc::clone(&ram), &spans).unwrap();
        Scattered { mapped, memory: InRam { spans, ram } }
    }

    pub(crate) fn content(&self, memory: &InRam) -> Vec<u8> {
        let piece = |span: &Span| {
            let mut bytes = vec![0; usize::try_from(span.len()).unwrap()];
            self.machine.ram().read(span.paddr(), &mut bytes).unwrap();
            bytes
        };
        memory.spans.iter().flat_map(piece).collect()
    }

    pub(crate) fn fill(&self, memory: &InRam, bytes: &[u8]) {
        let mut rest = bytes;
        for span in &memory.spans {
            let (now, later) = rest.split_at(usize::try_from(span.len()).unwrap());
            self.machine.ram().write(span.paddr(), now).unwrap();
            rest = later;
        }
    }
}
