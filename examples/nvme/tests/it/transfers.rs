//! Data, by PRPs, lists of them and scatter-gather lists, compared with the disk.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use dmaspan::Prot;
use dmaspan::regbuf::{ImportError, descriptors};
use dmaspan_nvme::{Controller, Error, IoQueue, Namespace, QueueConfig, Transfer};

use crate::access::{Machine, Mapped};
use crate::fake::Model;
use dmaspan_sim::rng::Rng;

const MDTS: u64 = 128 << 10;

struct Rig {
    machine: Machine,
    controller: Controller<Machine>,
    namespace: Namespace,
    queue: IoQueue<Machine>,
    rng: Rng,
}

impl Rig {
    fn new(model: Model, config: QueueConfig) -> Self {
        let machine = Machine::new(model);
        let (controller, namespace, queue) = machine.ready(config);
        let mut rng = Rng::new(7);
        let mut fake = machine.fake.lock();
        let bytes = fake.disk.len() as u64;
        fake.disk = rng.bytes(bytes as usize);
        drop(fake);
        Self { machine, controller, namespace, queue, rng }
    }

    fn scattered(&self, offset: u64, lens: &[u64]) -> Mapped {
        self.machine.map(self.machine.ram.scattered(offset, lens))
    }

    fn on_disk(&self, lba: u64, bytes: u64) -> Vec<u8> {
        let start = (lba * self.namespace.block_bytes()) as usize;
        self.machine.fake.lock().disk[start..start + bytes as usize].to_vec()
    }

    /// Reads and writes a range of a buffer, and compares everything around it, too.
    fn there_and_back(&mut self, lba: u64, buffer: &Mapped, start: u64, bytes: u64) {
        let (ram, len) = (&self.machine.ram, buffer.buffer.len());
        let mut expected = self.rng.bytes(len as usize);
        ram.fill(&buffer.buffer, 0, &expected);
        let range = start..start + bytes;
        self.queue.read(&self.namespace, lba, buffer, range.clone()).unwrap();
        expected[start as usize..][..bytes as usize].copy_from_slice(&self.on_disk(lba, bytes));
        assert!(ram.content(&buffer.buffer, 0, len) == expected, "what was read");

        let written = self.rng.bytes(len as usize);
        ram.fill(&buffer.buffer, 0, &written);
        let mut disk = self.machine.fake.lock().disk.clone();
        self.queue.write(&self.namespace, lba, buffer, range).unwrap();
        let first = (lba * self.namespace.block_bytes()) as usize;
        let part = &written[start as usize..][..bytes as usize];
        disk[first..first + bytes as usize].copy_from_slice(part);
        assert!(self.machine.fake.lock().disk == disk, "what was written");
        assert_eq!(ram.violations(), Vec::<String>::new());
    }

    fn end(self) {
        self.controller.shutdown([self.queue]).unwrap();
        assert_eq!(self.machine.ram.violations(), Vec::<String>::new());
    }
}

#[test]
fn scattered_misaligned_and_large_buffers_arrive() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(8));
    // One block, amid a page; a page over a border; two pages; a list; more than one command.
    for (offset, lens) in [
        (0x204, &[512][..]),
        (0xe00, &[0x200, 0xe00]),
        (0, &[4096, 4096]),
        (0xff8, &[8, 4096, 0x2000, 4088]),
        (0x800, &[0x1_0800, 4096, 0x4_0000]),
    ] {
        let buffer = rig.scattered(offset, lens);
        let bytes = lens.iter().sum::<u64>() & !511;
        rig.there_and_back(17, &buffer, 0, bytes);
    }
    assert_eq!(rig.machine.fake.lock().longest_chain, 1);
    rig.end();
}

#[test]
fn a_transfer_is_split_where_the_controller_takes_no_more() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(8));
    let buffer = rig.scattered(0, &[MDTS * 3 + 512]);
    let whole = rig.queue.submit(Transfer::Read, &rig.namespace, 0, &buffer, 0..MDTS + 512);
    let Err(Error::TooLarge { bytes, max }) = whole else { panic!("{whole:?}") };
    assert_eq!((bytes, max), (MDTS + 512, MDTS));
    rig.queue.read(&rig.namespace, 0, &buffer, 0..MDTS * 3 + 512).unwrap();
    assert_eq!(rig.machine.fake.lock().done, [2; 4]);
    rig.end();
}

