//! Hardware forgets what was unmapped, by few commands, and would not without them.

use std::sync::Barrier;
use std::thread;

use dmaspan::io_pgtable::AmdV1Config;
use dmaspan::{Prot, Span, lg2};
use dmaspan_drivers::amd_vi::AmdViConfig;

use crate::amd_vi::rig::{
    Board, COMPLETION_WAIT, INVALIDATE_PAGES, Rig, WRITERS, leave_out, map, opcode, paging, unmap,
};

#[test]
fn a_stale_translation_is_used_until_the_sync_and_never_after_it() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().allocate(0x1000).unwrap();
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let domain = rig.domain();
    stream.attach(paging(&domain)).unwrap();
    for iova in [0x1000, 0x40_0000, 0x80_0000_0000] {
        map(&domain, iova, buffer.span(), Prot::READ_WRITE);
        device.write(iova, buffer.paddr(), 4).unwrap();
        // A driver that leaves the invalidation out is found out.
        rig.board.tap.set_edit(Some(Box::new(|command| {
            if opcode(command) == INVALIDATE_PAGES {
                leave_out(command);
            }
        })));
        unmap(&domain, iova, 0x1000);
        device.write(iova, buffer.paddr(), 4).expect("the model has an IOTLB");
        rig.board.tap.set_edit(None);
        map(&domain, iova, buffer.span(), Prot::READ_WRITE);
        unmap(&domain, iova, 0x1000);
        device.write(iova, buffer.paddr(), 4).unwrap_err();
    }
}

#[test]
fn an_invalidation_of_another_domain_is_noticed() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().allocate(0x1000).unwrap();
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let domain = rig.domain();
    stream.attach(paging(&domain)).unwrap();
    map(&domain, 0x1000, buffer.span(), Prot::READ_WRITE);
    device.write(0x1000, buffer.paddr(), 4).unwrap();
    rig.board.tap.set_edit(Some(Box::new(|command| {
        if opcode(command) == INVALIDATE_PAGES {
            command[0] ^= 1 << 40;
        }
    })));
    unmap(&domain, 0x1000, 0x1000);
    device.write(0x1000, buffer.paddr(), 4).expect("the stale translation is used");
    rig.board.tap.set_edit(None);
}

#[test]
fn a_gigabyte_of_small_pages_is_forgotten_by_one_command() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().reserve(1 << 30).unwrap();
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let pages = Some(lg2::size(12));
    let domain = rig.domain_of(AmdV1Config { page_sizes: pages, ..rig.iommu.v1_config() });
    stream.attach(paging(&domain)).unwrap();
    map(&domain, 1 << 30, buffer.span(), Prot::READ_WRITE);
    let last = (2 << 30) - 4;
    for _ in 0..2 {
        device.write(last, buffer.paddr().wrapping_add((1 << 30) - 4), 4).unwrap();
    }
    let commands = rig.commands_of(|| unmap(&domain, 1 << 30, 1 << 30));
    let kinds: Vec<_> = commands.iter().map(|command| opcode(command)).collect();
    assert_eq!(kinds, [INVALIDATE_PAGES, COMPLETION_WAIT]);
    println!("1 GiB of 4 KiB pages: {} commands, not {}", kinds.len(), (1 << 18) + 1);
    device.write(last, buffer.paddr(), 4).unwrap_err();
}

#[test]
fn a_range_takes_two_commands_at_most_and_ranges_wait_once() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().reserve(1 << 26).unwrap();
    let domain = rig.domain();
    for pages in [1, 2, 3, 5, 511, 513, 4095] {
        for first in [0u64, 1, 7, 511, 0x3_ffff] {
            let bytes = pages << 12;
            let span = Span::new(buffer.paddr(), bytes).unwrap();
            map(&domain, first << 12, span, Prot::READ_WRITE);
            let commands = rig.commands_of(|| unmap(&domain, first << 12, bytes));
            let kinds: Vec<_> = commands.iter().map(|command| opcode(command)).collect();
            assert!(kinds.len() <= 3, "{first} {pages}: {kinds:?}");
            assert_eq!(kinds.iter().filter(|&&kind| kind == COMPLETION_WAIT).count(), 1);
            assert_eq!(kinds.last(), Some(&COMPLETION_WAIT));
        }
    }
}

#[test]
fn threads_that_unmap_at_once_all_get_their_answer_through_a_ring_that_wraps() {
    let Some(board) = Board::start() else { return };
    let config = AmdViConfig { lg2_commands: 8, ..board.config() };
    let rig = board.drive(config);
    let buffer = rig.board.machine.ram().allocate(0x1000).unwrap();
    let stream = rig.stream(WRITERS[0]);
    let domain = rig.domain();
    stream.attach(paging(&domain)).unwrap();
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for nth in 0..4u64 {
            let (domain, buffer, start) = (&domain, &buffer, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..100 {
                    let iova = (nth << 30) + (round << 12);
                    map(domain, iova, buffer.span(), Prot::READ_WRITE);
                    unmap(domain, iova, 0x1000);
                }
            });
        }
    });
    map(&domain, 0, buffer.span(), Prot::READ_WRITE);
    rig.board.writer(0).write(0, buffer.paddr(), 4).unwrap();
}
