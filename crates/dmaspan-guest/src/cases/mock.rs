//! The operations of iommufd on the devices that it has for its own tests.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::{
    DirtyLogging, DirtyNotes, DirtyPages, Error, HugePages, Ioas, Iommufd, LockedBy, MockDevice,
};
use dmaspan_linux::{Memory, MemoryKind};
use rustix::fs::{MemfdFlags, memfd_create};

use super::iommufd::NEEDS;
use super::{Case, MIB, Outcome, Result, case};

/// What the IOMMU of these devices maps (`MOCK_APERTURE_START` and `MOCK_APERTURE_LAST`).
/// The mock is of a kernel with such pages.
const PAGE: u64 = 4096;
const FIRST: u64 = 1 << 24;
const LAST: u64 = (1 << 31) - 1;

pub(super) const CASES: &[Case] = &[
    // What devices wrote.
    case("mock/dirty_pages_are_read_across_holes_and_cleared_or_kept", NEEDS, |_| {
        with_space(dirty_pages)
    }),
    // A leaf of many pages has one note, and the kernel writes all of its bits.
    case("mock/a_large_leaf_is_dirty_as_a_whole_and_read_as_a_whole", NEEDS, |_| {
        with_space(large_leaves)
    }),
    // A copy keeps the memory of what it was copied from.
    case("mock/copies_outlive_their_sources_and_keep_their_memory", NEEDS, |_| with_space(copies)),
    // The kernel holds a file's memory.
    case("mock/files_are_mapped_without_memory_of_the_process", NEEDS, |_| with_space(files)),
    // What can be mapped changes with the devices.
    case("mock/limits_shrink_with_a_device_and_grow_again_without_it", NEEDS, |_| {
        with_space(limits)
    }),
    // What is promised is kept.
    case("mock/promised_iovas_and_options_are_the_kernels", NEEDS, |_| with_space(promises)),
];

/// Runs a case with an address space, where there are devices for tests.
fn with_space(case: fn(&Ioas) -> Result) -> Result {
    let space = Iommufd::open()?.ioas()?;
    match MockDevice::of_space(&space) {
        Ok(device) => drop(device),
        Err(error) => {
            let why = format!("the kernel is built without CONFIG_IOMMUFD_TEST: {error}");
            return Ok(Outcome::Skipped(why));
        }
    }
    case(&space)
}

fn memory(kind: MemoryKind, len: u64) -> Result<Arc<Memory>> {
    Ok(Arc::new(Memory::new(kind, len)?))
}

fn map(space: &Ioas, memory: &Arc<Memory>, iova: u64) -> Result<(), Error> {
    space.map(memory, memory.user_range(), Iova::new(iova), Prot::READ_WRITE)
}

fn at(iova: u64, len: u64) -> Result<IovaRange> {
    Ok(IovaRange::from_len(Iova::new(iova), len)?)
}

fn dirty_pages(space: &Ioas) -> Result {
    let first = MockDevice::of_space(space)?;
    assert!(first.has_dirty_tracking()?);
    // A leaf has one dirty bit, so that neighbouring frames would be dirty together.
    space.set_huge_pages(HugePages::Off)?;
    let memory = memory(MemoryKind::Base, MIB)?;
    let (one, other) = (2 * FIRST, 2 * FIRST + 2 * MIB);
    map(space, &memory, one)?;
    map(space, &memory, other)?;
    let plain = first.hwpt(space, DirtyLogging::Off)?;
    let refused = plain.set_dirty_tracking(DirtyLogging::On);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    drop(plain);
    let table = first.hwpt(space, DirtyLogging::On)?;
    let second = MockDevice::of_table(&table)?;
    table.set_dirty_tracking(DirtyLogging::On)?;
    let mut dirty = Vec::new();
    for base in [one, other] {
        let mut pages = DirtyPages::new(at(base, MIB)?, PAGE)?;
        for (page, count) in [(1, 2), (255, 1)] {
            dirty.push(at(base + page * PAGE, count * PAGE)?);
            pages.mark(at(base + page * PAGE, count * PAGE)?);
        }
        assert_eq!(table.mock_write(&pages)?, 3);
    }
    let all = at(one, 3 * MIB)?;
    for notes in [DirtyNotes::Keep, DirtyNotes::Clear] {
        let mut bitmap = DirtyPages::new(all, PAGE)?;
        table.read_dirty(&mut bitmap, notes)?;
        assert_eq!(bitmap.ranges().collect::<Vec<_>>(), dirty);
    }
    let mut bitmap = DirtyPages::new(all, PAGE)?;
    table.read_dirty(&mut bitmap, DirtyNotes::Clear)?;
    assert_eq!(bitmap.dirty_pages(), 0);
    // In larger pages.
    let mut pages = DirtyPages::new(at(one, MIB)?, PAGE)?;
    pages.mark(at(one + 5 * PAGE, PAGE)?);
    table.mock_write(&pages)?;
    let mut bitmap = DirtyPages::new(at(one, MIB)?, 0x1_0000)?;
    table.read_dirty(&mut bitmap, DirtyNotes::Clear)?;
    assert_eq!(bitmap.ranges().collect::<Vec<_>>(), [at(one, 0x1_0000)?]);
    let mut small = DirtyPages::new(at(one, MIB)?, 0x800)?;
    let refused = table.read_dirty(&mut small, DirtyNotes::Keep);
    assert!(matches!(refused, Err(Error::Bitmap { .. })), "{refused:?}");
    table.set_dirty_tracking(DirtyLogging::Off)?;
    drop((second, table));
    drop(first);
    assert_eq!(space.unmap_all(), Ok(2 * MIB));
    Ok(Outcome::Passed)
}

