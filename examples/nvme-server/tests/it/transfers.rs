//! Commands of a guest that does what it should, and memory that goes and comes meanwhile.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use dmaspan::Prot;
use dmaspan_nvme_server::Observer;
use rustix::event::{EventfdFlags, eventfd};

use crate::client::{RESET, SET_IRQS, memfd};
use crate::guest::*;
use crate::judge::Judge;

const DISK: u64 = 16 << 20;
/// Pages of the largest command.
const MOST: u64 = 32;

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len / 8).flat_map(|_| next().to_le_bytes()).collect()
}

fn bytes_of(file: &File, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn the_file_has_what_a_guest_writes_and_a_guest_reads_what_the_file_has() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 4);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    // From one page to as many as a command may have, in order, backwards, and every second one.
    for (turn, count) in [1, 2, 3, 17, MOST].into_iter().enumerate() {
        let orders: [Vec<u64>; 3] = [
            (0..count).map(|n| DATA + n * PAGE).collect(),
            (0..count).rev().map(|n| DATA + n * PAGE).collect(),
            (0..count).map(|n| DATA + 2 * n * PAGE).collect(),
        ];
        for (n, pages) in orders.iter().enumerate() {
            let data = pattern(turn as u64 * 3 + n as u64 + 1, count * PAGE);
            for (page, bytes) in pages.iter().zip(data.chunks(PAGE as usize)) {
                guest.ram.write_all_at(bytes, *page).unwrap();
            }
            let (first, blocks) = (turn as u64 * 1000 + 7, count as u32 * 8);
            let write = guest.transfer(WRITE, 1, first, blocks, pages);
            assert_eq!(guest.run(&mut queue, write), Done { id: 1, status: 0, result: 0 });
            assert!(bytes_of(&disk, first * 512, count * PAGE) == data);
            // To other pages.
            let others: Vec<u64> = pages.iter().map(|page| page + 0x20_0000).collect();
            let read = guest.transfer(READ, 2, first, blocks, &others);
            assert_eq!(guest.run(&mut queue, read).status, 0);
            let back: Vec<u8> =
                others.iter().flat_map(|&page| bytes_of(&guest.ram, page, PAGE)).collect();
            assert!(back == data);
        }
    }
    assert_eq!(guest.run(&mut queue, command(FLUSH, 3, 1, &[])).status, 0);
    assert_eq!(guest.run(&mut queue, command(FLUSH, 3, u32::MAX, &[])).status, 0);
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!((report.refused, report.counts.commands, report.counts.failed), (0, 32, 0));
}

#[test]
fn identify_says_what_the_disk_is() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 1);
    let identify =
        |cns, namespace| with_prps(command(6, 9, namespace, &[(10, cns)]), RAM + DATA, 0);
    assert_eq!(guest.admin(identify(0, 1)).status, 0);
    assert_eq!(bytes_of(&guest.ram, DATA, 8), (DISK / 512).to_le_bytes());
    assert_eq!(guest.admin(identify(1, 0)).status, 0);
    assert_eq!(&bytes_of(&guest.ram, DATA + 4, 7), b"dmaspan");
    assert_eq!(guest.admin(identify(2, 0)).status, 0);
    assert_eq!(bytes_of(&guest.ram, DATA, 8), 1_u64.to_le_bytes());
    assert_eq!(guest.admin(identify(0, 2)).status, 0x0b);
    // Queues of each kind, and no more events than it has.
    assert_eq!(guest.admin(command(9, 1, 0, &[(10, 7), (11, 0x3f_003f)])).result, 0xf_000f);
    assert_eq!(guest.admin(command(0x7f, 1, 0, &[])).status, 1);
    for _ in 0..4 {
        guest.put_admin(command(0xc, 5, 0, &[]));
    }
    assert_eq!(guest.admin(command(0xc, 6, 0, &[])), Done { id: 6, status: 0x105, result: 0 });
    guest.client.end().1.unwrap();
}

