//! Clients that send what they should not.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::thread;

use dmaspan_nvme_server::{Disk, Session, WireError};
use dmaspan_vfio_user::ClientDma;
use rustix::pipe::pipe;

use crate::client::*;
use crate::guest::{Guest, PAGE, RAM};

const EINVAL: u32 = 22;
const EOPNOTSUPP: u32 = 95;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn a_request_that_is_short_wrong_or_unknown_gets_an_errno_and_the_next_one_an_answer() {
    let disk = memfd(1 << 20);
    let mut client = Client::new(&disk, 1);
    for command in 0..=u16::MAX {
        // All of the first, a few of the others.
        if command > 20 && command % 4099 != 0 {
            continue;
        }
        for len in 0..40 {
            let answer = client.ask(command, &vec![0xff; len]);
            let is_reset = command == 13;
            let is_info = command == 4 && len >= 4;
            match answer {
                Ok(_) => assert!(is_reset || is_info, "{command} with {len} bytes"),
                Err(errno) => assert!(!is_reset && errno != 0, "{command} with {len} bytes"),
            }
        }
    }
    assert_eq!(client.ask(6, &words(&[0; 4])), Err(EOPNOTSUPP));
    assert_eq!(client.ask(VERSION, b"\x01\0\0\0{}\0"), Err(EINVAL));
    assert!(client.ask(VERSION, b"\0\0\x05\0{}\0").unwrap().starts_with(b"\0\0\x01\0{"));
    // Regions: outside, over the end, and more than there is.
    for (region, offset, len) in [
        (0, 0x4000, 1),
        (0, 0x3ffc, 8),
        (0, u64::MAX, 4),
        (0, 0, u32::MAX),
        (7, 4093, 4),
        (7, u64::MAX, 1),
        (1, 0, 4),
        (u32::MAX, 0, 4),
    ] {
        assert_eq!(client.read(region, offset, len), Err(EINVAL), "{region} {offset:#x} {len}");
        let mut body = access(region, offset, len);
        body.resize(16 + len.min(8) as usize, 0);
        assert_eq!(client.ask(REGION_WRITE, &body), Err(EINVAL));
    }
    assert_eq!(client.read(0, 0, 8).unwrap().len(), 8);
    // Messages that are no requests have no answer.
    for flags in [1, 2, 0xf, 0x21] {
        client.send(DMA_MAP, flags, &[0; 32], &[]);
    }
    assert_eq!(client.read(0, 8, 4).unwrap(), [0, 4, 1, 0]);
    let (report, ended) = client.end();
    ended.unwrap();
    assert!(report.refused > 100 && report.first_refusal.is_some());
}

#[test]
fn a_map_or_an_unmap_that_cannot_be_is_an_error_and_nothing_else() {
    let disk = memfd(1 << 20);
    let mut guest = Guest::new(&disk, 1);
    let file = memfd(2 * PAGE);
    let fd = file.as_fd();
    let top = u64::MAX - PAGE + 1;
    for (address, len, file) in [
        // Over what is there, wrapping, unaligned, huge, empty, behind the file.
        (RAM, PAGE, Some((fd, 0))),
        (RAM - PAGE, 2 * PAGE, None),
        (top, 2 * PAGE, Some((fd, 0))),
        (top, u64::MAX, None),
        (0, PAGE + 1, Some((fd, 0))),
        (0, PAGE, Some((fd, 8))),
        (0, 1 << 62, Some((fd, 0))),
        (0, 0, Some((fd, 0))),
        (0, 0, None),
        (0, 2 * PAGE, Some((fd, PAGE))),
        (0, PAGE, Some((fd, top))),
    ] {
        let id = guest.client.map(address, len, file);
        assert!(guest.client.answer(id).is_err(), "{address:#x} {len:#x} {file:?}");
    }
    for (address, len) in
        [(RAM, PAGE), (RAM + PAGE, PAGE), (RAM - PAGE, 2 * PAGE), (RAM, 0), (2, u64::MAX)]
    {
        let id = guest.client.unmap(address, len);
        assert!(guest.client.answer(id).is_err(), "{address:#x} {len:#x}");
    }
    // Nothing is there; the end of the address space.
    for (address, len) in [(0, RAM), (0x8000_0000, 1 << 47), (top, PAGE)] {
        let id = guest.client.unmap(address, len);
        assert_eq!(guest.client.answer(id).unwrap().len(), 24);
    }
    let flags = words(&[24, 1, 0, 0, 0, 0]);
    assert_eq!(guest.client.ask(DMA_UNMAP, &flags), Err(EINVAL));
    // Everything.
    let all = words(&[24, 2, 0, 0, 0, 0]);
    guest.client.ask(DMA_UNMAP, &all).unwrap();
    guest.map_ram(0, crate::guest::RAM_LEN);
    guest.client.end().1.unwrap();
}

