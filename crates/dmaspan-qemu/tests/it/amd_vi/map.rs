//! A device reaches memory as it is mapped, and nothing else.

use dmaspan::io_pgtable::AmdV1Config;
use dmaspan::{Iova, Prot, lg2};

use crate::amd_vi::rig::{COPIER, Rig, WRITERS, map, paging, unmap};

/// What `iommu-testdev` leaves in the first word, of 8 bytes that it writes.
const WRITTEN: u64 = 0x1234_5678_1234_5678;

#[test]
fn mapped_memory_is_reached_and_what_is_beside_it_is_not() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().allocate(0x3000).unwrap();
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let domain = rig.domain();
    map(&domain, 0x7f_0000_1000, buffer.span(), Prot::READ_WRITE);
    stream.attach(paging(&domain)).unwrap();

    let at = |offset| buffer.paddr().wrapping_add(offset);
    for offset in [0, 0xff8, 0x1000, 0x2ff8] {
        device.write(0x7f_0000_1000 + offset, at(offset), 8).unwrap();
        assert_eq!(buffer.word(usize::try_from(offset / 8).unwrap()), WRITTEN);
    }
    for iova in [0, 0x7f_0000_0ff8, 0x7f_0000_4000, 0x1000, buffer.paddr().get()] {
        device.write(iova, at(0x100), 8).unwrap_err();
    }
    assert_eq!(buffer.word(0x20), 0);
}

#[test]
fn permissions_are_enforced_both_ways() {
    let Some(rig) = Rig::start() else { return };
    let ram = rig.board.machine.ram();
    let [source, target] = [0, 1].map(|_| ram.allocate(0x1000).unwrap());
    source.set_word(0, 0x5151_5151);
    let (stream, mut copier) = (rig.stream(COPIER), rig.board.copier());
    let domain = rig.domain();
    map(&domain, 0x1000, source.span(), Prot::READ);
    map(&domain, 0x2000, target.span(), Prot::WRITE);
    stream.attach(paging(&domain)).unwrap();

    copier.read(0x1000, 8);
    copier.write(0x2000, 8);
    assert_eq!(target.word(0), 0x5151_5151, "what may be read arrives where may be written");

    source.set_word(1, 7);
    copier.write(0x1008, 8);
    assert_eq!(source.word(1), 7, "what may be read is not written");

    target.set_word(0, 0x6262_6262);
    copier.read(0x2000, 8);
    copier.write(0x2008, 8);
    assert_ne!(target.word(1), 0x6262_6262, "what may be written is not read");
}

#[test]
fn leaves_of_every_size_are_honoured_to_their_last_word() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().reserve(1 << 30).unwrap();
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    for lg2 in 12..=30 {
        let domain = rig.domain();
        let bytes = lg2::size(lg2);
        let iova = 5 << 32;
        let span = dmaspan::Span::new(buffer.paddr(), bytes).unwrap();
        map(&domain, iova, span, Prot::READ_WRITE);
        let found = rig.walk(&domain, Iova::new(iova + bytes - 1)).unwrap();
        assert_eq!(found.group_lg2, lg2, "one leaf of 2^{lg2}");
        stream.replace(paging(&domain)).unwrap();

        for offset in [0, bytes / 2, bytes - 8] {
            let word = usize::try_from(offset / 8).unwrap();
            buffer.set_word(word, 0);
            device.write(iova + offset, buffer.paddr().wrapping_add(offset), 8).unwrap();
            assert_eq!(buffer.word(word), WRITTEN, "2^{lg2} at {offset:#x}");
        }
        for iova in [iova - 8, iova + bytes] {
            device.write(iova, buffer.paddr(), 8).unwrap_err();
        }
        unmap(&domain, iova, bytes);
        for offset in [0, bytes / 2, bytes - 8] {
            device.write(iova + offset, buffer.paddr(), 8).unwrap_err();
        }
        stream.detach().unwrap();
    }
}

#[test]
fn a_tree_grows_under_its_devices() {
    let Some(rig) = Rig::start() else { return };
    let buffers = [0; 6].map(|_| rig.board.machine.ram().allocate(0x1000).unwrap());
    for first_levels in 1..=3 {
        let config = AmdV1Config { first_levels, ..rig.iommu.v1_config() };
        let domain = rig.domain_of(config);
        let streams = WRITERS.map(|slot| rig.stream(slot));
        let mut devices = [0, 1].map(|index| rig.board.writer(index));
        map(&domain, 0x1000, buffers[0].span(), Prot::READ_WRITE);
        for stream in &streams {
            stream.attach(paging(&domain)).unwrap();
        }
        let (_, before) = domain.root_and_level();
        // One more address in the reach of each level.
        let iovas = [0x1000, 0x10_0000, 0x3000_0000, 0x70_0000_0000, 0xff00_0000_0000];
        for (nth, &iova) in iovas.iter().enumerate() {
            if nth > 0 {
                map(&domain, iova, buffers[nth].span(), Prot::READ_WRITE);
            }
            for device in &mut devices {
                for (&iova, buffer) in iovas.iter().zip(&buffers).take(nth + 1) {
                    buffer.set_word(0, 0);
                    device.write(iova, buffer.paddr(), 8).unwrap();
                    assert_eq!(buffer.word(0), WRITTEN);
                }
            }
        }
        assert!(domain.root_and_level().1 > before);
    }
}
