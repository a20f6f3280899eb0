//! Virtio descriptors of split rings.
//!
//! Virtual I/O Device 1.2, section 2.7.5.

use super::error::Error;
use super::virtq::{Chain, INDIRECT, NEXT, table_bytes};
use crate::addr::{Address, DmaAddr};
use crate::span::Span;

/// A descriptor of a split ring, `virtq_desc` (section 2.7.5), as the device reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SplitDescriptor {
    /// All of them little-endian.
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}
const _: () = assert!(size_of::<SplitDescriptor>() == 16);

impl SplitDescriptor {
    #[inline(always)]
    const fn new(addr: DmaAddr, len: u32, flags: u16, next: u16) -> Self {
        let addr = addr.get().to_le();
        Self { addr, len: len.to_le(), flags: flags.to_le(), next: next.to_le() }
    }

    /// The descriptor of a table of so many indirect ones at `addr`, alone in its chain (section
    /// 2.7.5.3).
    ///
    /// # Errors
    ///
    /// [`Error::Empty`] for none; [`Error::Room`] for more than a length of 32 bits can tell.
    pub fn indirect(addr: DmaAddr, descriptors: usize) -> Result<Self, Error> {
        Ok(Self::new(addr, table_bytes(descriptors)?, INDIRECT, 0))
    }

    /// Its bytes, as they lie in memory.
    pub const fn to_bytes(self) -> [u8; 16] {
        let (addr, len) = (u64::from_le(self.addr) as u128, u32::from_le(self.len) as u128);
        let (flags, next) = (u16::from_le(self.flags) as u128, u16::from_le(self.next) as u128);
        (addr | len << 64 | flags << 96 | next << 112).to_le_bytes()
    }
}

impl<R, W, A: Address> Chain<R, W>
where
    R: Iterator<Item = Span<A>> + Clone,
    W: Iterator<Item = Span<A>> + Clone,
{
    /// Chains descriptors of a split ring: calls `put` with each and its index, in their order, and
    /// returns how many they are. The indices are the first ones of `free`, and the first of all is
    /// the chain's head, for the available ring.
    ///
    /// Where `VIRTIO_F_IN_ORDER` was negotiated, they have to be in the ring's order (section
    /// 2.7.5.2).
    ///
    /// # Errors
    ///
    /// [`Error::Room`], and as of [`descriptors`](Self::descriptors): `put` was not called.
    ///
    /// # Context
    ///
    /// The indices are of free descriptors, all different, and no more than the queue has.
    #[inline(always)]
    pub fn write_split(
        self,
        free: &[u16],
        mut put: impl FnMut(u16, SplitDescriptor),
    ) -> Result<usize, Error> {
        let count = self.fits(free.len())?;
        let mut indices = free.iter().copied();
        let mut index = indices.next().unwrap_or(0);
        self.each(count, |element| {
            let next = if element.flags & NEXT != 0 { indices.next().unwrap_or(0) } else { 0 };
            let entry = element.entry;
            put(index, SplitDescriptor::new(entry.addr, entry.len, element.flags, next));
            index = next;
        });
        Ok(count)
    }

    /// Writes the descriptors to the beginning of an indirect table, and returns how many they are,
    /// for [`SplitDescriptor::indirect`]. They are chained in their order, which section 2.7.5.3.1
    /// asks for where `VIRTIO_F_IN_ORDER` was negotiated.
    ///
    /// # Errors
    ///
    /// With nothing written, [`Error::Room`], and as of [`descriptors`](Self::descriptors).
    ///
    /// # Context
    ///
    /// The device does not read the table meanwhile. It has no more entries than the queue
    /// (section 2.7.5.3.1).
    #[inline(always)]
    pub fn write_split_table(self, table: &mut [SplitDescriptor]) -> Result<usize, Error> {
        // Indices have 16 bits.
        let count = self.fits(table.len().min(1 << 16))?;
        let mut index = 0_u16;
        let mut places = table.iter_mut();
        self.each(count, |element| {
            index = index.wrapping_add(1);
            let next = if element.flags & NEXT != 0 { index } else { 0 };
            if let Some(place) = places.next() {
                let entry = element.entry;
                *place = SplitDescriptor::new(entry.addr, entry.len, element.flags, next);
            }
        });
        Ok(count)
    }
}
