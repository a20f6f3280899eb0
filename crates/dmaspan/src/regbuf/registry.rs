//! A [`Registry`] is a table of registered buffers.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::{fmt, result};

use super::buffer::{Buffer, Node, TagSink};
use super::error::Error;
use super::source::Source;
use crate::addr::{Address, UserAddr};
use crate::prot::Prot;
use crate::range::{RangeError, UserRange};

/// The most buffers of a registry (`IORING_MAX_REG_BUFFERS` of Linux, io_uring/rsrc.c).
pub const MAX_BUFFERS: u32 = 1 << 14;

/// The most bytes of a buffer (`io_validate_user_buf_range` of Linux, io_uring/rsrc.c).
pub const MAX_BUFFER_LEN: u64 = 1 << 40;

/// Says what a slot is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRequest {
    /// The memory; `None` for an empty slot.
    pub user: Option<UserRange>,
    /// What devices may do with it: by default read and write.
    pub access: Prot,
    /// What the registry's [`TagSink`] is told when the buffer is used no more; 0 for nothing.
    pub tag: u64,
}

impl BufferRequest {
    /// An empty slot.
    pub const VACANT: Self = Self { user: None, access: Prot::READ_WRITE, tag: 0 };

    /// A buffer that devices read and write, without a tag.
    pub const fn new(user: UserRange) -> Self {
        Self { user: Some(user), ..Self::VACANT }
    }

    /// Returns what an `iovec` of io_uring's asks for, where a base of 0 is none: an empty slot or
    /// a buffer (`io_sqe_buffers_register` of Linux, io_uring/rsrc.c).
    ///
    /// # Errors
    ///
    /// [`Error::NoAddress`], [`Error::Empty`], [`Error::TooLong`] and [`Error::Wraps`].
    pub fn from_iovec<E: core::error::Error>(
        base: u64,
        len: u64,
    ) -> result::Result<Self, Error<E>> {
        match (base, len) {
            (0, 0) => return Ok(Self::VACANT),
            (0, len) => return Err(Error::NoAddress { len }),
            (_, len) if len > MAX_BUFFER_LEN => {
                return Err(Error::TooLong { len, limit: MAX_BUFFER_LEN });
            }
            _ => {}
        }
        match UserRange::from_len(UserAddr::new(base), len) {
            Ok(user) => Ok(Self::new(user)),
            Err(RangeError::Wraps { start, len }) => Err(Error::Wraps { start, len }),
            Err(RangeError::Empty { start }) => Err(Error::Empty { start }),
        }
    }
}

/// A table of buffers, registered once and used often: by their slot, and offsets in them.
///
/// One registry is one ring's, or one queue's. It is filled from a [`Source`], which says whose
/// memory it is and what its addresses mean. I/O takes a [`Node`] of a slot and imports parts of
/// its buffer; the slot may be emptied, or given another buffer, while I/O is in flight.
///
/// It behaves as the buffer table of an io_uring (Linux, io_uring/rsrc.c), errors included, and
/// each call does all or nothing but [`update`](Self::update).
///
/// # Context
///
/// Changes want it exclusively, as those of a ring its lock. Nodes need no lock; dropping the last
/// one lets go of the memory there and then.
///
/// ```
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::regbuf::{BufferRequest, Pinned, Registry};
/// use dmaspan::{Account, Direction, HostAddr};
/// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     // 4 MiB of this process, pinned and charged to an account.
///     let memory = Arc::new(Memory::new(MemoryKind::Base, 4 << 20)?);
///     let account = Account::new(64 << 20);
///     let pinner = Arc::new(LinuxPinner::<HostAddr>::new()?);
///     let source = Pinned::new(pinner, Arc::clone(&memory), Arc::clone(&account), 12);
///     let mut registry = Registry::new(source);
///     registry.register(&[BufferRequest::new(memory.user_range()), BufferRequest::VACANT])?;
///     assert_eq!(registry.get(0)?.segments().count(), 1);
///
///     // An operation in flight keeps the buffer, whatever becomes of the table.
///     let node = registry.get(0)?.clone();
///     registry.unregister()?;
///     let pieces = node.import(0x1f_f000, 0x2000, Direction::FromDevice)?;
///     assert_eq!(pieces.map(|piece| piece.len()).collect::<Vec<_>>(), [0x2000]);
///     assert_eq!(account.used(), 4 << 20);
///     drop(node);
///     assert_eq!(account.used(), 0);
///     Ok(())
/// }
/// ```
pub struct Registry<S: Source> {
    source: S,
    /// Empty where no table is registered.
    pub(super) table: Box<[BufferSlot<S::Addr>]>,
    tags: Option<Arc<dyn TagSink>>,
    issuer: Option<u64>,
}

