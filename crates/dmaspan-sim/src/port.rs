//! A stream of accesses as an IOMMU tells it apart, which is attached to one domain or another.
//!
//! It is blocked, passes everything, or goes through the [`Iotlb`] of a domain, and changes between
//! them at one moment: an access that is in flight is waited for, and the next one sees the new.
//!
//! Lock order: the route before the accesses in flight of an IOTLB. Faults are reported without
//! either.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use dmaspan::iommu::{
    AllMemory, DomainOf, FaultAccess, FaultHook, FaultReason, FaultReport, FaultResponse,
    FaultState, HardwareError, Incompatible, PagingDomain, Port, ReservedRegions,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot};
use parking_lot::{Mutex, RwLock};

use crate::bus::{Bus, BusError};
use crate::device::{self, DmaError, Step, Stepped, in_pieces};
use crate::iotlb::{Hit, Iotlb};
use crate::sanitizer::{Sanitized, Sanitizer};
use crate::walker::{Access, Fault, FaultKind, TableWords, Walker};

/// An IOTLB of any walker.
trait Translate: Send + Sync {
    fn access(&self, iova: Iova, access: Access, step: Step<'_>) -> Stepped;

    /// What is told of accesses.
    fn sanitizer(&self) -> Option<&Sanitizer> {
        None
    }
}

impl<W: Walker + Send + Sync, T: TableWords + Send + Sync> Translate for Iotlb<W, T> {
    fn access(&self, iova: Iova, access: Access, step: Step<'_>) -> Stepped {
        self.with_translation(iova, access, step)
    }
}

impl<O: Translate> Translate for Sanitized<O> {
    fn access(&self, iova: Iova, access: Access, step: Step<'_>) -> Stepped {
        self.inner().access(iova, access, step)
    }

    fn sanitizer(&self) -> Option<&Sanitizer> {
        Some(self.sanitizer())
    }
}

/// Where accesses go.
enum Route {
    Blocked,
    Pass,
    Translate(Box<dyn Translate>),
}

/// Says what a hook that fails has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Nothing.
    NotDone,
    /// All of it: only the answer is missing.
    Unseen,
}

/// Says whether the stream can have the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Passing {
    /// It can.
    Supported,
    /// Its accesses are always translated.
    Unsupported,
}

/// A simulated stream. Clones share everything.
///
/// It starts as firmware leaves many: it passes everything, until an
/// [`Attachment`](dmaspan::iommu::Attachment) takes it.
pub struct SimPort<D> {
    shared: Arc<Shared>,
    domains: PhantomData<fn(&D)>,
}

struct Shared {
    stream: u32,
    regions: ReservedRegions,
    faults: FaultHook<parking_lot::RawMutex>,
    /// Held for reading while an access is under way, and for writing by a change.
    route: RwLock<Route>,
    control: Mutex<Control>,
}

#[derive(Debug)]
struct Control {
    failures: Vec<Failure>,
    passing: Passing,
    faulting: FaultState,
    refused: Option<Incompatible>,
}

impl<D> SimPort<D> {
    /// A stream with that number and those regions.
    pub fn new(stream: u32, regions: ReservedRegions) -> Self {
        let control = Control {
            failures: Vec::new(),
            passing: Passing::Supported,
            faulting: FaultState::Ended,
            refused: None,
        };
        let shared = Shared {
            stream,
            regions,
            faults: FaultHook::new(),
            route: RwLock::new(Route::Pass),
            control: Mutex::new(control),
        };
        Self { shared: Arc::new(shared), domains: PhantomData }
    }

    /// Makes the next hooks fail, one for each of `failures`, in their order.
    pub fn fail_next(&self, failures: &[Failure]) {
        self.shared.control.lock().failures = failures.to_vec();
    }

    /// Sets whether the stream can have the identity, from now on.
    pub fn set_passing(&self, passing: Passing) {
        self.shared.control.lock().passing = passing;
    }

    /// Sets whether accesses that fault stall until the handler has answered, from now on.
    pub fn set_faulting(&self, faulting: FaultState) {
        self.shared.control.lock().faulting = faulting;
    }

    /// Sets what the stream says of every domain, from now on; `None` for that it fits.
    pub fn set_refused(&self, refused: Option<Incompatible>) {
        self.shared.control.lock().refused = refused;
    }

    /// Reads memory of `bus` from `iova` on. Faults are reported.
    ///
    /// # Errors
    ///
    /// [`DmaError`], with the bytes that were read before.
    #[track_caller]
    pub fn read(&self, bus: &impl Bus, iova: Iova, buf: &mut [u8]) -> Result<(), DmaError> {
        self.tell(iova, buf.len(), Access::Read);
        let translate = |at, step: Step<'_>| self.access(at, Access::Read, step);
        in_pieces(iova, buf.len(), translate, |paddr, from, to| bus.read(paddr, &mut buf[from..to]))
    }

    /// Writes memory of `bus` from `iova` on. Faults are reported.
    ///
    /// # Errors
    ///
    /// [`DmaError`], with the bytes that were written before.
    #[track_caller]
    pub fn write(&self, bus: &impl Bus, iova: Iova, buf: &[u8]) -> Result<(), DmaError> {
        self.tell(iova, buf.len(), Access::Write);
        let translate = |at, step: Step<'_>| self.access(at, Access::Write, step);
        in_pieces(iova, buf.len(), translate, |paddr, from, to| bus.write(paddr, &buf[from..to]))
    }

