//! The container: user memory, pinned and mapped into domains.
//!
//! It does the work of Linux's VFIO type1 (drivers/vfio/vfio_iommu_type1.c): pin a range, map its
//! spans into every domain, keep account, and take all of it back in the order that keeps devices
//! out of freed memory.
//!
//! # From Linux
//!
//! | Linux's VFIO type1 | here |
//! |---|---|
//! | `VFIO_SET_IOMMU` | [`Container::new`], [`Container::with_version`] |
//! | attaching a group | [`Container::attach`], which replays all mappings |
//! | `VFIO_IOMMU_GET_INFO` | [`Container::info`] |
//! | `VFIO_IOMMU_MAP_DMA` | [`Container::map`], [`Container::map_request`] |
//! | `VFIO_DMA_MAP_FLAG_VADDR` | [`Container::update_vaddr`] |
//! | `VFIO_DMA_UNMAP_FLAG_VADDR` | [`Container::invalidate_vaddr`] |
//! | `VFIO_IOMMU_UNMAP_DMA` | [`Container::unmap`] |
//! | its flag `ALL` | [`Container::unmap_all`] |
//! | its flag `GET_DIRTY_BITMAP` | [`Container::unmap_dirty`] |
//! | `VFIO_IOMMU_DIRTY_PAGES` | [`Container::start_dirty`], [`Container::dirty_bitmap`] |
//! | `vfio_pin_pages` | [`Container::pin_external`] |
//! | `vfio_unpin_pages` | [`Container::unpin_external`] |
//! | `vfio_dma_rw` | [`Container::read`], [`Container::write`] |
//! | the callback `dma_unmap` of a device | [`UnmapNotifier`] |
//! | the parameter `dma_entry_limit` | [`Container::with_max_mappings`] |
//! | `RLIMIT_MEMLOCK`, `locked_vm` | [`Account`] |
//! | the errno of a request | [`Container::errno`] |
//! | the requests, by number and bytes | [`type1`] |
//!
//! # Who owns what
//!
//! A mapping enters the tree of mappings *before* it is built and leaves it after it is gone, and
//! no mapping overlaps another. The thread that put a mapping there, or took one over to unmap it,
//! owns its IOVAs. It holds the lock around the tree for that step only: memory is pinned and
//! tables are written without the lock, so many threads map at once. An operation on a range that
//! another thread works on gets [`Error::Busy`], or waits through a [`BusyHook`]. Domains are
//! attached and detached while no thread does either.
//!
//! # When memory is unpinned
//!
//! Memory is unpinned only behind the sync that covers it, in all domains. Where hardware does not
//! confirm that sync, the mapping stays in the tree, pinned and charged, and every later operation
//! that syncs tries it again, until all hardware has forgotten the mapping or has let go of its
//! tables.
//!
//! Emulated devices unpin themselves what they have pinned: an unmap tells them, and unmaps nothing
//! of the mapping until they have done so.
//!
//! # Example
//!
//! A server of vfio-user: it emulates a device for a client, whose memory it reaches through a
//! container, and answers with errnos as Linux would. For requests of VFIO itself, byte by byte,
//! there is [`type1`].
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::container::{DirtyRead, UnmapNotifier};
//! use dmaspan::{Account, Container, DmaSpace, Errno, HostAddr, Iova, IovaRange, Prot, UserRange};
//! use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
//!
//! /// Messages of a client.
//! enum Message {
//!     Map { user: UserRange, iova: Iova, prot: Prot },
//!     Unmap(IovaRange),
//!     StartDirty,
//!     GetDirty { range: IovaRange, page_size: u64 },
//! }
//!
//! #[derive(Debug, PartialEq, Eq)]
//! enum Reply {
//!     Done,
//!     Unmapped(u64),
//!     Dirty(Vec<u64>),
//! }
//!
//! /// The device has no pins that it would have to give up: it copies.
//! struct Device;
//!
//! impl UnmapNotifier for Device {
//!     fn unmapping(&self, _range: IovaRange) {}
//! }
//!
//! struct Server {
//!     container: Container<LinuxPinner<HostAddr>, parking_lot::RawMutex>,
//!     /// The client's memory: here this process's own, elsewhere the files that it sent.
//!     client: Arc<Memory>,
//! }
//!
//! impl Server {
//!     fn answer(&self, message: Message) -> Result<Reply, Errno> {
//!         let Self { container, client } = self;
//!         let reply = match message {
//!             Message::Map { user, iova, prot } => {
//!                 container.map(client, user, iova, prot).map(|_| Reply::Done)
//!             }
//!             Message::Unmap(range) => container.unmap(range).map(Reply::Unmapped),
//!             Message::StartDirty => container.start_dirty().map(|()| Reply::Done),
//!             Message::GetDirty { range, page_size } => {
//!                 let pages = range.len_less_one() / page_size.max(1) + 1;
//!                 // A client may ask for much; the container refuses more than 2^31 bits.
//!                 let words = usize::try_from(pages.div_ceil(64).min(1 << 25));
//!                 let mut words = vec![0; words.map_err(|_| Errno::ENOMEM)?];
//!                 let read =
//!                     container.dirty_bitmap(range, page_size, &mut words, DirtyRead::Clear);
//!                 read.map(|()| Reply::Dirty(words))
//!             }
//!         };
//!         reply.map_err(|error| container.errno(&error))
//!     }
//! }
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     let client = Arc::new(Memory::new(MemoryKind::Base, 0x8000)?);
//!     let user = client.user_range();
//!     let container = Container::new(LinuxPinner::new()?, Account::new(1 << 20));
//!     let device = container.attach_emulated(Arc::new(Device))?;
//!     let server = Server { container, client };
//!
//!     // The client maps 32 KiB, but not twice.
//!     let (iova, prot) = (Iova::new(0x10_0000), Prot::READ_WRITE);
//!     assert_eq!(server.answer(Message::Map { user, iova, prot }), Ok(Reply::Done));
//!     assert_eq!(server.answer(Message::Map { user, iova, prot }), Err(Errno::EEXIST));
//!
//!     // The device writes, and the client sees where: in page 3.
//!     let range = IovaRange::from_len(iova, 0x8000)?;
//!     assert_eq!(server.answer(Message::StartDirty), Ok(Reply::Done));
//!     server.container.write(Iova::new(0x10_3ffc), b"done")?;
//!     let written = server.answer(Message::GetDirty { range, page_size: 4096 });
//!     assert_eq!(written, Ok(Reply::Dirty(vec![1 << 3])));
//!
//!     // No part of a mapping is unmapped, and all of it at once.
//!     let half = IovaRange::from_len(iova, 0x4000)?;
//!     assert_eq!(server.answer(Message::Unmap(half)), Err(Errno::EINVAL));
//!     assert_eq!(server.answer(Message::Unmap(range)), Ok(Reply::Unmapped(0x8000)));
//!     server.container.detach_emulated(device)?;
//!     Ok(())
//! }
//! ```

