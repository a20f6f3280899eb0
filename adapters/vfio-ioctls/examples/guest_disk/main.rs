//! A VMM on vm-memory and vfio-ioctls gives its guest an NVMe disk: dmaspan maps the guest's
//! memory, vfio-ioctls opens the device.
//!
//! The guest has 64 MiB at 0, of a file, a hole, and 32 MiB at 4 GiB, without one. The controller
//! reads its disk into both, and into a DIMM that comes and goes. Then mappings of a virtual IOMMU
//! come, which one unmap takes away over the gaps between them. `beside` shows what a map that
//! fails leaves behind, and counts; `held` pins the guest's memory once for a virtual IOMMU, and
//! `drop_in` maps by `VfioOps`.
//!
//! Called with a function that has VFIO's driver: `guest_disk 0000:00:05.0 container|iommufd`.

#![expect(unsafe_code, reason = "a VMM answers for its guest's memory, and for its container")]
#![expect(clippy::cast_possible_truncation, reason = "addresses have 64 bits here")]

mod beside;
mod cloud_hypervisor;
mod drop_in;
mod held;
mod nvme;

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use cloud_hypervisor::{ExternalDmaMapping, GuestDma};
use dmaspan_vfio_ioctls::Shared;
use iommufd_ioctls::IommuFd;
use nvme::Nvme;
use rustix::fs::{MemfdFlags, memfd_create};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioIommufd, VfioOps};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;
/// What the guest has: the first of it of a file.
const LAYOUT: [(u64, u64); 2] = [(0, 64 * MIB), (4 << 30, 32 * MIB)];
const DIMM: (u64, u64) = (8 << 30, 16 * MIB);
/// What the virtual IOMMU maps.
const VIRTUAL: u64 = 16 << 30;

/// Memory of a guest, of a file of its own.
fn of_file((at, len): (u64, u64)) -> Result<GuestRegionMmap> {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    let file = Some(FileOffset::new(file, 0));
    Ok(GuestRegionMmap::from_range(GuestAddress(at), len as usize, file)?)
}

// ANCHOR: open
/// What dmaspan maps with, the device, and what vfio-ioctls maps with.
fn open(path: &Path, space: &str) -> Result<(Shared, VfioDevice, Arc<dyn VfioOps>)> {
    if space == "iommufd" {
        let theirs = Arc::new(VfioIommufd::new(Arc::new(IommuFd::new()?), None, None)?);
        let device = VfioDevice::new(path, theirs.clone(), true)?;
        // SAFETY: of what it maps this program unmaps nothing but by it.
        let shared = unsafe { Shared::iommufd(theirs.clone())? };
        return Ok((shared, device, theirs));
    }
    let theirs = Arc::new(VfioContainer::new(None)?);
    let device = VfioDevice::new(path, theirs.clone(), false)?;
    // SAFETY: as above.
    let shared = unsafe { Shared::container(theirs.clone())? };
    Ok((shared, device, theirs))
}
// ANCHOR_END: open

fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bdf, space] = arguments.as_slice() else {
        return Err("usage: guest_disk BDF container|iommufd".into());
    };
    let (at, len) = LAYOUT[1];
    let high = GuestRegionMmap::from_range(GuestAddress(at), len as usize, None)?;
    let guest = GuestMemoryMmap::from_regions(vec![of_file(LAYOUT[0])?, high])?;
    let path = Path::new("/sys/bus/pci/devices").join(bdf);
    let (shared, device, theirs) = open(&path, space)?;

    // ANCHOR: map
    // SAFETY: it is memory of vm-memory, which accesses it as volatile.
    let mapped = unsafe { shared.map_guest(&guest)? };
    println!("{} MiB in {} maps", mapped.bytes() / MIB, mapped.plan().maps().len());
    // ANCHOR_END: map
    let mut nvme = Nvme::start(&device, &guest, MIB)?;
    LAYOUT.iter().try_for_each(|(at, _)| nvme.check(&guest, at + 8 * MIB))?;

    // A DIMM comes, and goes.
    let dimm = Arc::new(of_file(DIMM)?);
    // SAFETY: as above.
    let added = unsafe { shared.add_region(&dimm)? };
    let larger = guest.insert_region(dimm)?;
    nvme.check(&larger, DIMM.0)?;
    added.unmap()?;
    let (guest, _dimm) = larger.remove_region(GuestAddress(DIMM.0), DIMM.1)?;

    // The guest's IOMMU maps parts, one across the hole, and unmaps over gaps.
    let before = shared.space().mappings();
    let dma = GuestDma { space: shared.space(), guest: GuestMemoryAtomic::new(guest.clone()) };
    dma.map(VIRTUAL, LAYOUT[1].0, MIB)?;
    dma.map(VIRTUAL + 3 * MIB, MIB, MIB)?;
    let across = dma.map(VIRTUAL + 8 * MIB, LAYOUT[0].1 - MIB, 2 * MIB).unwrap_err();
    let cut = dma.unmap(VIRTUAL, 4 * MIB - 4096).unwrap_err();
    println!("refused: {across}; {cut}");
    assert_eq!(shared.space().mappings() - before, 2);
    dma.unmap(VIRTUAL, 64 * MIB)?;
    assert_eq!(shared.space().mappings(), before);
    nvme.check(&guest, LAYOUT[1].0)?;

    nvme.stop()?;
    mapped.unmap()?;
    assert_eq!((shared.space().mappings(), shared.mapper().mapped_bytes()), (0, 0));
    beside::failures(&shared, &*theirs, &guest)?;
    beside::counts(&shared, &*theirs, &guest)?;
    if let Some(iommufd) = theirs.as_any().downcast_ref::<VfioIommufd>() {
        held::pinned_once(iommufd, &device, bdf.parse()?, &guest)?;
    }
    let reopen = || VfioDevice::new(&path, theirs.clone(), space == "iommufd");
    drop_in::drop_in(&shared, &guest, device, &reopen)
}
