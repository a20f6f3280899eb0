//! Devices that iommufd has for its own tests (drivers/iommu/iommufd/iommufd_test.h), where the
//! kernel was built with `CONFIG_IOMMUFD_TEST`.

use std::os::fd::AsFd;

use dmaspan::{Errno, IovaRange};

use super::{Iommufd, address_of};
use crate::sys::request;

/// `IOMMU_TEST_CMD`.
const TEST: u32 = 0x3ba0;
/// `IOMMU_TEST_OP_MOCK_DOMAIN`.
const DEVICE: u32 = 2;
/// `IOMMU_TEST_OP_DIRTY`.
const DIRTY: u32 = 13;

/// `struct iommu_test_cmd`, which is shorter; what lies behind it has to be 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Command {
    size: u32,
    op: u32,
    id: u32,
    reserved: u32,
    arguments: [u64; 14],
}

/// Makes a device that is attached to an address space or a page table. Returns the number that
/// destroys it, and the one that requests name it by.
pub(crate) fn device(iommufd: &Iommufd, table: u32) -> Result<(u32, u32), Errno> {
    let mut command = Command { op: DEVICE, id: table, ..Command::default() };
    // SAFETY: the request writes numbers behind the structure's head, and names no memory.
    unsafe { request::with_memory(iommufd.as_fd(), TEST, &mut command) }?;
    let number = |index: usize| command.arguments[index / 2] >> (32 * (index % 2));
    let number = |index| u32::try_from(number(index) & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    Ok((number(0), number(2)))
}

/// Makes pages of a page table dirty, where `bits` has a 1, and says how many there are.
pub(crate) fn write(
    iommufd: &Iommufd,
    table: u32,
    range: IovaRange,
    page_size: u64,
    bits: &mut [u64],
) -> Result<u64, Errno> {
    let length = super::room_for(range, page_size, bits.len())?;
    let mut command = Command { op: DIRTY, id: table, ..Command::default() };
    let arguments = [0, range.start().get(), length, page_size, address_of(bits), 0];
    command.arguments[..6].copy_from_slice(&arguments);
    // SAFETY: the request reads a bit for each page, which `bits` has.
    unsafe { request::with_memory(iommufd.as_fd(), TEST, &mut command) }?;
    Ok(command.arguments[5])
}