/// A slot of a table.
#[derive(Clone)]
pub(super) enum BufferSlot<A: Address> {
    Vacant,
    /// Registered from the registry's source, or cloned.
    Registered(Node<A>),
    /// Lent by a driver.
    Lent(Node<A>),
}

impl<A: Address> BufferSlot<A> {
    fn forget_tag(&mut self) {
        if let Self::Registered(node) = self {
            node.forget_tag();
        }
    }

    pub(super) fn node(&self) -> Option<&Node<A>> {
        match self {
            Self::Vacant => None,
            Self::Registered(node) | Self::Lent(node) => Some(node),
        }
    }
}

pub(super) type Table<S> = Box<[BufferSlot<<S as Source>::Addr>]>;
type Result<T, S> = result::Result<T, Error<<S as Source>::Error>>;

impl<S: Source> Registry<S> {
    /// A registry without a table.
    pub fn new(source: S) -> Self {
        Self { source, table: Box::default(), tags: None, issuer: None }
    }

    /// The same registry, whose tags go to `sink`. Without one they go nowhere.
    #[must_use]
    pub fn with_tags(self, sink: Arc<dyn TagSink>) -> Self {
        Self { tags: Some(sink), ..self }
    }

    /// The same registry, of one task, as a ring with `IORING_SETUP_SINGLE_ISSUER`: no other one
    /// [clones](Self::clone_from) buffers of it.
    #[must_use]
    pub fn with_issuer(self, task: u64) -> Self {
        Self { issuer: Some(task), ..self }
    }

    /// Returns where its buffers come from.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Returns which task it belongs to, if to one alone.
    pub fn issuer(&self) -> Option<u64> {
        self.issuer
    }

    /// Returns how many slots the table has; 0 without one.
    pub fn slots(&self) -> u32 {
        u32::try_from(self.table.len()).unwrap_or(u32::MAX)
    }

    /// Registers a table with a slot for each request.
    ///
    /// # Errors
    ///
    /// [`Error::TableExists`]; [`Error::TableLen`] for none or more than [`MAX_BUFFERS`];
    /// [`Error::NoMemory`]; and for a request as [`update`](Self::update). Then there is no table.
    pub fn register(&mut self, requests: &[BufferRequest]) -> Result<(), S> {
        let mut table = self.new_table(requests.len())?;
        let mut slots = (0..).zip(requests).zip(&mut table);
        let result = slots.try_for_each(|((index, request), slot)| self.fill(slot, index, request));
        match result {
            Ok(()) => self.table = table,
            // Nobody knows of these buffers, so nobody is told that they go.
            Err(_) => table.iter_mut().for_each(BufferSlot::forget_tag),
        }
        result
    }

    /// Registers a table of empty slots.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register).
    pub fn register_sparse(&mut self, slots: u32) -> Result<(), S> {
        self.table = self.new_table(usize::try_from(slots).unwrap_or(usize::MAX))?;
        Ok(())
    }

    /// Takes the table away. Buffers in flight stay until they are used no more.
    ///
    /// # Errors
    ///
    /// [`Error::NoTable`].
    pub fn unregister(&mut self) -> Result<(), S> {
        self.table().map(drop)?;
        self.table = Box::default();
        Ok(())
    }

