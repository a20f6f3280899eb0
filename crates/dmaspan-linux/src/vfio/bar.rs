//! A [`Bar`] is registers of a device, mapped into this process.

use std::fmt;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::{UserAddr, UserRange};
use dmaspan_drivers::Mmio;

use super::device::Shared;
use super::device_error::DeviceError;
use super::error::Error;
use crate::pci::Bdf;
use crate::sys::bar::{Area, Registers};
use crate::sys::uapi::vfio as uapi;
use crate::sys::vfio::{DmaBuf, WithCaps, read};

/// The registers of a BAR, mapped into this process: what a driver reaches a device by.
///
/// A clone is the same mapping. It begins at a multiple of the largest leaf that the BAR has room
/// for (4 KiB, 2 MiB or 1 GiB), as the BAR does on the bus, so that kernels that can (Linux 6.12
/// and later) map it by such leaves.
///
/// It may live longer than its [`VfioDevice`](super::VfioDevice), and keeps the device open then.
/// Nothing in this crate makes the device stop answering meanwhile: its memory space stays on, and
/// it is not put to sleep. During a [reset](super::VfioDevice::reset) an access waits, or reads all
/// ones. A device that is pulled out answers with all ones, or the kernel kills the process
/// (`SIGBUS`).
///
/// Where the kernel lets parts of the BAR be mapped alone, the rest reads all ones, as does what
/// lies outside of the BAR, and an access that is not aligned. The table of MSI-X vectors may be in
/// a BAR: the kernel owns and writes it.
#[derive(Clone)]
pub struct Bar {
    registers: Arc<Registers>,
    index: u32,
    len: u64,
    device: Arc<Shared>,
}

impl Bar {
    /// Maps a BAR of a device.
    pub(super) fn map(device: &Arc<Shared>, index: u32) -> Result<Self, DeviceError> {
        let bdf = device.bdf;
        if index >= uapi::PCI_BARS {
            return Err(DeviceError::NoBar { bdf, index });
        }
        let region = device.fd.region(index);
        let region = region.map_err(device.failed("VFIO_DEVICE_GET_REGION_INFO"))?;
        let len = region.info.size;
        if len == 0 {
            return Err(DeviceError::NoBar { bdf, index });
        }
        let needed = uapi::REGION_READ | uapi::REGION_WRITE | uapi::REGION_MMAP;
        if region.info.flags & needed != needed {
            return Err(if device.has_io_ports(index) {
                DeviceError::IoPorts { bdf, index }
            } else {
                DeviceError::NotMappable { bdf, index }
            });
        }
        let file = device.fd.file().as_fd();
        let registers = Registers::map(file, region.info.offset, len, &areas(&region));
        let registers = registers.map_err(device.failed("mmap of a BAR"))?;
        Ok(Self { registers: Arc::new(registers), index, len, device: Arc::clone(device) })
    }

    /// The length of the BAR in bytes.
    #[expect(clippy::len_without_is_empty, reason = "no BAR is empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The largest leaf of a page table, in bytes, that can map it in this process, as far as its
    /// address permits.
    pub fn alignment(&self) -> u64 {
        self.registers.alignment(self.len)
    }

    /// Returns which BAR it is.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The device that it is of.
    pub fn bdf(&self) -> Bdf {
        self.device.bdf
    }

