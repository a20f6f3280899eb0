//! The `PAGEMAP_SCAN` ioctl (Linux 6.7; Documentation/admin-guide/mm/pagemap.rst and
//! include/uapi/linux/fs.h).

#![expect(unsafe_code, reason = "an ioctl with pointers in its argument")]

use std::fs::File;
use std::os::fd::AsRawFd;

use dmaspan::Errno;

use crate::os;

/// The page is in memory, not in swap.
const PAGE_IS_PRESENT: u64 = 1 << 3;

/// A PMD or PUD entry maps the page: a leaf larger than a base page.
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `struct pm_scan_arg`: what to look for, and where the answer goes.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    /// Bytes of this struct.
    size: u64,
    /// What to do with the pages besides reporting them.
    flags: u64,
    /// The first address, of a page.
    start: u64,
    /// The address behind the last page.
    end: u64,
    /// Written by the kernel: where it stopped, `end` where it saw everything.
    walk_end: u64,
    /// The address of the regions.
    vec: u64,
    /// For how many regions there is room.
    vec_len: u64,
    /// The most pages to report, 0 for all.
    max_pages: u64,
    /// Categories whose bit is taken inverted.
    category_inverted: u64,
    /// Categories that all must be there.
    category_mask: u64,
    /// Categories of which one must be there.
    category_anyof_mask: u64,
    /// Categories to report; neighbours with the same ones are one region.
    return_mask: u64,
}

/// The size that the kernel knows the struct by since its first version.
const _: () = assert!(size_of::<ScanArg>() == 96);

/// `struct page_region`: pages of the same categories.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageRegion {
    /// The address of the first page.
    pub(crate) start: u64,
    /// The address behind the last page.
    pub(crate) end: u64,
    /// The categories, of those asked for.
    categories: u64,
}

const _: () = assert!(size_of::<PageRegion>() == 24);

/// How far a scan came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scanned {
    /// How many regions it wrote.
    pub(crate) regions: usize,
    /// The address behind the last page that it saw; less than asked where the regions ran out.
    pub(crate) end: u64,
}

/// Fills `regions` with the parts of `start..end` that are present and mapped by huge leaves, in
/// order. Both are addresses of pages of the process that `pagemap` belongs to.
pub(crate) fn huge_regions(
    pagemap: &File,
    start: u64,
    end: u64,
    regions: &mut [PageRegion],
) -> Result<Scanned, Errno> {
    let wanted = PAGE_IS_HUGE | PAGE_IS_PRESENT;
    let to_u64 = |value: usize| u64::try_from(value).map_err(|_| Errno::EINVAL);
    let mut arg = ScanArg {
        size: to_u64(size_of::<ScanArg>())?,
        start,
        end,
        vec: to_u64(regions.as_mut_ptr().expose_provenance())?,
        vec_len: to_u64(regions.len())?,
        category_mask: wanted,
        return_mask: wanted,
        ..ScanArg::default()
    };
    let request = libc::_IOWR::<ScanArg>(u32::from(b'f'), 16);
    // SAFETY:
    // 1. `arg` is a live `struct pm_scan_arg` of the size that it names; the kernel reads it and
    //    writes `walk_end`.
    // 2. The kernel writes at most `vec_len` regions at `vec`, which is `regions`, borrowed
    //    exclusively until the call returns; any bits are a `PageRegion`.
    // 3. Without flags the call changes nothing of the memory that it looks at. A file that is not
    //    a pagemap answers `ENOTTY`.
    let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), request, &raw mut arg) };
    let count = usize::try_from(count).map_err(|_| os::last_errno())?;
    Ok(Scanned { regions: count.min(regions.len()), end: arg.walk_end })
}