pub mod type1;

mod access;
mod alignment;
mod alone;
mod attach;
mod busy;
mod dirty;
mod domains;
mod emulated;
mod error;
mod external;
mod info;
mod list;
mod log;
mod map;
mod mapper;
mod mapping;
mod paging;
mod quarantine;
mod revoke;
mod room;
mod takedown;
mod tree;
mod unconfirmed;
mod unmap;
mod vaddr;

pub use alignment::Alignment;
pub use attach::{Attach, CacheCoherency, Interrupts};
pub use busy::{BusyHook, GaveUp};
pub use dirty::{DirtyRead, DirtySink, Undelivered};
pub use domains::DomainId;
pub use emulated::{EmulatedId, UnmapNotifier};
pub use error::Error;
pub use external::{ExternalPin, ForeignPin};
pub use info::Info;
pub use list::{ContainerMapping, MappingState};
pub use map::{MapRequest, Mapped};
pub use vaddr::VaddrUpdate;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::AtomicU64;

use lock_api::{Mutex, RawMutex};

use crate::account::Account;
use crate::addr::Iova;
use crate::error::Errno;
use crate::io_pgtable::{Format, LeafCensus, TableMemory};
use crate::iommu::{Domain, IommuOps};
use crate::label::Label;
use crate::pin::Pinner;
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};
use crate::space::{DmaSpace, Limits};
use domains::Domains;
use emulated::Emulated;
use external::External;
use mapping::{Tree, overlapping};
use quarantine::Quarantine;
use tree::Place;

/// Spans that go into the tables, or come out of them, at once by default: 4 KiB of stack. A sync
/// of an unmap covers as many at most.
pub const DEFAULT_BATCH: usize = 256;

/// Mappings that a sync of an unmap covers at most, however few spans are in them.
const MAPPINGS: usize = 64;

/// How many mappings a container has by default: `dma_entry_limit` of type1.
pub const DEFAULT_MAPPINGS: usize = 65535;

