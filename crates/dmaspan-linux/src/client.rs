//! The memory of a client, for servers of virtual devices: vfio-user, vhost-user.
//!
//! A client shares its memory region by region, by files or by address alone, and takes regions
//! back. [`ClientRegions`] has the regions, with what is held of them; see [`Regions`] for an
//! example of all of it. What is here is what a process adds to that: waiting for an unmap with a
//! bound, and reading and writing files straight from and to what is held.
//!
//! | request of vfio-user | here |
//! |---|---|
//! | any with descriptors | [`ClientDescriptor`], which nobody waits for |
//! | `DMA_MAP` with a file | [`map_file`], [`Regions::insert`] |
//! | `DMA_MAP` without one | [`Regions::insert_remote`]: a [`RemoteMemory`] sends messages |
//! | `DMA_UNMAP` | [`Regions::unmap`] or [`unmap_all`], answered after [`wait`] |
//! | a descriptor of a queue | [`Regions::hold`] until the device model is done with it |
//! | `DEVICE_SET_IRQS` | [`ClientEvent`], which is signalled without waiting |
//!
//! [`unmap_all`]: Regions::unmap_all
//! [`RemoteMemory`]: dmaspan::regbuf::RemoteMemory
//!
//! ```
//! use std::sync::Arc;
//!
//! use dmaspan::{Iova, Prot};
//! use dmaspan_linux::client::{self, ClientRegions};
//! use dmaspan_linux::{Memory, MemoryKind};
//!
//! let (regions, disk) = (ClientRegions::new(), std::fs::File::open("/proc/self/exe")?);
//! // Two regions, neighbours for the client.
//! for start in [0x1000_0000, 0x1010_0000] {
//!     let memory = Arc::new(Memory::new(MemoryKind::Memfd, 0x10_0000)?);
//!     regions.insert(Iova::new(start), Prot::READ_WRITE, memory)?;
//! }
//! // A block of the disk goes where the client's descriptor says, over both, without a copy.
//! let held = regions.hold(Iova::new(0x100f_f800), 0x1000, Prot::READ_WRITE)?;
//! assert_eq!(client::read_file(&held, 0..0x1000, &disk, 0)?, 0x1000);
//! let mut magic = [0; 4];
//! held.read(0, &mut magic)?;
//! assert_eq!(&magic, b"\x7fELF");
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dmaspan::regbuf::{Held, HeldError, HostMemory, Regions, Unmapping};
use dmaspan::{Address, Errno, Iova, Prot, Span};
use parking_lot::lock_api::RawMutex;

use crate::Memory;
use crate::mem::{AdoptError, ReadOnlyMemory};
use crate::os;
use crate::sys::vectored;
use crate::wait::within;

mod descriptor;

pub use descriptor::{ClientDescriptor, ClientDescriptors, ClientEvent, EventError};

/// The memory of a client whose addresses are IOVAs, as of a vfio-user client.
pub type ClientRegions = Regions<Iova, parking_lot::RawMutex>;

/// Part of the memory of such a client, which stays until this is dropped.
pub type ClientMemory = Held<Iova, parking_lot::RawMutex>;

/// What such a client has unmapped, until nothing holds any of it.
pub type ClientUnmapping = Unmapping<Iova, parking_lot::RawMutex>;

/// Maps part of a file that a client sent, as it may be accessed: without [`Prot::WRITE`] this
/// process cannot write it, and the file may be one that it could not write either. The file's
/// descriptor is closed.
///
/// ```
/// use dmaspan::{Iova, Prot};
/// use dmaspan_linux::client::{self, ClientRegions};
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let ram = Memory::new(MemoryKind::Memfd, 1 << 20)?;
/// let (fd, offset) = ram.file().ok_or("a memfd has a file")?;
/// let (regions, at) = (ClientRegions::new(), Iova::new(0x4000_0000));
/// let memory = client::map_file(fd.try_clone_to_owned()?, offset, 1 << 20, Prot::READ)?;
/// assert!(regions.insert(at, Prot::READ_WRITE, memory.clone()).is_err());
/// regions.insert(at, Prot::READ, memory)?;
/// assert!(regions.hold(at, 8, Prot::READ).is_ok() && regions.hold(at, 8, Prot::WRITE).is_err());
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// As [`Memory::from_file`].
///
/// # Context
///
/// As [`Memory::from_file`].
pub fn map_file(
    file: impl Into<OwnedFd>,
    offset: u64,
    len: u64,
    access: Prot,
) -> Result<Arc<dyn HostMemory>, AdoptError> {
    if access.contains(Prot::WRITE) {
        return Ok(Arc::new(Memory::from_file(file, offset, len)?.without_file()));
    }
    Ok(Arc::new(ReadOnlyMemory::from_file(file, offset, len)?.without_file()))
}

