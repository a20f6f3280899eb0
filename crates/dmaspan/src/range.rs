//! Inclusive address ranges, which are valid by construction.
//!
//! The top of an address space is an address, so a range is `start..=last`: a half-open range
//! cannot end there without wrapping to 0. No range is empty.

use core::{fmt, iter};

use crate::addr::{Iova, UserAddr};
use crate::error::Errno;

/// The reason why no range has this start and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The length is 0.
    #[error("the range at {start:#x} is empty")]
    Empty {
        /// Where it would start.
        start: u64,
    },
    /// The last byte would lie beyond 2^64 - 1, or before the start.
    #[error("the range at {start:#x} of {len:#x} bytes wraps beyond {:#x}", u64::MAX)]
    Wraps {
        /// Where it would start.
        start: u64,
        /// How many bytes it would have.
        len: u64,
    },
}

impl RangeError {
    /// Returns what Linux's VFIO answers: `EINVAL` for an empty range, `EOVERFLOW` for one that
    /// wraps (drivers/vfio/vfio_iommu_type1.c, `vfio_dma_do_map`).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Empty { .. } => Errno::EINVAL,
            Self::Wraps { .. } => Errno::EOVERFLOW,
        }
    }
}

macro_rules! range {
    ($(#[$doc:meta])* $name:ident of $addr:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name {
            start: $addr,
            last: $addr,
        }

        impl $name {
            /// Every address.
            pub const ALL: Self = Self { start: $addr::new(0), last: $addr::new(u64::MAX) };

            /// The range from `start` to `last`, both included; `None` where `last` is below.
            #[inline]
            pub const fn new(start: $addr, last: $addr) -> Option<Self> {
                if start.get() <= last.get() { Some(Self { start, last }) } else { None }
            }

            /// The range of `len` bytes from `start`.
            ///
            /// # Errors
            ///
            /// [`RangeError`] where `len` is 0 or the last byte has no address.
            #[inline]
            pub const fn from_len(start: $addr, len: u64) -> Result<Self, RangeError> {
                let start_value = start.get();
                let Some(above) = len.checked_sub(1) else {
                    return Err(RangeError::Empty { start: start_value });
                };
                match start.checked_add(above) {
                    Some(last) => Ok(Self { start, last }),
                    None => Err(RangeError::Wraps { start: start_value, len }),
                }
            }

            /// The range of one address.
            #[inline(always)]
            pub const fn point(address: $addr) -> Self {
                Self { start: address, last: address }
            }

            /// The first address.
            #[inline(always)]
            pub const fn start(self) -> $addr {
                self.start
            }

            /// The last address, which belongs to the range.
            #[inline(always)]
            pub const fn last(self) -> $addr {
                self.last
            }

            /// The bytes behind the first one: the length less one, which always fits.
            #[inline(always)]
            pub const fn len_less_one(self) -> u64 {
                self.last.get() - self.start.get()
            }

            /// The length in bytes; `None` for the whole space, whose length is 2^64.
            #[inline(always)]
            pub const fn checked_len(self) -> Option<u64> {
                self.len_less_one().checked_add(1)
            }

            /// Returns whether `address` lies in the range.
            #[inline(always)]
            pub const fn contains(self, address: $addr) -> bool {
                self.start.get() <= address.get() && address.get() <= self.last.get()
            }

            /// Returns whether every address of `other` lies in the range.
            #[inline(always)]
            pub const fn covers(self, other: Self) -> bool {
                self.start.get() <= other.start.get() && other.last.get() <= self.last.get()
            }

            /// Both ranges as one, where they overlap or are neighbours.
            #[inline]
            pub fn join(self, other: Self) -> Option<Self> {
                let in_order = self.start <= other.start;
                let (low, high) = if in_order { (self, other) } else { (other, self) };
                let meet = low.last >= high.start || low.last.checked_add(1) == Some(high.start);
                meet.then_some(Self { start: low.start, last: low.last.max(high.last) })
            }

            /// The addresses that both ranges have.
            #[inline]
            pub fn intersection(self, other: Self) -> Option<Self> {
                Self::new(self.start.max(other.start), self.last.min(other.last))
            }

            /// The parts of this range that are in none of `others`, which are sorted and disjoint:
            /// in order, each as long as can be.
            pub fn minus(self, others: &[Self]) -> impl Iterator<Item = Self> {
                let below = others.partition_point(|other| other.last < self.start);
                let mut others = others.iter().skip(below);
                let mut rest = Some(self);
                iter::from_fn(move || {
                    while let Some(whole) = rest {
                        let Some(hit) = others.next().and_then(|other| other.intersection(whole))
                        else {
                            return rest.take();
                        };
                        let behind = hit.last.checked_add(1);
                        rest = behind.and_then(|behind| Self::new(behind, whole.last));
                        if hit.start > whole.start {
                            let last = $addr::new(hit.start.get() - 1);
                            return Some(Self { start: whole.start, last });
                        }
                    }
                    None
                })
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}..={:#x}", self.start.get(), self.last.get())
            }
        }
    };
}

