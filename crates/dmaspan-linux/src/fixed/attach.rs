//! A pool puts its buffers into the table of a ring here, and takes them out again.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use dmaspan::{Errno, UserAddr, UserRange};
use io_uring::Submitter;
use parking_lot::Mutex;

use super::error::ring_advice;
use super::{FixedBuf, FixedPool, RingAttachError};
use crate::os;
use crate::registration::{RegisterError, SLOTS};
use crate::sys::ring::Ring;
use crate::sys::slices::{Slice, Slices};
use crate::sys::uring::{self, Buffer, BufferTable};

/// Says whether rings share one registration of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Share it where the kernel can, else register again.
    #[default]
    Auto,
    /// Share it, or fail.
    Clone,
    /// Register again, so that the ring depends on no other: memory is pinned and charged for each.
    Register,
}

/// Says how a ring got a pool's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachMethod {
    /// It shares the pool's registration.
    Cloned,
    /// It has a registration of its own, which pins and charges the memory again.
    Registered {
        /// Why it does not share; `None` where that was asked for.
        refused: Option<Errno>,
    },
}

impl fmt::Display for AttachMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cloned => f.write_str("registered once for all rings"),
            Self::Registered { refused: None } => f.write_str("registered for this ring alone"),
            Self::Registered { refused: Some(errno) } => write!(
                f,
                "registered again for this ring, which cannot share the buffers ({}{})",
                os::words(*errno),
                what_can_share(*errno)
            ),
        }
    }
}

/// What could share where this errno was the answer (io_uring_register(2),
/// `IORING_REGISTER_CLONE_BUFFERS`); nothing where neither kernel nor ring is to blame.
fn what_can_share(errno: Errno) -> &'static str {
    match errno {
        Errno::EOPNOTSUPP => "; Linux 6.12 can",
        Errno::EINVAL => "; Linux 6.12 and a ring of the same user can",
        Errno::EBUSY => "; Linux 6.13 can",
        _ => "",
    }
}

/// Says where the buffers of a pool are in the table of a ring.
///
/// It keeps the pool, not the ring: dropping it changes nothing, and a ring that is closed lets its
/// buffers go.
#[derive(Clone, Debug)]
pub struct RingAttachment {
    pool: FixedPool,
    first_slot: u32,
    method: AttachMethod,
}

impl RingAttachment {
    pub(super) fn new(pool: FixedPool, first_slot: u32, method: AttachMethod) -> Self {
        Self { pool, first_slot, method }
    }

    /// The pool.
    pub fn pool(&self) -> &FixedPool {
        &self.pool
    }

    /// The first slot; the pool has [`buffers`](FixedPool::buffers) of them.
    pub fn first_slot(&self) -> u32 {
        self.first_slot
    }

    /// Returns how the ring got the buffers.
    pub fn method(&self) -> AttachMethod {
        self.method
    }

    /// Registers the same memory anew in the same slots, by the way told. Operations in flight keep
    /// the old registration until they are done; those queued later use the new one.
    ///
    /// # Errors
    ///
    /// As [`FixedPool::attach_by`]. A new registration is charged before the old one goes, so
    /// with [`Sharing::Register`] the limit of locked memory needs room for a buffer more.
    ///
    /// # Context
    ///
    /// `ring` is the ring that was attached. As [`FixedPool::attach`].
    pub fn renew(&mut self, ring: &Submitter<'_>, sharing: Sharing) -> Result<(), RingAttachError> {
        self.method = self.pool.fill(Ring::Submitter(ring), self.first_slot, sharing)?;
        Ok(())
    }

    /// Empties the slots. Operations in flight keep the memory pinned until they are done;
    /// entries that are submitted later fail with `EFAULT`.
    ///
    /// # Errors
    ///
    /// [`DetachError`] where the kernel refuses; some slots may be full.
    ///
    /// # Context
    ///
    /// `ring` is the ring that was attached. As [`FixedPool::attach`].
    pub fn detach(&self, ring: &Submitter<'_>) -> Result<(), DetachError> {
        self.detach_from(Ring::Submitter(ring))
    }

