//! Virtio descriptors of packed rings.
//!
//! Virtual I/O Device 1.2, section 2.8.

use super::error::Error;
use super::scatter::ScatterEntry;
use super::virtq::{Chain, INDIRECT, NEXT, WRITE, table_bytes};
use crate::addr::{Address, DmaAddr};
use crate::span::Span;

/// Equal to the wrap counter in a descriptor that is made available: `VIRTQ_DESC_F_AVAIL` (section
/// 2.8.1).
const AVAIL: u16 = 1 << 7;
/// The inverse of the wrap counter there: `VIRTQ_DESC_F_USED` (section 2.8.1).
const USED: u16 = 1 << 15;
/// The most descriptors of a ring (section 2.8).
const MAX_SIZE: u16 = 1 << 15;

/// A descriptor of a packed ring, `pvirtq_desc` (section 2.8.13), as the device reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PackedDescriptor {
    /// All of them little-endian.
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}
const _: () = assert!(size_of::<PackedDescriptor>() == 16);

impl PackedDescriptor {
    #[inline(always)]
    const fn new(entry: ScatterEntry, id: u16, flags: u16) -> Self {
        let addr = entry.addr.get().to_le();
        Self { addr, len: entry.len.to_le(), id: id.to_le(), flags: flags.to_le() }
    }

    /// The descriptor at `position` of a table of so many indirect ones at `addr`, alone in its
    /// list (section 2.8.7), for the buffer `id`.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`] for none; [`Error::Room`] for more than a length of 32 bits can tell.
    pub fn indirect(
        position: PackedPosition,
        id: u16,
        addr: DmaAddr,
        descriptors: usize,
    ) -> Result<Self, Error> {
        let len = table_bytes(descriptors)?;
        Ok(Self::new(ScatterEntry { addr, len }, id, INDIRECT | position.flags()))
    }

    /// The flags, as a number: the last two bytes. They make the descriptor available.
    pub const fn flags(self) -> u16 {
        u16::from_le(self.flags)
    }

    /// Its bytes, as they lie in memory.
    pub const fn to_bytes(self) -> [u8; 16] {
        let (addr, len) = (u64::from_le(self.addr) as u128, u32::from_le(self.len) as u128);
        let (id, flags) = (u16::from_le(self.id) as u128, u16::from_le(self.flags) as u128);
        (addr | len << 64 | id << 96 | flags << 112).to_le_bytes()
    }
}

/// Says where a driver puts its next descriptor into a packed ring, and its wrap counter (section
/// 2.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedPosition {
    size: u16,
    index: u16,
    /// The wrap counter: all bits of a flag, or none.
    wrap: u16,
}

impl PackedPosition {
    /// The beginning of an empty ring of `size` descriptors, with a wrap counter of 1.
    ///
    /// # Errors
    ///
    /// [`Error::QueueSize`] unless they are 1 to 2^15.
    pub const fn start(size: u16) -> Result<Self, Error> {
        if size == 0 || size > MAX_SIZE {
            return Err(Error::QueueSize { size });
        }
        Ok(Self { size, index: 0, wrap: u16::MAX })
    }

    /// The index in the ring.
    pub const fn index(self) -> u16 {
        self.index
    }

    /// The wrap counter, 0 or 1.
    pub const fn wrap_counter(self) -> u16 {
        self.wrap & 1
    }

    /// The position behind this one, from the end on to the beginning with the other wrap counter.
    #[inline(always)]
    #[must_use]
    pub const fn next(self) -> Self {
        if self.index + 1 == self.size {
            Self { index: 0, wrap: !self.wrap, ..self }
        } else {
            Self { index: self.index + 1, ..self }
        }
    }

    /// The flags that make a descriptor available here.
    #[inline(always)]
    const fn flags(self) -> u16 {
        (self.wrap & AVAIL) | (!self.wrap & USED)
    }
}

impl<R, W, A: Address> Chain<R, W>
where
    R: Iterator<Item = Span<A>> + Clone,
    W: Iterator<Item = Span<A>> + Clone,
{
    /// Puts the list of descriptors into a packed ring, from `position` on, of which `free` are
    /// free there. Calls `put` with each and its index, and returns the position behind the list.
    /// The last descriptor has `id`, the others 0.
    ///
    /// `put` is called for the first descriptor last: when its flags are written, the device may
    /// use all of the list (section 2.8.6).
    ///
    /// # Errors
    ///
    /// [`Error::Room`], and as of [`descriptors`](Self::descriptors): `put` was not called.
    ///
    /// # Context
    ///
    /// Where the index is that of `position`, `put` writes the flags after all else, behind a
    /// barrier (section 2.8.21.1.1).
    #[inline(always)]
    pub fn write_packed(
        self,
        position: PackedPosition,
        free: u16,
        id: u16,
        mut put: impl FnMut(u16, PackedDescriptor),
    ) -> Result<PackedPosition, Error> {
        let count = self.fits(usize::from(free.min(position.size)))?;
        let (mut at, mut head) = (position, None);
        self.each(count, |element| {
            let id = if element.flags & NEXT == 0 { id } else { 0 };
            let descriptor = PackedDescriptor::new(element.entry, id, element.flags | at.flags());
            match head {
                None => head = Some(descriptor),
                Some(_) => put(at.index, descriptor),
            }
            at = at.next();
        });
        if let Some(head) = head {
            put(position.index, head);
        }
        Ok(at)
    }

    /// Writes the descriptors to the beginning of an indirect table, and returns how many they are,
    /// for [`PackedDescriptor::indirect`]. They have no flag but the one for bytes that the device
    /// writes (section 2.8.7).
    ///
    /// # Errors
    ///
    /// With nothing written, [`Error::Room`], and as of [`descriptors`](Self::descriptors).
    ///
    /// # Context
    ///
    /// The device does not read the table meanwhile. It has no more entries than the device allows
    /// (section 2.8.19).
    #[inline(always)]
    pub fn write_packed_table(self, table: &mut [PackedDescriptor]) -> Result<usize, Error> {
        let count = self.fits(table.len())?;
        let mut places = table.iter_mut();
        self.each(count, |element| {
            if let Some(place) = places.next() {
                *place = PackedDescriptor::new(element.entry, 0, element.flags & WRITE);
            }
        });
        Ok(count)
    }
}