range! {
    /// Addresses that a device uses.
    ///
    /// ```
    /// use dmaspan::{Iova, IovaRange, RangeError};
    ///
    /// let top = IovaRange::from_len(Iova::new(u64::MAX - 0xfff), 0x1000)?;
    /// assert_eq!(top.last(), Iova::new(u64::MAX));
    /// assert!(IovaRange::from_len(Iova::new(u64::MAX), 2).is_err());
    /// Ok::<(), RangeError>(())
    /// ```
    IovaRange of Iova
}
range! {
    /// Memory that somebody says is theirs: an allegation. Only a [`Pinner`](crate::pin::Pinner)
    /// turns it into memory that a device may use.
    UserRange of UserAddr
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn range(start: u64, last: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
    }

    #[test]
    fn the_last_byte_of_the_space_belongs_to_a_range() {
        let whole = range(0, u64::MAX);
        assert_eq!(whole.checked_len(), None);
        assert_eq!(whole.len_less_one(), u64::MAX);
        assert!(whole.contains(Iova::new(u64::MAX)));
        assert_eq!(IovaRange::from_len(Iova::new(u64::MAX), 1).unwrap(), range(u64::MAX, u64::MAX));
    }

    #[test]
    fn no_range_is_empty_backward_or_wrapping() {
        assert_eq!(IovaRange::new(Iova::new(2), Iova::new(1)), None);
        assert_eq!(IovaRange::from_len(Iova::new(5), 0), Err(RangeError::Empty { start: 5 }));
        let error = IovaRange::from_len(Iova::new(u64::MAX - 1), 3).unwrap_err();
        assert_eq!(error, RangeError::Wraps { start: u64::MAX - 1, len: 3 });
        assert_eq!(error.errno(), Errno::EOVERFLOW);
    }

    #[test]
    fn only_ranges_that_meet_join() {
        assert_eq!(range(1, 4).join(range(5, 9)), Some(range(1, 9)));
        assert_eq!(range(5, 9).join(range(1, 4)), Some(range(1, 9)));
        assert_eq!(range(1, 9).join(range(3, 4)), Some(range(1, 9)));
        assert_eq!(range(1, 4).join(range(6, 9)), None);
        assert_eq!(range(0, 0).join(range(u64::MAX, u64::MAX)), None);
    }

    #[test]
    fn covering_and_intersecting_include_both_ends() {
        assert!(range(1, 9).covers(range(1, 9)));
        assert!(!range(1, 9).covers(range(0, 9)));
        assert!(!range(1, 9).covers(range(1, 10)));
        assert_eq!(range(1, 9).intersection(range(9, 20)), Some(range(9, 9)));
        assert_eq!(range(1, 8).intersection(range(9, 20)), None);
    }

    #[test]
    fn what_is_in_no_other_range_is_what_a_walk_over_all_addresses_finds() {
        let top = u64::MAX - 15;
        // Each address of 16 is in one of the others or not; all of these sets, at both ends. Miri,
        // which is hundreds of times slower, tries some.
        let sets = (0..1u32 << 16).step_by(if cfg!(miri) { 1999 } else { 1 });
        for (base, set) in
            [0, 100, top].into_iter().flat_map(|base| sets.clone().map(move |set| (base, set)))
        {
            let run = |set: u32, is_in: u32| {
                let bits = (0..16u64).filter(move |bit| set >> bit & 1 == is_in);
                bits.fold(Vec::<IovaRange>::new(), |mut runs, bit| {
                    let one = range(base + bit, base + bit);
                    match runs.last_mut().and_then(|last| Some((last.join(one)?, last))) {
                        Some((joined, last)) => *last = joined,
                        None => runs.push(one),
                    }
                    runs
                })
            };
            let others = run(set, 1);
            let found: Vec<_> = range(base, base + 15).minus(&others).collect();
            assert_eq!(found, run(set, 0), "{set:#x}");
            let inner = range(base + 3, base + 9);
            let found: Vec<_> = inner.minus(&others).collect();
            let expected = run(set, 0).into_iter().filter_map(|run| run.intersection(inner));
            assert_eq!(found, expected.collect::<Vec<_>>(), "{set:#x}");
        }
    }

    #[test]
    fn ranges_that_touch_leave_nothing_between() {
        let others = [range(0, 4), range(5, 9), range(20, u64::MAX)];
        assert_eq!(range(2, 9).minus(&others).count(), 0);
        assert_eq!(range(0, u64::MAX).minus(&others).collect::<Vec<_>>(), [range(10, 19)]);
        assert_eq!(range(3, 7).minus(&[]).collect::<Vec<_>>(), [range(3, 7)]);
    }
}