fn large_leaves(space: &Ioas) -> Result {
    let first = MockDevice::of_space(space)?;
    let memory = memory(MemoryKind::Thp, 2 * MIB)?;
    map(space, &memory, 2 * FIRST)?;
    let table = first.hwpt(space, DirtyLogging::On)?;
    let second = MockDevice::of_table(&table)?;
    table.set_dirty_tracking(DirtyLogging::On)?;
    let whole = at(2 * FIRST, 2 * MIB)?;
    let mut pages = DirtyPages::new(whole, PAGE)?;
    pages.mark(at(2 * FIRST + 70 * PAGE, PAGE)?);
    table.mock_write(&pages)?;
    for (offset, len) in [(0, 64 * PAGE), (64 * PAGE, 64 * PAGE), (MIB, MIB), (0, MIB)] {
        let mut part = DirtyPages::new(at(2 * FIRST + offset, len)?, PAGE)?;
        let refused = table.read_dirty(&mut part, DirtyNotes::Clear);
        assert!(matches!(refused, Err(Error::Bisects { .. })), "{refused:?}");
    }
    let mut bitmap = DirtyPages::new(whole, PAGE)?;
    table.read_dirty(&mut bitmap, DirtyNotes::Clear)?;
    assert!(bitmap.is_dirty(Iova::new(2 * FIRST + 70 * PAGE)));
    drop((second, table));
    Ok(Outcome::Passed)
}

fn copies(from: &Ioas) -> Result {
    let to = from.iommufd().ioas()?;
    let devices = [MockDevice::of_space(from)?, MockDevice::of_space(&to)?];
    let memories = [memory(MemoryKind::Base, MIB)?, memory(MemoryKind::Base, MIB)?];
    map(from, &memories[0], FIRST)?;
    map(from, &memories[1], FIRST + MIB)?;
    let weak: Vec<_> = memories.iter().map(Arc::downgrade).collect();
    drop(memories);
    let part = at(FIRST + MIB / 2, MIB)?;
    to.copy(from, part, Iova::new(2 * FIRST), Prot::READ_WRITE)?;
    let hole = at(FIRST + MIB, 2 * MIB)?;
    let refused = to.copy(from, hole, Iova::new(4 * FIRST), Prot::READ);
    assert_eq!(refused, Err(Error::NotMapped { range: hole }));
    let low = to.copy(from, part, Iova::new(0), Prot::READ);
    assert!(matches!(low, Err(Error::OutsideApertures { .. })), "{low:?}");
    // In the same address space.
    from.copy(from, part, Iova::new(3 * FIRST), Prot::READ)?;
    assert_eq!(from.unmap_all(), Ok(3 * MIB));
    assert!(weak.iter().all(|memory| memory.strong_count() == 1));
    assert!(matches!(to.unmap(at(2 * FIRST, MIB / 2)?), Err(Error::Bisects { .. })));
    assert_eq!(to.unmap_all(), Ok(MIB));
    assert!(weak.iter().all(|memory| memory.strong_count() == 0));
    drop(devices);
    Ok(Outcome::Passed)
}

