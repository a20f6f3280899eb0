//! `Shared` in the place of vfio-ioctls' own types, for code that maps by `dyn VfioOps`; a device
//! goes and comes again meanwhile.

use std::error::Error;
use std::ptr;

use dmaspan_vfio_ioctls::Shared;
use vfio_ioctls::{VfioDevice, VfioError, VfioOps};
use vm_memory::GuestMemoryMmap;

use crate::beside::{PAGE, pinned, plain_map, regions};
use crate::nvme::Nvme;
use crate::{LAYOUT, MIB, VIRTUAL};

/// The errno of a map or an unmap that was refused.
fn errno(result: vfio_ioctls::Result<()>) -> Option<i32> {
    match result {
        Err(VfioError::IommuDmaMap(error) | VfioError::IommuDmaUnmap(error)) => Some(error.errno()),
        _ => None,
    }
}

/// Maps the guest's memory by `VfioOps`, reads the disk, lets the device go and come again, and
/// unmaps over the hole. Nothing is mapped before, nor behind it.
pub(crate) fn drop_in(
    shared: &Shared,
    guest: &GuestMemoryMmap,
    device: VfioDevice,
    reopen: &dyn Fn() -> vfio_ioctls::Result<VfioDevice>,
) -> Result<(), Box<dyn Error>> {
    let (ops, before): (&dyn VfioOps, u64) = (shared, pinned()?);
    plain_map(ops, guest)?;
    assert_eq!(shared.space().mappings(), 2);
    read(&device, guest)?;
    // What is refused changes nothing.
    let (at, len, host) = regions(guest)?[0];
    // SAFETY: it is memory of vm-memory, which lives until the end of `main`.
    let again = unsafe { ops.vfio_dma_map(at + MIB, len, host) };
    // SAFETY: as above.
    let odd = unsafe { ops.vfio_dma_map(VIRTUAL, PAGE - 1, host) };
    // SAFETY: there is none.
    let none = unsafe { ops.vfio_dma_map(VIRTUAL, PAGE, ptr::null_mut()) };
    assert!(matches!(none, Err(VfioError::GetHostAddress)));
    let cut = ops.vfio_dma_unmap(at, len - PAGE);
    let refused = [again, odd, cut].map(errno);
    assert_eq!(refused, [Some(EEXIST), Some(EINVAL), Some(EINVAL)]);
    assert_eq!(shared.space().mappings(), 2);
    // An iommufd keeps what is mapped while it has no device. A container that has none forgets.
    let is_iommufd = device.iommufd_dev_id().is_some();
    if !is_iommufd {
        ops.vfio_dma_unmap(0, WHOLE)?;
    }
    drop(device);
    let device = reopen()?;
    if !is_iommufd {
        plain_map(ops, guest)?;
    }
    read(&device, guest)?;
    // One unmap over the hole, and one of nothing.
    ops.vfio_dma_unmap(0, WHOLE)?;
    ops.vfio_dma_unmap(0, WHOLE)?;
    assert_eq!((shared.space().mappings(), pinned()?), (0, before));
    // Whichever map fails, those before it are known, and nothing else is mapped.
    for (n, (at, _, host)) in regions(guest)?.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { ops.vfio_dma_map(at, PAGE, host) }?;
        assert!(plain_map(ops, guest).is_err());
        assert_eq!(shared.space().mappings(), 1 + n as u64);
        ops.vfio_dma_unmap(0, WHOLE)?;
        assert_eq!((shared.space().mappings(), pinned()?), (0, before));
    }
    println!("drop-in: mapped, refused, detached and attached again, unmapped over the hole");
    Ok(())
}

/// More than the layout has, hole and all.
const WHOLE: usize = 8 << 30;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;

fn read(device: &VfioDevice, guest: &GuestMemoryMmap) -> Result<(), Box<dyn Error>> {
    let mut nvme = Nvme::start(device, guest, MIB)?;
    LAYOUT.iter().try_for_each(|(at, _)| nvme.check(guest, at + 8 * MIB))?;
    nvme.stop()
}
