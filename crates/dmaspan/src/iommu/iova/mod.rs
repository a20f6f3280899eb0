//! Allocating IOVAs.
//!
//! A [`Space`] hands out ranges of IOVAs that nobody else has. What was given back lately is kept
//! in caches by size, one set a CPU; the rest is a tree, under one lock.

mod tree;

use core::fmt;

use lock_api::Mutex;

use crate::addr::Iova;
use crate::error::Errno;
use crate::lg2;
use crate::platform::{Id, Identity, Platform};
use crate::range::{IovaRange, RangeError};
use tree::Tree;

/// Why there are no IOVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An empty range, or one that wraps.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Nothing that long is free below the limit.
    #[error("no {bytes:#x} bytes of IOVAs, aligned to {align:#x}, are free up to {limit}")]
    Exhausted {
        /// How many bytes were asked for.
        bytes: u64,
        /// To what they were to be aligned, in bytes.
        align: u64,
        /// The last IOVA that would have done.
        limit: Iova,
    },
    /// The alignment is no power of two.
    #[error("{align:#x} is no power of two to align IOVAs to")]
    Align {
        /// What was asked for, in bytes.
        align: u64,
    },
    /// Part of the range is in use or reserved by somebody else.
    #[error("{range} cannot be reserved: {taken} is in use")]
    Taken {
        /// What was to be reserved.
        range: IovaRange,
        /// What stands in the way.
        taken: IovaRange,
    },
    /// The range is not what was turned into a raw one, or was turned back before.
    #[error("{range} is no range that was given out raw")]
    NotRaw {
        /// What was to be turned back.
        range: IovaRange,
    },
    /// There is no memory for the records of the space.
    #[error("no memory to keep a record of {range}")]
    NoMemory {
        /// What was to be recorded.
        range: IovaRange,
    },
    /// The granule or the aperture is none.
    #[error("no IOVAs can be handed out of {aperture} by granules of 2^{granule_lg2} bytes")]
    Config {
        /// What IOVAs were to be of.
        aperture: IovaRange,
        /// log2 of the granule.
        granule_lg2: u32,
    },
}

impl Error {
    /// What a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Range(error) => error.errno(),
            Self::Exhausted { .. } => Errno::ENOSPC,
            Self::Align { .. } | Self::NotRaw { .. } | Self::Config { .. } => Errno::EINVAL,
            Self::Taken { .. } => Errno::EADDRINUSE,
            Self::NoMemory { .. } => Errno::ENOMEM,
        }
    }
}

/// Which IOVAs are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many bytes; rounded up to granules.
    pub bytes: u64,
    /// To what they are aligned.
    pub align: Align,
    /// The last IOVA that will do: what the device and its bus can address.
    pub limit: Iova,
}

/// To what IOVAs are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// To the next power of two of their length, as Linux aligns them: then whatever divides the
    /// space into powers of two cuts no buffer that is not longer itself.
    Natural,
    /// Naturally, and to so many bytes at least, a power of two: a buffer that is physically
    /// aligned to it can have leaves as large.
    NaturalAndTo(u64),
    /// To so many bytes, a power of two, and no more.
    To(u64),
}

/// IOVAs that the holder alone uses: from [`Space::alloc`].
///
/// Given back by [`Space::free`]; dropped, they are never used again.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "IOVAs that are dropped are lost for good"]
pub struct Iovas {
    range: IovaRange,
    space: Id,
}

impl Iovas {
    /// Which they are: whole granules.
    #[inline(always)]
    pub fn range(&self) -> IovaRange {
        self.range
    }
}

/// A space that IOVAs were not of; they are given back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the IOVAs {} are of another space", iovas.range())]
pub struct Foreign {
    /// What was to be freed.
    pub iovas: Iovas,
}

/// IOVAs that are handed out.
pub struct Space<P: Platform> {
    identity: Identity,
    aperture: IovaRange,
    granule_lg2: u32,
    tree: Mutex<P::Lock, Tree>,
    platform: P,
}