#[test]
fn lists_are_chained_up_to_the_pages_that_a_command_has() {
    let config = QueueConfig { list_pages: 4, ..QueueConfig::new(3) };
    let blocks = 3 << 10;
    let model = Model { mdts: 0, block_lg2: 12, blocks, ..Model::default() };
    let mut rig = Rig::new(model, config);
    // All lengths around those at which another page of the list is needed.
    let buffer = rig.scattered(0xffc, &[4, 4096 * 1536, 4096 * 509 + 4092]);
    for (pages, chain) in [(513, 1), (514, 2), (1024, 2), (1025, 3), (1536, 4), (2046, 4)] {
        rig.machine.fake.lock().longest_chain = 0;
        // The first entry is of 4 bytes.
        let range = 0..(pages - 1) * 4096;
        let command =
            rig.queue.submit(Transfer::Read, &rig.namespace, 1, &buffer, range.clone()).unwrap();
        rig.machine.run();
        rig.queue.reap(|done| assert_eq!((done.id, done.result), (command, Ok(())))).unwrap();
        assert_eq!(rig.machine.fake.lock().longest_chain, chain, "{pages}");
        let ram = &rig.machine.ram;
        assert!(ram.content(&buffer.buffer, 0, range.end) == rig.on_disk(1, range.end), "{pages}");
    }
    let beyond = rig.queue.submit(Transfer::Read, &rig.namespace, 1, &buffer, 0..2046 * 4096);
    let Err(Error::Descriptors(descriptors::Error::Room { needed, room })) = beyond else {
        panic!("{beyond:?}")
    };
    assert_eq!((needed, room), (2046, 2045));
    rig.there_and_back(0, &buffer, 0, 2046 * 4096);
    rig.end();
}

#[test]
fn a_queue_without_lists_splits_by_the_page() {
    let config = QueueConfig { list_pages: 0, ..QueueConfig::new(3) };
    let mut rig = Rig::new(Model::default(), config);
    let buffer = rig.scattered(0xe00, &[0x200, 4096, 0x3e00]);
    rig.there_and_back(0, &buffer, 0, 0x5000);
    assert_eq!(rig.machine.fake.lock().longest_chain, 0);
    rig.end();
}

#[test]
fn pieces_that_meet_amid_a_page_are_split_or_told_by_a_scatter_gather_list() {
    let lens = [0x600, 0xa00, 0x1400, 0x200, 0x3000, 0xc00];
    let mut rig = Rig::new(Model::default(), QueueConfig::new(3));
    let buffer = rig.scattered(0x100, &lens);
    rig.there_and_back(3, &buffer, 0x200, 0x5a00);
    assert!(rig.machine.fake.lock().done.len() > 6);
    // No block lies in two pieces that a command without lists could tell.
    let odd = rig.scattered(0, &[0x304, 0xcfc]);
    let refused = rig.queue.read(&rig.namespace, 0, &odd, 0..0x1000);
    let amid =
        |error: &Error| matches!(error, Error::Descriptors(descriptors::Error::AmidPage { .. }));
    assert!(refused.as_ref().is_err_and(amid), "{refused:?}");
    rig.end();

    for sgls in [1, 2] {
        let model = Model { sgls, mdts: 0, ..Model::default() };
        let mut rig = Rig::new(model, QueueConfig { list_pages: 2, ..QueueConfig::new(3) });
        let buffer = rig.scattered(0x100, &lens);
        rig.there_and_back(3, &buffer, 0x200, 0x5a00);
        let odd = rig.scattered(0, &[0x304, 0xcfc]);
        rig.there_and_back(3, &odd, 0, 0x1000);
        // More than a page of descriptors.
        let many = rig.scattered(8, &[1020; 400]);
        rig.there_and_back(3, &many, 1024, 1020 * 400 / 512 * 512 - 1024);
        let fake = rig.machine.fake.lock();
        assert_eq!((fake.done.len(), fake.by_sgl, fake.longest_chain), (6, 6, 2));
        drop(fake);
        let bytes = rig.scattered(1, &[511, 1]);
        let read = rig.queue.read(&rig.namespace, 0, &bytes, 0..512);
        assert_eq!(read.is_ok(), sgls == 1, "{read:?}");
        rig.end();
    }
}

