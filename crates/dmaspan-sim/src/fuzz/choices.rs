//! Choices read from bytes, as a fuzzer makes them.

use dmaspan::io_pgtable::Word;

/// What is left of the bytes. At their end every choice is the first.
#[derive(Clone, Debug)]
pub(super) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether all bytes were read.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        }
    }

    /// A number below `bound`, of two bytes; 0 where that is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        let number = u16::from_le_bytes([self.byte(), self.byte()]);
        u64::from(number).checked_rem(bound).unwrap_or(0)
    }

    /// Any word, of eight bytes.
    pub(super) fn word(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }

    /// One of some values; `first` where there are none.
    pub(super) fn one_of<T: Copy>(&mut self, first: T, values: &[T]) -> T {
        let which = usize::from(self.byte()).checked_rem(values.len()).unwrap_or(0);
        values.get(which).copied().unwrap_or(first)
    }
}

/// Words that any bits can be.
pub trait Bits: Word {
    /// The word of the lowest bits.
    fn from_bits(bits: u64) -> Self;
}

impl Bits for u32 {
    fn from_bits(bits: u64) -> Self {
        u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0)
    }
}

impl Bits for u64 {
    fn from_bits(bits: u64) -> Self {
        bits
    }
}
