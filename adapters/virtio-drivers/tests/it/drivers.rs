//! The drivers of the crate over the `Hal`, and devices that try what they may not.
#![expect(clippy::cast_possible_truncation, reason = "numbers of these tests are small")]

use dmaspan_virtio_drivers::{BehindIommu, Hal, VirtioUsage, hal};
use virtio_drivers::device::blk::VirtIOBlk;
use virtio_drivers::device::net::{TxBuffer, VirtIONet};

use crate::model::{Handle, INDIRECT, Kind, Model, SECRET, SECTOR};
use crate::rig::{copying, untrusted};

fn behind(device: &Handle) -> BehindIommu<Handle> {
    BehindIommu::new(device.clone()).unwrap_or_else(|_| panic!("it offers the feature"))
}

/// Reads and writes sectors by buffers amid others of the same page, and looks at the others.
fn drive_disk<H: Hal>(device: &Handle) {
    let mut disk = VirtIOBlk::<H, _>::new(behind(device)).unwrap();
    assert_eq!(disk.capacity(), 64);
    let mut memory = vec![SECRET; 64 << 10];
    for (n, sectors) in [1, 2, 9, 16].into_iter().enumerate() {
        let (at, len) = (3000 * n + 77, sectors * SECTOR);
        let first = 5 * n;
        let expected = device.model().sectors[first * SECTOR..][..len].to_vec();
        disk.read_blocks(first, &mut memory[at..at + len]).unwrap();
        assert_eq!(&memory[at..at + len], expected);
        assert!(memory[..at].iter().chain(&memory[at + len..]).all(|&byte| byte == SECRET));
        // And back, to another place of the disk.
        disk.write_blocks(first + 30, &memory[at..at + len]).unwrap();
        assert_eq!(device.model().sectors[(first + 30) * SECTOR..][..len], expected);
        assert_eq!(&memory[at..at + len], expected);
        memory[at..at + len].fill(SECRET);
    }
}

/// The device tried at each request, and saw nothing.
fn expect_kept_out(device: &Handle) {
    let Model { reached, seen, requests, .. } = &*device.model();
    assert_eq!((*seen, *requests), (0, 8), "it saw what lies beside a buffer");
    assert!(*reached > 0, "it tried nothing");
}

#[test]
fn their_disk_driver_works_and_its_device_reaches_neither_neighbours_nor_what_was_unshared() {
    hal! { struct Direct: parking_lot::RawMutex; }
    hal! { struct Indirect: parking_lot::RawMutex; }
    let (dma, reach) = untrusted();
    Direct::attach(dma).unwrap();
    let device = Handle::new(Kind::Disk, reach, 0);
    drive_disk::<Direct>(&device);
    expect_kept_out(&device);
    assert_eq!((device.model().late, Direct::usage()), (0, VirtioUsage::default()));

    let (dma, reach) = untrusted();
    Indirect::attach(dma).unwrap();
    let device = Handle::new(Kind::Disk, reach, INDIRECT);
    drive_disk::<Indirect>(&device);
    expect_kept_out(&device);
    assert_eq!((device.model().late, Indirect::usage()), (0, VirtioUsage::default()));
}

#[test]
fn their_disk_driver_works_by_copies_and_its_device_reaches_nothing_but_slots() {
    hal! { struct Direct: parking_lot::RawMutex; }
    hal! { struct Indirect: parking_lot::RawMutex; }
    let (dma, reach) = copying(1 << 20);
    Direct::attach(dma).unwrap();
    let device = Handle::new(Kind::Disk, reach, 0);
    drive_disk::<Direct>(&device);
    expect_kept_out(&device);
    assert_eq!(Direct::usage(), VirtioUsage::default());

    let (dma, reach) = copying(1 << 20);
    Indirect::attach(dma).unwrap();
    let device = Handle::new(Kind::Disk, reach, INDIRECT);
    drive_disk::<Indirect>(&device);
    expect_kept_out(&device);
    assert_eq!(Indirect::usage(), VirtioUsage::default());
}

/// Packets that come back as they were sent. The driver leaves its receive buffers with the device
/// when it is dropped, which are counted.
fn drive_network<H: Hal>(device: &Handle) {
    const BUFFERS: usize = 16;
    let mut card = VirtIONet::<H, _, BUFFERS>::new(behind(device), 2048).unwrap();
    assert_eq!(card.mac_address(), [2, 0, 0, 0, 0, 1]);
    for n in 0..100usize {
        let packet: Vec<u8> = (0..60 + 14 * n).map(|byte| (byte ^ n) as u8).collect();
        card.send(TxBuffer::from(&packet)).unwrap();
        let received = card.receive().unwrap();
        assert_eq!(received.packet(), packet, "packet {n}");
        card.recycle_rx_buffer(received).unwrap();
    }
}

#[test]
fn their_network_driver_works_and_buffers_that_it_leaves_behind_are_counted() {
    hal! { struct Mapped: parking_lot::RawMutex; }
    hal! { struct Copied: parking_lot::RawMutex; }
    let left = VirtioUsage { buffers: 16, queues: 0, refused: 0 };
    let (dma, reach) = untrusted();
    Mapped::attach(dma).unwrap();
    drive_network::<Mapped>(&Handle::new(Kind::Network, reach, 0));
    assert_eq!(Mapped::usage(), left);
    let (dma, reach) = copying(1 << 20);
    Copied::attach(dma).unwrap();
    drive_network::<Copied>(&Handle::new(Kind::Network, reach, INDIRECT));
    assert_eq!(Copied::usage(), left);
}

/// Lines of what a program writes to drive a disk by VFIO, without comments.
#[test]
fn a_user_writes_at_most_60_lines() {
    let program = include_str!("../../examples/virtio_disk.rs");
    let (_, rest) = program.split_once("// ANCHOR: glue").unwrap();
    let (glue, _) = rest.split_once("// ANCHOR_END: glue").unwrap();
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let lines = glue.lines().filter(is_code).count();
    assert!(lines <= 60, "{lines} lines");
}
