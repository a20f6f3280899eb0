//! A controller fails commands whose addresses are mapped no more.
//!
//! QEMU's controller is not told that an access failed: it goes on, with zeros for what it could
//! not read. So memory and what the IOMMU reports tell, and not how a command ended, but for those
//! of which it could not read what to do.

use dmaspan::iommu::{FaultAccess, Prepared, Target};
use dmaspan::{Direction, DmaAddr, Iova, IovaRange, Span};
use dmaspan_nvme::{Error, Opcode, Transfer};

use crate::iommus::{DomainOf, Iommu};
use crate::nvme::access::Mapped;
use crate::nvme::rig::{InRam, Rig, Scattered};
use crate::nvme::translated::Setup;

const LBA: u64 = 100;
/// Bytes of a buffer: two pages.
const LEN: usize = 0x2000;

fn spans(mapped: &Mapped) -> Vec<Span<DmaAddr>> {
    let len = mapped.buffer.segments().len();
    mapped.buffer.import(0, len, Direction::FromDevice).unwrap().collect()
}

fn range(span: Span<DmaAddr>) -> IovaRange {
    IovaRange::new(Iova::new(span.start().get()), Iova::new(span.last().get())).unwrap()
}

type RigOf<'m, I> = Rig<'m, DomainOf<I>>;

/// A buffer of two pages, mapped by itself.
fn buffer<I: Iommu>(rig: &RigOf<'_, I>) -> Scattered {
    rig.scattered(0, &[LEN as u64])
}

/// What is on the disk from the tests' block on.
fn on_disk<I: Iommu>(rig: &RigOf<'_, I>, len: usize) -> Vec<u8> {
    let first = usize::try_from(LBA * rig.namespace.block_bytes()).unwrap();
    rig.disk.content()[first..first + len].to_vec()
}

/// Three buffers in one command, and the one in the middle is unmapped.
pub(crate) fn amid_a_list<I: Iommu>(setup: &Setup<I>) {
    let mut rig = setup.rig();
    let buffers = [0; 3].map(|_| buffer::<I>(&rig));
    let addrs = buffers.each_ref().map(|buffer| spans(&buffer.mapped));
    let all = rig.controller.access().forgotten(&addrs.concat());
    let len = 3 * LEN as u64;

    // As long as all are mapped.
    let disk = on_disk::<I>(&rig, 3 * LEN);
    rig.queue.read(&rig.namespace, LBA, &all, 0..len).unwrap();
    setup.behind.no_faults();
    for (buffer, disk) in buffers.iter().zip(disk.chunks(LEN)) {
        assert!(rig.content(&buffer.memory) == disk);
    }

    let [first, Scattered { mapped, memory: middle }, last] = buffers;
    drop(mapped);
    let gone = range(addrs[1][0]);
    let memories: [&InRam; 3] = [&first.memory, &middle, &last.memory];
    let secret = rig.rng.bytes(LEN);
    memories.iter().for_each(|memory| rig.fill(memory, &secret));
    rig.queue.read(&rig.namespace, LBA, &all, 0..len).unwrap();
    assert!(rig.content(&middle) == secret, "what was unmapped is written");
    setup.behind.faulted(FaultAccess::Write, gone);
    // The rest of it was done.
    assert!(rig.content(memories[0]) == disk[..LEN]);
    assert!(rig.content(memories[2]) == disk[2 * LEN..]);

    memories.iter().for_each(|memory| rig.fill(memory, &secret));
    rig.queue.write(&rig.namespace, LBA, &all, 0..len).unwrap();
    rig.queue.flush(&rig.namespace).unwrap();
    setup.behind.faulted(FaultAccess::Read, gone);
    let written = on_disk::<I>(&rig, 3 * LEN);
    assert!(written[..LEN] == secret && written[2 * LEN..] == secret);
    assert!(written[LEN..2 * LEN] == [0; LEN], "what was unmapped is on the disk");

    // The controller and its queues go on.
    rig.queue.read(&rig.namespace, LBA, &first.mapped, 0..LEN as u64).unwrap();
    setup.behind.no_faults();
    rig.controller.shutdown([rig.queue]).unwrap();
}