#[test]
fn what_cannot_be_transferred_is_refused_before_any_of_it_is() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(3));
    let buffer = rig.scattered(0, &[0x1_0000]);
    let (namespace, queue) = (rig.namespace, &mut rig.queue);
    let mut read = |lba, range| queue.read(&namespace, lba, &buffer, range).unwrap_err();
    assert!(matches!(read(0, 0..0), Error::NotBlocks { bytes: 0, block: 512 }));
    assert!(matches!(read(0, 0..513), Error::NotBlocks { bytes: 513, block: 512 }));
    let backwards = core::ops::Range { start: 1024, end: 512 };
    assert!(matches!(read(0, backwards), Error::NotBlocks { bytes: 0, .. }));
    assert!(matches!(read(8191, 0..1024), Error::Blocks { lba: 8191, count: 2, blocks: 8192 }));
    assert!(matches!(read(u64::MAX, 0..1024), Error::Blocks { .. }));
    assert!(matches!(read(0, 0..0x1_0200), Error::Import(ImportError::Outside { .. })));
    assert!(matches!(read(0, u64::MAX - 511..u64::MAX), Error::NotBlocks { .. }));

    let start = rig.machine.ram.allocate(512, 4096);
    let read_only = rig.machine.ram.buffer(&[(start, 512)], Prot::READ);
    let read_only = rig.machine.map(read_only);
    let error = rig.queue.read(&rig.namespace, 0, &read_only, 0..512).unwrap_err();
    assert!(matches!(error, Error::Import(ImportError::Direction { .. })), "{error}");
    rig.queue.write(&rig.namespace, 0, &read_only, 0..512).unwrap();

    let other = Machine::new(Model::default());
    let foreign = other.map(other.ram.scattered(0, &[512]));
    let error = rig.queue.read(&rig.namespace, 0, &foreign, 0..512).unwrap_err();
    assert!(matches!(error, Error::Foreign), "{error}");
    assert_eq!((rig.machine.fake.lock().done.as_slice(), rig.queue.in_flight()), (&[1][..], 0));
    rig.end();
}

/// Blocks of one controller are 4 KiB, of the other 512 bytes: 16 of them are 64 KiB to the first,
/// which would find addresses of the pages behind two in the buffer's own bytes.
#[test]
fn a_namespace_of_another_controller_lets_the_device_at_no_memory_beside_the_buffer() {
    let mut rig =
        Rig::new(Model { blocks: 1024, block_lg2: 12, ..Model::default() }, QueueConfig::new(8));
    let other = Machine::new(Model::default());
    let (controller, theirs, queue) = other.ready(QueueConfig::new(8));
    let (buffer, bystander) = (rig.scattered(0, &[8192]), rig.scattered(0, &[4096]));
    let start = bystander.buffer.segments().iter().next().unwrap().start().get();
    rig.machine.ram.fill(&buffer.buffer, 4096, &start.to_le_bytes().repeat(512));
    let before = rig.machine.ram.content(&bystander.buffer, 0, 4096);

    let read = rig.queue.read(&theirs, 0, &buffer, 0..8192);
    assert!(rig.machine.ram.content(&bystander.buffer, 0, 4096) == before, "{read:?}");
    let write = rig.queue.write(&theirs, 0, &buffer, 0..8192);
    let submitted = rig.queue.submit(Transfer::Read, &theirs, 0, &buffer, 0..8192).map(drop);
    let flushes = [rig.queue.flush(&theirs), rig.queue.submit_flush(&theirs).map(drop)];
    for refused in [read, write, submitted].into_iter().chain(flushes) {
        assert!(matches!(refused, Err(Error::Foreign)), "{refused:?}");
    }
    assert_eq!((rig.machine.fake.lock().done.len(), rig.queue.in_flight()), (0, 0));
    controller.shutdown([queue]).unwrap();
    rig.end();
}

