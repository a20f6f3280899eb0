//! A space's refusals, which leave nothing behind.

use std::fs;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Prot, UserRange};
use dmaspan_linux::vfio::{self, Backend, OpenError, VfioSpace};
use dmaspan_linux::{Memory, MemoryKind};

use super::context::{FREE_HUGEPAGES, with_4_mib_to_lock};
use super::{BACKEND, Case, Context, MIB, Need, Outcome, Result, case, noiommu, page, same};

const AT: u64 = 1 << 32;

pub(super) const CASES: &[Case] = &[
    // What no kernel has to be asked for.
    case("space/what_cannot_be_mapped_is_refused_before_the_request", BACKEND, before_the_request),
    // What the kernel would answer, too.
    case("space/parts_and_overlaps_are_answered_as_the_kernel_does", BACKEND, parts_and_overlaps),
    // A limit of locked memory that a mapping does not fit in.
    case(
        "space/too_little_memory_that_may_be_locked_is_said_and_leaves_nothing",
        BACKEND,
        locked_memory,
    ),
    // More mappings than the kernel allows.
    case(
        "space/the_mapping_limit_is_said_and_leaves_nothing",
        &[Need::Backend, Need::OneOf(&[Backend::Vfio])],
        mapping_limit,
    ),
    // Devices that cannot be opened.
    case("space/a_device_that_cannot_be_opened_is_said_with_the_reason", BACKEND, unusable),
    // A process that ends while devices reach its memory.
    case("space/a_killed_process_leaves_the_device_usable", BACKEND, killed),
    // A machine that does not keep interrupts apart, and a kernel that was told to go on all the
    // same.
    case(
        "space/interrupts_that_are_not_remapped_are_refused_unless_permitted",
        BACKEND,
        unsafe_interrupts,
    ),
];

fn before_the_request(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 2 * MIB)?);
    let user = memory.user_range();
    let part = |offset, len| memory.sub_range(offset, len);
    let before = space.requests();
    let top = Iova::new(u64::MAX - 2 * MIB + 1);
    // Interrupts are behind the first aperture on x86 (Intel VT-d, section 3.15) and on Arm: no
    // memory is reached there.
    let limits = space.limits();
    let below = limits.apertures.first().ok_or("nothing can be mapped")?.last();
    let interrupts = below.wrapping_add(1);
    let right_below = Iova::new(interrupts.get() - page());
    let at = Iova::new(AT);
    let refused: [(UserRange, Iova, Prot, Errno); 7] = [
        (part(0, page())?, interrupts, Prot::READ_WRITE, Errno::EINVAL),
        (part(0, 2 * page())?, right_below, Prot::READ_WRITE, Errno::EINVAL),
        (user, top, Prot::READ_WRITE, Errno::EINVAL),
        (user, Iova::new(u64::MAX - page() + 1), Prot::READ_WRITE, Errno::EOVERFLOW),
        (user, at, Prot::empty(), Errno::EINVAL),
        (user, Iova::new(AT + 0x800), Prot::READ, Errno::EINVAL),
        (part(0, 0x800)?, at, Prot::READ, Errno::EINVAL),
    ];
    for (user, iova, prot, errno) in refused {
        refuses(&space, space.map(&memory, user, iova, prot), errno, &format!("{iova:?}"))?;
    }
    let other = Memory::new(MemoryKind::Base, page())?;
    let foreign = space.map(&memory, other.user_range(), at, Prot::READ);
    refuses(&space, foreign, Errno::EFAULT, "memory of somebody else")?;
    same(space.requests(), before, "requests")?;
    // Right below the interrupts there is room.
    space.map(&memory, part(0, page())?, right_below, Prot::READ_WRITE)?;
    same(space.unmap_all()?, page(), "bytes below the interrupts")?;
    Ok(Outcome::Passed)
}

