//! The descriptors of an import: scatter-gather entries, and NVMe's two forms of them.

use std::num::NonZeroU32;

use dmaspan::lg2;

use super::buffer::ImportBefore;
use super::{PAGE, PAGE_LG2, RegbufBeforeError};

/// Contiguous bytes for a device (`struct scatterlist`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct EntryBefore {
    /// Where they begin: in memory, and as the device knows it after [`map_direct`].
    pub(crate) addr: u64,
    /// How many there are.
    pub(crate) len: u32,
}

/// What one entry may be (`struct queue_limits`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitsBefore {
    /// The longest in bytes (`max_segment_size`).
    pub(crate) max_segment: NonZeroU32,
    /// All bits below the one at whose multiples none may go on (`seg_boundary_mask`).
    pub(crate) boundary_mask: u64,
}

impl LimitsBefore {
    /// Those of an NVMe device in Linux: what lengths of 32 bits can say, within 4 GiB.
    pub(crate) const NVME: Self =
        Self { max_segment: NonZeroU32::MAX, boundary_mask: lg2::mask(32) };

    /// How long an entry at `addr` may be (`get_max_segment_size`).
    #[inline(always)]
    fn longest(self, addr: u64) -> u32 {
        let above = u64::from(self.max_segment.get() - 1).min(self.boundary_mask & !addr);
        // Below the length of 32 bits, and so is one more.
        u32::try_from(above).map_or(u32::MAX, |above| above + 1)
    }

    /// Whether bytes can be part of the entry before them (`biovec_phys_mergeable`).
    #[inline(always)]
    fn join(self, before: EntryBefore, next: EntryBefore) -> Option<EntryBefore> {
        let len = u64::from(before.len) + u64::from(next.len);
        let touches = before.addr.wrapping_add(u64::from(before.len)) == next.addr;
        let last = before.addr.wrapping_add(len).wrapping_sub(1);
        let within = (before.addr ^ last) & !self.boundary_mask == 0;
        let short = len <= u64::from(self.max_segment.get());
        let joined = EntryBefore { len: before.len.wrapping_add(next.len), ..before };
        (touches & within & short).then_some(joined)
    }
}

/// Entries that are written one behind the other.
struct Places<'a> {
    entries: &'a mut [EntryBefore],
    used: usize,
}

impl Places<'_> {
    #[inline(always)]
    fn push(&mut self, entry: EntryBefore) -> Result<(), RegbufBeforeError> {
        let room = self.entries.len();
        let place = self.entries.get_mut(self.used).ok_or(RegbufBeforeError::NoRoom { room })?;
        *place = entry;
        self.used += 1;
        Ok(())
    }

    /// Writes what the limits cut off contiguous bytes, and returns the rest, which is one entry.
    #[inline(always)]
    fn cut(
        &mut self,
        bytes: EntryBefore,
        limits: LimitsBefore,
    ) -> Result<EntryBefore, RegbufBeforeError> {
        let mut rest = bytes;
        loop {
            let len = limits.longest(rest.addr);
            if len >= rest.len {
                return Ok(rest);
            }
            self.push(EntryBefore { len, ..rest })?;
            rest = EntryBefore { addr: rest.addr + u64::from(len), len: rest.len - len };
        }
    }
}

/// Makes entries of an import, bvec by bvec, and returns how many (`__blk_rq_map_sg`). A bvec is
/// part of the entry before it where it touches that and the limits allow all of it; else it begins
/// one, and is cut where they say so.
///
/// # Errors
///
/// [`RegbufBeforeError::NoRoom`], with entries written.
pub(crate) fn map_sg(
    import: ImportBefore<'_>,
    limits: LimitsBefore,
    entries: &mut [EntryBefore],
) -> Result<usize, RegbufBeforeError> {
    let mut places = Places { entries, used: 0 };
    let mut import = import;
    let Some(first) = import.next() else { return Ok(0) };
    let mut open = places.cut(first, limits)?;
    for bytes in import {
        if let Some(joined) = limits.join(open, bytes) {
            open = joined;
            continue;
        }
        places.push(open)?;
        open = places.cut(bytes, limits)?;
    }
    places.push(open)?;
    Ok(places.used)
}

