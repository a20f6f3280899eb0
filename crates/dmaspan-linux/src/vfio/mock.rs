//! What iommufd does with the devices that it has for its own tests. These run where the kernel has
//! them, and the user may open `/dev/iommu`.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Prot};

use super::*;
use crate::sys;
use crate::sys::iommufd::mock;
use crate::sys::kept::fake::iovas;
use crate::{Memory, MemoryKind};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 0x1000;

/// `MOCK_APERTURE_START` and `MOCK_APERTURE_LAST`.
const FIRST: u64 = 1 << 24;
const LAST: u64 = (1 << 31) - 1;

/// An address space, where there are devices for tests.
fn space() -> Option<Ioas> {
    let space = match Iommufd::open() {
        Ok(iommufd) => iommufd.ioas().unwrap(),
        Err(error) => {
            println!("SKIP: {error}");
            return None;
        }
    };
    match device(&space) {
        Ok(device) => destroy(&space, &device),
        Err(errno) => {
            println!("SKIP: the kernel has no devices for tests ({errno})");
            return None;
        }
    }
    Some(space)
}

fn device(space: &Ioas) -> Result<mock::Device, Errno> {
    mock::device(space.id().iommufd(), space.id().get())
}

fn destroy(space: &Ioas, device: &mock::Device) {
    space.id().iommufd().destroy(device.device).unwrap();
}

fn memory(len: u64) -> Arc<Memory> {
    Arc::new(Memory::new(MemoryKind::Base, len).unwrap())
}

fn map(space: &Ioas, memory: &Arc<Memory>, iova: u64) -> Result<(), Error> {
    space.map(memory, memory.user_range(), Iova::new(iova), Prot::READ_WRITE)
}

fn at(iova: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(iova), len).unwrap()
}

#[test]
fn mock_dirty_pages_are_read_across_holes_and_cleared_or_kept() {
    let Some(space) = space() else { return };
    let first = device(&space).unwrap();
    let iommufd = Arc::clone(space.id().iommufd());
    let capabilities = iommufd.capabilities(first.id).unwrap();
    assert_ne!(capabilities & sys::uapi::iommufd::HW_CAP_DIRTY_TRACKING, 0);
    // A leaf has one dirty bit, so that neighbouring frames would be dirty together.
    space.set_huge_pages(HugePages::Off).unwrap();
    let memory = memory(MIB);
    let (one, other) = (2 * FIRST, 2 * FIRST + 2 * MIB);
    map(&space, &memory, one).unwrap();
    map(&space, &memory, other).unwrap();
    let bdf = "0000:00:00.0".parse().unwrap();
    let plain = space.hwpt_for(bdf, first.id, DirtyTracking::Off).unwrap();
    let refused = plain.set_dirty_tracking(DirtyTracking::On).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    drop(plain);
    let table = space.hwpt_for(bdf, first.id, DirtyTracking::On).unwrap();
    let second = mock::device(&iommufd, table.id().get()).unwrap();
    table.set_dirty_tracking(DirtyTracking::On).unwrap();
    for iova in [one, other] {
        // Pages 1, 2 and 255 of each mapping.
        let mut bits = [6, 0, 0, 1 << 63];
        mock::write(&iommufd, table.id().get(), at(iova, MIB), PAGE, &mut bits).unwrap();
    }
    let all = at(one, 3 * MIB);
    let page = |base: u64, page: u64, count: u64| at(base + page * PAGE, count * PAGE);
    let dirty = [page(one, 1, 2), page(one, 255, 1), page(other, 1, 2), page(other, 255, 1)];
    for notes in [DirtyNotes::Keep, DirtyNotes::Clear] {
        let mut bitmap = DirtyBitmap::new(all, PAGE).unwrap();
        table.read_dirty(&mut bitmap, notes).unwrap();
        assert_eq!(bitmap.ranges().collect::<Vec<_>>(), dirty);
    }
    let mut bitmap = DirtyBitmap::new(all, PAGE).unwrap();
    table.read_dirty(&mut bitmap, DirtyNotes::Clear).unwrap();
    assert_eq!(bitmap.dirty_pages(), 0);
    // In larger pages, of a part of a mapping.
    let mut bits = [1 << 5, 0, 0, 0];
    mock::write(&iommufd, table.id().get(), at(one, MIB), PAGE, &mut bits).unwrap();
    let mut bitmap = DirtyBitmap::new(at(one, MIB / 2), 0x1_0000).unwrap();
    table.read_dirty(&mut bitmap, DirtyNotes::Clear).unwrap();
    assert_eq!(bitmap.ranges().collect::<Vec<_>>(), [at(one, 0x1_0000)]);
    let small = DirtyBitmap::new(at(one, MIB), 0x800)
        .map(|mut bitmap| table.read_dirty(&mut bitmap, DirtyNotes::Keep));
    assert!(matches!(small, Ok(Err(Error::Bitmap { .. }))));
    table.set_dirty_tracking(DirtyTracking::Off).unwrap();
    destroy(&space, &second);
    drop(table);
    destroy(&space, &first);
    assert_eq!(space.unmap_all(), Ok(2 * MIB));
}