/// How many mappings can be read from tables at the same time, at most.
const WALKS: usize = 16;

/// The page of users by default.
const PAGE: u64 = 4096;

/// Says which rules of VFIO unmapping follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Version {
    /// `VFIO_TYPE1_IOMMU`: an unmap takes whole mappings, also such as end behind its range.
    V1,
    /// `VFIO_TYPE1v2_IOMMU`: an unmap may not cut a mapping.
    #[default]
    V2,
}

/// User memory mapped for devices.
///
/// `P` pins memory, `L` is the lock around the tree of mappings, and up to `BATCH` spans, at least
/// one, are mapped or unmapped at once: 16 bytes of stack for each.
///
/// Dropped, it unmaps everything. What hardware neither forgets nor lets go of, and what emulated
/// devices have pinned and not unpinned, stays pinned for ever.
pub struct Container<P: Pinner, L: RawMutex, const BATCH: usize = DEFAULT_BATCH> {
    pinner: P,
    /// Charged where a request names nobody else.
    account: Arc<Account>,
    version: Version,
    max_mappings: usize,
    /// The user's page: a power of two.
    page_size: u64,
    hook: Option<Box<dyn BusyHook>>,
    /// How many operations have ended that others may have waited for.
    ended: AtomicU64,
    /// The page of the logs of what was written, 0 where nothing is tracked. It changes while
    /// nobody is at work.
    tracking: AtomicU64,
    /// Held while marks of a mapping are read from tables, a part of it at a time: by its address.
    walks: [Mutex<L, ()>; WALKS],
    /// Held neither while memory is pinned or mapped nor while hardware is waited for, but while
    /// the empty tables around a mapping are taken out.
    state: Mutex<L, State<P>>,
}

struct State<P: Pinner> {
    tree: Tree<P>,
    domains: Arc<Domains>,
    /// Operations that are at work without the lock.
    working: usize,
    /// Whether domains are being attached or detached: then nobody else works.
    exclusive: bool,
    /// How many go first, as they wait until nobody works, or nobody at what they revoke: nobody
    /// begins to meanwhile.
    asking: usize,
    /// How many of them revoke.
    revoking: usize,
    /// How many slots have tables around them that hardware may walk though they were detached.
    walking: usize,
    quarantine: Quarantine,
    /// How many mappings were begun.
    serials: u64,
    /// How many unmaps there were.
    unmaps: u64,
    /// How many revocations were begun.
    revokes: u64,
    /// How often what was written was read.
    reads: u64,
    /// How many mappings are without their users' addresses.
    invalid: usize,
    emulated: Emulated,
    external: External<P::Pin>,
}

impl<P: Pinner, L: RawMutex> Container<P, L> {
    /// An empty container without a domain, which charges `account`.
    pub fn new(pinner: P, account: Arc<Account>) -> Self {
        Self::of_batch(pinner, account)
    }