/// The pages that say where a command's bytes are: it is not done at all.
pub(crate) fn lists<I: Iommu>(setup: &Setup<I>) {
    let mut rig = setup.rig();
    let buffer = rig.scattered(0, &[3 * LEN as u64]);
    let secret = rig.rng.bytes(3 * LEN);
    rig.fill(&buffer.memory, &secret);
    let disk = rig.disk.content();
    let gone = range(rig.controller.access().unmap_block(0));
    for (transfer, opcode) in [(Transfer::Read, Opcode::Read), (Transfer::Write, Opcode::Write)] {
        let (queue, namespace, mapped) = (&mut rig.queue, &rig.namespace, &buffer.mapped);
        let failed = match transfer {
            Transfer::Read => queue.read(namespace, LBA, mapped, 0..3 * LEN as u64),
            Transfer::Write => queue.write(namespace, LBA, mapped, 0..3 * LEN as u64),
        };
        let expected = matches!(&failed, Err(Error::Command { opcode: of, .. }) if *of == opcode);
        assert!(expected, "{failed:?}");
        setup.behind.faulted(FaultAccess::Read, gone);
    }
    assert!(rig.content(&buffer.memory) == secret, "memory was written");
    // Two pages need no list.
    rig.queue.read(&rig.namespace, LBA, &buffer.mapped, 0..LEN as u64).unwrap();
    rig.queue.flush(&rig.namespace).unwrap();
    assert!(rig.disk.content() == disk, "the disk was written");
    setup.behind.no_faults();
    rig.controller.shutdown([rig.queue]).unwrap();
}

/// The queue of completions: what is there instead by now is not overwritten, and the driver hears
/// of it.
pub(crate) fn completions<I: Iommu>(setup: &Setup<I>) {
    let mut rig = setup.rig();
    let buffer = buffer::<I>(&rig);
    let gone = range(rig.controller.access().unmap_block(1));
    let failed = rig.queue.read(&rig.namespace, LBA, &buffer.mapped, 0..LEN as u64);
    assert!(matches!(failed, Err(Error::Fatal { .. })), "{failed:?}");
    setup.behind.faulted(FaultAccess::Write, gone);
    // The completion would be in the queue's memory.
    assert_eq!(rig.queue.reap(drop).unwrap(), 0);
    assert_eq!(rig.queue.in_flight(), 1);
}

/// All of it at once, and attached again.
pub(crate) fn detached<I: Iommu>(setup: &Setup<I>) {
    let mut rig = setup.rig();
    let buffer = buffer::<I>(&rig);
    let disk = rig.disk.content();
    let secret = rig.rng.bytes(LEN);
    rig.fill(&buffer.memory, &secret);
    setup.behind.attachment.detach().unwrap();
    let failed = rig.queue.write(&rig.namespace, LBA, &buffer.mapped, 0..LEN as u64);
    assert!(matches!(failed, Err(Error::Fatal { .. })), "{failed:?}");
    let failed = rig.queue.read(&rig.namespace, 0, &buffer.mapped, 0..LEN as u64);
    assert!(matches!(failed, Err(Error::Fatal { .. })), "{failed:?}");
    assert!(rig.content(&buffer.memory) == secret, "memory was written");
    assert!(rig.disk.content() == disk, "the disk was written");
    // Some hardware says nothing of a stream that is blocked.
    setup.behind.faults();

    let domain = Prepared::new(setup.behind.domain.clone());
    setup.behind.attachment.attach(Target::Paging(domain)).unwrap();
    let mut rig = setup.rig();
    rig.queue.read(&rig.namespace, LBA, &buffer.mapped, 0..LEN as u64).unwrap_err();
    let buffer = self::buffer::<I>(&rig);
    rig.queue.read(&rig.namespace, LBA, &buffer.mapped, 0..LEN as u64).unwrap();
    assert!(rig.content(&buffer.memory) == on_disk::<I>(&rig, LEN));
    setup.behind.no_faults();
    rig.controller.shutdown([rig.queue]).unwrap();
}
