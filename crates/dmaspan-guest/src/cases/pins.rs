//! Maps of a virtual IOMMU, of a guest's memory that is pinned once.

use std::fs;
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, Prot};
use dmaspan_linux::plan::{MappedRegions, Region};
use dmaspan_linux::vfio::{
    self, Backend, DirtyLogging, GuestDomain, HeldGuest, Ioas, Iommufd, MockDevice, VfioDevice,
};
use dmaspan_linux::{Memory, MemoryKind};

use super::iommufd::NEEDS;
use super::{Case, Context, MIB, Need, Outcome, Result, case, page};

pub(super) const CASES: &[Case] = &[
    // Any part of what is held, also across regions.
    case("pins/parts_are_copied_to_a_mock_device", NEEDS, mock),
    case("pins/parts_are_copied_to_a_device", NEEDS, device),
    // The kernel's count stays what it was, for one endpoint and for two.
    case("pins/a_copy_pins_nothing", NEEDS, counted),
    // More at once than VFIO's type 1 permits.
    case("pins/more_than_65535_at_once_in_random_order", NEEDS, |at| random(at, 100_000)),
    case("pins/a_million_in_random_order", LONG, |at| random(at, 1_000_000)),
];

const LONG: &[Need] = &[Need::Backend, Need::OneOf(&[Backend::Iommufd]), Need::Named];

/// Where the guest has its memory: in the apertures of the mock device, too.
const GUEST: u64 = 1 << 28;
/// Where it is mapped.
const AT: u64 = 1 << 29;

/// What the kernel counts as pinned by the process, in KiB.
pub(super) fn pinned_kib() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    Ok(line.and_then(|line| line.split_whitespace().next()).ok_or("no VmPin")?.parse()?)
}

fn at(start: u64, len: u64) -> Result<IovaRange> {
    Ok(IovaRange::from_len(Iova::new(start), len)?)
}

/// A guest of two regions, one behind the other, of so many bytes each.
fn guest(held: &HeldGuest, len: u64) -> Result<MappedRegions<Ioas>> {
    let region = |n: u64, kind| {
        let memory = Arc::new(Memory::new(kind, len)?);
        Ok::<_, Box<dyn std::error::Error>>(
            Region::whole(&memory, Prot::READ_WRITE).at(Iova::new(GUEST + n * len)),
        )
    };
    Ok(held.mapper().map([region(0, MemoryKind::Base)?, region(1, MemoryKind::Memfd)?])?)
}

/// Copies parts: pages within a region, and across both.
fn parts(domain: &GuestDomain, len: u64) -> Result<()> {
    let before = domain.space().requests();
    let parts = [(0, page()), (page(), 3 * page()), (len - page(), 2 * page()), (0, 2 * len)];
    for (skip, len) in parts {
        domain.map(at(AT, len)?, Iova::new(GUEST + skip), Prot::READ_WRITE)?;
        let cut = domain.unmap(at(AT, len - page() / 2)?);
        check!(matches!(cut, Err(vfio::Error::Bisects { .. })));
        check!(domain.space().mappings(), 1);
        check!(domain.unmap(at(AT, len)?)?, len);
    }
    // One request each: no copy was refused, and nothing mapped in its place.
    let requests = domain.space().requests();
    check!((requests.maps - before.maps, requests.unmaps - before.unmaps), (4, 4));
    let beyond = domain.map(at(AT, page())?, Iova::new(GUEST + 2 * len), Prot::READ);
    check!(matches!(beyond, Err(vfio::Error::NotMapped { .. })));
    // Gaps, and several at once.
    for n in [0, 3, 9] {
        domain.map(at(AT + n * page(), page())?, Iova::new(GUEST), Prot::READ)?;
    }
    check!(domain.unmap(at(AT, 64 * page())?)?, 3 * page());
    Ok(())
}