#[test]
fn a_command_whose_memory_is_not_the_devices_fails_and_the_next_one_does_not() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 2);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    // Memory of which the client sends no file, and a file that is no memory, as of a BAR.
    let rom = RAM + RAM_LEN;
    let id = guest.client.map(rom, PAGE, None);
    guest.client.answer(id).unwrap();
    let device = File::open("/dev/zero").unwrap();
    let id = guest.client.map(rom + PAGE, PAGE, Some((device.as_fd(), 0)));
    guest.client.answer(id).unwrap();
    let io = |opcode, prp1, prp2, first: u32, blocks: u32| {
        with_prps(command(opcode, 4, 1, &[(10, first), (12, blocks - 1)]), prp1, prp2)
    };
    let data = RAM + DATA;
    let (transfer, offset, range, field) = (0x04, 0x13, 0x80, 0x02);
    for (command, status) in [
        (io(READ, rom, 0, 0, 8), transfer),
        (io(WRITE, rom + PAGE, 0, 0, 8), transfer),
        // Over the end of memory, half in what cannot be reached, and where nothing is.
        (io(WRITE, rom - PAGE, rom, 0, 16), transfer),
        (io(READ, rom - PAGE, 0x7000, 0, 16), transfer),
        (io(READ, 0x1000, 0, 0, 8), transfer),
        (io(READ, u64::MAX - 3, 0, 0, 1), transfer),
        // A list that is nowhere, in what cannot be reached, within an entry.
        (io(WRITE, data, 0x7000, 0, 24), transfer),
        (io(WRITE, data, rom, 0, 24), transfer),
        (io(WRITE, data, data + 4, 0, 24), offset),
        (io(READ, data + 2, 0, 0, 8), offset),
        (io(READ, data, data + 0x1010, 0, 16), offset),
        // Blocks that there are not, and more than a command may have.
        (io(READ, data, 0, (DISK / 512) as u32, 1), range),
        (io(READ, data, data + PAGE, (DISK / 512 - 1) as u32, 9), range),
        (io(READ, data, data, 0, 257), field),
        (command(0x55, 4, 1, &[]), 0x01),
        (command(READ, 4, 2, &[]), 0x0b),
    ] {
        assert_eq!(guest.run(&mut queue, command).status, status, "{command:x?}");
        let good = io(READ, data, 0, 0, 8);
        assert_eq!(guest.run(&mut queue, good).status, 0);
    }
    // A list of one entry, which leads to itself.
    let at = DATA + 2 * PAGE - 8;
    guest.ram.write_all_at(&(RAM + at).to_le_bytes(), at).unwrap();
    assert_eq!(guest.run(&mut queue, io(WRITE, data, RAM + at, 0, 24)).status, offset);
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!(report.refused, 0);
}

#[test]
fn ram_goes_and_comes_in_pieces_under_load_and_no_command_notices() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 4);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    let depth = 32;
    for round in 0..60_u64 {
        for id in 0..depth {
            let data = pattern(round * depth + id + 1, 2 * PAGE);
            let pages = [DATA + 4 * id * PAGE, DATA + (4 * id + 2) * PAGE];
            for (page, bytes) in pages.iter().zip(data.chunks(PAGE as usize)) {
                guest.ram.write_all_at(bytes, *page).unwrap();
            }
            let write = guest.transfer(WRITE, id as u16, id * 16, 16, &pages);
            guest.put(&mut queue, write);
        }
        guest.ring(&queue);
        // As QEMU does it: everything goes and comes without an answer in between.
        let cut = (1 + round * 7 % 250) * PAGE;
        let mut requests = vec![guest.client.unmap(0, 1 << 47)];
        for (from, to) in [(0, DATA), (DATA, DATA + cut), (DATA + cut, RAM_LEN)] {
            let file = Some((guest.ram.as_fd(), from));
            requests.push(guest.client.map(RAM + from, to - from, file));
        }
        for request in requests {
            guest.client.answer(request).unwrap();
        }
        for _ in 0..depth {
            let done = guest.wait(&mut queue);
            assert_eq!(done.status, 0, "round {round}: {done:x?}");
        }
        for id in 0..depth {
            let data = pattern(round * depth + id + 1, 2 * PAGE);
            assert!(bytes_of(&disk, id * 16 * 512, 2 * PAGE) == data, "round {round}");
        }
    }
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!((report.refused, report.counts.failed), (0, 0));
    assert_eq!((report.counts.commands, report.unmaps), (60 * depth, 60));
    assert!(report.longest_unmap < Duration::from_secs(4), "{report}");
}

