//! The registers of a device, mapped into this process.

#![expect(unsafe_code, reason = "maps registers and hands them to devices")]

use std::num::NonZero;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::{Errno, IovaRange, Prot, UserRange};
use dmaspan_drivers::{Mmio, MmioRegion};

use super::kernel_mapping::{DmaTable, Kernel, KernelMapping, Owner, Refused, Source};
use super::mapping::Region;
use super::page_size;
use super::vfio::DmaBuf;

/// A part of a BAR that can be mapped, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Area {
    fn contains(&self, offset: u64) -> bool {
        offset.checked_sub(self.offset).is_some_and(|inside| inside < self.len)
    }

    /// Whether the `len` bytes from `offset` on are all in it.
    fn covers(&self, offset: u64, len: NonZero<u64>) -> bool {
        let last = offset.checked_add(len.get() - 1);
        self.contains(offset) && last.is_some_and(|last| self.contains(last))
    }
}

/// The size of the largest leaf of a page table that `len` bytes have room for: a page, or what an
/// entry of the table above maps, or of the one above that. All tables have 8-byte entries and are
/// a page long.
pub(crate) fn largest_leaf(page: u64, len: u64) -> u64 {
    let above = |leaf: &u64| leaf.checked_mul(page / 8);
    let leaves = std::iter::successors(Some(page), above).take(3);
    leaves.take_while(|&leaf| leaf <= len).last().unwrap_or(page)
}

/// The registers of a BAR, unmapped on drop.
///
/// # Invariant
///
/// The registers of each area are mapped, readable and writable, until the region is unmapped.
#[derive(Debug)]
pub(crate) struct Registers {
    areas: Vec<(Area, MmioRegion)>,
    /// The address of the BAR's first byte.
    start: NonNull<u8>,
    /// Held to be unmapped with this.
    _region: Region,
}

// SAFETY:
// 1. The registers are mapped into the process, not into a thread: any thread may use and unmap
//    them.
unsafe impl Send for Registers {}

// SAFETY:
// 1. Through `&Registers` registers are accessed by `MmioRegion` alone, which is `Sync`.
unsafe impl Sync for Registers {}

impl Registers {
    /// Maps `areas` of the BAR of `len` bytes that begins at `offset` of a device's file, all at
    /// their places behind a multiple of the largest leaf that fits. Areas that do not begin
    /// between pages, or are not all in the BAR, are left out.
    pub(crate) fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        areas: &[Area],
    ) -> Result<Self, Errno> {
        let page = page_size();
        let leaf = usize::try_from(largest_leaf(page, len)).map_err(|_| Errno::ENOMEM)?;
        let mapped_len = len.checked_next_multiple_of(page).ok_or(Errno::ENOMEM)?;
        let mapped_len = usize::try_from(mapped_len).map_err(|_| Errno::ENOMEM)?;
        let areas = areas.iter().copied().filter(|area| {
            let end = area.offset.checked_add(area.len);
            area.len != 0 && end.is_some_and(|end| end <= len) && area.offset.is_multiple_of(page)
        });
        let areas: Vec<Area> = areas.collect();
        let (mut region, skip) = Region::reserve(mapped_len, leaf)?;
        for area in &areas {
            // No longer than `mapped_len`, and so no overflow.
            let area_len = area.len.next_multiple_of(page);
            let (at, area_len) = (usize::try_from(area.offset), usize::try_from(area_len));
            let at = at.map_err(|_| Errno::ENOMEM)?.checked_add(skip).ok_or(Errno::ENOMEM)?;
            let area_len = area_len.map_err(|_| Errno::ENOMEM)?;
            let file = offset.checked_add(area.offset).and_then(|at| at.try_into().ok());
            let file = file.ok_or(Errno::EOVERFLOW)?;
            region = region.place(at, area_len, libc::MAP_SHARED, fd.as_raw_fd(), file)?;
        }
        let view = |area: Area| {
            let at = skip.checked_add(usize::try_from(area.offset).ok()?)?;
            let start = NonNull::new(region.at(at))?.cast();
            // SAFETY:
            // 1. The area has just been mapped as the file's, which are the device's registers, and
            //    stays mapped as long as the region, which is dropped with the view.
            // 2. Nobody else knows the address, and what is behind it is accessed by the view
            //    alone: with volatile accesses.
            // 3. It begins between pages: aligned to 8 bytes.
            let registers = unsafe { MmioRegion::new(start, area.len) };
            Some((area, registers))
        };
        let areas = areas.into_iter().filter_map(view).collect();
        // No region is at 0.
        let start = NonNull::new(region.at(skip)).ok_or(Errno::ENOMEM)?.cast();
        Ok(Self { areas, start, _region: region })
    }

    /// The address of `len` bytes from `offset` on, where all of them are mapped.
    pub(crate) fn address(&self, offset: u64, len: NonZero<u64>) -> Option<u64> {
        u64::try_from(self.pointer(offset, len)?.addr().get()).ok()
    }

    /// The same as a pointer, which may be used for all of them while this lives.
    pub(crate) fn pointer(&self, offset: u64, len: NonZero<u64>) -> Option<NonNull<u8>> {
        self.areas.iter().find(|(area, _)| area.covers(offset, len))?;
        let skip = usize::try_from(offset).ok()?;
        NonNull::new(self.start.as_ptr().wrapping_byte_add(skip))
    }

    /// The largest leaf that `len` bytes have room for and that the first byte's address is a
    /// multiple of.
    pub(crate) fn alignment(&self, len: u64) -> u64 {
        let start = self.start.addr().get();
        let of_start = start & start.wrapping_neg();
        largest_leaf(page_size(), len.min(u64::try_from(of_start).unwrap_or(u64::MAX)))
    }

    /// The area that `offset` is in, and where in there. A BAR has one area, or a few.
    fn find(&self, offset: u64) -> Option<(&MmioRegion, u64)> {
        let (area, registers) = self.areas.iter().find(|(area, _)| area.contains(offset))?;
        Some((registers, offset - area.offset))
    }
}