fn mock(_: &Context) -> Result {
    let held = Arc::new(HeldGuest::new(&Iommufd::open()?)?);
    let domain = GuestDomain::new(&held)?;
    let device = match MockDevice::of_space(domain.space()) {
        Ok(device) => device,
        Err(error) => {
            let why = format!("the kernel is built without CONFIG_IOMMUFD_TEST: {error}");
            return Ok(Outcome::Skipped(why));
        }
    };
    let before = pinned_kib()?;
    let all = guest(&held, MIB)?;
    check!(pinned_kib()?, before);
    device.pin(&held)?;
    check!(pinned_kib()?, before + 2048);
    parts(&domain, MIB)?;
    check!(pinned_kib()?, before + 2048);
    all.unmap()?;
    check!(pinned_kib()?, before);
    Ok(Outcome::Passed)
}

/// A guest's memory, pinned, and a domain with the device in it.
fn open(
    context: &Context,
    len: u64,
) -> Result<(VfioDevice, GuestDomain, Arc<HeldGuest>, MappedRegions<Ioas>)> {
    let held = Arc::new(HeldGuest::new(&Iommufd::open()?)?);
    let domain = GuestDomain::new(&held)?;
    let device = domain.space().attach(context.device.parse()?)?;
    let all = guest(&held, len)?;
    held.pin_for(&device)?;
    Ok((device, domain, held, all))
}

fn device(context: &Context) -> Result {
    let (_device, domain, _held, _all) = open(context, MIB)?;
    parts(&domain, MIB)?;
    Ok(Outcome::Passed)
}

fn counted(context: &Context) -> Result {
    let before = pinned_kib()?;
    let (device, domain, held, all) = open(context, 8 * MIB)?;
    let whole = before + 16 * 1024;
    check!(pinned_kib()?, whole);
    let second = GuestDomain::new(&held)?;
    let table = second.space().hwpt(&device, DirtyLogging::Off)?;
    for domain in [&domain, &second] {
        for n in 0..64 {
            let range = at(AT + n * 64 * page(), 16 * page())?;
            domain.map(range, Iova::new(GUEST + n * page()), Prot::READ_WRITE)?;
        }
    }
    check!(pinned_kib()?, whole);
    // What is mapped stays pinned when the guest's memory goes, and no longer.
    all.unmap()?;
    let left = pinned_kib()? - before;
    check!(left > 0 && left < 16 * 1024; "the memory of the guest is pinned that nobody maps");
    check!(domain.unmap(at(AT, 64 * MIB)?)?, 64 * 16 * page());
    check!(pinned_kib()? - before, left);
    drop(table);
    check!(second.unmap(at(AT, 64 * MIB)?)?, 64 * 16 * page());
    check!(pinned_kib()?, before);
    Ok(Outcome::Passed)
}

/// Maps and unmaps single pages in random order, so many times each.
fn random(context: &Context, count: u32) -> Result {
    const PLACES: usize = 400_000;
    let before = pinned_kib()?;
    let (device, domain, _held, all) = open(context, 16 * MIB)?;
    let whole = pinned_kib()?;
    let mut mapped = vec![false; PLACES];
    let (mut maps, mut unmaps, mut now, mut most) = (0_u32, 0_u32, 0_u32, 0_u32);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    while maps < count || unmaps < count {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // Unmaps until there are as many, once there were enough maps.
        let place = usize::try_from(random >> 32)? % PLACES;
        let range = at(AT + 2 * page() * u64::try_from(place)?, page())?;
        let is_mapped = mapped.get_mut(place).ok_or("no place")?;
        if *is_mapped {
            check!(domain.unmap(range)?, page());
            (unmaps, now) = (unmaps + 1, now - 1);
        } else if maps < count {
            let guest = GUEST + random % (32 * MIB / page()) * page();
            domain.map(range, Iova::new(guest), Prot::READ_WRITE)?;
            (maps, now) = (maps + 1, now + 1);
        } else {
            continue;
        }
        *is_mapped = !*is_mapped;
        most = most.max(now);
        if (maps + unmaps).is_multiple_of(1 << 16) {
            check!(pinned_kib()?, whole);
        }
    }
    check!((now, pinned_kib()?), (0, whole));
    println!("{maps} maps and {unmaps} unmaps, {most} mapped at once, {whole} KiB pinned");
    check!(most > 65_535; "there were never more mappings than type 1 permits");
    all.unmap()?;
    drop((domain, device));
    check!(pinned_kib()?, before);
    Ok(Outcome::Passed)
}