    /// Gives slots from `index` on what is requested, one by one; what they had goes. Returns how
    /// many: fewer than requested where a later one could not be made (`__io_sqe_buffers_update` of
    /// Linux, io_uring/rsrc.c).
    ///
    /// # Errors
    ///
    /// [`Error::NoTable`]; [`Error::Index`], also for no requests; [`Error::IndexOverflow`]; and
    /// where the first request is refused: [`Error::TagOfVacant`], [`Error::NoAccess`],
    /// [`Error::TooLong`], or [`Error::Buffer`] with the source's reason. Then nothing changed.
    pub fn update(&mut self, index: u32, requests: &[BufferRequest]) -> Result<usize, S> {
        let slots = self.slots();
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        if count == 0 {
            return Err(Error::Index { index, count, slots });
        }
        let Some(end) = index.checked_add(count) else {
            return Err(Error::IndexOverflow { index, count, slots });
        };
        self.table()?;
        if end > slots {
            return Err(Error::Index { index, count, slots });
        }
        let mut done = 0;
        for (index, request) in (index..).zip(requests) {
            let mut new = BufferSlot::Vacant;
            match self.fill(&mut new, index, request) {
                Ok(()) => {}
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            if let Some(slot) = self.table.get_mut(to_index(index)) {
                *slot = new;
                done += 1;
            }
        }
        Ok(done)
    }

    /// The buffer of a slot. Cloned, it is kept for I/O in flight.
    ///
    /// # Errors
    ///
    /// [`Error::Vacant`] for an empty slot and one that does not exist.
    #[inline]
    pub fn get(&self, index: u32) -> Result<&Node<S::Addr>, S> {
        self.table.get(to_index(index)).and_then(BufferSlot::node).ok_or(Error::Vacant { index })
    }

    /// The slots that have buffers, in order, with these.
    ///
    /// ```
    /// use dmaspan::UserRange;
    /// use dmaspan::regbuf::{Registry, Source};
    ///
    /// /// The first slot whose buffer has all of a range.
    /// fn slot_of<S: Source>(registry: &Registry<S>, range: UserRange) -> Option<u32> {
    ///     let (index, _) = registry.nodes().find(|(_, node)| node.user().covers(range))?;
    ///     Some(index)
    /// }
    /// ```
    pub fn nodes(&self) -> impl Iterator<Item = (u32, &Node<S::Addr>)> {
        (0..).zip(&self.table).filter_map(|(index, slot)| Some((index, slot.node()?)))
    }

    /// Puts a buffer that somebody else keeps into an empty slot: a request's memory that a driver
    /// lends to the owner of the registry (`io_buffer_register_bvec` of Linux, io_uring/rsrc.c). A
    /// shared one, an `Arc` of a [`Buffer`], may be lent to several registries.
    ///
    /// # Errors
    ///
    /// [`Error::Index`] and [`Error::Occupied`]. Then the buffer is dropped.
    pub fn lend(&mut self, index: u32, buffer: impl Into<Arc<Buffer<S::Addr>>>) -> Result<(), S> {
        match self.slot(index)? {
            slot @ BufferSlot::Vacant => *slot = BufferSlot::Lent(Node::new(buffer.into())),
            _ => return Err(Error::Occupied { index }),
        }
        Ok(())
    }

    /// Empties a slot that has a [lent](Self::lend) buffer, which goes when no I/O is in flight
    /// (`io_buffer_unregister_bvec` of Linux, io_uring/rsrc.c).
    ///
    /// # Errors
    ///
    /// [`Error::Index`]; [`Error::NothingLent`] for an empty slot; [`Error::NotLent`].
    pub fn take_back(&mut self, index: u32) -> Result<(), S> {
        match self.slot(index)? {
            slot @ BufferSlot::Lent(_) => *slot = BufferSlot::Vacant,
            BufferSlot::Vacant => return Err(Error::NothingLent { index }),
            BufferSlot::Registered(_) => return Err(Error::NotLent { index }),
        }
        Ok(())
    }

    fn slot(&mut self, index: u32) -> Result<&mut BufferSlot<S::Addr>, S> {
        let slots = self.slots();
        let count = 1;
        self.table.get_mut(to_index(index)).ok_or(Error::Index { index, count, slots })
    }

    /// The table, if there is one.
    pub(super) fn table(&self) -> Result<&[BufferSlot<S::Addr>], S> {
        if self.table.is_empty() { Err(Error::NoTable) } else { Ok(&self.table) }
    }

    fn new_table(&self, slots: usize) -> Result<Table<S>, S> {
        if !self.table.is_empty() {
            return Err(Error::TableExists { slots: self.slots() });
        }
        vacant::<S>(slots)
    }

    /// Gives a vacant slot what is requested.
    #[inline]
    fn fill(
        &self,
        slot: &mut BufferSlot<S::Addr>,
        index: u32,
        request: &BufferRequest,
    ) -> Result<(), S> {
        let BufferRequest { user, access, tag } = *request;
        let Some(user) = user else {
            return if tag == 0 { Ok(()) } else { Err(Error::TagOfVacant { index, tag }) };
        };
        if !access.permits_access() {
            return Err(Error::NoAccess { user, access });
        }
        let len = user.checked_len().unwrap_or(u64::MAX);
        if len > MAX_BUFFER_LEN {
            return Err(Error::TooLong { len, limit: MAX_BUFFER_LEN });
        }
        let buffer = self.source.buffer(user, access).map_err(|error| {
            let errno = self.source.errno(&error);
            Error::Buffer { index, error, errno }
        })?;
        let buffer = Arc::new(buffer);
        *slot = BufferSlot::Registered(match &self.tags {
            Some(sink) if tag != 0 => Node::tagged(buffer, tag, sink),
            _ => Node::new(buffer),
        });
        Ok(())
    }
}

/// A table of empty slots.
pub(super) fn vacant<S: Source>(slots: usize) -> Result<Table<S>, S> {
    let limit = MAX_BUFFERS;
    let count = u32::try_from(slots).ok().filter(|count| (1..=limit).contains(count));
    let count = count.ok_or(Error::TableLen { slots, limit })?;
    let mut table = Vec::new();
    table.try_reserve_exact(slots).map_err(|_| Error::NoMemory { slots: count })?;
    table.resize_with(slots, || BufferSlot::Vacant);
    Ok(table.into_boxed_slice())
}

pub(super) fn to_index(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

impl<S: Source> fmt::Debug for Registry<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.nodes()).finish()
    }
}
