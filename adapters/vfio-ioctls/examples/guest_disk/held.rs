//! A virtual IOMMU in front of a device that vfio-ioctls has open: the guest's memory is pinned
//! once, and what the guest maps is copied.

use std::error::Error;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, Prot};
use dmaspan_linux::Bdf;
use dmaspan_linux::vfio::{GuestDomain, HeldGuest, Iommufd};
use dmaspan_vfio_ioctls::guest_regions;
use vfio_ioctls::{VfioDevice, VfioIommufd};
use vm_memory::GuestMemoryMmap;

use crate::beside::pinned;
use crate::nvme::Nvme;
use crate::{MIB, VIRTUAL};

/// Has the device read its disk through what a virtual IOMMU maps, without more pins.
pub(crate) fn pinned_once(
    theirs: &VfioIommufd,
    device: &VfioDevice,
    bdf: Bdf,
    guest: &GuestMemoryMmap,
) -> Result<(), Box<dyn Error>> {
    let before = pinned()?;
    // SAFETY: it is an open file of `theirs`.
    let fd = unsafe { BorrowedFd::borrow_raw(theirs.iommufd().as_raw_fd()) };
    // SAFETY: it is `/dev/iommu`, and vfio-ioctls uses the address space that it made alone.
    let iommufd = unsafe { Iommufd::adopt(fd.try_clone_to_owned()?)? };
    let held = Arc::new(HeldGuest::new(&iommufd)?);
    // SAFETY: it is memory of vm-memory.
    let all = held.mapper().map(unsafe { guest_regions(guest)? })?;
    held.pin_for_adopted(bdf, device.iommufd_dev_id().ok_or("no iommufd has the device")?)?;
    let once = pinned()?;
    let domain = GuestDomain::new(&held)?;
    device.attach_hwpt(domain.space().number())?;
    // What the controller uses is mapped one to one; of the rest it reaches what is at `VIRTUAL`.
    for (at, from, len) in [(MIB, MIB, MIB), (8 * MIB, 8 * MIB, MIB), (VIRTUAL, 16 * MIB, 3 * MIB)]
    {
        let range = IovaRange::from_len(Iova::new(at), len)?;
        domain.map(range, Iova::new(from), Prot::READ_WRITE)?;
    }
    let mut nvme = Nvme::start(device, guest, MIB)?;
    nvme.check(guest, 8 * MIB)?;
    assert_eq!(pinned()?, once);
    nvme.stop()?;
    println!("pinned once: {} KiB, whatever is mapped", once - before);
    device.attach_hwpt(theirs.ioas().id())?;
    domain.unmap(IovaRange::ALL)?;
    drop(domain);
    all.unmap()?;
    drop(held);
    assert_eq!(pinned()?, before);
    Ok(())
}