    pub(crate) fn detach_from(&self, ring: Ring<'_>) -> Result<(), DetachError> {
        let slots = self.first_slot..self.first_slot + self.pool.buffers();
        slots.map(|slot| uring::empty(ring, slot)).fold(Ok(()), Result::and).map_err(DetachError)
    }

    /// The slot of the ring's table that a buffer is in, for operations that the application makes
    /// itself (`buf_index` of a submission queue entry); `None` for a buffer of another pool.
    pub fn slot<T: Pod>(&self, buffer: &FixedBuf<T>) -> Option<u16> {
        self.slot_of(buffer.slice())
    }

    /// The slot that a slice is in; `None` for one of another pool.
    #[inline]
    pub(super) fn slot_of(&self, slice: &Slice) -> Option<u16> {
        if !Arc::ptr_eq(slice.owner(), self.pool.own_slices()) {
            return None;
        }
        u16::try_from(self.first_slot + slice.chunk()).ok()
    }
}

/// The reason why a ring's slots were not emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring did not let the buffers go: {}", ring_advice(*.0))]
pub struct DetachError(Errno);

impl DetachError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        self.0
    }
}

/// What rings clone from.
#[derive(Debug)]
pub(super) enum Source {
    /// Nothing was registered yet.
    Untried,
    /// A ring of the pool's own, with all of its buffers.
    Ready(Box<BufferTable>),
    /// There is none.
    Missing(Errno),
}

/// Fills slots of a ring with the chunks of a pool.
pub(super) fn fill(
    slices: &Slices,
    source: &Mutex<Source>,
    ring: Ring<'_>,
    first: u32,
    sharing: Sharing,
) -> Result<AttachMethod, RingAttachError> {
    let needed = slices.layout().chunks();
    if first.checked_add(needed).is_none_or(|end| end > SLOTS) {
        return Err(RingAttachError::BeyondTable { first, needed });
    }
    let refused = match sharing {
        Sharing::Register => None,
        Sharing::Auto | Sharing::Clone => match share(slices, &mut source.lock(), ring, first)? {
            Ok(()) => return Ok(AttachMethod::Cloned),
            Err(errno) if sharing == Sharing::Clone => {
                return Err(RingAttachError::Clone { errno });
            }
            Err(errno) => Some(errno),
        },
    };
    register(slices, ring, first)?;
    Ok(AttachMethod::Registered { refused })
}

/// Clones the pool's own registration, which is made first where there is none. The inner error
/// says why it cannot be shared with this ring.
fn share(
    slices: &Slices,
    source: &mut Source,
    ring: Ring<'_>,
    first: u32,
) -> Result<Result<(), Errno>, RingAttachError> {
    if matches!(source, Source::Untried) {
        match own_registration(slices)? {
            // Too many open files, or the like: another time there may be a ring.
            Source::Missing(errno) if errno != Errno::EOPNOTSUPP => return Ok(Err(errno)),
            made => *source = made,
        }
    }
    let table = match source {
        Source::Ready(table) => table,
        Source::Missing(errno) => return Ok(Err(*errno)),
        Source::Untried => return Ok(Err(Errno::EOPNOTSUPP)),
    };
    match table.clone_into(ring, first, slices.layout().chunks()) {
        Ok(()) => Ok(Ok(())),
        // Another user or process, a kernel of which this is too much, a table in the way, or
        // restrictions.
        Err(errno @ (Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EBUSY | Errno::EACCES)) => {
            Ok(Err(errno))
        }
        Err(Errno::ENOMEM) => {
            Err(RegisterError::NoMemory { range: slices.memory().user_range() }.into())
        }
        Err(errno) => Err(RingAttachError::Ring { errno }),
    }
}

