//! Table entries as machine words, with the orderings of their loads and stores.

use core::fmt::Debug;
use core::ops::{BitAnd, BitOr};

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
            fn load(cell: &$atomic) -> Self {
                cell.load(Ordering::Relaxed)
            }

            #[inline(always)]
            fn load_link(cell: &$atomic) -> Self {
                cell.load(Ordering::Acquire)
            }

            #[inline(always)]
            fn store(cell: &$atomic, word: Self) {
                cell.store(word, Ordering::Relaxed);
            }

            #[inline(always)]
            fn install(cell: &$atomic, link: Self) -> Result<(), Self> {
                cell.compare_exchange(0, link, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
            }

            #[inline(always)]
            fn exchange(cell: &$atomic, word: Self) -> Self {
                // Both, since a leaf may give way to a table.
                cell.swap(word, Ordering::AcqRel)
            }

            #[inline(always)]
            fn replace(cell: &$atomic, old: Self, new: Self) -> Result<(), Self> {
                cell.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).map(|_| ())
            }

            #[inline(always)]
            fn set(cell: &$atomic, bits: Self) {
                cell.fetch_or(bits, Ordering::Relaxed);
            }
        }
    };
}

word!(u32, AtomicU32, 2);
word!(u64, AtomicU64, 3);
