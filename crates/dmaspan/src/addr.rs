//! Addresses, with one type for each address space, so that no layer takes one for another.
//!
//! 0 is an ordinary address in all of them, never "none".

use core::fmt;

use crate::span::{Span, SpanBuf};

/// An address of one address space, of 64 bits: for what works in any of them, like a
/// [`Span`].
pub trait Address: Copy + Ord + fmt::Debug + Send + Sync + 'static + sealed::Sealed {
    /// The address with this value.
    fn new(value: u64) -> Self;

    /// The address as a number.
    fn get(self) -> u64;
}

pub(crate) mod sealed {
    use crate::span::Span;

    pub trait Sealed: Sized {
        /// Hands spans that come out of page tables to `take`, as the kind of address that they
        /// went in as: tables and what is built on them have numbers alone, as [`PhysAddr`]s.
        ///
        /// [`PhysAddr`]: super::PhysAddr
        fn of_outputs(outputs: &[Span], take: &mut dyn FnMut(&[Span<Self>]));
    }
}

/// How many spans of another kind of address than tables have are handed on at once.
const OUTPUTS: usize = 32;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The address with this value.
            #[inline(always)]
            pub const fn new(value: u64) -> Self {
                Self(value)
            }

            /// The address as a number.
            #[inline(always)]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The address `bytes` further on, or `None` beyond the top of the space.
            #[inline(always)]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(value) => Some(Self(value)),
                    None => None,
                }
            }

            /// The address `bytes` further on, modulo 2^64.
            ///
            /// For cursors, whose position behind the last byte may be the top of the space.
            #[inline(always)]
            pub const fn wrapping_add(self, bytes: u64) -> Self {
                Self(self.0.wrapping_add(bytes))
            }
        }

        impl Address for $name {
            #[inline(always)]
            fn new(value: u64) -> Self {
                Self(value)
            }

            #[inline(always)]
            fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// An address that a device uses and an IOMMU translates.
    Iova
}
address! {
    /// An address behind the IOMMU: of memory, of a device's registers or of a page table.
    PhysAddr
}
address! {
    /// An address in the address space of whoever asked for a mapping: a process, a guest, a
    /// client.
    UserAddr
}
address! {
    /// An address at which this program reaches memory itself: all that a server of another
    /// process's or of a guest's devices has of their memory.
    HostAddr
}
address! {
    /// What a driver gives a device: a translated, direct or bounced address. Only a translated one
    /// is an IOVA; the driver need not know which it has.
    DmaAddr
}

impl DmaAddr {
    /// What a driver is given in place of a buffer that was refused, by an interface that has no
    /// error to say so: nothing is mapped in the 4096 bytes from here to the end, nor on a bus. A
    /// device that uses it faults, and the sanitizer of `dmaspan-sim` says why.
    pub const REFUSED: Self = Self(!0xfff);
}

impl sealed::Sealed for PhysAddr {
    #[inline(always)]
    fn of_outputs(outputs: &[Span], take: &mut dyn FnMut(&[Span])) {
        take(outputs);
    }
}

macro_rules! not_in_tables {
    ($($name:ident)*) => {
        $(impl sealed::Sealed for $name {
            fn of_outputs(outputs: &[Span], take: &mut dyn FnMut(&[Span<Self>])) {
                let mut room = SpanBuf::room::<OUTPUTS>();
                for some in outputs.chunks(OUTPUTS) {
                    for (place, output) in room.iter_mut().zip(some) {
                        *place = output.of_output();
                    }
                    take(&room[..some.len()]);
                }
            }
        })*
    };
}

not_in_tables!(Iova UserAddr HostAddr DmaAddr);
