//! Virtio descriptor chains: what the formats of both kinds of ring share.
//!
//! Virtual I/O Device 1.2, sections 2.7 (split) and 2.8 (packed).

use super::error::Error;
use super::limits::SegmentLimits;
use super::scatter::ScatterEntry;
use crate::addr::Address;
use crate::span::Span;

/// Another descriptor of the chain follows: `VIRTQ_DESC_F_NEXT` (sections 2.7.5 and 2.8.6).
pub(super) const NEXT: u16 = 1;
/// The device writes the bytes: `VIRTQ_DESC_F_WRITE` (sections 2.7.5 and 2.8.3).
pub(super) const WRITE: u16 = 2;
/// The bytes are a table of descriptors: `VIRTQ_DESC_F_INDIRECT` (sections 2.7.5 and 2.8.7).
pub(super) const INDIRECT: u16 = 4;
/// log2 of the size of a descriptor of either ring.
pub(super) const DESCRIPTOR_LG2: u32 = 4;

/// The longest chain, in bytes (section 2.7.5.2). In packed rings too no device can tell by a
/// length of 32 bits how much more it has written.
const MAX_BYTES: u64 = 1 << 32;

/// A chain of virtio descriptors: the bytes that a device reads, and behind them those that it
/// writes, in the order that sections 2.7.4.2 and 2.8.17 ask for. Each of both is an iterator of
/// spans.
///
/// Where spans touch they are one descriptor: a device of Virtio 1 makes nothing of how bytes are
/// framed (section 2.7.4.1). The limits are those of the device, like `size_max` of a block device;
/// its `seg_max` and the size of its queue are the room to give.
///
/// ```
/// use dmaspan::regbuf::descriptors::{Chain, SegmentLimits, SplitDescriptor};
/// use dmaspan::{PhysAddr, Span};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let header = Span::new(PhysAddr::new(0x1000), 16)?;
///     let data = Span::new(PhysAddr::new(0x20_0000), 1 << 20)?;
///     let status = Span::new(PhysAddr::new(0x1010), 1)?;
///
///     let mut table = [SplitDescriptor::default(); 8]; // of the queue
///     let chain = Chain::new(SegmentLimits::default(), [header], [data, status]);
///     let head = chain.write_split(&[5, 2, 7, 1], |index, descriptor| {
///         table[usize::from(index)] = descriptor;
///     })?;
///     assert_eq!(head, 3); // descriptors 5, 2 and 7; the head is 5
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Chain<R, W> {
    limits: SegmentLimits,
    readable: R,
    writable: W,
}

/// A descriptor of a chain, in either format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) entry: ScatterEntry,
    /// [`WRITE`] and [`NEXT`], as is right for its place in the chain.
    pub(super) flags: u16,
}

impl<R, W, A: Address> Chain<R, W>
where
    R: Iterator<Item = Span<A>> + Clone,
    W: Iterator<Item = Span<A>> + Clone,
{
    /// The chain of what a device reads and of what it writes.
    #[inline(always)]
    pub fn new(
        limits: SegmentLimits,
        readable: impl IntoIterator<IntoIter = R>,
        writable: impl IntoIterator<IntoIter = W>,
    ) -> Self {
        Self { limits, readable: readable.into_iter(), writable: writable.into_iter() }
    }

    /// Returns how many descriptors the chain has, which is not none.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`], and [`Error::TooLong`] beyond 2^32 bytes.
    #[inline(always)]
    pub fn descriptors(&self) -> Result<usize, Error> {
        let readable = self.limits.need(self.readable.clone());
        let writable = self.limits.need(self.writable.clone());
        let bytes = readable.bytes.saturating_add(writable.bytes);
        match bytes {
            0 => Err(Error::Empty),
            1..=MAX_BYTES => Ok(readable.entries.saturating_add(writable.entries)),
            _ => Err(Error::TooLong { bytes, max: MAX_BYTES }),
        }
    }

    /// How many descriptors the chain has, of which `room` have a place.
    #[inline(always)]
    pub(super) fn fits(&self, room: usize) -> Result<usize, Error> {
        let needed = self.descriptors()?;
        if needed > room { Err(Error::Room { needed, room }) } else { Ok(needed) }
    }

    /// Calls `each` with the descriptors in their order, of which there are `count`: with no more,
    /// whose places may be those of another chain, if a clone of the spans gave fewer.
    #[inline(always)]
    pub(super) fn each(self, count: usize, mut each: impl FnMut(Element)) {
        let readable = self.limits.entries(self.readable).map(|entry| (entry, 0));
        let writable = self.limits.entries(self.writable).map(|entry| (entry, WRITE));
        let mut left = count;
        readable.chain(writable).for_each(|(entry, access)| {
            let Some(behind) = left.checked_sub(1) else { return };
            left = behind;
            let next = if left > 0 { NEXT } else { 0 };
            each(Element { entry, flags: access | next });
        });
    }
}

/// The length of a table of descriptors, in bytes; a chain has fewer than 2^28.
#[inline(always)]
pub(super) fn table_bytes(descriptors: usize) -> Result<u32, Error> {
    let room = (u32::MAX >> DESCRIPTOR_LG2) as usize;
    match u32::try_from(descriptors) {
        Ok(0) => Err(Error::Empty),
        Ok(count) if descriptors <= room => Ok(count << DESCRIPTOR_LG2),
        _ => Err(Error::Room { needed: descriptors, room }),
    }
}
