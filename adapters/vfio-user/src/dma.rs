//! The memory of a client, by its messages DMA_MAP and DMA_UNMAP.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::regbuf::{RegionError, RemoteMemory};
use dmaspan::{Errno, Iova, Prot};
use dmaspan_linux::client::{self, ClientDescriptor, ClientMemory, ClientRegions, ClientUnmapping};
use parking_lot::{Condvar, Mutex};
use rustix::fs::{SealFlags, fcntl_get_seals, fstatfs};
use vfio_user::{DmaMapFlags, DmaUnmapFlags};

use crate::ClientDmaError;

/// `HUGETLBFS_MAGIC` of linux/magic.h.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Which files of a client become memory. Files that are no memory, such as those of other devices'
/// BARs, are remembered as unreachable either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ClientFiles {
    /// Memfds of base pages that nobody can shorten any more (`F_SEAL_SHRINK` of fcntl(2)), as
    /// those of QEMU's `memory-backend-memfd` are: no client can end this process by `SIGBUS`.
    #[default]
    Sealed,
    /// All files in memory. The client is trusted not to shorten one, nor to punch holes into one
    /// of hugetlb pages.
    Any,
}

/// The memory of a vfio-user client: its regions, changed by its messages.
///
/// The thread that reads messages calls [`map`](Self::map) and [`unmap`](Self::unmap). All threads
/// of the device model hold what its descriptors name, by [`hold`](Self::hold) or
/// [`hold_settled`](Self::hold_settled), and each lets go when it is done.
#[derive(Debug)]
pub struct ClientDma {
    regions: ClientRegions,
    files: ClientFiles,
    most: usize,
    settle: Duration,
    changes: Mutex<Changes>,
    mapped: Condvar,
}

#[derive(Debug, Default)]
struct Changes {
    /// How many maps there have been.
    maps: u64,
    unmapped: Option<Instant>,
}

impl Default for ClientDma {
    fn default() -> Self {
        Self::new(ClientFiles::default())
    }
}

impl ClientDma {
    /// The most regions of a client, unless [`with_most`](Self::with_most) says another number. A
    /// process may have some 65,530 mappings (`vm.max_map_count`), and needs some for itself.
    pub const MOST: usize = 32_768;
    /// How long memory may be away between DMA_UNMAP and DMA_MAP, unless
    /// [`with_settle`](Self::with_settle) says another time.
    pub const SETTLE: Duration = Duration::from_millis(200);

    /// A client that has mapped nothing yet.
    pub fn new(files: ClientFiles) -> Self {
        Self {
            regions: ClientRegions::new(),
            files,
            most: Self::MOST,
            settle: Self::SETTLE,
            changes: Mutex::default(),
            mapped: Condvar::new(),
        }
    }

    /// The same with another number of regions that there may be.
    #[must_use]
    pub fn with_most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The same with another time for which memory may be away; see
    /// [`hold_settled`](Self::hold_settled).
    #[must_use]
    pub fn with_settle(self, settle: Duration) -> Self {
        Self { settle, ..self }
    }

    /// The regions, which are also a source of registered buffers.
    pub fn regions(&self) -> &ClientRegions {
        &self.regions
    }

    /// DMA_MAP: the client has `size` bytes at `address`, those of `file` from `offset` on.
    ///
    /// Without a file, and with a file that is no memory, the region is remembered as unreachable:
    /// it can be held, and each read and write of it fails with `EFAULT`. Memory is mapped as
    /// `flags` say: this process cannot write what the client gave for reads alone, and the file of
    /// that may be open for reading or sealed against being written.
    ///
    /// # Errors
    ///
    /// [`ClientDmaError`], with nothing changed.
    ///
    /// # Context
    ///
    /// System calls, among them mmap(2), that wait for nobody, whatever the file is.
    pub fn map(
        &self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        file: Option<OwnedFd>,
    ) -> Result<(), ClientDmaError> {
        // Before anything can fail: a plain close may wait for whoever is behind the file.
        let file = file.map(ClientDescriptor::from);
        let most = self.most;
        if self.regions.count() >= most {
            return Err(ClientDmaError::TooMany { address, most });
        }
        let (at, access) = (Iova::new(address), access(flags));
        match file.and_then(ClientDescriptor::into_memory) {
            Some(file) => {
                self.check(&file, address, size)?;
                let memory = client::map_file(file, offset, size, access);
                let failed = |error| ClientDmaError::File { address, len: size, error };
                self.regions.insert(at, access, memory.map_err(failed)?)?
            }
            None => self.regions.insert_remote(at, size, access, Arc::new(Unreachable))?,
        };
        self.changes.lock().maps += 1;
        self.mapped.notify_all();
        Ok(())
    }