fn parts_and_overlaps(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 4 * MIB)?);
    let user = memory.user_range();
    let range = |start, len| IovaRange::from_len(Iova::new(start), len);
    space.map(&memory, user, Iova::new(AT), Prot::READ_WRITE)?;
    let before = space.requests();
    for iova in [AT, AT + 4 * MIB - page(), AT - 4 * MIB + page(), AT + MIB] {
        let overlap = space.map(&memory, user, Iova::new(iova), Prot::READ_WRITE);
        refuses(&space, overlap, Errno::EEXIST, "an overlap")?;
    }
    for (start, len) in
        [(AT, page()), (AT + page(), 8 * MIB), (AT - page(), 2 * MIB), (AT + MIB, MIB)]
    {
        let part = space.unmap(range(start, len)?);
        refuses(&space, part.map(drop), Errno::EINVAL, "a part")?;
    }
    same(space.requests(), before, "requests")?;
    // Neighbours on both sides, holes between: one request takes all of them away.
    space.map(&memory, memory.sub_range(0, page())?, Iova::new(AT - page()), Prot::READ)?;
    space.map(&memory, memory.sub_range(0, page())?, Iova::new(AT + 8 * MIB), Prot::READ)?;
    same(space.unmap(range(AT - page(), 16 * MIB)?)?, 4 * MIB + 2 * page(), "bytes of three")?;
    same(space.unmap(range(AT - page(), 16 * MIB)?)?, 0, "bytes of none")?;
    let asked = space.requests();
    same(asked.unmaps, before.unmaps + 1, "requests to unmap")?;
    same(space.mappings(), 0, "mappings")?;
    Ok(Outcome::Passed)
}

fn locked_memory(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 8 * MIB)?);
    let locked = locked_kib()?;
    let map = |user, at| space.map(&memory, user, Iova::new(at), Prot::READ_WRITE);
    let (two, three) = (memory.sub_range(0, 2 * MIB)?, memory.sub_range(0, 3 * MIB)?);
    let [too_much, fits, rest] =
        with_4_mib_to_lock(|| [map(memory.user_range(), AT), map(two, AT), map(three, 2 * AT)])?;
    match &too_much {
        Err(error @ vfio::Error::MemlockLimit { needed, limit, .. }) => {
            same((*needed, *limit), (8 * MIB, 4 * MIB), "needed and limit")?;
            if !error.to_string().contains("ulimit -l") {
                return Err(format!("the error does not say what to do: {error}").into());
            }
        }
        other => return Err(format!("8 MiB of 4 MiB gave {other:?}").into()),
    }
    fits.map_err(|error| format!("after that 2 MiB of 4 MiB were refused: {error}"))?;
    match &rest {
        // What is mapped counts.
        Err(vfio::Error::MemlockLimit { needed, locked, .. }) => {
            same(
                (*needed, *locked >= 2 * MIB),
                (3 * MIB, true),
                "needed, and locked by the first",
            )?;
        }
        other => return Err(format!("3 MiB of the 2 MiB that are left gave {other:?}").into()),
    }
    same(space.unmap_all()?, 2 * MIB, "bytes")?;
    same(locked_kib()?, locked, "locked KiB")?;
    Ok(Outcome::Passed)
}

fn mapping_limit(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let Some(most) = space.limits().mappings_left else {
        return Ok(Outcome::Skipped("this kernel does not say how many mappings it allows".into()));
    };
    let memory = Arc::new(Memory::new(MemoryKind::Base, page())?);
    let place = |index: u64| Iova::new(AT + 2 * page() * index);
    for index in 0..most {
        space.map(&memory, memory.user_range(), place(index), Prot::READ)?;
    }
    same(space.limits().mappings_left, Some(0), "mappings that are left")?;
    let before = space.requests();
    let one_more = space.map(&memory, memory.user_range(), place(most), Prot::READ);
    match &one_more {
        Err(error @ vfio::Error::NoMappingsLeft { mappings }) if *mappings == most => {
            if !error.to_string().contains("dma_entry_limit") {
                return Err(format!("the error does not say what to do: {error}").into());
            }
        }
        other => return Err(format!("mapping {most} and one more gave {other:?}").into()),
    }
    same(space.requests(), before, "requests")?;
    same(space.mappings(), most, "mappings")?;
    same(space.unmap_all()?, most * page(), "bytes")?;
    same(space.limits().mappings_left, Some(most), "mappings that are left")?;
    Ok(Outcome::Passed)
}