/// How a device without an IOMMU reaches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BusBefore {
    /// What is added to an address, modulo 2^64.
    pub(crate) offset: u64,
    /// The last address that the device can use.
    pub(crate) last: u64,
}

impl BusBefore {
    /// All of memory, at its own addresses.
    pub(crate) const WHOLE: Self = Self { offset: 0, last: u64::MAX };
}

/// Makes addresses of the device out of those of memory, entry by entry (`dma_direct_map_sg`).
///
/// # Errors
///
/// [`RegbufBeforeError::OutOfReach`], with entries before that one mapped.
#[inline]
pub(crate) fn map_direct(
    entries: &mut [EntryBefore],
    bus: BusBefore,
) -> Result<(), RegbufBeforeError> {
    for entry in entries {
        let addr = entry.addr.wrapping_add(bus.offset);
        let above = u64::from(entry.len).wrapping_sub(1);
        if addr.checked_add(above).is_none_or(|last| last > bus.last) {
            let EntryBefore { addr, len } = *entry;
            return Err(RegbufBeforeError::OutOfReach { addr, len, last: bus.last });
        }
        entry.addr = addr;
    }
    Ok(())
}

/// Makes an SGL data block descriptor of each entry, and returns how many (NVM Express Base
/// Specification 2.0, section 4.1.2; `nvme_pci_sgl_set_data`): the address, and the length with
/// descriptor type 0, little-endian both.
///
/// # Errors
///
/// [`RegbufBeforeError::NoRoom`], with nothing written.
#[inline]
pub(crate) fn sgl(
    entries: &[EntryBefore],
    out: &mut [[u64; 2]],
) -> Result<usize, RegbufBeforeError> {
    let room = out.len();
    let places = out.get_mut(..entries.len()).ok_or(RegbufBeforeError::NoRoom { room })?;
    for (place, entry) in places.iter_mut().zip(entries) {
        *place = [entry.addr.to_le(), u64::from(entry.len).to_le()];
    }
    Ok(entries.len())
}

/// Makes a PRP entry of each page of 4 KiB under entries, and returns how many (NVM Express Base
/// Specification 2.0, section 4.1.1; `nvme_pci_setup_prps`), little-endian. The first keeps its
/// offset into the page.
///
/// # Errors
///
/// [`RegbufBeforeError::NotPages`] where an entry does not begin with a page and is not the first,
/// or does not end with one and is not the last, and where the first begins within a dword;
/// [`RegbufBeforeError::NoRoom`]. PRPs of entries before that one are written.
pub(crate) fn prps(entries: &[EntryBefore], out: &mut [u64]) -> Result<usize, RegbufBeforeError> {
    let room = out.len();
    let mut used = 0;
    for (number, entry) in entries.iter().enumerate() {
        let EntryBefore { addr, len } = *entry;
        let end = addr.wrapping_add(u64::from(len));
        let begins = if number == 0 { addr % 4 == 0 } else { addr % PAGE == 0 };
        let ends = number + 1 == entries.len() || end % PAGE == 0;
        if !begins || !ends {
            return Err(RegbufBeforeError::NotPages { addr, len });
        }
        let no_room = RegbufBeforeError::NoRoom { room };
        *out.get_mut(used).ok_or(no_room)? = addr.to_le();
        used += 1;
        let pages = (addr % PAGE + u64::from(len)).div_ceil(PAGE);
        if pages > 1 {
            let others = usize::try_from(pages - 1).map_err(|_| no_room)?;
            let places = out.get_mut(used..).and_then(|rest| rest.get_mut(..others));
            let mut page = lg2::align_down(addr, PAGE_LG2);
            for place in places.ok_or(no_room)? {
                page = page.wrapping_add(PAGE);
                *place = page.to_le();
            }
            used += others;
        }
    }
    Ok(used)
}