/// Sleeps until nothing holds what was unmapped, for `bound` at most, and returns how many bytes
/// that were. The client is answered then.
///
/// # Errors
///
/// [`StillHeld`], with the unmapping, where something holds some of it when the time is over. It
/// can be waited for again.
///
/// # Context
///
/// The thread holds none of it: it would wait for itself.
pub fn wait<A: Address, L: RawMutex>(
    mut unmapping: Unmapping<A, L>,
    bound: Duration,
) -> Result<u64, StillHeld<A, L>> {
    if let Some(bytes) = within(&mut unmapping, bound) {
        return Ok(bytes);
    }
    match unmapping.held() {
        Some(held) => Err(StillHeld { held, bound, unmapping }),
        // Let go this moment.
        None => Ok(unmapping.bytes()),
    }
}

/// What was unmapped is held still.
pub struct StillHeld<A: Address = Iova, L: RawMutex = parking_lot::RawMutex> {
    /// The lowest region that something holds.
    pub held: Span<A>,
    /// How long the wait was.
    pub bound: Duration,
    /// What to wait for.
    pub unmapping: Unmapping<A, L>,
}

impl<A: Address, L: RawMutex> StillHeld<A, L> {
    /// `EBUSY`.
    pub const fn errno(&self) -> Errno {
        Errno::EBUSY
    }
}

impl<A: Address, L: RawMutex> fmt::Display for StillHeld<A, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the unmapped region {} is still held after {:?}: an operation on it does not end, or \
             what held it was forgotten",
            self.held, self.bound
        )
    }
}

impl<A: Address, L: RawMutex> fmt::Debug for StillHeld<A, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, bound, unmapping } = self;
        let mut fields = f.debug_struct("StillHeld");
        fields.field("held", held).field("bound", bound).field("unmapping", unmapping).finish()
    }
}

impl<A: Address, L: RawMutex> std::error::Error for StillHeld<A, L> {}

/// The reason why a file was not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeldFileError<A: Address> {
    /// The client's memory cannot be used so. Nothing was read or written.
    #[error(transparent)]
    Held(#[from] HeldError<A>),
    /// The kernel's answer.
    #[error("{len:#x} bytes at {offset:#x} of the file: {error}")]
    System {
        /// Where in the file.
        offset: u64,
        /// How many bytes were left then.
        len: u64,
        /// What it was.
        #[source]
        error: io::Error,
    },
}

impl<A: Address> HeldFileError<A> {
    /// The errno.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Held(error) => error.errno(),
            Self::System { error, .. } => os::errno(error),
        }
    }
}

/// Reads a file from `offset` on into `bytes` of what is held, without a copy (preadv(2)). Returns
/// how many bytes were read: fewer at the end of the file, and where an error came after the first.
///
/// A region that is not mapped here gets its bytes by a copy, 1 MiB at most at a time: the client
/// is asked to write them.
///
/// # Errors
///
/// [`HeldFileError::Held`] where the bytes are not all held, not for writes, or the client does not
/// take them; [`HeldFileError::System`].
///
/// # Context
///
/// A system call for each 1024 regions, which waits for the disk, and one for each copy.
pub fn read_file<A: Address, L: RawMutex>(
    held: &Held<A, L>,
    bytes: Range<u64>,
    file: impl AsFd,
    offset: u64,
) -> Result<u64, HeldFileError<A>> {
    vectored::transfer(held, bytes, Prot::WRITE, file.as_fd(), offset)
}

/// Writes `bytes` of what is held to a file from `offset` on, without a copy (pwritev(2)). Returns
/// how many bytes were written. Bytes that are not mapped here are asked for and copied, as
/// [`read_file`] does.
///
/// # Errors
///
/// As [`read_file`], where they are not held for reads.
///
/// # Context
///
/// As [`read_file`].
pub fn write_file<A: Address, L: RawMutex>(
    held: &Held<A, L>,
    bytes: Range<u64>,
    file: impl AsFd,
    offset: u64,
) -> Result<u64, HeldFileError<A>> {
    vectored::transfer(held, bytes, Prot::READ, file.as_fd(), offset)
}
