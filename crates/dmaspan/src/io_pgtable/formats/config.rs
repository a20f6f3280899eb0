//! The configurations of all formats share this code: their checks, and the error of a bad one.

use crate::addr::Iova;
use crate::error::Errno;
use crate::lg2;
use crate::range::IovaRange;

/// Says which half of a 64-bit input space a table translates, where addresses are sign-extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// From address 0 up.
    Lower,
    /// Up to the highest address: the upper IOVA bits are all ones.
    Upper,
}

/// Says whether hardware marks the leaf entries through which it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyTracking {
    /// It does not, and writes no entries.
    Off,
    /// It does, for [`Format::is_dirty`](crate::io_pgtable::Format::is_dirty) to see.
    Hardware,
}

/// Says what it takes to replace a leaf by leaves of another size, or those by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakBeforeMake {
    /// The entry is emptied and hardware made to forget it first: accesses between fail.
    Needed,
    /// The entry is simply written: Arm's FEAT_BBM at level 2 (ID_AA64MMFR2_EL1.BBM and
    /// SMMU_IDR3.BBML).
    NotNeeded,
}

impl Half {
    /// The addresses of `2^bits` bytes at this end of the space.
    pub(super) fn aperture(self, bits: u32) -> IovaRange {
        let last = lg2::mask(bits);
        let (start, last) = match self {
            Self::Lower => (0, last),
            Self::Upper => (!last, u64::MAX),
        };
        // `start` is not above `last`; the fallback is never taken.
        IovaRange::new(Iova::new(start), Iova::new(last))
            .unwrap_or(IovaRange::point(Iova::new(start)))
    }
}

/// The leaf sizes asked for, or else `usual`: those `supported`, and the granule among them.
///
/// # Errors
///
/// [`ConfigError::PageSizes`].
pub(super) fn page_sizes(
    asked: Option<u64>,
    usual: u64,
    supported: u64,
    granule_lg2: u32,
) -> Result<u64, ConfigError> {
    let page_sizes = asked.unwrap_or(usual);
    if page_sizes & !supported != 0 || page_sizes & lg2::size(granule_lg2) == 0 {
        return Err(ConfigError::PageSizes { page_sizes, supported });
    }
    Ok(page_sizes)
}

/// A configuration that the architecture does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The format has no such granule.
    #[error("the granule cannot be 2^{granule_lg2} bytes: the format has {supported}")]
    Granule {
        /// log2 of the granule asked for.
        granule_lg2: u32,
        /// What there is, in words.
        supported: &'static str,
    },
    /// A number of input bits that there is not.
    #[error("the tables cannot have {input_bits} input bits: the format has {supported}")]
    InputBits {
        /// What was asked for.
        input_bits: u32,
        /// What there is, in words.
        supported: &'static str,
    },
    /// A number of levels that there is not.
    #[error("the tree cannot have {levels} levels: the format has {supported}")]
    Levels {
        /// What was asked for.
        levels: u32,
        /// What there is, in words.
        supported: &'static str,
    },
    /// A number of output bits that there is not.
    #[error("the tables cannot have {output_bits} output bits: the format has {supported}")]
    OutputBits {
        /// What was asked for.
        output_bits: u32,
        /// What there is, in words.
        supported: &'static str,
    },
    /// Leaf sizes that the format does not have, or not the granule among them.
    #[error("page sizes {page_sizes:#x} lack the granule or are not all among {supported:#x}")]
    PageSizes {
        /// What was asked for, one bit each.
        page_sizes: u64,
        /// What there is, one bit each.
        supported: u64,
    },
    /// Parts of the configuration that do not go together.
    #[error("{what}")]
    Unsupported {
        /// Which, and why.
        what: &'static str,
    },
}

impl ConfigError {
    /// `EOPNOTSUPP` for a combination, `EINVAL` for a single value.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Unsupported { .. } => Errno::EOPNOTSUPP,
            _ => Errno::EINVAL,
        }
    }
}
