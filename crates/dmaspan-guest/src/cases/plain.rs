//! The requests of VFIO type 1 and iommufd as a plain program makes them, to compare with.
//!
//! Requests are made beforehand, word for word as include/uapi/linux/vfio.h and iommufd.h have
//! them, so that a loop over them is nothing but system calls.

#![expect(unsafe_code, reason = "requests of ioctl name memory by its address")]

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, UserRange};
use dmaspan_linux::Memory;
use dmaspan_linux::vfio::{Backend, Error, Ioas, Iommufd, VfioContainer, VfioSpace};
use rustix::ioctl::{IntegerSetter, Opcode, Updater, ioctl};

use super::context::in_sysfs;
use super::{Context, Result};

/// `_IO(VFIO_TYPE, VFIO_BASE + n)`; iommufd's have the same type.
const fn number(n: u8) -> Opcode {
    0x3b00 | n as Opcode
}

const SET_IOMMU: Opcode = number(102);
const GROUP_SET_CONTAINER: Opcode = number(104);
const MAP_DMA: Opcode = number(113);
const UNMAP_DMA: Opcode = number(114);
const DEVICE_BIND_IOMMUFD: Opcode = number(118);
const DEVICE_ATTACH_IOMMUFD_PT: Opcode = number(119);
const IOAS_ALLOC: Opcode = number(0x81);
const IOAS_MAP: Opcode = number(0x85);
const IOAS_UNMAP: Opcode = number(0x86);

const TYPE1V2: usize = 3;
/// `VFIO_DMA_MAP_FLAG_READ` and `_WRITE`.
const READ_WRITE: u32 = 3;
/// `IOMMU_IOAS_MAP_FIXED_IOVA`, `_WRITEABLE` and `_READABLE`.
const FIXED_READ_WRITE: u32 = 7;

/// An open address space with a device in it, and requests to map memory in it.
///
/// Files come first: they are closed, which unmaps all, before the memory is freed.
#[derive(Debug)]
pub(super) struct Plain {
    kernel: Kernel,
    _memory: Arc<Memory>,
}

#[derive(Debug)]
enum Kernel {
    Type1 { _group: File, container: File, maps: Vec<[u64; 4]>, unmaps: Vec<[u64; 3]> },
    Iommufd { _device: File, iommufd: File, ioas: u32, maps: Vec<[u64; 5]>, unmaps: Vec<[u64; 3]> },
}

/// Two fields of 32 bits.
const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

impl Plain {
    /// Opens the context's device, with a request for each of `maps`, parts of `memory` and their
    /// IOVAs, and one for each of `unmaps`, IOVAs and lengths.
    pub(super) fn open(
        context: &Context,
        memory: &Arc<Memory>,
        maps: &[(UserRange, Iova)],
        unmaps: &[(Iova, u64)],
    ) -> Result<Self> {
        let inside = maps.iter().all(|(user, _)| memory.user_range().covers(*user));
        if !inside {
            return Err("a part is not in the memory".into());
        }
        let maps = maps
            .iter()
            .map(|(user, iova)| (user.start().get(), iova.get(), user.len_less_one() + 1));
        let kernel = match context.backend {
            Backend::Iommufd => {
                let (device, iommufd, ioas) = open_iommufd(context)?;
                let map = |(user, iova, len)| {
                    [pair(40, FIXED_READ_WRITE), pair(ioas, 0), user, len, iova]
                };
                let unmap = |&(iova, len): &(Iova, u64)| [pair(24, ioas), iova.get(), len];
                Kernel::Iommufd {
                    _device: device,
                    iommufd,
                    ioas,
                    maps: maps.map(map).collect(),
                    unmaps: unmaps.iter().map(unmap).collect(),
                }
            }
            _ => {
                let (group, container) = open_type1(context)?;
                let map = |(user, iova, len)| [pair(32, READ_WRITE), user, iova, len];
                let unmap = |&(iova, len): &(Iova, u64)| [pair(24, 0), iova.get(), len];
                Kernel::Type1 {
                    _group: group,
                    container,
                    maps: maps.map(map).collect(),
                    unmaps: unmaps.iter().map(unmap).collect(),
                }
            }
        };
        Ok(Self { kernel, _memory: Arc::clone(memory) })
    }

    /// Makes all requests to map.
    pub(super) fn map(&mut self) -> Result<()> {
        match &mut self.kernel {
            Kernel::Type1 { container, maps, .. } => all::<MAP_DMA, _>(container, maps),
            Kernel::Iommufd { iommufd, maps, .. } => all::<IOAS_MAP, _>(iommufd, maps),
        }
    }

