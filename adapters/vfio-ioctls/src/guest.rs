//! A guest's memory as regions to map.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::{Iova, Prot};
use dmaspan_linux::mem::AdoptError;
use dmaspan_linux::plan::Region;
use dmaspan_linux::{Memory, vfio};
use vm_memory::{
    Address, FileOffset, GuestMemoryBackend, GuestMemoryRegion, GuestUsize, MemoryRegionAddress,
};

/// The reason why a guest's memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// A region has no address in this process.
    #[error("the guest's region at {start:#x} has no address in this process: map it with mmap")]
    NoAddress {
        /// Where the guest has it.
        start: u64,
    },
    /// A region is no memory that can be mapped.
    #[error("the guest's region at {start:#x} of {len:#x} bytes: {source}")]
    Region {
        /// Where the guest has it.
        start: u64,
        /// Its length in bytes.
        len: u64,
        /// What is wrong with it.
        source: AdoptError,
    },
    /// The file of a region cannot be opened once more.
    #[error("the file of the guest's region at {start:#x} cannot be duplicated: {source}")]
    File {
        /// Where the guest has it.
        start: u64,
        /// What the kernel answered.
        source: io::Error,
    },
    /// A plan is refused, or the kernel refuses a map.
    #[error(transparent)]
    Map(#[from] dmaspan_linux::plan::MapError<vfio::Error>),
    /// The space cannot be used.
    #[error(transparent)]
    Space(#[from] vfio::Error),
    /// Nothing can be mapped in the space.
    #[error(transparent)]
    Plan(#[from] dmaspan_linux::plan::PlanError),
}

/// A region as memory that can be mapped.
struct Piece {
    start: u64,
    memory: Arc<Memory>,
    /// Its file, where it is mapped by that.
    file: Option<FileOffset>,
}

impl Piece {
    /// Where `next` has to begin so that both are one.
    fn is_followed_by(&self, next: &Self) -> bool {
        let (Some(file), Some(behind)) = (&self.file, &next.file) else { return false };
        let len = self.memory.len();
        let is_same = match (file.file().metadata(), behind.file().metadata()) {
            (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
            _ => false,
        };
        is_same
            && self.start.checked_add(len) == Some(next.start)
            && file.start().checked_add(len) == Some(behind.start())
    }

    /// Both as one, which begins with this.
    fn joined(&self, next: &Self) -> Result<Self, GuestError> {
        let Some(file) = self.file.clone() else {
            return Err(GuestError::NoAddress { start: self.start });
        };
        let (start, len) = (self.start, self.memory.len().saturating_add(next.memory.len()));
        let fd = file.file().try_clone().map_err(|source| GuestError::File { start, source })?;
        let memory = Memory::from_file(fd, file.start(), len)
            .map_err(|source| GuestError::Region { start, len, source })?;
        Ok(Self { start, memory: Arc::new(memory), file: Some(file) })
    }

    fn region(self) -> Region {
        let Self { start, memory, .. } = self;
        Region::whole(&memory, Prot::READ_WRITE).at(Iova::new(start)).label("guest memory")
    }
}

/// All memory of a guest, at the guest's own addresses, readable and writable: the fewest regions.
/// All keep one clone of `guest`, or the file that they are of.
///
/// # Errors
///
/// [`GuestError`], which names the guest's region.
///
/// # Safety
///
/// While a clone of `guest` lives, each of its regions is memory at the address that it says, as
/// long as it says, mapped readable and writable, and code of this process accesses it as
/// [`Memory::foreign`] asks: vm-memory's own `GuestMemoryMmap` does, by volatile accesses.
pub unsafe fn guest_regions<M>(guest: &M) -> Result<Vec<Region>, GuestError>
where
    M: GuestMemoryBackend + Clone + Send + Sync + 'static,
{
    let mut all: Vec<&M::R> = guest.iter().collect();
    all.sort_by_key(|region| region.start_addr().raw_value());
    let kept = Arc::new(guest.clone());
    let mut pieces: Vec<Piece> = Vec::with_capacity(all.len());
    for region in all {
        // SAFETY: the caller promises it, and a clone is kept.
        let piece = unsafe { piece(region, || Arc::clone(&kept)) }?;
        match pieces.last_mut() {
            Some(last) if last.is_followed_by(&piece) => *last = last.joined(&piece)?,
            _ => pieces.push(piece),
        }
    }
    Ok(pieces.into_iter().map(Piece::region).collect())
}

/// One region of a guest, such as a DIMM that is added, as [`guest_regions`].
///
/// # Errors
///
/// As [`guest_regions`].
///
/// # Safety
///
/// As [`guest_regions`], of this region and while a reference to it lives.
pub unsafe fn guest_region<R>(region: &Arc<R>) -> Result<Region, GuestError>
where
    R: GuestMemoryRegion + Send + Sync + 'static,
{
    // SAFETY: the caller promises it, and a reference is kept.
    let piece = unsafe { piece(&**region, || Arc::clone(region)) }?;
    Ok(piece.region())
}

/// A region as memory, by its file where that is possible.
///
/// # Safety
///
/// As [`guest_regions`], while what `keep` returns lives.
unsafe fn piece<R: GuestMemoryRegion, K: Send + Sync + 'static>(
    region: &R,
    keep: impl Fn() -> K,
) -> Result<Piece, GuestError> {
    let (start, len): (u64, GuestUsize) = (region.start_addr().raw_value(), region.len());
    let host = region.get_host_address(MemoryRegionAddress(0)).ok().and_then(NonNull::new);
    let host = host.ok_or(GuestError::NoAddress { start })?;
    let failed = |source| GuestError::Region { start, len, source };
    if let Some(file) = region.file_offset() {
        let fd = file.file().try_clone().map_err(|source| GuestError::File { start, source })?;
        // SAFETY: the caller promises it, of what is kept.
        match unsafe { Memory::foreign_with_file(host, len, fd, file.start(), keep()) } {
            Ok(memory) => {
                return Ok(Piece { start, memory: Arc::new(memory), file: Some(file.clone()) });
            }
            // Private memory, or of a file on a disk.
            Err(AdoptError::NotShared { .. } | AdoptError::NotInMemory) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    // SAFETY: the caller promises it, of what is kept.
    let memory = unsafe { Memory::foreign(host, len, keep()) }.map_err(failed)?;
    Ok(Piece { start, memory: Arc::new(memory), file: None })
}
