//! A registry gets its buffers from a [`Source`].

use alloc::sync::Arc;

use super::buffer::Buffer;
use crate::account::Account;
use crate::addr::Address;
use crate::error::Errno;
use crate::prot::Prot;
use crate::range::UserRange;

/// Makes buffers of what an owner names by its own addresses: pins it, maps it, or looks it up.
pub trait Source {
    /// Of what the segments are addresses.
    type Addr: Address;
    /// Why there is no buffer.
    type Error: core::error::Error + 'static;

    /// A buffer of `user` that devices may access as `access` says.
    ///
    /// # Errors
    ///
    /// Where there is none. Then nothing is pinned, charged or mapped.
    fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<Self::Addr>, Self::Error>;

    /// Whose memory it is.
    fn owner(&self) -> Owner<'_>;

    /// The errno of an error, for front ends that answer as Linux does.
    fn errno(&self, error: &Self::Error) -> Errno;
}

/// One source of several registries, or one that its owner looks at.
impl<S: Source + ?Sized> Source for Arc<S> {
    type Addr = S::Addr;
    type Error = S::Error;

    fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<Self::Addr>, Self::Error> {
        (**self).buffer(user, access)
    }

    fn owner(&self) -> Owner<'_> {
        (**self).owner()
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        (**self).errno(error)
    }
}

/// Whose memory a source names: buffers are cloned only between registries of the same owner.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// What is charged; `None` where nothing is.
    pub account: Option<&'a Account>,
    /// The address space.
    pub space: u64,
    /// The device whose addresses those of the buffers are: another one finds other memory there,
    /// or none. `None` for physical addresses and those of this process.
    pub device: Option<usize>,
}

impl PartialEq for Owner<'_> {
    fn eq(&self, other: &Self) -> bool {
        let same_account = match (self.account, other.account) {
            (Some(one), Some(other)) => core::ptr::eq(one, other),
            (None, None) => true,
            _ => false,
        };
        same_account && self.space == other.space && self.device == other.device
    }
}

impl Eq for Owner<'_> {}
