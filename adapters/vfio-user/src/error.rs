//! The errors of a client's requests.

use std::io;

use dmaspan::regbuf::RegionError;
use dmaspan::{Errno, Iova};

use dmaspan_linux::client::StillHeld;
use dmaspan_linux::mem::AdoptError;

/// The reason why a client's memory was not mapped or unmapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientDmaError {
    /// The table of the client's regions refuses it. Nothing changed.
    #[error(transparent)]
    Region(#[from] RegionError<Iova>),
    /// The file is memory, and cannot be mapped so. Nothing changed.
    #[error("{len:#x} bytes at {address:#x} were not mapped: {error}")]
    File {
        /// Where they would be for the device.
        address: u64,
        /// How many.
        len: u64,
        /// Why.
        #[source]
        error: AdoptError,
    },
    /// The client could shorten the file, and an access to what is missing ends the process.
    /// Nothing changed.
    #[error(
        "{len:#x} bytes at {address:#x} were not mapped: their file is no memfd that is sealed \
         against shrinking (F_SEAL_SHRINK); have the client seal it, or take any file of a client \
         that is trusted (ClientFiles::Any)"
    )]
    NotSealed {
        /// Where they would be for the device.
        address: u64,
        /// How many.
        len: u64,
    },
    /// The client has as many regions as it may have. Nothing changed.
    #[error("{address:#x} would begin one more than {most} regions: unmap some first")]
    TooMany {
        /// Where the region would begin.
        address: u64,
        /// How many there may be.
        most: usize,
    },
    /// Nobody new gets what was unmapped, and something holds some of it still.
    #[error(transparent)]
    Held(#[from] StillHeld),
}

impl ClientDmaError {
    /// The errno that a client is answered.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Region(error) => error.errno(),
            Self::File { error, .. } => error.errno(),
            Self::NotSealed { .. } => Errno::EPERM,
            Self::TooMany { .. } => Errno::ENOSPC,
            Self::Held(error) => error.errno(),
        }
    }
}

impl From<ClientDmaError> for io::Error {
    /// An error with the words of this one and the kind of its errno.
    fn from(error: ClientDmaError) -> Self {
        let kind = Self::from_raw_os_error(error.errno().get()).kind();
        Self::new(kind, error)
    }
}