    /// An empty container that maps into `domain`, which is its alone, and charges `account`.
    ///
    /// The domain is [attached](Container::attach) by somebody who knows that its devices have no
    /// reserved regions and that their interrupts are isolated.
    pub fn with_domain<F, M, O>(pinner: P, domain: Domain<F, M, O>, account: Arc<Account>) -> Self
    where
        F: Format,
        M: TableMemory<F::Word> + 'static,
        O: IommuOps<Address = P::Address> + 'static,
    {
        let mut container = Self::new(pinner, account);
        let only = Domains::only(Attach::new(Interrupts::Isolated).into_attached(domain));
        let all = container.state.get_mut();
        all.domains = Arc::new(only);
        // Where there is no memory for it, nothing can be mapped.
        let _ = all.quarantine.make_room(DEFAULT_BATCH, 1);
        container
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// [`new`](Container::new) with batches of another size: a kernel with a small stack has
    /// smaller ones. Results do not depend on it.
    pub fn of_batch(pinner: P, account: Arc<Account>) -> Self {
        const { assert!(BATCH > 0, "a batch has at least one span") };
        Self {
            pinner,
            account,
            version: Version::V2,
            max_mappings: DEFAULT_MAPPINGS,
            page_size: PAGE,
            hook: None,
            ended: AtomicU64::new(0),
            tracking: AtomicU64::new(0),
            walks: [const { Mutex::new(()) }; WALKS],
            state: Mutex::new(State {
                tree: Tree::new(),
                domains: Arc::default(),
                working: 0,
                exclusive: false,
                asking: 0,
                revoking: 0,
                walking: 0,
                quarantine: Quarantine::default(),
                serials: 0,
                unmaps: 0,
                revokes: 0,
                reads: 0,
                invalid: 0,
                emulated: Emulated::default(),
                external: External::default(),
            }),
        }
    }

    /// The same container with another limit on its mappings.
    #[must_use]
    pub fn with_max_mappings(mut self, max_mappings: usize) -> Self {
        self.max_mappings = max_mappings;
        self
    }

    /// The same container for users with pages of so many bytes, 4096 by default: the power of two
    /// that `bytes` is a multiple of. Domains with smaller pages look as if theirs were of that
    /// size, as `PAGE_SIZE` is to Linux's (`vfio_update_pgsize_bitmap`).
    #[must_use]
    pub fn with_page_size(mut self, bytes: u64) -> Self {
        if bytes != 0 {
            self.page_size = bytes & bytes.wrapping_neg();
        }
        self
    }

    /// The same container, whose callers wait by this hook instead of being told [`Error::Busy`].
    #[must_use]
    pub fn with_busy_hook(mut self, hook: Box<dyn BusyHook>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// The same container, which unmaps by the rules of this version.
    #[must_use]
    pub fn with_version(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    /// Returns what supplies the memory.
    pub fn pinner(&self) -> &P {
        &self.pinner
    }

    /// Returns what the container charges where a request names nobody else.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// The rules by which it unmaps.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The number of mappings, those under construction and in quarantine included.
    pub fn mappings(&self) -> usize {
        self.state.lock().tree.len()
    }

    /// Returns how many leaves of each size translate all that is mapped.
    ///
    /// # Context
    ///
    /// Holds the container's lock while it reads the tables: for reports, not for hot paths.
    pub fn census(&self) -> LeafCensus {
        let all = self.state.lock();
        let mut census = LeafCensus::default();
        for (start, slot) in all.tree.iter() {
            if slot.mapped().is_some() {
                census.add(&all.domains.census(slot.range(start)));
            }
        }
        census
    }

    /// Pins `user` of `space` and maps it at `iova`: a [`MapRequest`] without more, whose label is
    /// the place of this call.
    ///
    /// # Errors
    ///
    /// [`Error`], with translations, pins, charges and tables as before.
    #[track_caller]
    pub fn map(
        &self,
        space: &P::Space,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<Mapped, Error<P::Error>> {
        self.map_request(&MapRequest::new(space, user, iova, prot))
    }
}

impl<P: Pinner, L: RawMutex + Send + Sync, const BATCH: usize> DmaSpace for Container<P, L, BATCH> {
    type Memory = P::Space;
    type Error = Error<P::Error>;

    fn map_labelled(
        &self,
        memory: &P::Space,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Self::Error> {
        let request = MapRequest::new(memory, user, iova, prot).label(label);
        self.map_request(&request).map(|_| ())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Self::Error> {
        Container::unmap(self, range)
    }

    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        let all = self.state.lock();
        overlapping(&all.tree, range).next().map(|(mapped, _)| mapped)
    }

    fn limits(&self) -> Limits {
        let Info { iova_ranges, page_sizes, mappings_left, .. } = self.info();
        Limits { apertures: iova_ranges, page_sizes, mappings_left: Some(mappings_left) }
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        error.errno(|error| self.pinner.errno(error))
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Drop for Container<P, L, BATCH> {
    fn drop(&mut self) {
        self.abandon_external();
        let doomed = self.state.get_mut().doom(IovaRange::ALL, Place::default(), BATCH);
        if self.unmap_doomed(doomed, IovaRange::ALL, None).is_ok() {
            return;
        }
        let all = self.state.get_mut();
        all.quarantine.let_departed_go();
        if let Some(domains) = Arc::get_mut(&mut all.domains) {
            // Whose hardware lets go has forgotten all. What fails stays pinned for ever.
            domains.let_all_go();
        }
        // What there was no room for is still mapped.
        let doomed = self.state.get_mut().doom(IovaRange::ALL, Place::default(), BATCH);
        let _ = self.unmap_doomed(doomed, IovaRange::ALL, None);
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> fmt::Debug for Container<P, L, BATCH> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Container");
        debug.field("account", &self.account);
        if let Some(all) = self.state.try_lock() {
            debug
                .field("domains", &all.domains.list.len())
                .field("mappings", &all.tree.len())
                .field("working", &all.working)
                .field("quarantined", &all.quarantine.slots());
        }
        debug.finish_non_exhaustive()
    }
}
