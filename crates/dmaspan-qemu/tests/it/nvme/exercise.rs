//! The exercise of a controller, whatever lies between it and memory.

use dmaspan::dma::{Device, FromRegistered, NoPool, Translation};
use dmaspan_nvme::{QueueConfig, Transfer};
use dmaspan_qemu::{Machine, Pci};

use crate::nvme::disk::Disk;
use crate::nvme::rig::{DISK_BYTES, Rig};

/// Identifies the controller that [`NVME`](crate::nvme::rig::NVME) is, reads and writes by it, and
/// compares with its disk.
pub(crate) fn exercise<T>(machine: &Machine, pci: &Pci, disk: &Disk, device: Device<T, NoPool>)
where
    T: Translation<Memory: FromRegistered> + 'static,
{
    let mut rig = Rig::new(machine, pci, disk, device);
    assert_eq!(rig.controller.info().serial, "dmaspan-7");
    assert_eq!(rig.controller.info().model, "QEMU NVMe Ctrl");
    assert_eq!(rig.controller.info().max_transfer, Some(2 << 20));
    assert_eq!(rig.namespace.blocks() * rig.namespace.block_bytes(), DISK_BYTES as u64);
    assert!(rig.controller.namespace(2).is_err());
    rig.there_and_back();
    rig.random_reads_at_depth();
    rig.a_second_queue();
    rig.controller.shutdown([rig.queue]).unwrap();
    assert!(!machine.is_gone());
}

impl<T: Translation<Memory: FromRegistered> + 'static> Rig<'_, T> {
    /// Scattered, misaligned and large buffers, read and written, by PRPs, lists of them and
    /// scatter-gather lists.
    fn there_and_back(&mut self) {
        let cases: [(u64, &[u64]); 8] = [
            (0, &[4096]),
            (0xe00, &[0x200, 0xe00]),
            (0x204, &[4096]),
            (0, &[4096; 5]),
            (0xffc, &[4, 0x2000, 4096, 0x5000, 4092]),
            // Pieces that meet amid pages, which PRPs cannot tell.
            (0x10, &[0x600, 0xa00, 0x1404, 0x1fc, 0x3000, 0xa00]),
            // Full lists.
            (0x800, &[0x800, 0x10_0000, 0xf_f000, 0x800]),
            // More than a command transfers.
            (0, &[9 << 20]),
        ];
        for (case, (offset, lens)) in cases.into_iter().enumerate() {
            let buffer = self.scattered(offset, lens);
            let bytes: u64 = lens.iter().sum();
            let len = usize::try_from(bytes).unwrap();
            let blocks = bytes / self.namespace.block_bytes();
            let lba = self.rng.below(self.namespace.blocks() - blocks);
            let first = usize::try_from(lba * self.namespace.block_bytes()).unwrap();

            self.queue.read(&self.namespace, lba, &buffer.mapped, 0..bytes).unwrap();
            let mut expected = self.disk.content();
            assert!(
                self.content(&buffer.memory) == expected[first..first + len],
                "read, case {case}"
            );

            let written = self.rng.bytes(len);
            self.fill(&buffer.memory, &written);
            self.queue.write(&self.namespace, lba, &buffer.mapped, 0..bytes).unwrap();
            self.queue.flush(&self.namespace).unwrap();
            expected[first..first + len].copy_from_slice(&written);
            assert!(self.disk.content() == expected, "written, case {case}");
        }
    }

    /// 4 KiB each, 32 at a time, all in one buffer.
    fn random_reads_at_depth(&mut self) {
        let buffer = self.scattered(0, &[4096; 32]);
        let content = self.disk.content();
        let per_page = 4096 / self.namespace.block_bytes();
        for _ in 0..4 {
            let lbas: [u64; 32] = std::array::from_fn(|_| self.rng.below(4000) * per_page);
            for (page, lba) in (0..).zip(lbas) {
                let range = page * 4096..(page + 1) * 4096;
                let (transfer, mapped) = (Transfer::Read, &buffer.mapped);
                self.queue.submit(transfer, &self.namespace, lba, mapped, range).unwrap();
            }
            assert_eq!((self.queue.in_flight(), self.queue.slots()), (32, 32));
            for _ in 0..100_000 {
                if self.queue.in_flight() == 0 {
                    break;
                }
                self.machine.clock_step(10_000);
                self.queue.reap(|done| assert_eq!(done.result, Ok(()))).unwrap();
            }
            assert_eq!(self.queue.in_flight(), 0);
            let read = self.content(&buffer.memory);
            for (page, lba) in read.chunks(4096).zip(lbas) {
                let first = usize::try_from(lba * self.namespace.block_bytes()).unwrap();
                assert!(page == &content[first..first + 4096], "{lba}");
            }
        }
    }

    /// It is made, used and deleted beside the first one, twice.
    fn a_second_queue(&mut self) {
        let buffer = self.scattered(0, &[4096]);
        for _ in 0..2 {
            let mut queue = self.controller.create_queue(QueueConfig::new(2)).unwrap();
            assert!(self.controller.create_queue(QueueConfig::new(2)).is_err());
            for _ in 0..3 {
                queue.read(&self.namespace, 0, &buffer.mapped, 0..4096).unwrap();
            }
            assert!(self.content(&buffer.memory) == self.disk.content()[..4096]);
            self.controller.delete_queue(queue).unwrap();
        }
    }
}
