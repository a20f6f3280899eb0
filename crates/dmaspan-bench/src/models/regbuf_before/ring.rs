//! Rings, and what their users are charged (`io_buffer_account_pin`, `io_buffer_unmap`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use dmaspan::{PhysAddr, UserRange};

use super::buffer::BufferBefore;
use super::coalesce::Coalescing;
use super::folio::{FolioBefore, folios_under};
use super::{PAGE_LG2, RegbufBeforeError};

/// What a user has charged, over all rings (`user->locked_vm`).
#[derive(Debug)]
pub(crate) struct UserBefore {
    pages: AtomicI64,
    limit: u64,
}

impl UserBefore {
    /// A user who may have `limit` bytes charged, in whole pages (`RLIMIT_MEMLOCK`).
    pub(crate) fn new(limit: u64) -> Self {
        Self { pages: AtomicI64::new(0), limit: limit >> PAGE_LG2 }
    }

    /// How many pages are charged; below 0 where more were given back than taken.
    #[cfg(test)]
    pub(crate) fn charged_pages(&self) -> i64 {
        self.pages.load(Ordering::Relaxed)
    }

    fn charge(&self, asked: u64) -> Result<(), RegbufBeforeError> {
        let limit = i64::try_from(self.limit).unwrap_or(i64::MAX);
        let pages = i64::try_from(asked).unwrap_or(i64::MAX);
        let more = |used: i64| used.checked_add(pages).filter(|sum| *sum <= limit);
        let charged = self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let over = |used| RegbufBeforeError::OverLimit { asked, used, limit: self.limit };
        charged.map(|_| ()).map_err(over)
    }

    fn uncharge(&self, pages: u64) {
        self.pages.fetch_sub(i64::try_from(pages).unwrap_or(i64::MAX), Ordering::Relaxed);
    }
}

/// A buffer that a ring has, or several do.
///
/// Dropped, it stays charged: [`RingBefore::unregister`] ends it.
pub(crate) type RegisteredBefore = Arc<BufferBefore>;

/// A ring with registered buffers (`struct io_ring_ctx`), and what tells the folios of pages.
///
/// # The account
///
/// It is that of Linux 7.2. A large folio is charged whole when the ring's map has it for the first
/// time. A clone is in the map of its ring too, and charges nothing. A buffer that is unregistered
/// leaves the map of the ring that had it; but what left the map entirely is given back only when
/// no ring has the buffer any more, by the last of them.
///
/// So where buffers A and B of a ring share a folio, and B is cloned into a second ring and then
/// unregistered from the first and from the second, the second ring's map loses the folio, which
/// is given back while A keeps it pinned. Unregistering A gives it back again, and the user has
/// less than nothing charged.
///
/// The other way round, a clone in a ring that has registered the folio itself leaves the first
/// ring's charge behind for ever: that ring's map loses the folio while the clone is there, and the
/// clone ends while its own ring's map keeps it. And a folio in two rings that registered it each
/// is charged twice.
pub(crate) struct RingBefore<F> {
    user: Arc<UserBefore>,
    folios: F,
    heads: Heads,
}

impl<F: Fn(PhysAddr) -> FolioBefore> RingBefore<F> {
    /// A ring without buffers.
    pub(crate) fn new(user: Arc<UserBefore>, folios: F) -> Self {
        Self { user, folios, heads: Heads::default() }
    }

    /// Registers a buffer, under which these pages are pinned, 4 KiB each, the last one too. They
    /// stay so until it [is the caller's again](Self::unregister).
    ///
    /// # Errors
    ///
    /// [`RegbufBeforeError::TooLong`], [`RegbufBeforeError::Pages`],
    /// [`RegbufBeforeError::OverLimit`] and [`RegbufBeforeError::NoMemory`].
    pub(crate) fn register(
        &mut self,
        user: UserRange,
        pages: &[PhysAddr],
        coalescing: Coalescing,
    ) -> Result<RegisteredBefore, RegbufBeforeError> {
        let buffer = Arc::new(BufferBefore::new(user, pages, &self.folios, coalescing)?);
        let folios = folios_under(&self.folios, buffer.bvecs());
        let asked = self.heads.reference(folios.clone())?;
        if let Err(error) = self.user.charge(asked) {
            self.heads.unreference(folios);
            return Err(error);
        }
        drop(folios);
        Ok(buffer)
    }