impl<K: Kernel> DmaTable<K> {
    /// Maps `user`, which is all in `registers`, at `range`, which is as long. They are kept until
    /// what is returned is released.
    pub(crate) fn map_registers(
        &self,
        registers: &Arc<Registers>,
        user: UserRange,
        range: IovaRange,
        prot: Prot,
    ) -> Result<KernelMapping, Refused> {
        let start = u64::try_from(registers.start.addr().get()).ok();
        let offset = start.and_then(|start| user.start().get().checked_sub(start));
        let len = user.checked_len().and_then(NonZero::new);
        let is_mapped = offset.zip(len).and_then(|(at, len)| registers.address(at, len)).is_some();
        if !is_mapped || user.len_less_one() != range.len_less_one() {
            return Err(Refused { request: K::MAP, errno: Errno::EFAULT });
        }
        let owner: Owner = Arc::<Registers>::clone(registers);
        // SAFETY:
        // 1. All of `user` is mapped while the owner lives, and the range is no longer.
        // 2. What is there are registers. They are no memory of Rust's: nobody has a reference to
        //    them, and they are accessed by volatile accesses, which expect any value.
        // 3. What the device behind them is made to do by their being written, it does to memory
        //    that is mapped for it, which it may access at any time (the promise that was given
        //    when that was mapped).
        unsafe { self.map(owner, Source::User(user.start()), range, prot) }
    }

    /// Maps a dma-buf of registers at `range`, from its start on. `registers` are what keeps the
    /// device open that they are of; they are kept until what is returned is released.
    pub(crate) fn map_dma_buf(
        &self,
        registers: &Arc<Registers>,
        dma_buf: &DmaBuf,
        range: IovaRange,
        prot: Prot,
    ) -> Result<KernelMapping, Refused> {
        let owner: Owner = Arc::<Registers>::clone(registers);
        let source = Source::File { fd: dma_buf.as_fd().as_raw_fd(), offset: 0 };
        // SAFETY:
        // 1. The kernel maps no more of the dma-buf than there is, and the mapping holds it. When
        //    the device is closed or reset the kernel takes the registers away from everybody.
        // 2. They are no memory of Rust's, as in `map_registers`, and 3. there.
        unsafe { self.map(owner, source, range, prot) }
    }
}

