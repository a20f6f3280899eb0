//! The requests that make user addresses invalid, and valid again.

use lock_api::RawMutex;

use super::super::VaddrUpdate;
use super::map::What;
use super::{Client, Type1};
use crate::addr::Iova;
use crate::error::Errno;
use crate::pin::Pinner;
use crate::range::UserRange;

impl<P: Pinner, L: RawMutex, const BATCH: usize> Type1<'_, P, L, BATCH> {
    /// Nothing is mapped or unmapped.
    pub(super) fn invalidate(&self, what: What) -> Result<u64, Errno> {
        let invalidated = match what {
            What::All => self.container.invalidate_vaddr_all(),
            What::Range(range) => self.container.invalidate_vaddr(range),
        };
        invalidated.map_err(|error| self.errno(&error))
    }

    /// The memory of a mapping is the client's now, and charged to it.
    ///
    /// # Errors
    ///
    /// `ESRCH` where the client has exited: nobody could be charged.
    pub(super) fn update(
        &self,
        client: &Client<'_, P>,
        iova: Iova,
        user: UserRange,
    ) -> Result<u32, Errno> {
        if client.has_exited() {
            return Err(Errno::ESRCH);
        }
        let update = VaddrUpdate::new(client.space, user, iova).owner(client.account);
        self.container.update_vaddr(&update).map(|()| 0).map_err(|error| self.errno(&error))
    }
}