#[test]
fn mock_copies_outlive_their_sources_and_keep_their_memory() {
    let Some(from) = space() else { return };
    let to = from.iommufd().ioas().unwrap();
    let devices = [(&from, device(&from).unwrap()), (&to, device(&to).unwrap())];
    let memories = [memory(MIB), memory(MIB)];
    map(&from, &memories[0], FIRST).unwrap();
    map(&from, &memories[1], FIRST + MIB).unwrap();
    let weak: Vec<_> = memories.iter().map(Arc::downgrade).collect();
    drop(memories);
    let part = at(FIRST + MIB / 2, MIB);
    to.copy(&from, part, Iova::new(2 * FIRST), Prot::READ_WRITE).unwrap();
    let hole = at(FIRST + MIB, 2 * MIB);
    let refused = to.copy(&from, hole, Iova::new(4 * FIRST), Prot::READ).unwrap_err();
    assert_eq!(refused, Error::NotMapped { range: hole });
    let low = to.copy(&from, part, Iova::new(0), Prot::READ).unwrap_err();
    assert!(matches!(low, Error::OutsideApertures { .. }), "{low}");
    // In the same address space.
    from.copy(&from, part, Iova::new(3 * FIRST), Prot::READ).unwrap();
    assert_eq!(from.unmap_all(), Ok(3 * MIB));
    assert!(weak.iter().all(|memory| memory.strong_count() == 1));
    assert!(matches!(to.unmap(at(2 * FIRST, MIB / 2)), Err(Error::Bisects { .. })));
    assert_eq!(to.unmap_all(), Ok(MIB));
    assert!(weak.iter().all(|memory| memory.strong_count() == 0));
    devices.iter().for_each(|(space, device)| destroy(space, device));
}

#[test]
fn mock_files_are_mapped_without_memory_of_the_process() {
    let Some(space) = space() else { return };
    let device = device(&space).unwrap();
    let file = File::from(sys::memfd(c"dmaspan", 0).unwrap());
    file.set_len(MIB).unwrap();
    let fd = file.as_fd();
    let ask =
        |offset, len, iova| space.map_file(fd, offset, len, Iova::new(iova), Prot::READ_WRITE);
    ask(MIB / 2, MIB / 2, FIRST).unwrap();
    assert!(matches!(ask(0, MIB, FIRST), Err(Error::Overlap { .. })));
    let offset = ask(8, MIB / 2, 2 * FIRST).unwrap_err();
    assert!(matches!(offset, Error::Misaligned { what: "the offset", .. }), "{offset}");
    let long = ask(MIB / 2, MIB, 2 * FIRST).unwrap_err();
    assert_eq!(long.errno(), Errno::EINVAL);
    let pipe = File::open("/dev/null").unwrap();
    let (iova, prot) = (Iova::new(3 * FIRST), Prot::READ);
    let other = space.map_file(&pipe, 0, PAGE, iova, prot).unwrap_err();
    assert_eq!(other.errno(), Errno::EINVAL);
    assert_eq!(space.mappings(), 1);
    assert_eq!(space.unmap_all(), Ok(MIB / 2));
    destroy(&space, &device);
}

#[test]
fn mock_limits_shrink_with_a_device_and_grow_again_without_it() {
    let Some(space) = space() else { return };
    let everywhere = iovas(0, u64::MAX);
    assert_eq!(space.limits().apertures, [everywhere]);
    let page = memory(PAGE);
    // Both ends, which one request unmaps.
    map(&space, &page, 0).unwrap();
    map(&space, &page, u64::MAX - PAGE + 1).unwrap();
    let unmaps = space.requests().unmaps;
    assert_eq!(space.unmap_all(), Ok(2 * PAGE));
    assert_eq!(space.requests().unmaps, unmaps + 1);
    map(&space, &page, 0).unwrap();
    assert_eq!(device(&space).unwrap_err(), Errno::EADDRINUSE);
    space.unmap_all().unwrap();
    map(&space, &page, FIRST).unwrap();
    let narrow = device(&space).unwrap();
    assert_eq!(space.limits().apertures, [iovas(FIRST, LAST)]);
    let before = space.requests();
    let refused = map(&space, &page, 0).unwrap_err();
    assert!(matches!(refused, Error::OutsideApertures { .. }), "{refused}");
    assert_eq!(space.requests(), before);
    destroy(&space, &narrow);
    // What was known is too narrow by now, and nobody asked for the limits since.
    map(&space, &page, 0).unwrap();
    assert_eq!(space.limits().apertures, [everywhere]);
    // What is known is too wide after a device came without our asking.
    space.unmap(at(0, PAGE)).unwrap();
    let behind = device(&space).unwrap();
    let late = map(&space, &page, 0).unwrap_err();
    assert!(matches!(late, Error::OutsideApertures { .. }), "{late}");
    assert_eq!(space.mappings(), 1);
    destroy(&space, &behind);
}

#[test]
fn mock_promised_iovas_and_options_are_the_kernels() {
    let Some(space) = space() else { return };
    space.allow_iovas(&[at(FIRST, MIB), at(2 * FIRST, MIB)]).unwrap();
    device(&space).map(|device| destroy(&space, &device)).unwrap();
    space.allow_iovas(&[at(0, MIB)]).unwrap();
    assert_eq!(device(&space).unwrap_err(), Errno::EADDRINUSE);
    space.allow_iovas(&[]).unwrap();
    let device = device(&space).unwrap();
    let refused = space.allow_iovas(&[at(0, MIB)]).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    assert_eq!(space.huge_pages(), Ok(HugePages::On));
    space.set_huge_pages(HugePages::Off).unwrap();
    assert_eq!(space.huge_pages(), Ok(HugePages::Off));
    let page = memory(MIB);
    map(&space, &page, FIRST).unwrap();
    space.unmap_all().unwrap();
    destroy(&space, &device);
    let late = space.iommufd().set_accounting(Accounting::Process).unwrap_err();
    assert_eq!(late.errno(), Errno::EBUSY);
    let early = Iommufd::open().unwrap();
    early.set_accounting(Accounting::Process).unwrap();
    assert_eq!(early.accounting(), Ok(Accounting::Process));
    let counted = early.ioas().unwrap();
    map(&counted, &page, 0).unwrap();
}