    /// The addresses of `part`, in which no request maps or unmaps, for dmaspan to map in.
    pub(super) fn adopted(&self, part: IovaRange) -> Result<VfioSpace> {
        let meets = |start: u64, len: u64| {
            IovaRange::from_len(Iova::new(start), len)
                .is_ok_and(|range| range.intersection(part).is_some())
        };
        let in_part = match &self.kernel {
            Kernel::Type1 { maps, unmaps, .. } => {
                maps.iter().any(|&[_, _, iova, len]| meets(iova, len))
                    || unmaps.iter().any(|&[_, iova, len]| meets(iova, len))
            }
            Kernel::Iommufd { maps, unmaps, .. } => {
                maps.iter().any(|&[_, _, _, len, iova]| meets(iova, len))
                    || unmaps.iter().any(|&[_, iova, len]| meets(iova, len))
            }
        };
        if in_part {
            return Err("a request maps or unmaps in the part".into());
        }
        Ok(match &self.kernel {
            Kernel::Type1 { container, .. } => {
                // SAFETY:
                // 1. It is a container whose IOMMU `open_type1` has set.
                // 2. All requests that are made of it are those above, none of them in `part`.
                VfioSpace::Type1(unsafe { VfioContainer::adopt(duplicate(container)?, part) }?)
            }
            Kernel::Iommufd { iommufd, ioas, .. } => {
                // SAFETY: it is `/dev/iommu`, and no request destroys anything.
                let iommufd = unsafe { Iommufd::adopt(duplicate(iommufd)?) }?;
                // SAFETY: all requests that map and unmap are those above, none of them in `part`.
                VfioSpace::Ioas(unsafe { Ioas::adopt(&iommufd, *ioas, part) }?)
            }
        })
    }

    /// Makes all requests to unmap, and returns the bytes that the kernel says it unmapped. It
    /// writes them into the requests: as they were asked for all of it, the same again.
    pub(super) fn unmap(&mut self) -> Result<u64> {
        let unmaps = match &mut self.kernel {
            Kernel::Type1 { container, unmaps, .. } => {
                all::<UNMAP_DMA, _>(container, unmaps)?;
                unmaps
            }
            Kernel::Iommufd { iommufd, unmaps, .. } => {
                all::<IOAS_UNMAP, _>(iommufd, unmaps)?;
                unmaps
            }
        };
        Ok(unmaps.iter().map(|&[_, _, bytes]| bytes).sum())
    }
}

fn duplicate(file: &File) -> Result<OwnedFd> {
    Ok(file.as_fd().try_clone_to_owned()?)
}

/// What is refused as a container and as `/dev/iommu`: a file that is no device, and a device that
/// is neither.
pub(super) fn adopted_files_that_are_none(part: IovaRange) -> Result<()> {
    for (path, is_device) in [("/proc/self/exe", false), ("/dev/null", true)] {
        // SAFETY: neither file knows a request of VFIO, so that nothing is mapped by them.
        let container = unsafe { VfioContainer::adopt(File::open(path)?.into(), part) };
        // SAFETY: as above, of iommufd.
        let space = unsafe { Iommufd::adopt(File::open(path)?.into()) };
        // SAFETY: as above.
        let space = space.and_then(|iommufd| unsafe { Ioas::adopt(&iommufd, 1, part) });
        for error in [container.err(), space.err()] {
            match error {
                Some(Error::NoLimits { .. }) if is_device => {}
                Some(Error::Unsupported { .. }) if !is_device => {}
                other => return Err(format!("{path} is adopted: {other:?}").into()),
            }
        }
    }
    Ok(())
}

fn open_type1(context: &Context) -> Result<(File, File)> {
    let container = open(Path::new("/dev/vfio/vfio"))?;
    let link = fs::read_link(in_sysfs(&context.device).join("iommu_group"))?;
    let name = link.file_name().ok_or("a group without a number")?;
    let group = open(&Path::new("/dev/vfio").join(name))?;
    request::<GROUP_SET_CONTAINER, _>(&group, &mut container.as_raw_fd())?;
    // SAFETY: the argument of this request is a number.
    let set = unsafe { IntegerSetter::<SET_IOMMU>::new_usize(TYPE1V2) };
    // SAFETY: the request reads and writes no memory of the process.
    unsafe { ioctl(&container, set) }?;
    Ok((group, container))
}

fn open_iommufd(context: &Context) -> Result<(File, File, u32)> {
    let iommufd = open(Path::new("/dev/iommu"))?;
    let mut names = fs::read_dir(in_sysfs(&context.device).join("vfio-dev"))?;
    let name = names.next().ok_or("a device that VFIO does not have")??.file_name();
    let device = open(&Path::new("/dev/vfio/devices").join(name))?;
    let fd = u32::try_from(iommufd.as_raw_fd())?;
    request::<DEVICE_BIND_IOMMUFD, _>(&device, &mut [16, 0, fd, 0])?;
    let mut ioas = [12, 0, 0];
    request::<IOAS_ALLOC, _>(&iommufd, &mut ioas)?;
    let [_, _, ioas] = ioas;
    request::<DEVICE_ATTACH_IOMMUFD_PT, _>(&device, &mut [12, 0, ioas])?;
    Ok((device, iommufd, ioas))
}

fn open(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.map_err(|error| format!("{}: {error}", path.display()).into())
}

fn all<const NUMBER: Opcode, T>(file: &File, arguments: &mut [T]) -> Result<()> {
    for argument in arguments {
        request::<NUMBER, T>(file, argument)?;
    }
    Ok(())
}

/// Makes a request of this module with its structure.
#[inline]
fn request<const NUMBER: Opcode, T>(file: impl AsFd, argument: &mut T) -> rustix::io::Result<()> {
    // SAFETY:
    // 1. Every request of this module that comes here has a structure of numbers as its argument,
    //    which says how long it is, or a file descriptor.
    let updater = unsafe { Updater::<NUMBER, T>::new(argument) };
    // SAFETY:
    // 1. The kernel reads and writes no more than the structure.
    // 2. The memory that requests to map name is of a `Memory` (checked in `Plain::open`), whose
    //    bytes are accessed as atomic words alone. `Plain` has it until the files are closed, which
    //    unmaps it, or for ever if it is forgotten.
    unsafe { ioctl(file, updater) }
}