#[test]
fn a_full_queue_refuses_and_each_completion_makes_room() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(4));
    let buffer = rig.scattered(0, &[4096]);
    // Several times around the queues.
    for turn in 0..9 {
        for n in 0..3 {
            let range = n * 512..(n + 1) * 512;
            rig.queue.submit(Transfer::Read, &rig.namespace, turn * 3 + n, &buffer, range).unwrap();
        }
        let full = rig.queue.submit_flush(&rig.namespace);
        assert!(matches!(full, Err(Error::Full { in_flight: 3 })), "{full:?}");
        rig.machine.run();
        let mut ended = Vec::new();
        let count = rig.queue.reap(|done| ended.push((done.id.index(), done.result))).unwrap();
        ended.sort_unstable_by_key(|(id, _)| *id);
        assert_eq!((count, ended), (3, vec![(0, Ok(())), (1, Ok(())), (2, Ok(()))]));
        let disk = rig.on_disk(turn * 3, 1536);
        assert_eq!(rig.machine.ram.content(&buffer.buffer, 0, 1536), disk);
    }
    rig.end();
}

#[test]
fn one_doorbell_tells_of_all_that_was_entered_and_one_of_all_that_was_reaped() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(8));
    let buffer = rig.scattered(0, &[4096]);
    let doorbells = |rig: &Rig| rig.machine.fake.lock().doorbells;
    let before = doorbells(&rig);
    let push = |rig: &mut Rig, lba: u64| {
        let range = lba * 512..(lba + 1) * 512;
        rig.queue.push(Transfer::Read, &rig.namespace, lba, &buffer, range).unwrap();
    };
    (0..4).for_each(|lba| push(&mut rig, lba));
    rig.machine.run();
    assert_eq!((doorbells(&rig) - before, rig.machine.fake.lock().done.len()), (0, 0));
    rig.queue.ring();
    rig.queue.ring();
    assert_eq!(doorbells(&rig) - before, 1);
    rig.machine.run();
    assert_eq!((rig.queue.reap(drop).unwrap(), doorbells(&rig) - before), (4, 2));
    assert_eq!(rig.machine.ram.content(&buffer.buffer, 0, 2048), rig.on_disk(0, 2048));

    // Whatever looks for completions tells of what was entered.
    push(&mut rig, 4);
    assert_eq!((rig.queue.reap(drop).unwrap(), doorbells(&rig) - before), (0, 3));
    push(&mut rig, 5);
    rig.queue.wait(Duration::ZERO);
    assert_eq!(doorbells(&rig) - before, 4);
    push(&mut rig, 6);
    rig.queue.flush(&rig.namespace).unwrap();
    assert_eq!(rig.queue.reap(drop).unwrap(), 3);
    assert_eq!(rig.machine.ram.content(&buffer.buffer, 0, 3584), rig.on_disk(0, 3584));
    rig.end();
}

#[test]
fn a_panic_of_who_reaps_loses_no_slot_and_no_place() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(4));
    let buffer = rig.scattered(0, &[4096]);
    // More often than the queues have places.
    for lba in 0..20 {
        let count = lba as usize % 3 + 1;
        for n in 0..count as u64 {
            rig.queue.submit(Transfer::Read, &rig.namespace, lba + n, &buffer, 0..512).unwrap();
        }
        rig.machine.run();
        let queue = &mut rig.queue;
        let reap = AssertUnwindSafe(|| queue.reap(|_| resume_unwind(Box::new(()))));
        assert!(catch_unwind(reap).is_err());
        assert_eq!(rig.queue.in_flight(), count - 1);
        assert_eq!(rig.queue.reap(drop).unwrap(), count - 1);
        let unread = rig.machine.fake.lock().unread(1);
        assert_eq!((rig.queue.in_flight(), unread), (0, 0));
    }
    rig.end();
}

