//! Table entries as machine words, with the orderings of their loads and stores.
//!
//! All hardware reads entries with the lower byte first (IHI 0070, as the drivers configure it;
//! Intel VT-d specification, 1.2; AMD IOMMU specification, 2; RISC-V IOMMU, 2.3). So a big-endian
//! CPU turns words round, here and nowhere else.

use core::fmt::Debug;
use core::ops::{BitAnd, BitOr, Not};

use crate::atomic::{AtomicU32, AtomicU64, Ordering};

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// The word that an entry fills: `u32` or `u64`.
///
/// An all-zero word is an empty entry in every format.
pub trait Word:
    sealed::Sealed
    + Copy
    + Eq
    + BitAnd<Output = Self>
    + BitOr<Output = Self>
    + Not<Output = Self>
    + Debug
    + Send
    + Sync
    + 'static
{
    /// The word in a table that hardware and other CPUs read at the same time.
    type Atomic: Debug + Send + Sync + 'static;

    /// The empty entry.
    const EMPTY: Self;
    /// log2 of the word's bytes.
    const LG2_BYTES: u32;

    /// The word's bits.
    fn bits(self) -> u64;

    /// The word of these bits, the lowest of them where it has fewer.
    fn of_bits(bits: u64) -> Self;

    /// The word in the first of these bytes, of which those that are missing are 0.
    fn of_bytes(bytes: &[u8]) -> Self;

    /// Reads an entry whose meaning does not depend on other memory: a leaf.
    fn load(cell: &Self::Atomic) -> Self;

    /// Reads an entry that may lead to a table, whose entries are visible then.
    fn load_link(cell: &Self::Atomic) -> Self;

    /// Writes an entry.
    fn store(cell: &Self::Atomic, word: Self);

    /// Makes an empty entry lead to a table, whose entries are visible to whoever sees the link.
    ///
    /// # Errors
    ///
    /// What the entry held, where it was not empty.
    fn install(cell: &Self::Atomic, link: Self) -> Result<(), Self>;

    /// Writes an entry and returns what was there, also what hardware added to it meanwhile.
    fn exchange(cell: &Self::Atomic, word: Self) -> Self;

    /// Writes an entry where it is still `old`.
    ///
    /// # Errors
    ///
    /// What the entry held, where it was something else.
    fn replace(cell: &Self::Atomic, old: Self, new: Self) -> Result<(), Self>;

    /// Sets bits of an entry.
    fn set(cell: &Self::Atomic, bits: Self);
}

macro_rules! word {
    ($word:ident, $atomic:ident, $lg2_bytes:literal) => {
        impl Word for $word {
            type Atomic = $atomic;
            const EMPTY: Self = 0;
            const LG2_BYTES: u32 = $lg2_bytes;

            #[inline(always)]
            fn bits(self) -> u64 {
                self.into()
            }

            #[inline(always)]
            fn of_bits(bits: u64) -> Self {
                // What is left fits, and the fallback is no code.
                (bits & Self::MAX.bits()).try_into().unwrap_or(Self::MAX)
            }

            fn of_bytes(bytes: &[u8]) -> Self {
                let mut word = [0; 1 << $lg2_bytes];
                word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                Self::from_le_bytes(word)
            }

            #[inline(always)]
            fn load(cell: &$atomic) -> Self {
                Self::from_le(cell.load(Ordering::Relaxed))
            }

            #[inline(always)]
            fn load_link(cell: &$atomic) -> Self {
                Self::from_le(cell.load(Ordering::Acquire))
            }

            #[inline(always)]
            fn store(cell: &$atomic, word: Self) {
                cell.store(word.to_le(), Ordering::Relaxed);
            }

            #[inline(always)]
            fn install(cell: &$atomic, link: Self) -> Result<(), Self> {
                cell.compare_exchange(0, link.to_le(), Ordering::AcqRel, Ordering::Acquire)
                    .map(|_| ())
                    .map_err(Self::from_le)
            }

            #[inline(always)]
            fn exchange(cell: &$atomic, word: Self) -> Self {
                // Both, since a leaf may give way to a table.
                Self::from_le(cell.swap(word.to_le(), Ordering::AcqRel))
            }

            #[inline(always)]
            fn replace(cell: &$atomic, old: Self, new: Self) -> Result<(), Self> {
                cell.compare_exchange(
                    old.to_le(),
                    new.to_le(),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .map(|_| ())
                .map_err(Self::from_le)
            }

            #[inline(always)]
            fn set(cell: &$atomic, bits: Self) {
                cell.fetch_or(bits.to_le(), Ordering::Relaxed);
            }
        }
    };
}

word!(u32, AtomicU32, 2);
word!(u64, AtomicU64, 3);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_are_in_memory_with_the_lower_byte_first_on_every_cpu() {
        let cell = AtomicU64::new(0);
        let bytes = || cell.load(Ordering::Relaxed).to_ne_bytes();
        u64::store(&cell, 0x1122_3344_5566_7788);
        assert_eq!(bytes(), [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(
            (u64::load(&cell), u64::load_link(&cell)),
            (0x1122_3344_5566_7788, u64::load(&cell))
        );
        assert_eq!(u64::install(&cell, 1), Err(0x1122_3344_5566_7788));
        assert_eq!(u64::exchange(&cell, 0), 0x1122_3344_5566_7788);
        assert_eq!(u64::install(&cell, 1), Ok(()));
        assert_eq!(bytes(), [1, 0, 0, 0, 0, 0, 0, 0]);
        u64::set(&cell, 0x100);
        assert_eq!(u64::replace(&cell, 1, 2), Err(0x101));
        assert_eq!(u64::replace(&cell, 0x101, 2), Ok(()));
        assert_eq!(bytes(), [2, 0, 0, 0, 0, 0, 0, 0]);
        let cell = AtomicU32::new(0);
        u32::store(&cell, 0x1122_3344);
        assert_eq!(cell.load(Ordering::Relaxed).to_ne_bytes(), [0x44, 0x33, 0x22, 0x11]);
    }
}
