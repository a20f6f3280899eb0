//! A [`SoftStream`] is a device of software that is attached to domains, one after the other.

use alloc::sync::Arc;
use core::{fmt, mem};

use lock_api::Mutex;

use super::SoftIommu;
use super::device::{Named, SoftDevice};
use super::slot::{self, Models, Phase, Route, Ticket, TryAgain, spin};
use crate::addr::Address;
use crate::io_pgtable::{Format, TableMemory};
use crate::iommu::attach::{AllMemory, DomainOf, Incompatible, PagingDomain, Port};
use crate::iommu::fault::FaultHook;
use crate::iommu::ops::{DriverOps, HardwareError};
use crate::iommu::reserved::ReservedRegions;
use crate::platform::Flag;

/// The accesses of a device model as the IOMMU tells them apart from others: a [`Port`], to be
/// attached by an [`Attachment`](crate::iommu::Attachment) to any domain whose hooks are a
/// [`SoftIommu`] of one format and one kind of table memory, or wrap one. Clones are the same
/// stream.
///
/// It is blocked at first. An access that is under way is waited for before it reaches something
/// else, and the next one sees the new.
pub struct SoftStream<D: PagingDomain> {
    named: Arc<Named>,
    regions: Arc<ReservedRegions>,
    routed: Arc<RoutedOf<D>>,
    again: TryAgain,
}

/// What a stream to be attached to domains `D` has.
type RoutedOf<D> = Mutex<Flag, Routed<<D as PagingDomain>::Format, <D as PagingDomain>::Memory>>;

/// Where accesses go, and whose.
struct Routed<F: Format, M: TableMemory<F::Word>> {
    route: Route<F, M>,
    models: Models<F, M>,
    /// How often the route changed.
    changes: u64,
}

impl<F: Format, M: TableMemory<F::Word>> Routed<F, M> {
    fn models(&self) -> &Models<F, M> {
        &self.models
    }
}

impl<D: PagingDomain> SoftStream<D> {
    /// A stream with that number and those regions, blocked.
    pub fn new(stream: u32, regions: ReservedRegions) -> Self {
        let routed = Routed { route: Route::Blocked, models: Models::new(), changes: 0 };
        let named = Arc::new(Named { stream, faults: FaultHook::new() });
        let (regions, routed) = (Arc::new(regions), Arc::new(Mutex::new(routed)));
        Self { named, regions, routed, again: spin }
    }

    /// The same with another way to wait for accesses that are under way: see
    /// [`SoftIommu::waiting_by`].
    pub fn waiting_by(self, again: TryAgain) -> Self {
        Self { again, ..self }
    }
}

impl<D, F, M, A> SoftStream<D>
where
    D: PagingDomain<Format = F, Memory = M, Ops: DriverOps<Driver = SoftIommu<F, M, A>>>,
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    A: Address,
{
    /// A device model of the stream. It goes where the stream goes. Each thread of a device has one
    /// of its own, so that no two share an IOTLB and its lock.
    pub fn device(&self) -> SoftDevice<F, M, A> {
        let device = SoftDevice::of(Arc::clone(&self.named));
        let mut routed = self.routed.lock();
        // What the stream was given goes on to be what it has. Where there is no memory for it the
        // device stays blocked.
        let route = routed.route.clone();
        let is_known = match &route {
            Route::Tables(walks) => {
                let mut models = walks.models.lock();
                walks.phase() != Phase::Ended && models.add(device.slot()).is_ok()
            }
            Route::Blocked | Route::Pass => true,
        };
        if routed.models.add(device.slot()).is_ok() && is_known {
            device.slot().state.lock().change(route);
        }
        device
    }

    /// Lets every device model of the stream go to `route`, each when it is in no access.
    fn change(&self, route: Route<F, M>) -> Result<(), HardwareError> {
        let (former, change, ticket, end) = {
            let mut routed = self.routed.lock();
            if let Route::Tables(walks) = &route {
                let mut models = walks.models.lock();
                if walks.phase() != Phase::Serves {
                    let what = "the hooks of the domain have let go of its tables";
                    return Err(HardwareError { what, status: 0 });
                }
                routed.models.iter().try_for_each(|slot| models.add(slot))?;
            }
            routed.changes += 1;
            let former = mem::replace(&mut routed.route, route.clone());
            (former, routed.changes, Ticket::draw(), routed.models.end())
        };
        slot::each(&self.routed, Routed::models, end, |slot| {
            slot.ask_to_go(route.clone(), change, ticket);
            Ok(())
        })?;
        slot::each(&self.routed, Routed::models, end, |slot| slot.wait(ticket, self.again))?;
        // Nobody goes through the former tables any more, unless a later change has led there. Its
        // access may last when another one has led away: then these stay among the device models.
        let routed = self.routed.lock();
        if let Route::Tables(walks) = &former
            && routed.changes == change
            && !route.is_through(walks)
        {
            let mut models = walks.models.lock();
            routed.models.iter().for_each(|slot| models.remove(slot));
        }
        Ok(())
    }
}

#[expect(unsafe_code, reason = "the trait is a promise about devices, kept as said above")]
// SAFETY:
// 1., 2. A device model uses what it reaches under its slot's lock alone. A change has every device
//    model of the stream go elsewhere, under that lock and before it looks anything up, and waits
//    until each has. A later one gets what the stream has, by the lock of the stream: when a hook
//    returns `Ok`, only what it asked for is used, or what a hook beside it did that came later.
// 3. A hook that fails has changed some of the device models, or none: each has what the stream
//    had, or what was asked for, and that only from the end of its access on. Nothing else gives
//    them anything.
// 4. Each device model is entered among those of the domain's hooks before it is given the tables,
//    so that their promises are kept to it; hooks that have let go of the tables are refused.
unsafe impl<D, F, M, A> Port for SoftStream<D>
where
    D: PagingDomain<Format = F, Memory = M, Ops: DriverOps<Driver = SoftIommu<F, M, A>>>,
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    A: Address,
{
    type Paging = D;
    type Lock = Flag;

    fn reserved_regions(&self) -> &ReservedRegions {
        &self.regions
    }

    fn faults(&self) -> &FaultHook<Flag> {
        &self.named.faults
    }

    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        match domain.ops().driver().walks.phase() {
            Phase::Serves => Ok(()),
            Phase::Made | Phase::Ended => {
                Err(Incompatible { what: "its hooks have let go of its tables" })
            }
        }
    }

    fn passes(&self) -> bool {
        true
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.change(Route::Blocked)
    }

    fn pass(&self, _promise: AllMemory) -> Result<(), HardwareError> {
        self.change(Route::Pass)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        self.change(Route::Tables(Arc::clone(&domain.ops().driver().walks)))
    }
}

impl<D: PagingDomain> Clone for SoftStream<D> {
    fn clone(&self) -> Self {
        let (named, regions) = (Arc::clone(&self.named), Arc::clone(&self.regions));
        Self { named, regions, routed: Arc::clone(&self.routed), again: self.again }
    }
}

impl<D: PagingDomain> fmt::Debug for SoftStream<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftStream")
            .field("stream", &self.named.stream)
            .field("regions", &self.regions)
            .field("faults", &self.named.faults)
            .finish_non_exhaustive()
    }
}
