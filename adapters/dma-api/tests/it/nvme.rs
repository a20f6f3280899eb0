//! The crate nvme-driver, which knows dma-api alone, over a device behind an IOMMU.

use std::num::NonZeroUsize;
use std::ptr::{NonNull, with_exposed_provenance_mut};

use dma_api::{CpuDmaBuffer, DeviceDma, DmaDirection};
use dmaspan::Iova;
use mmio_api::{MapError, MmioAddr, MmioOp, MmioRaw};
use nvme_driver::{Config, Nvme, NvmeBlockDriver};
use rdif_block::{
    BHardwareQueue, BlockController as _, CompletedRequest, CompletionSink, ControlEvent,
    ControllerEvent, ControllerState, OwnedRequest, OwnedRequestBatch, RequestFlags, RequestId,
    RequestOp, SubmissionSink,
};

use crate::controller::{BLOCK, Controller, Registers};
use crate::rig::{Ops, Process, device};

/// Registers are memory of the process.
struct OneToOne;

impl MmioOp for OneToOne {
    fn ioremap(&self, addr: MmioAddr, size: usize) -> Result<MmioRaw, MapError> {
        let at = NonNull::new(with_exposed_provenance_mut(addr.as_usize())).unwrap();
        #[expect(unsafe_code, reason = "registers that are leaked")]
        // SAFETY: the test has leaked as many bytes there.
        Ok(unsafe { MmioRaw::new(addr, at, size) })
    }

    fn iounmap(&self, _: &MmioRaw) {}
}

#[derive(Default)]
struct Sink(Vec<CompletedRequest>);

impl SubmissionSink for Sink {
    fn accepted(&mut self, _: RequestId) {}
}

impl CompletionSink for Sink {
    fn complete(&mut self, request: CompletedRequest) {
        self.0.push(request);
    }
}

struct Rig {
    driver: NvmeBlockDriver,
    queue: BHardwareQueue,
    controller: Controller,
    dma: DeviceDma,
    ops: &'static Ops,
}

impl Rig {
    /// Starts the controller as a kernel does: registers are looked at again, and interrupts come.
    fn new() -> Self {
        let (dma, ops, reach) = device(u64::MAX);
        let registers = Registers::new();
        let mut controller = Controller::new(registers, reach);
        let at = std::ptr::from_ref(registers).expose_provenance() as u64;
        let own = DeviceDma::new(dma.info(), ops);
        let config = Config::msix(4096, [0, 1]).unwrap();
        let nvme = Nvme::new(at, Registers::BYTES, own, &OneToOne, config).unwrap();
        let mut driver = NvmeBlockDriver::from_nvme(nvme);
        let mut event = ControllerEvent::Start { target_queues: 1 };
        for _ in 0..100 {
            let mut update = driver.advance(event).unwrap();
            controller.run();
            event = match update.controller_state() {
                ControllerState::RegisterPending { .. } => ControllerEvent::RegisterRetry,
                ControllerState::WaitingForIrq => ControllerEvent::Irq(ControlEvent::new(0, 1)),
                ControllerState::Ready => {
                    let queue = update.take_queues().pop().unwrap();
                    return Self { driver, queue, controller, dma, ops };
                }
                ControllerState::Shutdown => panic!("the driver gave up"),
            };
        }
        panic!("the controller does not get ready");
    }

    /// A read or a write of blocks, with the bytes that there are then.
    fn transfer(&mut self, op: RequestOp, lba: u64, bytes: &mut [u8]) {
        let direction = match op {
            RequestOp::Read => DmaDirection::FromDevice,
            _ => DmaDirection::ToDevice,
        };
        let len = NonZeroUsize::new(bytes.len()).unwrap();
        let mut buffer = CpuDmaBuffer::new_zero(&self.dma, len, 4096, direction).unwrap();
        buffer.copy_from_slice_cpu(bytes);
        let data = Some(buffer.prepare_for_device());
        let block_count = u32::try_from(bytes.len() / BLOCK).unwrap();
        let request = OwnedRequest { op, lba, block_count, data, flags: RequestFlags::NONE };
        let (mut batch, mut sink) = (OwnedRequestBatch::with_capacity(1), Sink::default());
        batch.push_back(request);
        assert_eq!(self.queue.submit_batch_owned(&mut batch, &mut sink).accepted(), 1);
        self.queue.commit_submissions().unwrap();
        self.controller.run();
        self.queue.drain_completions(&mut sink).unwrap();
        let [done] = &mut sink.0[..] else { panic!("it has not ended") };
        done.result.unwrap();
        done.data.take().unwrap().copy_to_slice_cpu(bytes);
    }
}

#[test]
fn their_nvme_driver_reads_and_writes_and_its_controller_reaches_nothing_that_was_given_back() {
    let mut rig = Rig::new();
    let live = rig.ops.live();
    // One page, a part of one, two by both PRPs, and more by a list.
    for (lba, blocks) in [(0, 8), (3, 1), (100, 16), (5, 128), (1020, 4)] {
        let len = blocks * BLOCK;
        let first = usize::try_from(lba).unwrap() * BLOCK;
        let mut bytes = vec![0; len];
        rig.transfer(RequestOp::Read, lba, &mut bytes);
        assert_eq!(bytes, rig.controller.blocks[first..first + len], "{blocks} blocks of {lba}");
        let mut other: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        rig.transfer(RequestOp::Write, lba, &mut other);
        assert_eq!(rig.controller.blocks[first..first + len], other, "{blocks} blocks of {lba}");
        // The driver has dropped the buffer: its controller tries all of it.
        for (addr, len) in rig.controller.last.clone() {
            for at in [addr, addr + len as u64 - 1] {
                let written = rig.controller.reach.write(&Process, Iova::new(at), &[1]);
                assert!(written.is_err(), "{at:#x} is reached");
            }
        }
        assert_eq!(rig.ops.live(), live);
    }
    rig.driver.advance(ControllerEvent::Shutdown).unwrap();
    rig.controller.run();
    let Rig { driver, queue, ops, .. } = rig;
    drop(queue);
    drop(driver);
    assert_eq!(ops.live(), (0, 0), "the driver leaves memory with the device");
}