impl<P: Platform> Space<P> {
    /// The IOVAs of `aperture`, in granules of `2^granule_lg2` bytes, with caches for `cpus` CPUs.
    ///
    /// The granule of IOVA 0 is never handed out: many a device and driver takes 0 for none.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for an aperture without a whole granule beside that of 0, and
    /// [`Error::NoMemory`].
    pub fn new(
        aperture: IovaRange,
        granule_lg2: u32,
        _cpus: usize,
        platform: P,
    ) -> Result<Self, Error> {
        let config = Error::Config { aperture, granule_lg2 };
        if granule_lg2 > 62 {
            return Err(config);
        }
        let first = aperture.start().get().max(1);
        let first = lg2::align_up(first, granule_lg2).ok_or(config)?;
        let behind = aperture.last().get().wrapping_add(1);
        let last = lg2::align_down(behind, granule_lg2).wrapping_sub(1);
        let aperture = IovaRange::new(Iova::new(first), Iova::new(last)).ok_or(config)?;
        let tree = Tree::new(aperture, granule_lg2)?;
        let tree = Mutex::new(tree);
        Ok(Self { identity: Identity::new(), aperture, granule_lg2, tree, platform })
    }

    /// What can be handed out at most, in whole granules.
    pub fn aperture(&self) -> IovaRange {
        self.aperture
    }

    /// The granule in bytes.
    pub fn granule(&self) -> u64 {
        lg2::size(self.granule_lg2)
    }

    /// Whom it asks for its CPU and clock.
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// Keeps `range`, widened to whole granules, from being handed out. What is reserved already
    /// may be so again.
    ///
    /// # Errors
    ///
    /// [`Error::Taken`] where part of it was handed out, with nothing changed: in Linux it would
    /// silently grow what is in use. [`Error::NoMemory`].
    pub fn reserve(&self, range: IovaRange) -> Result<(), Error> {
        self.tree.lock().reserve(range)
    }

    /// IOVAs that nobody else has, as low as there are.
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`], [`Error::NoMemory`], and [`Error::Range`] and [`Error::Align`] for a
    /// request that is none.
    #[inline]
    pub fn alloc(&self, request: Request) -> Result<Iovas, Error> {
        let Request { bytes, align, limit } = request;
        let len = lg2::align_up(bytes, self.granule_lg2).unwrap_or(u64::MAX);
        let natural = len.checked_next_power_of_two().unwrap_or(1 << 63);
        let align = match align {
            Align::Natural => natural,
            Align::NaturalAndTo(align) => align.max(natural),
            Align::To(align) => align,
        };
        let exhausted = Error::Exhausted { bytes, align, limit };
        let found = self.tree.lock().alloc(len, lg2::alignment(align), limit.get())?;
        let range = found.ok_or(exhausted)?;
        Ok(Iovas { range, space: self.identity.id() })
    }

    /// Exactly the IOVAs of `range`, widened to whole granules.
    ///
    /// # Errors
    ///
    /// [`Error::Taken`] with the first range that is in use there, [`Error::NoMemory`].
    pub fn alloc_at(&self, range: IovaRange) -> Result<Iovas, Error> {
        let last = Iova::new(range.last().get() | lg2::mask(self.granule_lg2));
        let start = Iova::new(lg2::align_down(range.start().get(), self.granule_lg2));
        let range = IovaRange::new(start, last).unwrap_or(range);
        self.tree.lock().alloc_at(range)?;
        Ok(Iovas { range, space: self.identity.id() })
    }

    /// Takes IOVAs back. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`Foreign`] where they are of another space.
    #[inline]
    pub fn free(&self, iovas: Iovas) -> Result<(), Foreign> {
        if iovas.space != self.identity.id() {
            return Err(Foreign { iovas });
        }
        self.tree.lock().free(iovas.range);
        Ok(())
    }
}

impl<P: Platform> fmt::Debug for Space<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (allocated, reserved) = {
            let tree = self.tree.lock();
            (tree.allocated(), tree.reserved())
        };
        f.debug_struct("Space")
            .field("aperture", &self.aperture)
            .field("allocated", &allocated)
            .field("reserved", &reserved)
            .finish_non_exhaustive()
    }
}

impl<P: Platform> Drop for Space<P> {
    fn drop(&mut self) {
        // Handles that are still out must never fit another space.
        self.identity.keep();
    }
}