impl Mmio for Registers {
    fn read32(&self, offset: u64) -> u32 {
        self.find(offset).map_or(u32::MAX, |(registers, offset)| registers.read32(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        if let Some((registers, offset)) = self.find(offset) {
            registers.write32(offset, value);
        }
    }

    fn read64(&self, offset: u64) -> u64 {
        self.find(offset).map_or(u64::MAX, |(registers, offset)| registers.read64(offset))
    }

    fn write64(&self, offset: u64, value: u64) {
        if let Some((registers, offset)) = self.find(offset) {
            registers.write64(offset, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::sys;

    #[test]
    fn a_bar_begins_at_a_multiple_of_the_largest_leaf_that_it_has_room_for() {
        const K4: u64 = 4 << 10;
        const K64: u64 = 64 << 10;
        for (page, len, leaf) in [
            (K4, 256, K4),
            (K4, 16 << 10, K4),
            (K4, (2 << 20) - 1, K4),
            (K4, 2 << 20, 2 << 20),
            (K4, 16 << 20, 2 << 20),
            (K4, 1 << 30, 1 << 30),
            (K4, 32 << 30, 1 << 30),
            (K4, 1 << 40, 1 << 30),
            (K64, 1 << 20, K64),
            (K64, 512 << 20, 512 << 20),
            (K64, u64::MAX, 4 << 40),
        ] {
            assert_eq!(largest_leaf(page, len), leaf, "{page:#x}, {len:#x}");
        }
    }

    /// A file of numbered words in the place of a device's.
    fn words(len: u64) -> std::fs::File {
        let file = std::fs::File::from(sys::memfd(c"bar", 0).unwrap());
        let words: Vec<u8> =
            (0..len / 4).flat_map(|i| u32::try_from(i).unwrap().to_le_bytes()).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &words, 0).unwrap();
        file
    }

    #[test]
    fn accesses_outside_of_the_areas_are_not_made() {
        let page = page_size();
        let file = words(8 * page);
        let areas = [
            Area { offset: page, len: page },
            Area { offset: 3 * page, len: 2 * page },
            // Not between pages, beyond the end, empty.
            Area { offset: 12, len: page },
            Area { offset: 4 * page, len: 2 * page },
            Area { offset: u64::MAX - page + 1, len: page },
            Area { offset: 0, len: 0 },
        ];
        // The BAR begins a page behind the file's start, and is 5 pages long.
        let bar = Registers::map(file.as_fd(), page, 5 * page, &areas).unwrap();
        for offset in (0..6 * page).step_by(4).chain([2, u64::MAX, u64::MAX - 3]) {
            let (number, inside) = (offset / page, offset % 4 == 0);
            let mapped = inside && (number == 1 || number == 3 || number == 4);
            let value = u32::try_from((page + offset.min(6 * page)) / 4).unwrap();
            assert_eq!(bar.read32(offset), if mapped { value } else { u32::MAX }, "{offset:#x}");
        }
        bar.write64(2 * page - 8, 7);
        bar.write64(2 * page, 7);
        bar.write32(2 * page, 7);
        assert_eq!(bar.read64(2 * page - 8), 7);
        assert_eq!(bar.read64(2 * page), u64::MAX);
        let mut bytes = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 3 * page - 8).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), 7);
        let len = |len| NonZero::new(len).unwrap();
        assert!(bar.address(3 * page, len(2 * page)).is_some());
        for (offset, bytes) in [(0, page), (page, page + 1), (3 * page, u64::MAX), (2 * page, 1)] {
            assert_eq!(bar.address(offset, len(bytes)), None, "{offset:#x}, {bytes:#x}");
            assert_eq!(bar.pointer(offset, len(bytes)), None, "{offset:#x}, {bytes:#x}");
        }
        let last = bar.pointer(2 * page - 8, len(8)).unwrap().cast::<u64>();
        // SAFETY:
        // 1. The word is of the second page, which is mapped while `bar` lives.
        assert_eq!(unsafe { last.read_volatile() }, 7);
    }

    #[test]
    fn a_large_bar_is_aligned() {
        let file = words(4 << 20);
        let areas = [Area { offset: 0, len: 4 << 20 }];
        let bar = Registers::map(file.as_fd(), 0, 4 << 20, &areas).unwrap();
        let leaf = largest_leaf(page_size(), 4 << 20);
        assert!(bar.alignment(4 << 20) >= leaf && leaf >= page_size());
        assert!(page_size() > 4096 || leaf == 2 << 20);
        assert_eq!(bar.alignment(1 << 20), page_size());
        assert_eq!(bar.read32((4 << 20) - 4), (1 << 20) - 1);
    }

    #[test]
    fn registers_that_cannot_be_mapped_are_an_error() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let page = page_size();
        let areas = [Area { offset: 0, len: page }];
        assert!(Registers::map(file.as_fd(), 0, page, &areas).is_err());
        assert!(Registers::map(file.as_fd(), 0, u64::MAX, &areas).is_err());
        assert!(Registers::map(file.as_fd(), u64::MAX - page + 1, page, &areas).is_err());
    }
}