#[test]
fn descriptors_of_the_wrong_kind_or_number_are_refused() {
    let disk = memfd(1 << 20);
    let mut client = Client::new(&disk, 1);
    let (reader, writer) = pipe().unwrap();
    let map = words(&[32, 3, 0, 0, 0, 0, 0x1000, 0]);
    let set = |count| words(&[20, 0x24, 2, 0, count]);
    let mut ask = |command, body: &[u8], fds: &[BorrowedFd<'_>]| {
        let id = client.send(command, 0, body, fds);
        client.answer(id)
    };
    let fd = reader.as_fd();
    assert_eq!(ask(DMA_MAP, &map, &[fd, fd]), Err(EINVAL));
    assert_eq!(ask(DMA_MAP, &map, &[fd; 17]), Err(24));
    // A write to a pipe could wait for ever.
    assert_eq!(ask(SET_IRQS, &set(1), &[writer.as_fd()]), Err(EINVAL));
    assert_eq!(ask(SET_IRQS, &set(2), &[fd]), Err(EINVAL));
    assert_eq!(ask(SET_IRQS, &set(18), &[]), Err(EINVAL));
    assert_eq!(ask(SET_IRQS, &words(&[20, 0x24, 2, 1, u32::MAX]), &[]), Err(EINVAL));
    assert_eq!(ask(SET_IRQS, &words(&[20, 0x21, 2, 0, 1]), &[]), Err(EINVAL));
    assert_eq!(ask(SET_IRQS, &words(&[20, 0x24, 0, 0, 1]), &[]), Err(EINVAL));
    assert_eq!(ask(SET_IRQS, &words(&[20, 0x21, 2, 0, 0]), &[]), Ok(Vec::new()));
    // A pipe is no memory: it is remembered, and an access would fail.
    assert_eq!(ask(DMA_MAP, &map, &[fd]), Ok(Vec::new()));
    client.end().1.unwrap();
}

#[test]
fn a_socket_that_ends_in_a_message_ends_the_session() {
    let disk = memfd(1 << 20);
    let header = |len: u32| {
        let mut bytes = vec![1, 0, 2, 0];
        bytes.extend(len.to_le_bytes());
        bytes.extend([0; 8]);
        bytes
    };
    for len in 0..16 {
        let (_, ended) = Client::new(&disk, 1).end_with(&vec![0; len]);
        match len {
            0 => ended.unwrap(),
            _ => assert!(matches!(ended, Err(WireError::Ended { got }) if got == len)),
        }
    }
    let mut part = header(48);
    part.extend([0; 31]);
    let (_, ended) = Client::new(&disk, 1).end_with(&part);
    assert!(matches!(ended, Err(WireError::Ended { got: 47 })));
    for len in [0, 15, 1 << 21, u32::MAX] {
        let (_, ended) = Client::new(&disk, 1).end_with(&header(len));
        assert!(matches!(ended, Err(WireError::Length { len: found }) if found == len));
    }
}

#[test]
fn a_guest_whose_queues_are_nowhere_has_a_controller_that_failed_and_can_be_reset() {
    let disk = memfd(1 << 20);
    let mut guest = Guest::new(&disk, 2);
    let unmap = guest.client.unmap(RAM, crate::guest::RAM_LEN);
    guest.client.answer(unmap).unwrap();
    guest.client.write(0x1000, &1_u32.to_le_bytes());
    // CSTS.CFS.
    while guest.client.register(0x1c) & 2 == 0 {
        thread::yield_now();
    }
    guest.client.write(0x14, &0_u32.to_le_bytes());
    while guest.client.register(0x1c) != 0 {
        thread::yield_now();
    }
    guest.map_ram(0, crate::guest::RAM_LEN);
    guest.enable();
    // Doorbells of queues that there are not, and values that no queue has.
    for offset in (0x1000..0x2000).step_by(4) {
        guest.client.write(offset, &u32::MAX.to_le_bytes());
        guest.client.write(offset, &[1]);
        guest.client.write(offset, &[1; 8]);
    }
    // Page sizes and queues that there are not.
    for cc in [1 | 1 << 7, 1 | 1 << 4] {
        guest.client.write(0x14, &0_u32.to_le_bytes());
        while guest.client.register(0x1c) != 0 {
            thread::yield_now();
        }
        guest.client.write(0x14, &u32::to_le_bytes(cc));
        assert_eq!(guest.client.register(0x1c), 2);
    }
    guest.client.end().1.unwrap();
}

#[test]
fn the_client_of_the_crate_finds_the_device() {
    let disk = memfd(1 << 20);
    let path = std::env::temp_dir().join(format!("dmaspan-nvme-server-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let disk = Disk::new(disk).unwrap();
    let session = Session::new(disk, ClientDma::default(), 1).unwrap();
    let serving = thread::spawn(move || session.serve(&listener.accept().unwrap().0));
    let mut client = vfio_user::Client::new(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(client.region(0).unwrap().size, 0x4000);
    let mut id = [0; 4];
    client.region_read(7, 0, &mut id).unwrap();
    assert_eq!(id, [0x36, 0x1b, 0x10, 0x00]);
    assert_eq!(client.get_irq_info(2).unwrap().count, 17);
    let memory: File = memfd(PAGE);
    client.dma_map(0, RAM, PAGE, std::os::fd::AsRawFd::as_raw_fd(&memory)).unwrap();
    client.dma_unmap(RAM, PAGE).unwrap();
    client.reset().unwrap();
    client.shutdown().unwrap();
    let (report, ended) = serving.join().unwrap();
    ended.unwrap();
    assert_eq!(report.refused, 0);
}