fn unusable(context: &Context) -> Result {
    let bdf = context.device.parse()?;
    let (space, device) = VfioSpace::open(context.backend, bdf)?;
    let again = VfioSpace::open(context.backend, bdf).map(drop);
    let is_said = match context.backend {
        Backend::Iommufd => matches!(again, Err(OpenError::NotTaken { .. })),
        _ => matches!(again, Err(OpenError::InUse { .. })),
    };
    is_said.then_some(()).ok_or(format!("a device that is open gave {again:?}"))?;
    drop((space, device));
    // Nothing is there, and the bridge that every machine begins with.
    for (name, why) in [("0000:00:1e.7", "no PCI function"), ("0000:00:00.0", "is a bridge")] {
        match VfioSpace::open(context.backend, name.parse()?).map(drop) {
            Err(error @ OpenError::Unusable { .. }) if error.to_string().contains(why) => {}
            other => return Err(format!("{name} gave {other:?}").into()),
        }
    }
    drop(VfioSpace::open(context.backend, bdf)?);
    Ok(Outcome::Passed)
}

/// What a process that is going to be killed says when all is mapped.
const MAPPED: &str = "mapped";

fn killed(context: &Context) -> Result {
    let pages = fs::read_to_string(FREE_HUGEPAGES)?;
    for _ in 0..3 {
        let mut victim = context.victim(MAPPED)?;
        victim.kill()?;
        victim.wait()?;
        let (space, _device) = context.open()?;
        let memory = Arc::new(Memory::new(MemoryKind::Base, 4 * MIB)?);
        space.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
        same(space.unmap_all()?, 4 * MIB, "bytes")?;
    }
    same(fs::read_to_string(FREE_HUGEPAGES)?, pages, "free hugepages")?;
    Ok(Outcome::Passed)
}

/// Maps, says so, and maps and unmaps until it is killed.
///
/// # Errors
///
/// Why it could not.
pub(crate) fn be_killed(context: &Context) -> Result<()> {
    if context.backend == Backend::NoIommu {
        return noiommu::be_killed(context);
    }
    let (space, device) = context.open()?;
    device.set_bus_master(vfio::BusMaster::On).map_err(|errno| format!("{errno:?}"))?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 32 * MIB)?);
    space.map(&memory, memory.user_range(), Iova::new(AT), Prot::READ_WRITE)?;
    println!("{MAPPED}");
    loop {
        let other = Iova::new(2 * AT);
        space.map(&memory, memory.user_range(), other, Prot::READ_WRITE)?;
        space.unmap(IovaRange::from_len(other, 32 * MIB)?)?;
    }
}

fn unsafe_interrupts(context: &Context) -> Result {
    let module = match context.backend {
        Backend::Vfio => "vfio_iommu_type1",
        _ => "iommufd",
    };
    let permitted = format!("/sys/module/{module}/parameters/allow_unsafe_interrupts");
    if fs::read_to_string(&permitted)?.trim() != "Y" {
        return Ok(Outcome::Skipped("nothing permits them, so they are remapped here".into()));
    }
    fs::write(&permitted, "N")?;
    let refused = VfioSpace::open(context.backend, context.device.parse()?);
    fs::write(&permitted, "Y")?;
    match refused {
        Err(error @ vfio::OpenError::Unusable { .. }) => {
            let words = error.to_string();
            let says = ["interrupts are not remapped", "`dmaspan devices"];
            if !says.iter().all(|part| words.contains(part)) {
                return Err(format!("the error does not say what to do: {error}").into());
            }
        }
        other => return Err(format!("without permission: {other:?}").into()),
    }
    context.open()?;
    Ok(Outcome::Passed)
}

/// `VmLck` of this process.
fn locked_kib() -> Result<String> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmLck:"));
    Ok(line.ok_or("no VmLck")?.to_owned())
}

fn refuses(
    space: &VfioSpace,
    result: Result<(), vfio::Error>,
    errno: Errno,
    what: &str,
) -> Result<()> {
    match result {
        Err(error) if space.errno(&error) == errno => Ok(()),
        other => Err(format!("{what} gave {other:?} and should give {errno:?}").into()),
    }
}
