//! dmaspan beside plain vfio-ioctls: what a map that fails leaves behind, requests, instructions.

use std::error::Error;
use std::fs;
use std::time::Instant;

use dmaspan::{DmaSpace, IovaRange};
use dmaspan_vfio_ioctls::{Shared, guest_regions};
use vfio_ioctls::VfioOps;
use vm_memory::{
    Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress,
};

/// A page that is in the way of a region, and what is behind it.
pub(crate) const PAGE: usize = 4096;
const TURNS: u32 = 8;

/// Where the guest has a region, its length, and where this process has it.
pub(crate) type Placed = (u64, usize, *mut u8);

pub(crate) fn regions(guest: &GuestMemoryMmap) -> Result<Vec<Placed>, Box<dyn Error>> {
    guest
        .iter()
        .map(|region| {
            let host = region.get_host_address(MemoryRegionAddress(0))?;
            Ok((region.start_addr().raw_value(), region.len() as usize, host))
        })
        .collect()
}

/// As `VfioContainer::vfio_map_guest_memory` does: region after region, up to the first that fails.
pub(crate) fn plain_map(
    theirs: &dyn VfioOps,
    guest: &GuestMemoryMmap,
) -> Result<(), Box<dyn Error>> {
    regions(guest)?.into_iter().try_for_each(|(at, len, host)| {
        // SAFETY: it is memory of vm-memory, which lives until the end of `main`.
        Ok(unsafe { theirs.vfio_dma_map(at, len, host) }?)
    })
}

/// Which regions can be unmapped, and are then.
fn plain_unmap(theirs: &dyn VfioOps, guest: &GuestMemoryMmap) -> Result<usize, Box<dyn Error>> {
    let regions = regions(guest)?;
    Ok(regions.into_iter().filter(|(at, len, _)| theirs.vfio_dma_unmap(*at, *len).is_ok()).count())
}

/// What the kernel counts for the process, in KiB.
pub(crate) fn pinned() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let of = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    let lines =
        status.lines().filter(|line| line.starts_with("VmLck") || line.starts_with("VmPin"));
    Ok(lines.filter_map(of).sum())
}

/// Has the kernel refuse the map of each region in turn, since something is mapped there already.
pub(crate) fn failures(
    shared: &Shared,
    theirs: &dyn VfioOps,
    guest: &GuestMemoryMmap,
) -> Result<(), Box<dyn Error>> {
    for (n, (at, _, host)) in regions(guest)?.into_iter().enumerate() {
        let before = pinned()?;
        // SAFETY: as in `plain_map`.
        unsafe { theirs.vfio_dma_map(at, PAGE, host) }?;
        let in_the_way = pinned()?;
        // SAFETY: it is memory of vm-memory.
        let refused = unsafe { shared.map_guest(guest) }.map(drop);
        let left = (shared.space().mappings(), shared.mapper().mapped_bytes(), pinned()?);
        assert_eq!(left, (0, 0, in_the_way), "map {n}");
        println!("map {n} fails: dmaspan leaves nothing ({})", refused.unwrap_err());
        assert!(plain_map(theirs, guest).is_err());
        let pins = pinned()? - in_the_way;
        // Of what is left nobody knows but the kernel.
        theirs.vfio_dma_unmap(at, PAGE)?;
        let left = plain_unmap(theirs, guest)?;
        assert_eq!(left, n);
        println!("map {n} fails: vfio-ioctls leaves {left} regions, {pins} KiB pinned");
        assert_eq!(pinned()?, before);
    }
    Ok(())
}

/// Counts requests, and times both; where instructions are counted, each is a nanosecond.
pub(crate) fn counts(
    shared: &Shared,
    theirs: &dyn VfioOps,
    guest: &GuestMemoryMmap,
) -> Result<(), Box<dyn Error>> {
    let time = |work: &mut dyn FnMut() -> Result<(), Box<dyn Error>>| {
        let mut best = u128::MAX;
        for _ in 0..TURNS {
            let start = Instant::now();
            work()?;
            best = best.min(start.elapsed().as_nanos());
        }
        Ok::<_, Box<dyn Error>>(best)
    };
    let before = shared.space().requests();
    let ours = time(&mut || {
        // SAFETY: it is memory of vm-memory.
        Ok(unsafe { shared.map_guest(guest) }?.unmap()?)
    })?;
    let requests = shared.space().requests();
    let of = |now: u64, before: u64| (now - before) / u64::from(TURNS);
    let (maps, unmaps) = (of(requests.maps, before.maps), of(requests.unmaps, before.unmaps));
    // The pages are there, so that to allocate them is a look at each and no more.
    let unpopulated = time(&mut || {
        // SAFETY: as above.
        for region in unsafe { guest_regions(guest) }? {
            let at = region.iova.ok_or("a region has its place")?;
            shared.space().map(&region.memory, region.user, at, region.prot)?;
        }
        shared.unmap(IovaRange::ALL)?;
        Ok(())
    })?;
    let plain = time(&mut || {
        plain_map(theirs, guest)?;
        plain_unmap(theirs, guest).map(drop)
    })?;
    let regions = guest.num_regions();
    println!("dmaspan: {maps} + {unmaps} requests, {ours} ns; {unpopulated} ns without a plan");
    println!("vfio-ioctls: {regions} + {regions} requests, {plain} ns");
    Ok(())
}
