//! NVMe scatter-gather lists.
//!
//! NVM Express Base Specification 2.0, section 4.1.2: descriptors of 16 bytes. A command has one,
//! of data or of a segment, which is an array of further ones.

use super::error::Error;
use super::limits::SegmentLimits;
use super::list::{ListPage, PagePosition, pages_for};
use super::scatter::ScatterEntry;
use crate::addr::{Address, DmaAddr};
use crate::lg2;
use crate::span::Span;

/// The type of a descriptor, in the high four bits of its last byte; the low ones, the sub type,
/// are 0 for an address (section 4.1.2, SGL Descriptor Type).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// SGL Data Block: bytes of the transfer.
    Data = 0x00,
    /// SGL Segment: the next segment, behind which others follow.
    Segment = 0x20,
    /// SGL Last Segment: the next segment, which is the last one.
    LastSegment = 0x30,
}

/// log2 of the alignment of a segment (section 4.1.2).
const SEGMENT_ALIGN_LG2: u32 = 3;
/// How many descriptors a segment may have for the length of it to fit.
const MAX_SEGMENT: usize = (u32::MAX / 16) as usize;

/// A descriptor, as the controller reads it (section 4.1.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SglDescriptor {
    /// Bytes 0 to 7, little-endian.
    addr: u64,
    /// Bytes 8 to 11, little-endian.
    len: u32,
    /// Bytes 12 to 14.
    reserved: [u8; 3],
    /// Byte 15, the identifier.
    identifier: u8,
}
const _: () = assert!(size_of::<SglDescriptor>() == 16);
/// log2 of its size.
const DESCRIPTOR_LG2: u32 = 4;

impl SglDescriptor {
    #[inline(always)]
    const fn new(kind: Kind, addr: DmaAddr, len: u32) -> Self {
        let addr = addr.get().to_le();
        Self { addr, len: len.to_le(), reserved: [0; 3], identifier: kind as u8 }
    }

    /// A Data Block.
    #[inline(always)]
    const fn data(entry: ScatterEntry) -> Self {
        Self::new(Kind::Data, entry.addr, entry.len)
    }

    /// Its bytes, as they lie in memory.
    pub const fn to_bytes(self) -> [u8; 16] {
        let (addr, len) = (u64::from_le(self.addr) as u128, u32::from_le(self.len) as u128);
        (addr | len << 64 | (self.identifier as u128) << 120).to_le_bytes()
    }
}

/// A scatter-gather list: what a command has of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sgl {
    /// SGL entry 1, for the field DPTR of the command, bytes 24 to 39 (section 3.3.3.1).
    pub sgl1: SglDescriptor,
    /// How many pages of the list the command uses.
    pub list_pages: usize,
}

impl Sgl {
    /// Writes what a command needs to transfer all bytes of `spans`: a Data Block for each segment
    /// that `limits` allow. A single one stands in the command, several in `list`, by segments that
    /// are chained. The pages of the list are taken from the first one on, and those that are not
    /// needed are left as they are. They may be of any length and lie anywhere, aligned to 8 bytes.
    ///
    /// How many Data Blocks there are says [`SegmentLimits::need`]; a page that another follows has
    /// one less than it has entries.
    ///
    /// # Errors
    ///
    /// With nothing written: [`Error::Empty`]; [`Error::Room`]; [`Error::Unaligned`] and
    /// [`Error::ListPage`] for a page of the list that is not so.
    ///
    /// # Context
    ///
    /// The device does not read the list meanwhile.
    #[inline(always)]
    pub fn write<A: Address, I>(
        limits: SegmentLimits,
        spans: I,
        list: &mut [ListPage<'_, SglDescriptor>],
    ) -> Result<Self, Error>
    where
        I: IntoIterator<Item = Span<A>, IntoIter: Clone>,
    {
        let spans = spans.into_iter();
        let mut left = limits.need(spans.clone()).entries;
        let mut entries = limits.entries(spans);
        if left <= 1 {
            let sgl1 = SglDescriptor::data(entries.next().ok_or(Error::Empty)?);
            return Ok(Self { sgl1, list_pages: 0 });
        }
        let list_pages = pages_for(list, left, check)?;
        let sgl1 = pointer(list, 0, list_pages, left);
        for n in 1..list_pages {
            let Some(data) = list.get(n - 1).map(|page| page.entries.len() - 1) else { break };
            left = left.saturating_sub(data);
            let next = pointer(list, n, list_pages, left);
            let place = list.get_mut(n - 1).and_then(|page| page.entries.last_mut());
            if let (Some(place), Some(next)) = (place, next) {
                *place = next;
            }
        }
        let mut pages = list.iter_mut().take(list_pages).enumerate();
        let mut places = [].iter_mut();
        entries.for_each(|entry| {
            loop {
                if let Some(place) = places.next() {
                    *place = SglDescriptor::data(entry);
                    return;
                }
                let Some((n, page)) = pages.next() else { return };
                let data = page.entries.len() - usize::from(n + 1 != list_pages);
                places = page.entries.split_at_mut(data).0.iter_mut();
            }
        });
        sgl1.map(|sgl1| Self { sgl1, list_pages }).ok_or(Error::Empty)
    }
}

/// The descriptor of the segment in page `n` of the list, of which `list_pages` are used: it and
/// those behind it have `left` entries of data. `None` behind the last one.
#[inline(always)]
fn pointer(
    list: &[ListPage<'_, SglDescriptor>],
    n: usize,
    list_pages: usize,
    left: usize,
) -> Option<SglDescriptor> {
    let page = list.get(n)?;
    let (kind, count) = if n + 1 == list_pages {
        (Kind::LastSegment, left)
    } else {
        (Kind::Segment, page.entries.len())
    };
    // It was checked that it fits.
    let len = u32::try_from(count).ok()? << DESCRIPTOR_LG2;
    Some(SglDescriptor::new(kind, page.addr, len))
}

/// Refuses a page of a list that no descriptor can tell.
#[inline(always)]
fn check(_: usize, page: &ListPage<'_, SglDescriptor>, place: PagePosition) -> Result<(), Error> {
    let (addr, entries) = (page.addr, page.entries.len());
    if !lg2::is_aligned(addr.get(), SEGMENT_ALIGN_LG2) {
        return Err(Error::Unaligned { addr, align: lg2::size(SEGMENT_ALIGN_LG2) });
    }
    if entries > MAX_SEGMENT {
        return Err(Error::ListPage { addr, entries, expected: MAX_SEGMENT });
    }
    if place == PagePosition::Chained && entries == 0 {
        return Err(Error::ListPage { addr, entries, expected: 1 });
    }
    Ok(())
}