    /// Refuses a file in memory that the client could shorten, unless it is trusted. Of such files
    /// the kernel alone answers both questions.
    fn check(&self, file: &OwnedFd, address: u64, len: u64) -> Result<(), ClientDmaError> {
        let is_sealed = || fcntl_get_seals(file).is_ok_and(|has| has.contains(SealFlags::SHRINK));
        let is_base = || fstatfs(file).is_ok_and(|on| u64::try_from(on.f_type) != Ok(HUGETLBFS));
        match self.files {
            ClientFiles::Sealed if !(is_sealed() && is_base()) => {
                Err(ClientDmaError::NotSealed { address, len })
            }
            _ => Ok(()),
        }
    }

    /// DMA_UNMAP: takes back what lies in `size` bytes from `address` on, be it none or several
    /// regions, or all with [`DmaUnmapFlags::UNMAP_ALL`]. Nobody gets any of it from now on; the
    /// client is answered when the returned unmapping is done, for which
    /// [`client::wait`](dmaspan_linux::client::wait) waits.
    ///
    /// # Errors
    ///
    /// [`ClientDmaError::Region`], with nothing changed, where the range is empty, wraps beyond
    /// 2^64, or would cut a region.
    ///
    /// # Context
    ///
    /// Waits for nothing. Memory that nothing holds is unmapped by system calls.
    pub fn unmap(
        &self,
        flags: DmaUnmapFlags,
        address: u64,
        size: u64,
    ) -> Result<ClientUnmapping, ClientDmaError> {
        // Set first: what finds a hole from now on finds this, too.
        self.changes.lock().unmapped = Some(Instant::now());
        match flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            true => Ok(self.regions.unmap_all()),
            false => Ok(self.regions.unmap(Iova::new(address), size)?),
        }
    }

    /// Takes all regions back, as when the client is gone.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap).
    pub fn unmap_all(&self) -> ClientUnmapping {
        self.regions.unmap_all()
    }

    /// Holds `len` bytes from `address` on, as [`Regions::hold`](dmaspan::regbuf::Regions::hold)
    /// does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn hold(
        &self,
        address: u64,
        len: u64,
        access: Prot,
    ) -> Result<ClientMemory, RegionError<Iova>> {
        self.regions.hold(Iova::new(address), len, access)
    }

    /// The same for a thread that may find memory away which is there again in a moment.
    ///
    /// Where a client rearranges its address space it takes all of its RAM back and maps it again,
    /// in other pieces, without waiting in between. A hole that is found less than
    /// [`SETTLE`](Self::SETTLE) after an unmap is therefore waited for until that time is over.
    ///
    /// # Errors
    ///
    /// As [`hold`](Self::hold).
    ///
    /// # Context
    ///
    /// May sleep. The thread that reads the client's messages would wait for itself; so would one
    /// that holds some of what is being unmapped, until the time is over.
    pub fn hold_settled(
        &self,
        address: u64,
        len: u64,
        access: Prot,
    ) -> Result<ClientMemory, RegionError<Iova>> {
        loop {
            let maps = self.changes.lock().maps;
            let hole = match self.hold(address, len, access) {
                Err(hole @ RegionError::Hole { .. }) => hole,
                held => return held,
            };
            let mut changes = self.changes.lock();
            while changes.maps == maps {
                let until = changes.unmapped.and_then(|at| at.checked_add(self.settle));
                let Some(until) = until.filter(|until| *until > Instant::now()) else {
                    return Err(hole);
                };
                self.mapped.wait_until(&mut changes, until);
            }
        }
    }
}

/// What a region may be accessed for.
fn access(flags: DmaMapFlags) -> Prot {
    let mut access = Prot::empty();
    access.set(Prot::READ, flags.contains(DmaMapFlags::READ));
    access.set(Prot::WRITE, flags.contains(DmaMapFlags::WRITE));
    access
}

/// Memory that this process cannot reach.
struct Unreachable;

impl RemoteMemory for Unreachable {
    fn read(&self, _offset: u64, _bytes: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::EFAULT)
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Errno> {
        Err(Errno::EFAULT)
    }
}