#[test]
fn one_unmap_takes_512_maps_another_what_is_up_to_the_end_of_addresses_and_one_nothing() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 4);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    // As a guest's IOMMU has them: a map for each page, far from the queues, with the last at the
    // end of all addresses.
    let window = 0x1_0000_0000;
    let top = u64::MAX - PAGE + 1;
    let last = DATA + 512 * PAGE;
    for round in 0..4_u64 {
        let file = |offset| Some((guest.ram.as_fd(), offset));
        let maps: Vec<u16> = (0..512)
            .map(|n| (window + n * PAGE, DATA + n * PAGE))
            .chain([(top, last)])
            .map(|(address, offset)| guest.client.map(address, PAGE, file(offset)))
            .collect();
        for map in maps {
            guest.client.answer(map).unwrap();
        }
        let io = |opcode, id: u16, prp1| {
            let first = u32::from(id) * 8;
            with_prps(command(opcode, id, 1, &[(10, first), (12, 7)]), prp1, 0)
        };
        for id in 0..32 {
            guest.put(&mut queue, io(READ, id, window + (u64::from(id) * 16 + round) * PAGE));
        }
        guest.put(&mut queue, io(WRITE, 32, top));
        guest.ring(&queue);
        // The second finds nothing, and the third ends at 2^64.
        for (address, len) in [(window, 512 * PAGE), (0x9_0000_0000, 1 << 32), (top, PAGE)] {
            let unmap = guest.client.unmap(address, len);
            assert_eq!(guest.client.answer(unmap).unwrap().len(), 24);
        }
        for _ in 0..33 {
            let done = guest.wait(&mut queue);
            assert!([0, 0x04].contains(&done.status), "{done:x?}");
        }
        // All of it is gone, and nothing else.
        for address in [window, window + 511 * PAGE, top] {
            assert_eq!(guest.run(&mut queue, io(READ, 1, address)).status, 0x04);
        }
        assert_eq!(guest.run(&mut queue, io(READ, 1, RAM + DATA)).status, 0);
    }
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!((report.refused, report.unmaps, report.most_regions), (0, 12, 514));
}

#[test]
fn nothing_reaches_memory_after_its_unmap_was_answered() {
    let disk = memfd(DISK);
    disk.write_all_at(&pattern(1, DISK), 0).unwrap();
    let mut guest = Guest::new(&disk, 4);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    // Data apart from the queues, so that only that goes.
    let id = guest.client.unmap(RAM, RAM_LEN);
    guest.client.answer(id).unwrap();
    guest.map_ram(0, DATA);
    for round in 0..20_u64 {
        guest.map_ram(DATA, RAM_LEN - DATA);
        for id in 0..32 {
            let pages: Vec<u64> = (0..MOST).map(|n| DATA + (id % 4 * MOST + n) * PAGE).collect();
            let read = guest.transfer(READ, id as u16, (id * 257 + round) % 900, 256, &pages);
            guest.put(&mut queue, read);
        }
        guest.ring(&queue);
        let unmap = guest.client.unmap(RAM + DATA, RAM_LEN - DATA);
        guest.client.answer(unmap).unwrap();
        let mark = [0xee; 4 * (MOST * PAGE) as usize];
        guest.ram.write_all_at(&mark, DATA).unwrap();
        for _ in 0..32 {
            let done = guest.wait(&mut queue);
            assert!([0, 0x04].contains(&done.status), "{done:x?}");
        }
        assert!(bytes_of(&guest.ram, DATA, mark.len() as u64) == mark, "round {round}");
    }
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!(report.counts.commands, 20 * 32);
}

#[test]
fn a_use_of_memory_that_was_taken_back_or_never_given_is_found() {
    let judge = Judge::new();
    judge.gave(RAM, 2 * PAGE, Prot::READ_WRITE);
    judge.gave(RAM + 2 * PAGE, PAGE, Prot::READ);
    judge.used(RAM + PAGE, 2 * PAGE, Prot::READ);
    judge.took(0, RAM);
    judge.used(RAM + PAGE, 8, Prot::WRITE);
    assert_eq!(judge.verdict(), (2, Vec::new()));
    judge.used(RAM + 2 * PAGE, 8, Prot::WRITE);
    judge.used(RAM - 8, 8, Prot::READ);
    assert_eq!(judge.verdict().1.len(), 2);
    judge.took(0, RAM + 2 * PAGE);
    judge.used(RAM + PAGE, 8, Prot::READ);
    assert_eq!(judge.verdict().1.len(), 3);
}

#[test]
fn completions_that_find_no_room_wait_for_it() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 3);
    let mut queue = guest.queue(1, ENTRIES, 4);
    for id in 0..40 {
        let read = guest.transfer(READ, id, 0, 8, &[DATA]);
        guest.put(&mut queue, read);
    }
    guest.ring(&queue);
    let mut seen: Vec<u16> = (0..40).map(|_| guest.wait(&mut queue).id).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<_>>());
    guest.client.end().1.unwrap();
}

