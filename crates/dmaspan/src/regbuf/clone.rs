//! Cloning the buffers of one registry into another.

use alloc::sync::Arc;

use super::buffer::Node;
use super::error::Error;
use super::registry::{BufferSlot, MAX_BUFFERS, Registry, Table, to_index, vacant};
use super::source::Source;
use crate::addr::Address;

/// Says which buffers are cloned, and where to (`struct io_uring_clone_buffers` of Linux,
/// include/uapi/linux/io_uring.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CloneRequest {
    /// The first slot of the source.
    pub source_index: u32,
    /// The first slot that gets a clone.
    pub index: u32,
    /// How many slots; 0 for all of the source, which is for whole tables alone.
    pub count: u32,
    /// What becomes of a table that is there.
    pub existing: Existing,
    /// The task that clones, where registries belong to [one](Registry::with_issuer).
    pub task: Option<u64>,
}

/// Says what becomes of a table into which buffers are cloned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Existing {
    /// It is an error.
    #[default]
    Refuse,
    /// Its slots get clones, those not named stay; it grows as far as needed
    /// (`IORING_REGISTER_DST_REPLACE`).
    Replace,
}

type Result<T, S> = core::result::Result<T, Error<<S as Source>::Error>>;

impl<S: Source> Registry<S> {
    /// Clones buffers of `source`, which share memory, pins and charges with the originals. Empty
    /// slots are cloned as such; tags are not cloned (`io_clone_buffers` of Linux,
    /// io_uring/rsrc.c).
    ///
    /// # Errors
    ///
    /// [`Error::TableExists`], [`Error::OtherTask`], [`Error::OtherOwner`], [`Error::NoCount`],
    /// [`Error::NoTable`] for a source without one, [`Error::Index`], [`Error::IndexOverflow`],
    /// [`Error::TableLen`] and [`Error::NoMemory`]. Then nothing changed.
    pub fn clone_from<T>(&mut self, source: &Registry<T>, request: &CloneRequest) -> Result<(), S>
    where
        T: Source<Addr = S::Addr>,
    {
        refuse_existing::<S>(&self.table, request)?;
        if let Some(issuer) = source.issuer()
            && request.task != Some(issuer)
        {
            return Err(Error::OtherTask { issuer });
        }
        if self.source().owner() != source.source().owner() {
            return Err(Error::OtherOwner);
        }
        self.table = cloned::<S>(&source.table, &self.table, request)?;
        Ok(())
    }

    /// [`clone_from`](Self::clone_from) this registry itself.
    ///
    /// # Errors
    ///
    /// As that.
    pub fn clone_within(&mut self, request: &CloneRequest) -> Result<(), S> {
        refuse_existing::<S>(&self.table, request)?;
        self.table = cloned::<S>(&self.table, &self.table, request)?;
        Ok(())
    }
}

/// Checked first, as in `io_register_clone_buffers` (Linux, io_uring/rsrc.c).
fn refuse_existing<S: Source>(to: &[BufferSlot<S::Addr>], request: &CloneRequest) -> Result<(), S> {
    if request.existing == Existing::Refuse && !to.is_empty() {
        return Err(Error::TableExists { slots: slots(to) });
    }
    Ok(())
}

fn slots<A: Address>(table: &[BufferSlot<A>]) -> u32 {
    u32::try_from(table.len()).unwrap_or(u32::MAX)
}

/// The table that a destination gets.
fn cloned<S: Source>(
    from: &[BufferSlot<S::Addr>],
    to: &[BufferSlot<S::Addr>],
    request: &CloneRequest,
) -> Result<Table<S>, S> {
    let CloneRequest { source_index, index, count, .. } = *request;
    if count == 0 && (source_index != 0 || index != 0) {
        return Err(Error::NoCount { source_index, index });
    }
    if from.is_empty() {
        return Err(Error::NoTable);
    }
    let slots = slots(from);
    let count = if count == 0 { slots } else { count };
    if count > slots {
        return Err(Error::Index { index: source_index, count, slots });
    }
    let nodes = source_index
        .checked_add(count)
        .and_then(|end| from.get(to_index(source_index)..to_index(end)));
    let Some(nodes) = nodes else {
        return Err(Error::IndexOverflow { index: source_index, count, slots });
    };
    let Some(end) = index.checked_add(count) else {
        return Err(Error::IndexOverflow { index, count, slots: MAX_BUFFERS });
    };
    let mut table = vacant::<S>(to_index(end).max(to.len()))?;
    for (slot, old) in table.iter_mut().zip(to) {
        *slot = old.clone();
    }
    for (slot, node) in table.iter_mut().skip(to_index(index)).zip(nodes) {
        *slot = node.share();
    }
    Ok(table)
}

impl<A: Address> BufferSlot<A> {
    /// Another slot's node of the same buffer, which knows nothing of this one's tag.
    fn share(&self) -> Self {
        let node = |node: &Node<A>| Node::new(Arc::clone(node.buffer()));
        match self {
            Self::Vacant => Self::Vacant,
            Self::Registered(of) => Self::Registered(node(of)),
            Self::Lent(of) => Self::Lent(node(of)),
        }
    }
}
