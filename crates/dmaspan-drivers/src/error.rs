//! The errors of making a driver, a stream or a domain.

use core::ops::RangeInclusive;

use dmaspan::Errno;
use dmaspan::iommu::HardwareError;

use crate::host::NoMemory;

/// The reason why a driver, a stream or the hooks of a domain could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Hardware did not answer, or said that it failed.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// There is no memory for what hardware reads.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// The hardware does not have what is needed.
    #[error("the IOMMU has no {what} (its register says {value:#x})")]
    Unsupported {
        /// What, lower-case.
        what: &'static str,
        /// The register that says so.
        value: u64,
    },
    /// The configuration asks for what cannot be.
    #[error("{what} is {value}, but the limit is {limit}")]
    Config {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// The most, or the least, that is possible.
        limit: u64,
    },
    /// There is no such stream.
    #[error("there is no stream {stream:#x}: the streams of this IOMMU are 0 to {last:#x}")]
    NoStream {
        /// Its number.
        stream: u32,
        /// The largest number.
        last: u32,
    },
    /// The stream is somebody's.
    #[error("the stream {stream:#x} is claimed already")]
    Claimed {
        /// Its number.
        stream: u32,
    },
    /// All numbers for domains are taken.
    #[error("all {limit} {what} of the IOMMU are taken")]
    NoIds {
        /// Of what: "ASIDs", "VMIDs", "domain IDs", "context banks".
        what: &'static str,
        /// How many there are.
        limit: u32,
    },
}

impl Error {
    /// Refuses a number of a configuration that is not within its limits.
    pub(crate) fn check(
        what: &'static str,
        value: u32,
        limits: RangeInclusive<u32>,
    ) -> Result<(), Self> {
        if limits.contains(&value) {
            return Ok(());
        }
        let limit = value.clamp(*limits.start(), *limits.end());
        Err(Self::Config { what, value: value.into(), limit: limit.into() })
    }

    /// The hardware has no such thing, as `register` says.
    pub(crate) fn unsupported(what: &'static str, register: impl Into<u64>) -> Self {
        Self::Unsupported { what, value: register.into() }
    }

    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Hardware(_) => Errno::EIO,
            Self::NoMemory(_) => Errno::ENOMEM,
            Self::Unsupported { .. } => Errno::EOPNOTSUPP,
            Self::Config { .. } | Self::NoStream { .. } => Errno::EINVAL,
            Self::Claimed { .. } => Errno::EBUSY,
            Self::NoIds { .. } => Errno::ENOSPC,
        }
    }
}