#[test]
fn a_queue_is_deleted_when_its_commands_have_ended_and_can_be_made_again() {
    let disk = memfd(DISK);
    for threads in [1, 4] {
        let mut guest = Guest::new(&disk, threads);
        for _ in 0..20 {
            let mut queue = guest.queue(1, ENTRIES, ENTRIES);
            for id in 0..48 {
                let read = guest.transfer(READ, id, 0, 64, &[DATA; 8]);
                guest.put(&mut queue, read);
            }
            guest.ring(&queue);
            let delete = |opcode| command(opcode, 3, 0, &[(10, 1)]);
            // Not while a submission queue uses it.
            assert_eq!(guest.admin(delete(4)).status, 0x10c);
            assert_eq!(guest.admin(delete(0)).status, 0);
            let mark = [0xdd; 0x8000];
            guest.ram.write_all_at(&mark, DATA).unwrap();
            assert_eq!(guest.admin(delete(0)).status, 0x101);
            assert_eq!(guest.admin(delete(4)).status, 0);
            assert!(bytes_of(&guest.ram, DATA, 0x8000) == mark);
        }
        guest.client.end().1.unwrap();
    }
}

#[test]
fn a_reset_ends_what_is_under_way_by_each_of_its_three_ways() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 4);
    for turn in 0..30 {
        let mut queue = guest.queue(1, ENTRIES, ENTRIES);
        let pages: Vec<u64> = (0..MOST).map(|n| DATA + n * PAGE).collect();
        for id in 0..48 {
            let read = guest.transfer(READ, id, 0, 256, &pages);
            guest.put(&mut queue, read);
        }
        guest.ring(&queue);
        match turn % 3 {
            0 => {
                guest.client.write(0x14, &0_u32.to_le_bytes());
                while guest.client.register(0x1c) & 1 != 0 {}
            }
            1 => assert_eq!(guest.client.ask(RESET, &[]), Ok(Vec::new())),
            _ => {
                // Initiate Function Level Reset, in Device Control.
                guest.client.configure(0x68, &0x8000_u16.to_le_bytes());
                assert_eq!(guest.client.read(7, 0x68, 2), Ok(vec![0, 0]));
            }
        }
        let mark = vec![0xcc; (MOST * PAGE) as usize];
        guest.ram.write_all_at(&mark, DATA).unwrap();
        assert_eq!(guest.client.register(0x1c), 0);
        guest.enable();
        assert!(bytes_of(&guest.ram, DATA, MOST * PAGE) == mark);
    }
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!(report.refused, 0);
}

#[test]
fn a_function_that_is_no_bus_master_reaches_no_memory_until_it_is_one_again() {
    let disk = memfd(DISK);
    disk.write_all_at(&pattern(1, DISK), 0).unwrap();
    let mut guest = Guest::new(&disk, 4);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    let (count, pages) = (48, (0..MOST).map(|n| DATA + n * PAGE).collect::<Vec<u64>>());
    for round in 0..20_u64 {
        for id in 0..count {
            let read = guest.transfer(READ, id, round, 256, &pages);
            guest.put(&mut queue, read);
        }
        guest.ring(&queue);
        guest.client.configure(COMMAND, &NO_MASTER);
        let mut done = 0;
        while guest.poll(&mut queue).is_some() {
            done += 1;
        }
        guest.taken(&queue);
        // More work, of which nothing is done either.
        let last = guest.transfer(READ, count, round, 256, &pages);
        guest.put(&mut queue, last);
        guest.ring(&queue);
        let mark = vec![0xbb; (MOST * PAGE) as usize];
        guest.ram.write_all_at(&mark, DATA).unwrap();
        for _ in 0..100 {
            assert_eq!(guest.client.register(0x1c), 1);
        }
        assert_eq!(guest.poll(&mut queue), None, "round {round}");
        assert!(bytes_of(&guest.ram, DATA, MOST * PAGE) == mark, "round {round}");
        guest.client.configure(COMMAND, &MASTER);
        for _ in done..=count {
            assert_eq!(guest.wait(&mut queue).status, 0);
        }
        assert!(bytes_of(&guest.ram, DATA, MOST * PAGE) != mark);
    }
    let (report, ended) = guest.client.end();
    ended.unwrap();
    assert_eq!((report.refused, report.counts.failed), (0, 0));
}

#[test]
fn a_completion_signals_the_eventfd_of_its_queue() {
    let disk = memfd(DISK);
    let mut guest = Guest::new(&disk, 1);
    let mut queue = guest.queue(1, ENTRIES, ENTRIES);
    let event = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let words = [20_u32, 0x24, 2, 1, 1];
    let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let id = guest.client.send(SET_IRQS, 0, &body, &[event.as_fd()]);
    guest.client.answer(id).unwrap();
    let read = guest.transfer(READ, 1, 0, 8, &[DATA]);
    assert_eq!(guest.run(&mut queue, read).status, 0);
    // It is signalled behind the completion.
    let mut count = [0; 8];
    while (&event).read(&mut count).is_err() {}
    assert_eq!(u64::from_ne_bytes(count), 1);
    guest.client.end().1.unwrap();
}
