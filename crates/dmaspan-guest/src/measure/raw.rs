//! Requests of VFIO as a plain program makes them, for registers at an address that the library
//! does not give them.

#![expect(unsafe_code, reason = "requests of ioctl name memory by its address")]

use std::ffi::c_void;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr;

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::Result;

/// `_IO(VFIO_TYPE, VFIO_BASE + n)` (include/uapi/linux/vfio.h).
const fn number(n: u8) -> Opcode {
    0x3b00 | n as Opcode
}

const SET_IOMMU: Opcode = number(102);
const GROUP_SET_CONTAINER: Opcode = number(104);
const GROUP_GET_DEVICE_FD: Opcode = number(106);
const DEVICE_GET_REGION_INFO: Opcode = number(108);
const MAP_DMA: Opcode = number(113);
const UNMAP_DMA: Opcode = number(114);

const TYPE1V2: usize = 3;
/// `VFIO_DMA_MAP_FLAG_READ` and `_WRITE`.
const READ_WRITE: u32 = 3;
/// What the largest leaf maps.
const LEAF: u64 = 1 << 30;

/// A container with a group, whose IOMMU is type1.
#[derive(Debug)]
pub(super) struct RawSpace {
    container: File,
    group: File,
}

impl RawSpace {
    /// That of a function's group.
    pub(super) fn open(bdf: &str) -> Result<Self> {
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        let container = open(Path::new("/dev/vfio/vfio"))?;
        let link = fs::read_link(Path::new("/sys/bus/pci/devices").join(bdf).join("iommu_group"))?;
        let name = link.file_name().ok_or("a group without a number")?;
        let group = open(&Path::new("/dev/vfio").join(name))?;
        request(&group, GROUP_SET_CONTAINER, &mut container.as_raw_fd())?;
        // SAFETY: the argument of this request is a number, and it accesses no memory.
        unsafe { ioctl(&container, Request(SET_IOMMU, ptr::without_provenance_mut(TYPE1V2))) }?;
        Ok(Self { container, group })
    }

    /// A function of the group.
    pub(super) fn device(&self, bdf: &str) -> Result<OwnedFd> {
        let mut name = bdf.as_bytes().to_vec();
        name.push(0);
        // SAFETY: the request reads a text up to its zero, which is in `name`.
        let fd =
            unsafe { ioctl(&self.group, Request(GROUP_GET_DEVICE_FD, name.as_mut_ptr().cast())) }?;
        // SAFETY: it is a new descriptor, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Maps `len` bytes of this process from `start` on for the group.
    pub(super) fn map(&self, start: u64, len: u64, iova: u64) -> Result {
        request(&self.container, MAP_DMA, &mut [pair(32, READ_WRITE), start, iova, len])?;
        Ok(())
    }

    /// Unmaps, and returns how many bytes were mapped.
    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<u64> {
        let mut unmap = [pair(24, 0), iova, len];
        request(&self.container, UNMAP_DMA, &mut unmap)?;
        let [.., unmapped] = unmap;
        Ok(unmapped)
    }
}

/// The registers of a device, mapped into this process.
#[derive(Debug)]
pub(super) struct RawDevice {
    reserved: *mut c_void,
    reserved_len: usize,
    start: u64,
    len: u64,
}

impl RawDevice {
    /// Maps a BAR so far behind a multiple of the largest leaf.
    pub(super) fn map_bar(device: BorrowedFd<'_>, index: u32, behind: u64) -> Result<Self> {
        // struct vfio_region_info: argsz, flags, index, cap_offset, size, offset.
        let mut info = [pair(32, 0), pair(index, 0), 0, 0];
        request(device, DEVICE_GET_REGION_INFO, &mut info)?;
        let [_, _, len, offset] = info;
        let reserved_len = usize::try_from(len + 2 * LEAF)?;
        let none = ProtFlags::empty();
        // SAFETY: where the kernel wants, there is nothing yet.
        let reserved =
            unsafe { mmap_anonymous(ptr::null_mut(), reserved_len, none, MapFlags::PRIVATE) }?;
        let address = u64::try_from(reserved.addr())?;
        let skip = usize::try_from(address.next_multiple_of(LEAF) - address + behind)?;
        let at = reserved.wrapping_byte_add(skip);
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: it is all in what is reserved, which nobody uses.
        unsafe { mmap(at, usize::try_from(len)?, both, flags, device, offset) }?;
        Ok(Self { reserved, reserved_len, start: u64::try_from(at.addr())?, len })
    }

    /// Where it begins.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// How long it is, in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        // What stays mapped is freed with the process.
        // SAFETY: nobody has a pointer to what was reserved. What is mapped for devices there are
        // registers, which stay.
        let _ = unsafe { munmap(self.reserved, self.reserved_len) };
    }
}

/// Two fields of 32 bits.
const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// A request and its argument, whose result is what the system call returns.
struct Request(Opcode, *mut c_void);

// SAFETY: the number and the argument are those that it was made with, and nothing is read from
// them afterwards.
unsafe impl Ioctl for Request {
    type Output = i32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.0
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.1
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
        Ok(output)
    }
}

/// Makes a request of this module with its structure.
fn request<T>(file: impl AsFd, number: Opcode, argument: &mut T) -> rustix::io::Result<()> {
    // SAFETY:
    // 1. Every request that comes here has a structure of numbers as its argument, which says how
    //    long it is, or a file descriptor: the kernel reads and writes no more.
    // 2. What requests to map name are registers, which no code of this process accesses.
    unsafe { ioctl(file, Request(number, ptr::from_mut(argument).cast())) }.map(drop)
}
