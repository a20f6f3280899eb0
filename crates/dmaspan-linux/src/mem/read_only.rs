//! [`ReadOnlyMemory`] is memory of a file that this process does not write.

#![expect(unsafe_code, reason = "promises that memory stays where it is")]

use std::os::fd::OwnedFd;

use dmaspan::Prot;
use dmaspan::regbuf::{HostMemory, HostSlice, Outside};

use super::{AccessError, AdoptError, Memory};

/// Memory of a file, mapped so that this process can read it and cannot write it: what a client
/// shares for reads alone. Others who have the file may write it.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::{Iova, Prot};
/// use dmaspan_linux::client::ClientRegions;
/// use dmaspan_linux::mem::ReadOnlyMemory;
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let ram = Memory::new(MemoryKind::Memfd, 1 << 20)?;
/// let (fd, offset) = ram.file().ok_or("a memfd has a file")?;
/// let shared = ReadOnlyMemory::from_file(fd.try_clone_to_owned()?, offset, 1 << 20)?;
/// ram.write(0x1000, b"theirs")?;
///
/// let (regions, at) = (ClientRegions::new(), Iova::new(0x4000_0000));
/// let shared = Arc::new(shared);
/// assert!(regions.insert(at, Prot::READ_WRITE, shared.clone()).is_err());
/// regions.insert(at, Prot::READ, shared)?;
/// let mut bytes = [0; 6];
/// regions.hold(Iova::new(0x4000_1000), 6, Prot::READ)?.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"theirs");
/// assert!(regions.hold(Iova::new(0x4000_1000), 6, Prot::WRITE).is_err());
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ReadOnlyMemory(
    /// Nothing is called of it that writes: its mapping is only read.
    Memory,
);

impl ReadOnlyMemory {
    /// As [`Memory::from_file`], of a file that was opened for reading, or is sealed against being
    /// written, as well.
    ///
    /// # Errors
    ///
    /// As [`Memory::from_file`].
    ///
    /// # Context
    ///
    /// As [`Memory::from_file`].
    pub fn from_file(file: impl Into<OwnedFd>, offset: u64, len: u64) -> Result<Self, AdoptError> {
        Memory::of_file(file.into(), offset, len, Prot::READ).map(Self)
    }

    pub(crate) fn without_file(self) -> Self {
        Self(self.0.without_file())
    }

    /// Copies the bytes from `offset` on into `bytes`.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all in the memory.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.0.read(offset, bytes)
    }
}

// SAFETY:
// 1. The mapping is that of the `Memory`, for which the same is promised.
// 2. It may be read at any time; nobody is told that it may be written.
unsafe impl HostMemory for ReadOnlyMemory {
    fn slice(&self) -> HostSlice<'_> {
        self.0.slice()
    }

    fn access(&self) -> Prot {
        Prot::READ
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        HostMemory::read(&self.0, offset, bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside> {
        Err(Outside { offset, len: u64::try_from(bytes.len()).unwrap_or(u64::MAX), buffer: 0 })
    }
}
