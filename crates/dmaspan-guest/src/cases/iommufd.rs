//! The operations of iommufd alone, with a device behind an IOMMU.

use std::fs::{self, File};
use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::{
    self, Backend, DirtyLogging, DirtyNotes, DirtyPages, HugePages, Ioas, OpenError,
};
use dmaspan_linux::{Memory, MemoryKind};
use rustix::fs::{MemfdFlags, memfd_create};

use super::{Case, Context, MIB, Need, Outcome, Result, case, page};

pub(super) const NEEDS: &[Need] = &[Need::Backend, Need::OneOf(&[Backend::Iommufd])];
const AT: u64 = 1 << 32;

pub(super) const CASES: &[Case] = &[
    // A device moves from one space, and from one page table, to another.
    case("iommufd/a_device_moves_between_page_tables", NEEDS, moves),
    // A copy keeps the memory of what it was copied from.
    case("iommufd/a_copy_keeps_its_memory", NEEDS, copies),
    // The kernel takes the file's pages, and the process's page table stays as it is.
    case("iommufd/memory_with_a_file_is_mapped_by_it", NEEDS, by_file),
    // Ranges that are promised, and options.
    case("iommufd/promises_and_options_are_kept", NEEDS, promises),
];

fn moves(context: &Context) -> Result {
    let (space, device) = Ioas::open(context.device.parse()?)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, MIB)?);
    space.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
    let other = space.iommufd().ioas()?;
    // The devices of `other` are none: it maps what no device could.
    let interrupts = Iova::new(0xfee0_0000);
    other.map(&memory, memory.user_range(), interrupts, Prot::READ_WRITE)?;
    let refused = other.reattach(&device);
    check!(matches!(refused, Err(OpenError::DoesNotFit { .. })); "the interrupts fit a device");
    other.unmap_all()?;
    other.reattach(&device)?;
    let narrow = other.map(&memory, memory.user_range(), interrupts, Prot::READ_WRITE);
    check!(matches!(narrow, Err(vfio::Error::OutsideApertures { .. })); "interrupts are mapped");
    // Where it was before there is none any more.
    space.map(&memory, memory.user_range(), interrupts, Prot::READ_WRITE)?;
    space.unmap_all()?;
    let plain = other.hwpt(&device, DirtyLogging::Off)?;
    plain.attach(&device)?;
    other.reattach(&device)?;
    drop(plain);
    match (device.has_dirty_tracking()?, other.hwpt(&device, DirtyLogging::On)) {
        (false, Err(OpenError::Unsupported { .. })) => {}
        (true, Ok(table)) => {
            other.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
            table.attach(&device)?;
            table.set_dirty_tracking(DirtyLogging::On)?;
            let range = IovaRange::from_len(Iova::new(AT), MIB)?;
            let mut bitmap = DirtyPages::new(range, page())?;
            table.read_dirty(&mut bitmap, DirtyNotes::Clear)?;
            check!(bitmap.dirty_pages() == 0; "pages are dirty that nobody wrote");
        }
        (has, made) => return Err(format!("tracking {has}, and a table {made:?}").into()),
    }
    other.detach(&device)?;
    other.map(&memory, memory.user_range(), interrupts, Prot::READ_WRITE)?;
    Ok(Outcome::Passed)
}

fn copies(context: &Context) -> Result {
    let (space, _device) = Ioas::open(context.device.parse()?)?;
    let other = space.iommufd().ioas()?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 2 * MIB)?);
    space.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
    let kept = Arc::downgrade(&memory);
    drop(memory);
    let part = IovaRange::from_len(Iova::new(AT + MIB), MIB)?;
    other.copy(&space, part, Iova::new(0), Prot::READ)?;
    space.unmap_all()?;
    check!(kept.strong_count() == 1; "the copy does not keep the memory");
    let again = other.copy(&space, part, Iova::new(AT), Prot::READ);
    check!(matches!(again, Err(vfio::Error::NotMapped { .. })); "nothing was copied");
    other.unmap_all()?;
    check!(kept.strong_count() == 0; "the memory is kept");
    Ok(Outcome::Passed)
}

fn by_file(context: &Context) -> Result {
    let (space, _device) = Ioas::open(context.device.parse()?)?;
    let file = File::from(memfd_create("dmaspan", MemfdFlags::CLOEXEC)?);
    file.set_len(8 * MIB)?;
    let memory = Arc::new(Memory::from_file(file, 0, 8 * MIB)?);
    let before = shared_kib()?;
    space.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
    let grown = shared_kib()? - before;
    check!(grown < 1024; "the process has the pages that were mapped");
    // All of them are there: the process finds what the device would have.
    memory.populate()?;
    check!(shared_kib()? - before >= 8 * 1024; "the process has not the pages that it looked for");
    check!(space.unmap_all()?, 8 * MIB);
    Ok(Outcome::Passed)
}

/// What the process has of files in memory.
fn shared_kib() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:"));
    let number = line.and_then(|line| line.split_whitespace().next()).ok_or("no RssShmem")?;
    Ok(number.parse()?)
}

fn promises(context: &Context) -> Result {
    let bdf = context.device.parse()?;
    let (space, device) = Ioas::open(bdf)?;
    let interrupts = IovaRange::from_len(Iova::new(0xfee0_0000), MIB)?;
    let refused = space.allow_iovas(&[interrupts]);
    check!(matches!(refused, Err(vfio::Error::Unsupported { .. })); "interrupts are promised");
    space.allow_iovas(&[IovaRange::from_len(Iova::new(AT), MIB)?])?;
    check!(space.huge_pages()? == HugePages::On; "huge pages are off");
    space.set_huge_pages(HugePages::Off)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 2 * MIB)?);
    space.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
    space.unmap_all()?;
    drop((space, device));
    // Promised first, a device is refused that cannot map it.
    let space = vfio::Iommufd::open()?.ioas()?;
    space.allow_iovas(&[interrupts])?;
    check!(matches!(space.attach(bdf), Err(OpenError::DoesNotFit { .. })); "a device fits");
    Ok(Outcome::Passed)
}