    /// Returns where this process has `len` bytes from `offset` of the BAR: for code that brings
    /// its own accesses, as a driver of virtio does. Keep this, or a clone of it, as long as the
    /// pointer is used.
    ///
    /// What is there are registers. They are accessed by volatile reads and writes of the width and
    /// alignment that the device expects, and never through a reference: a read may change them,
    /// and the device does at any time. What is written may make the device access memory; it
    /// reaches what is mapped for it, and nothing else.
    ///
    /// ```no_run
    /// use dmaspan_linux::vfio::{Backend, VfioSpace};
    ///
    /// let (_space, device) = VfioSpace::open(Backend::Vfio, "0000:00:05.0".parse()?)?;
    /// let bar = device.bar(0)?;
    /// let status = bar.as_ptr(0x1c, 4)?.cast::<u32>();
    /// // SAFETY: the register is mapped while `bar` lives, and reading it changes nothing.
    /// println!("{:#x}", unsafe { status.read_volatile() });
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::OutsideBar`] where they are not all mapped into the process, or none.
    pub fn as_ptr(&self, offset: u64, len: u64) -> Result<NonNull<u8>, Error> {
        let found = NonZero::new(len).and_then(|len| self.registers.pointer(offset, len));
        let offsets = offset..offset.saturating_add(len);
        let (bdf, index) = (self.bdf(), self.index);
        found.ok_or(Error::OutsideBar { bdf, index, offsets })
    }

    /// Returns where the BAR begins on the bus, as the device's configuration space says: what a
    /// driver that looks there itself asks for.
    ///
    /// # Errors
    ///
    /// [`DeviceError::System`], where the device is gone.
    pub fn bus_address(&self) -> Result<u64, DeviceError> {
        self.device.bar_address(self.index)
    }

    /// What keeps it mapped.
    pub(super) fn registers(&self) -> &Arc<Registers> {
        &self.registers
    }

    /// Where the process has the registers of `offsets`.
    pub(crate) fn user_range(&self, offsets: Range<u64>) -> Result<UserRange, Error> {
        let len = offsets.end.checked_sub(offsets.start).and_then(NonZero::new);
        let user = len.and_then(|len| {
            let start = self.registers.address(offsets.start, len)?;
            UserRange::from_len(UserAddr::new(start), len.get()).ok()
        });
        let (bdf, index) = (self.bdf(), self.index);
        user.ok_or(Error::OutsideBar { bdf, index, offsets })
    }

    /// The registers of `offsets`, as a dma-buf.
    pub(super) fn dma_buf(&self, offsets: Range<u64>) -> Result<DmaBuf, Error> {
        let len = offsets.end.saturating_sub(offsets.start);
        let dma_buf = self.device.fd.dma_buf(self.index, offsets.start, len);
        dma_buf.map_err(|errno| Error::NoDmaBuf { bdf: self.bdf(), index: self.index, errno })
    }
}

impl Mmio for Bar {
    fn read32(&self, offset: u64) -> u32 {
        self.registers.read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.registers.write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.registers.write64(offset, value);
    }
}

impl fmt::Debug for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bar")
            .field("bdf", &self.bdf())
            .field("index", &self.index)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// The parts of a region that can be mapped: all of it, or what the capability says.
fn areas(region: &WithCaps<uapi::RegionInfo>) -> Vec<Area> {
    let info = &region.info;
    let sparse = (info.flags & uapi::REGION_CAPS != 0)
        .then(|| region.capability(info.cap_offset, uapi::REGION_CAP_SPARSE_MMAP))
        .flatten();
    sparse.map_or_else(|| vec![Area { offset: 0, len: info.size }], sparse_areas)
}

/// The areas of `struct vfio_region_info_cap_sparse_mmap`: behind its header their number, 32
/// reserved bits, and of each the offset and the size. As many as there are bytes for.
fn sparse_areas(capability: &[u8]) -> Vec<Area> {
    let bytes = capability.get(size_of::<uapi::CapHeader>()..).unwrap_or_default();
    let count = read::<u32>(bytes).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    let areas = bytes.get(8..).unwrap_or_default().as_chunks::<16>().0.iter().take(count);
    let area = |bytes: &[u8; 16]| {
        let [offset, len]: [u64; 2] = read(bytes)?;
        Some(Area { offset, len })
    };
    areas.filter_map(area).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capability(count: u32, words: &[u64]) -> Vec<u8> {
        let header = uapi::CapHeader { id: uapi::REGION_CAP_SPARSE_MMAP, version: 1, next: 0 };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        bytes.extend(count.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        bytes
    }

    #[test]
    fn areas_are_read_as_far_as_they_are_there() {
        let (first, second) =
            (Area { offset: 0, len: 0x1000 }, Area { offset: 0x3000, len: 0x5000 });
        let words = [0, 0x1000, 0x3000, 0x5000];
        assert_eq!(sparse_areas(&capability(2, &words)), [first, second]);
        assert_eq!(sparse_areas(&capability(1, &words)), [first]);
        assert_eq!(sparse_areas(&capability(u32::MAX, &words[..3])), [first]);
        assert_eq!(sparse_areas(&capability(0, &words)), []);
        assert_eq!(sparse_areas(&capability(2, &words)[..10]), []);
        assert_eq!(sparse_areas(&[]), []);
    }
}