/// Registers a pool with a ring of its own.
fn own_registration(slices: &Slices) -> Result<Source, RingAttachError> {
    let needed = slices.layout().chunks();
    let table = match BufferTable::new(needed) {
        Ok(table) => Box::new(table),
        // The application's ring must do.
        Err(errno) => return Ok(Source::Missing(errno)),
    };
    if !table.can_clone() {
        return Ok(Source::Missing(Errno::EOPNOTSUPP));
    }
    // What is registered when one fails goes with the table.
    for chunk in 0..needed {
        let (buffer, range) = chunk_buffer(slices, chunk)?;
        table.fill(chunk, buffer).map_err(|errno| unregistered(slices, range, errno))?;
    }
    Ok(Source::Ready(table))
}

/// Registers a pool with the application's ring. Where one buffer fails, the slots of those before
/// it are empty, the others hold what they held, and the ring has no table where it had none.
fn register(slices: &Slices, ring: Ring<'_>, first: u32) -> Result<(), RingAttachError> {
    let needed = slices.layout().chunks();
    let mut had_table = true;
    for chunk in 0..needed {
        let (buffer, range) = chunk_buffer(slices, chunk)?;
        let mut result = uring::fill(ring, first + chunk, buffer);
        if chunk == 0 && result == Err(os::ENXIO) {
            ring.make_sparse(first + needed).map_err(|errno| no_table(range, errno))?;
            had_table = false;
            result = uring::fill(ring, first, buffer);
        }
        let Err(errno) = result else { continue };
        // What was registered a moment ago can be let go.
        if had_table {
            for done in 0..chunk {
                let _ = uring::empty(ring, first + done);
            }
        } else {
            let _ = ring.unregister();
        }
        return Err(match errno {
            // Buffers of a pool have lengths and places that the kernel takes.
            Errno::EINVAL => RingAttachError::TableTooShort { first, needed },
            Errno::EEXIST
            | os::EBADFD
            | os::EBADF
            | os::ENXIO
            | Errno::EACCES
            | Errno::EOPNOTSUPP => RingAttachError::Ring { errno },
            errno => unregistered(slices, range, errno).into(),
        });
    }
    Ok(())
}

/// Why the buffer `range` of a pool is not registered. Of a limit the pool needs room for all.
fn unregistered(slices: &Slices, range: UserRange, errno: Errno) -> RegisterError {
    match errno {
        Errno::ENOMEM => RegisterError::of(slices.memory().user_range(), errno),
        errno => RegisterError::of(range, errno),
    }
}

/// What `errno` means for a table that a ring does not get.
fn no_table(range: UserRange, errno: Errno) -> RingAttachError {
    match errno {
        Errno::ENOMEM => RegisterError::of(range, errno).into(),
        Errno::EEXIST | os::EBADFD | Errno::EACCES => RingAttachError::Ring { errno },
        errno => RegisterError::Unavailable { errno }.into(),
    }
}

/// A chunk for the kernel, and for errors.
fn chunk_buffer(slices: &Slices, chunk: u32) -> Result<(Buffer, UserRange), RingAttachError> {
    let memory = slices.memory();
    let part = slices.layout().chunk(chunk, memory.len()).and_then(|bytes| {
        let len = bytes.end - bytes.start;
        let start = memory.part(bytes.start, len)?.as_ptr();
        let addr = UserAddr::new(u64::try_from(start.addr()).ok()?);
        let range = UserRange::from_len(addr, u64::try_from(len).ok()?).ok()?;
        Some((Buffer { start: start.cast(), len }, range))
    });
    // Every chunk of a layout is in its memory.
    part.ok_or(RingAttachError::Ring { errno: Errno::EFAULT })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_or_a_user_is_named_only_where_that_is_why_buffers_are_not_shared() {
        let text = |errno| AttachMethod::Registered { refused: Some(errno) }.to_string();
        assert!(text(Errno::EOPNOTSUPP).ends_with("; Linux 6.12 can)"));
        assert!(text(Errno::EINVAL).ends_with("; Linux 6.12 and a ring of the same user can)"));
        assert!(text(Errno::EBUSY).ends_with("; Linux 6.13 can)"));
        for errno in [os::EMFILE, os::ENFILE, Errno::EPERM, Errno::EACCES, Errno::ENOMEM] {
            let text = text(errno);
            assert!(text.ends_with(&format!("({})", os::words(errno))), "{text}");
        }
    }
}
