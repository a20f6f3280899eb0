//! [`IommuStream`] is a stream of accesses that is attached to domains, whichever driver's it is.
//! It checks a domain before the driver's hooks see it.

use alloc::sync::Arc;
use core::fmt;
use core::marker::PhantomData;

use dmaspan::iommu::{
    AllMemory, DomainOf, FaultHook, HardwareError, Incompatible, PagingDomain, Port,
    ReservedRegions,
};
use lock_api::RawMutex;

use crate::faults::ClaimedStream;
use crate::log;

/// A stream of accesses that an IOMMU tells apart, made by its driver. `D` is the type of the
/// domains that it can have, and `X` the driver's part.
///
/// Dropped, it leaves hardware as it is, and others can claim its number: an
/// [`Attachment`](dmaspan::iommu::Attachment) blocks it before.
pub struct IommuStream<D, X: StreamHooks> {
    pub(crate) hooks: X,
    claimed: Arc<ClaimedStream<X::Lock>>,
    domains: PhantomData<fn(&D)>,
}

/// Says what a driver knows of a stream.
pub trait StreamHooks: Send + Sync {
    /// What the stream is called where it is printed.
    const NAME: &'static str;
    /// The lock around what it is attached to.
    type Lock: RawMutex + Send + Sync;

    /// Takes the claim of the stream with that number back.
    fn release(&self, id: u32);
}

/// The work of a driver for a stream that can have domains of the type `D`.
///
/// # Safety
///
/// As for [`Port`], whose hooks these are; [`translate`](Self::translate) is asked for domains that
/// [`accepts`](Self::accepts) took, and no others, and [`pass`](Self::pass) where the promise was
/// made that it needs.
#[expect(unsafe_code, reason = "the contract of a port")]
pub unsafe trait PortHooks<D: PagingDomain>: StreamHooks {
    /// As [`Port::accepts`].
    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible>;

    /// As [`Port::passes`].
    fn passes(&self) -> bool {
        true
    }

    /// As [`Port::block`].
    fn block(&self) -> Result<(), HardwareError>;

    /// As [`Port::pass`].
    fn pass(&self) -> Result<(), HardwareError>;

    /// As [`Port::translate`].
    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError>;
}

/// Refuses a domain by the first of the conditions that does not hold.
pub(crate) fn require(conditions: &[(bool, &'static str)]) -> Result<(), Incompatible> {
    match conditions.iter().find(|(holds, _)| !holds) {
        Some(&(_, what)) => Err(Incompatible { what }),
        None => Ok(()),
    }
}

impl<D, X: StreamHooks> IommuStream<D, X> {
    pub(crate) fn new(hooks: X, claimed: Arc<ClaimedStream<X::Lock>>) -> Self {
        Self { hooks, claimed, domains: PhantomData }
    }

    /// Its number, as it was claimed by; of several streams that are one, the lowest.
    pub fn id(&self) -> u32 {
        self.claimed.id
    }
}

#[expect(unsafe_code, reason = "the promise of a port")]
// SAFETY: the hooks are the driver's, which promises the same. A domain is checked here, whoever
// asks for it.
unsafe impl<D: PagingDomain, X: PortHooks<D>> Port for IommuStream<D, X> {
    type Paging = D;
    type Lock = X::Lock;

    fn reserved_regions(&self) -> &ReservedRegions {
        &self.claimed.regions
    }

    fn faults(&self) -> &FaultHook<X::Lock> {
        &self.claimed.faults
    }

    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        self.hooks.accepts(domain)
    }

    fn passes(&self) -> bool {
        self.hooks.passes()
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.hooks.block().inspect(|()| log::info!("stream {:#x} is blocked", self.claimed.id))
    }

    fn pass(&self, _promise: AllMemory) -> Result<(), HardwareError> {
        self.hooks.pass().inspect(|()| {
            log::info!("stream {:#x} reaches all memory, untranslated", self.claimed.id);
        })
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        self.hooks.accepts(domain)?;
        self.hooks.translate(domain).inspect(|()| {
            log::info!("stream {:#x} is attached to a domain", self.claimed.id);
        })
    }
}

impl<D, X: StreamHooks> Drop for IommuStream<D, X> {
    fn drop(&mut self) {
        self.hooks.release(self.claimed.id);
    }
}

impl<D, X: StreamHooks> fmt::Debug for IommuStream<D, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClaimedStream { id, regions, .. } = &*self.claimed;
        f.debug_struct(X::NAME).field("id", id).field("regions", regions).finish_non_exhaustive()
    }
}