fn files(space: &Ioas) -> Result {
    let _device = MockDevice::of_space(space)?;
    let file = File::from(memfd_create("dmaspan", MemfdFlags::CLOEXEC)?);
    file.set_len(MIB)?;
    let fd = file.as_fd();
    let ask =
        |offset, len, iova| space.map_file(fd, offset, len, Iova::new(iova), Prot::READ_WRITE);
    ask(MIB / 2, MIB / 2, FIRST)?;
    assert!(matches!(ask(0, MIB, FIRST), Err(Error::Overlap { .. })));
    let offset = ask(8, MIB / 2, 2 * FIRST);
    assert!(matches!(offset, Err(Error::Misaligned { what: "the offset", .. })), "{offset:?}");
    let long = ask(MIB / 2, MIB, 2 * FIRST);
    assert_eq!(long.map_err(|error| error.errno()), Err(Errno::EINVAL));
    let null = File::open("/dev/null")?;
    let other = space.map_file(&null, 0, PAGE, Iova::new(3 * FIRST), Prot::READ);
    assert_eq!(other.map_err(|error| error.errno()), Err(Errno::EINVAL));
    assert_eq!(space.mappings(), 1);
    assert_eq!(space.unmap_all(), Ok(MIB / 2));
    Ok(Outcome::Passed)
}

fn limits(space: &Ioas) -> Result {
    let everywhere = [IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).ok_or("no range")?];
    assert_eq!(space.limits().apertures, everywhere);
    let page = memory(MemoryKind::Base, PAGE)?;
    // Both ends, which one request unmaps.
    map(space, &page, 0)?;
    map(space, &page, u64::MAX - PAGE + 1)?;
    let unmaps = space.requests().unmaps;
    assert_eq!(space.unmap_all(), Ok(2 * PAGE));
    assert_eq!(space.requests().unmaps, unmaps + 1);
    map(space, &page, 0)?;
    let refused = MockDevice::of_space(space).map_err(|error| error.errno());
    assert!(matches!(refused, Err(Errno::EADDRINUSE)), "{refused:?}");
    space.unmap_all()?;
    map(space, &page, FIRST)?;
    let narrow = MockDevice::of_space(space)?;
    assert_eq!(space.limits().apertures, [at(FIRST, LAST - FIRST + 1)?]);
    let before = space.requests();
    let refused = map(space, &page, 0);
    assert!(matches!(refused, Err(Error::OutsideApertures { .. })), "{refused:?}");
    assert_eq!(space.requests(), before);
    drop(narrow);
    // What was known is too narrow by now, and nobody asked for the limits since.
    map(space, &page, 0)?;
    assert_eq!(space.limits().apertures, everywhere);
    // What is known is too wide after a device came without our asking.
    space.unmap(at(0, PAGE)?)?;
    let _behind = MockDevice::of_space(space)?;
    let late = map(space, &page, 0);
    assert!(matches!(late, Err(Error::OutsideApertures { .. })), "{late:?}");
    assert_eq!(space.mappings(), 1);
    Ok(Outcome::Passed)
}

fn promises(space: &Ioas) -> Result {
    space.allow_iovas(&[at(FIRST, MIB)?, at(2 * FIRST, MIB)?])?;
    drop(MockDevice::of_space(space)?);
    space.allow_iovas(&[at(0, MIB)?])?;
    let refused = MockDevice::of_space(space).map_err(|error| error.errno());
    assert!(matches!(refused, Err(Errno::EADDRINUSE)), "{refused:?}");
    space.allow_iovas(&[])?;
    let device = MockDevice::of_space(space)?;
    let refused = space.allow_iovas(&[at(0, MIB)?]);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    assert_eq!(space.huge_pages(), Ok(HugePages::On));
    space.set_huge_pages(HugePages::Off)?;
    assert_eq!(space.huge_pages(), Ok(HugePages::Off));
    let memory = memory(MemoryKind::Base, MIB)?;
    map(space, &memory, FIRST)?;
    space.unmap_all()?;
    drop(device);
    let late = space.iommufd().set_accounting(LockedBy::Process);
    assert_eq!(late.map_err(|error| error.errno()), Err(Errno::EBUSY));
    let early = Iommufd::open()?;
    early.set_accounting(LockedBy::Process)?;
    assert_eq!(early.accounting(), Ok(LockedBy::Process));
    map(&early.ioas()?, &memory, 0)?;
    Ok(Outcome::Passed)
}