    /// Returns where an access to `iova` would go, if anywhere. Fills the IOTLB as an access does,
    /// and reports no fault.
    pub fn probe(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        let mut paddr = None;
        let mut note = |hit: Hit| {
            paddr = Some(hit.paddr);
            Ok(1)
        };
        self.route(iova, access, &mut note).ok()?.ok()?;
        paddr
    }

    /// Tells the sanitizer of the domain, where its hooks have one.
    #[track_caller]
    fn tell(&self, iova: Iova, len: usize, access: Access) {
        if let Route::Translate(iotlb) = &*self.shared.route.read() {
            device::tell(iotlb.sanitizer(), iova, len, access);
        }
    }

    /// Does an access, and tries again for as long as the handler says.
    fn access(&self, iova: Iova, access: Access, step: Step<'_>) -> Stepped {
        loop {
            let (fault, reason) = match self.route(iova, access, &mut *step) {
                Ok(done) => return Ok(done),
                Err(refused) => refused,
            };
            let report = FaultReport {
                stream: self.shared.stream,
                iova: fault.iova,
                access: match access {
                    Access::Read => FaultAccess::Read,
                    Access::Write => FaultAccess::Write,
                },
                reason,
                state: self.shared.control.lock().faulting,
            };
            if self.shared.faults.report(&report) == FaultResponse::Terminate {
                return Err(fault);
            }
        }
    }

    fn route(
        &self,
        iova: Iova,
        access: Access,
        step: Step<'_>,
    ) -> Result<Result<usize, BusError>, (Fault, FaultReason)> {
        match &*self.shared.route.read() {
            Route::Blocked => {
                let fault = Fault { kind: FaultKind::Translation, level: 0, iova, access };
                Err((fault, FaultReason::Blocked))
            }
            Route::Pass => {
                let paddr = PhysAddr::new(iova.get());
                let block = IovaRange::new(iova, Iova::new(u64::MAX));
                let block = block.unwrap_or(IovaRange::point(iova));
                Ok(step(Hit { paddr, block, prot: Prot::READ_WRITE }))
            }
            Route::Translate(iotlb) => {
                iotlb.access(iova, access, step).map_err(|fault| (fault, reason(fault.kind)))
            }
        }
    }

    /// Waits for what is in flight, and changes.
    fn change(&self, route: Route) -> Result<(), HardwareError> {
        let mut control = self.shared.control.lock();
        let failure = (!control.failures.is_empty()).then(|| control.failures.remove(0));
        drop(control);
        if failure != Some(Failure::NotDone) {
            *self.shared.route.write() = route;
        }
        match failure {
            Some(_) => {
                Err(HardwareError { what: "the simulated stream did not change", status: 1 })
            }
            None => Ok(()),
        }
    }
}

fn reason(kind: FaultKind) -> FaultReason {
    match kind {
        FaultKind::Translation => FaultReason::Translation,
        FaultKind::Permission | FaultKind::AccessFlag => FaultReason::Permission,
        FaultKind::AddressSize | FaultKind::Reserved | FaultKind::ExternalAbort(_) => {
            FaultReason::Tables
        }
    }
}

impl<D> Clone for SimPort<D> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), domains: PhantomData }
    }
}

impl<D> fmt::Debug for SimPort<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimPort")
            .field("stream", &self.shared.stream)
            .field("regions", &self.shared.regions)
            .field("faults", &self.shared.faults)
            .field("control", &*self.shared.control.lock())
            .finish_non_exhaustive()
    }
}

// SAFETY:
// 1., 2. Accesses hold the route for reading until they are done, and a change holds it for
//    writing: when it is done, only the new route is used.
// 3. A change that fails stored the new route or nothing, and nothing else stores one.
// 4. The route goes through the domain's own IOTLB, which is what answers for its hooks: the
//    private `Translate` is implemented for that, and for a wrapper that passes all hooks on to it.
#[expect(unsafe_code, reason = "the trait is a promise about devices, kept as said above")]
unsafe impl<D: PagingDomain<Ops: Translate + Clone + 'static>> Port for SimPort<D> {
    type Paging = D;
    type Lock = parking_lot::RawMutex;

    fn reserved_regions(&self) -> &ReservedRegions {
        &self.shared.regions
    }

    fn faults(&self) -> &FaultHook<parking_lot::RawMutex> {
        &self.shared.faults
    }

    fn accepts(&self, _domain: &DomainOf<D>) -> Result<(), Incompatible> {
        self.shared.control.lock().refused.map_or(Ok(()), Err)
    }

    fn passes(&self) -> bool {
        self.shared.control.lock().passing == Passing::Supported
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.change(Route::Blocked)
    }

    fn pass(&self, _promise: AllMemory) -> Result<(), HardwareError> {
        self.change(Route::Pass)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        self.accepts(domain)?;
        self.change(Route::Translate(Box::new(domain.ops().clone())))
    }
}