    /// Pins the memory of a space and registers it: [`register`](Self::register) with the array of
    /// pages, which is freed again.
    ///
    /// # Errors
    ///
    /// As there, with nothing pinned; [`RegbufBeforeError::Pages`] where the user has not all of
    /// it, or may not write it.
    #[cfg(test)]
    pub(crate) fn pin_and_register(
        &mut self,
        space: &dmaspan_sim::memory::SimSpace,
        user: UserRange,
        coalescing: Coalescing,
    ) -> Result<RegisteredBefore, RegbufBeforeError> {
        let needed = (user.last().get() >> PAGE_LG2) - (user.start().get() >> PAGE_LG2) + 1;
        let no_memory = RegbufBeforeError::NoMemory { bytes: needed.saturating_mul(8) };
        let room = usize::try_from(needed).map_err(|_| no_memory)?;
        let mut pages = Vec::new();
        pages.try_reserve_exact(room).map_err(|_| no_memory)?;
        pages.resize(room, PhysAddr::new(0));
        let pinned = space.pin_pages(user, dmaspan_sim::walker::Access::Write, &mut pages).pages;
        let registered = self.register(user, &pages[..pinned], coalescing);
        if registered.is_err() {
            let memory = space.memory();
            pages[..pinned]
                .iter()
                .for_each(|page| memory.unpin_page(*page, dmaspan::pin::Dirty::Clean));
        }
        registered
    }

    /// A buffer of another ring of the same user in this one too (`io_clone_buffers`).
    ///
    /// # Errors
    ///
    /// [`RegbufBeforeError::NoMemory`].
    #[cfg(test)]
    pub(crate) fn clone_in(
        &mut self,
        buffer: &RegisteredBefore,
    ) -> Result<RegisteredBefore, RegbufBeforeError> {
        // What that counts as new is not charged.
        self.heads.reference(folios_under(&self.folios, buffer.bvecs()))?;
        Ok(Arc::clone(buffer))
    }

    /// Ends a buffer of this ring, and returns it where no other ring has it: the caller unpins its
    /// pages.
    pub(crate) fn unregister(&mut self, buffer: RegisteredBefore) -> Option<BufferBefore> {
        let left = self.heads.unreference(folios_under(&self.folios, buffer.bvecs()));
        let last = Arc::into_inner(buffer)?;
        self.user.uncharge(left);
        Some(last)
    }
}

/// How often buffers of a ring have each large folio, by its first page (`ctx->hpage_acct`).
#[derive(Debug, Default)]
struct Heads {
    counts: HashMap<PhysAddr, u64, BuildHasherDefault<Spread>>,
}

impl Heads {
    /// Counts the folios of a buffer, and returns how many pages those have that are new.
    fn reference(
        &mut self,
        folios: impl Iterator<Item = FolioBefore> + Clone,
    ) -> Result<u64, RegbufBeforeError> {
        let mut new = 0;
        for (done, folio) in folios.clone().enumerate() {
            if !folio.is_large() {
                new += 1;
                continue;
            }
            if self.counts.try_reserve(1).is_err() {
                self.unreference(folios.take(done));
                return Err(RegbufBeforeError::NoMemory { bytes: 16 });
            }
            let count = self.counts.entry(folio.head).or_default();
            *count += 1;
            if *count == 1 {
                new += folio.pages();
            }
        }
        Ok(new)
    }

    /// Undoes that, and returns how many pages those have that nothing counts any more.
    fn unreference(&mut self, folios: impl Iterator<Item = FolioBefore>) -> u64 {
        let mut left = 0;
        for folio in folios {
            if !folio.is_large() {
                left += 1;
                continue;
            }
            if let Entry::Occupied(mut entry) = self.counts.entry(folio.head) {
                *entry.get_mut() -= 1;
                if *entry.get() == 0 {
                    entry.remove();
                    left += folio.pages();
                }
            }
        }
        left
    }
}

/// A hash of one address, of which the high bits matter as much as the low.
#[derive(Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