#[test]
#[expect(unsafe_code, reason = "PRPs by hand are promised to be right")]
fn prps_by_hand_are_used_as_they_are() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(4));
    let start = rig.machine.ram.allocate(3 * 4096, 4096);
    let buffer = rig.machine.map(rig.machine.ram.buffer(&[(start, 3 * 4096)], Prot::READ_WRITE));
    let (prps, read) = ([start + 8192, start], Transfer::Read);
    // SAFETY: the buffer exists until the command has ended.
    let pushed = unsafe { rig.queue.push_prps(read, &rig.namespace, 7, 8192, prps) };
    pushed.unwrap();
    rig.queue.ring();
    rig.machine.run();
    let mut held = Vec::new();
    rig.queue.reap(|done| held.push((done.buffer.is_some(), done.result))).unwrap();
    assert_eq!(held, [(false, Ok(()))]);
    assert_eq!(rig.machine.ram.content(&buffer.buffer, 8192, 4096), rig.on_disk(7, 4096));
    assert_eq!(rig.machine.ram.content(&buffer.buffer, 0, 4096), rig.on_disk(15, 4096));
    // SAFETY: it is refused.
    let refused = unsafe { rig.queue.push_prps(read, &rig.namespace, 0, MDTS + 512, prps) };
    assert!(matches!(refused, Err(Error::TooLarge { max: MDTS, .. })), "{refused:?}");
    rig.end();
}

#[test]
fn who_waits_leaves_what_else_ends_to_be_reaped() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(8));
    let buffer = rig.scattered(0, &[8192]);
    let first = rig.queue.submit(Transfer::Read, &rig.namespace, 9, &buffer, 0..512).unwrap();
    rig.queue.read(&rig.namespace, 5, &buffer, 4096..8192).unwrap();
    rig.queue.flush(&rig.namespace).unwrap();
    assert_eq!(rig.queue.in_flight(), 1);
    let mut ended = Vec::new();
    rig.queue.reap(|done| ended.push(done.id)).unwrap();
    assert_eq!((ended, rig.queue.in_flight()), (vec![first], 0));
    assert_eq!(rig.machine.fake.lock().done, [2, 2, 0]);
    rig.end();
}

#[test]
fn a_buffer_in_flight_outlives_its_owner() {
    let mut rig = Rig::new(Model::default(), QueueConfig::new(8));
    let before = rig.machine.ram.live();
    let buffer = rig.scattered(0, &[4096]);
    rig.queue.submit(Transfer::Read, &rig.namespace, 9, &buffer, 0..4096).unwrap();
    drop(buffer);
    assert_eq!(rig.machine.ram.live(), before + 1);
    rig.machine.run();
    assert_eq!(rig.machine.ram.live(), before + 1);
    rig.queue.reap(drop).unwrap();
    assert_eq!(rig.machine.ram.live(), before);
    rig.end();
}

/// A buffer in random pieces: of whole pages, or of any dwords where the controller takes lists of
/// those.
fn random_buffer(rig: &mut Rig, sgls: u8) -> Mapped {
    let offset = rig.rng.below(1024) * 4;
    let mut lens = vec![4096 - offset];
    for _ in 0..rig.rng.below(8) {
        let pages = (1 + rig.rng.below(5)) * 4096;
        let odd = sgls != 0 && rig.rng.below(3) == 0;
        lens.push(if odd { 4 + rig.rng.below(2000) * 4 } else { pages });
    }
    lens.push(4096);
    rig.scattered(offset, &lens)
}

#[test]
fn random_transfers_agree_with_the_disk() {
    for (sgls, list_pages) in [(0, 1), (1, 1), (2, 2), (0, 0)] {
        let model = Model { sgls, blocks: 512, ..Model::default() };
        let config = QueueConfig { list_pages, ..QueueConfig::new(5) };
        let mut rig = Rig::new(model, config);
        for _ in 0..150 {
            let buffer = random_buffer(&mut rig, sgls);
            let blocks = buffer.buffer.len() / 512;
            let count = 1 + rig.rng.below(blocks);
            // PRPs begin with a dword.
            let slack = buffer.buffer.len() - count * 512;
            let start = rig.rng.below(slack + 1) & !3;
            let lba = rig.rng.below(512 - count);
            rig.there_and_back(lba, &buffer, start, count * 512);
        }
        rig.end();
    }
}
