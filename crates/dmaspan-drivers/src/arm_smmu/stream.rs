//! Streams are attached to domains here, by their entries in the stream map.

use alloc::sync::Arc;

use dmaspan::Coherency;
use dmaspan::io_pgtable::TableMemory as _;
use dmaspan::iommu::{DomainOf, DriverOps, HardwareError, Incompatible, PagingDomain};

use lock_api::Mutex;

use super::bank::Bank;
use super::format::Context;
use super::map::{Route, StreamMap};
use super::ops::SmmuV2Ops;
use super::spec::gr0;
use super::{SmmuV2, SmmuV2Format, State, Translates};
use crate::host::Host;
use crate::mmio::Mmio;
use crate::stream::{IommuStream, PortHooks, StreamHooks, require};

/// A stream, or several as one: an entry of the stream map. See [`SmmuV2::stream`].
///
/// Dropped, its entry is free again, unless hardware may let something through it: then nobody gets
/// these streams any more.
pub type SmmuV2Stream<D, R, H> = IommuStream<D, SmmuV2StreamHooks<R, H>>;

/// Says what the driver knows of a stream.
#[expect(missing_debug_implementations, reason = "the stream has it, and nobody sees this")]
pub struct SmmuV2StreamHooks<R: Mmio, H: Host> {
    smmu: Arc<SmmuV2<R, H>>,
    entry: u32,
    /// Held while the stream is switched, so that what is noted as its route is the last one.
    switching: Mutex<H::Lock, ()>,
}

impl<R: Mmio, H: Host> StreamHooks for SmmuV2StreamHooks<R, H> {
    const NAME: &'static str = "SmmuV2Stream";
    type Lock = H::Lock;

    fn release(&self, _id: u32) {
        self.smmu.state.lock().map.release(&self.smmu.registers, self.entry);
    }
}

impl<R: Mmio, H: Host> SmmuV2StreamHooks<R, H> {
    pub(super) fn new(smmu: Arc<SmmuV2<R, H>>, entry: u32) -> Self {
        Self { smmu, entry, switching: Mutex::new(()) }
    }

    /// Switches the stream, by one thread at a time.
    fn switch(
        &self,
        route: Route,
        prepare: impl FnOnce(&mut State<H::Lock>),
    ) -> Result<(), HardwareError> {
        let _one = self.switching.lock();
        self.smmu.switch(self.entry, route, prepare)
    }
}

impl<R: Mmio, H: Host> SmmuV2<R, H> {
    /// Sends the accesses of an entry elsewhere, and waits until none goes the former way.
    /// `prepare` makes the new one ready, under the same lock: nobody takes it away in between.
    fn switch(
        &self,
        entry: u32,
        route: Route,
        prepare: impl FnOnce(&mut State<H::Lock>),
    ) -> Result<(), HardwareError> {
        let mut state = self.state.lock();
        prepare(&mut state);
        let former = state.map.send(&self.registers, entry, route);
        let bank = match former {
            Some(Route::Bank(index)) if former != Some(route) => {
                state.bank(index).map(|it| it.bank)
            }
            _ => None,
        };
        drop(state);
        if !StreamMap::<H::Lock>::has(&self.registers, entry, route) {
            let status = self.registers.read_entry(gr0::S2CR, entry).into();
            return Err(HardwareError {
                what: "the SMMU did not take a stream's new route",
                status,
            });
        }
        let left = match (former, bank) {
            (_, Some(bank)) => Left::Bank(bank),
            (Some(_), None) => Left::NoBank,
            (None, None) => Left::Any,
        };
        // The sync waits for accesses that used what is forgotten, and may wait for stalled ones.
        self.end_stalled(left);
        match left {
            Left::Bank(bank) => bank.forget_all(&self.registers),
            Left::NoBank => {}
            Left::Any => self.registers.write(gr0::TLBIALLNSNH, 0),
        }
        self.sync_global()?;
        // What was on its way to the tables before may have stalled since.
        self.end_stalled(left);
        self.state.lock().map.arrived(entry, route);
        Ok(())
    }

    /// Ends the accesses that are stalled where a stream was.
    fn end_stalled(&self, left: Left) {
        match left {
            Left::Bank(bank) => bank.end_stalled(&self.registers),
            Left::NoBank => {}
            Left::Any => {
                let banks = (0..self.features.banks).filter_map(|index| {
                    // The lock is not held while hardware is asked.
                    self.state.lock().bank(index).map(|taken| taken.bank)
                });
                banks.for_each(|bank| bank.end_stalled(&self.registers));
            }
        }
    }
}

/// Where a stream was that was sent elsewhere.
#[derive(Clone, Copy)]
enum Left {
    NoBank,
    Bank(Bank),
    /// That is not known.
    Any,
}

// SAFETY: 1. and 2. One write to S2CR changes the way of all later accesses; it is read back. All
// that used a translation of the former bank have completed when the sync is over that follows an
// invalidation of all of it, and stalled ones are ended, before the sync and after it, since they
// would be translated again. 3. A hook writes S2CR or does not; what then fails leaves the old or
// the new. Nothing else writes the entry's S2CR while it is claimed, and it stays claimed unless it
// is blocked. 4. The hooks of a domain always tell the bank, whoever uses it; `translate` takes
// none of another SMMU.
#[expect(unsafe_code, reason = "the promises of a port")]
unsafe impl<D, R, H> PortHooks<D> for SmmuV2StreamHooks<R, H>
where
    R: Mmio,
    H: Host,
    D: PagingDomain<Ops: DriverOps<Driver = SmmuV2Ops<R, H>>>,
    D::Format: SmmuV2Format,
{
    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        let ops = domain.ops().driver();
        let is_own = Arc::ptr_eq(ops.smmu(), &self.smmu);
        let context = <D::Format as super::format::sealed::SmmuTables>::CONTEXT;
        require(&[
            (is_own, "it belongs to another SMMU"),
            (ops.taken().context == context, "its hooks are for tables of another format"),
        ])?;
        let features = &self.smmu.features;
        Context::fits(domain.format(), features)?;
        let seen = features.walks == Coherency::Coherent
            || domain.memory().coherency() == Coherency::NonCoherent;
        require(&[(seen, "its tables are not written back, where the SMMU looks")])
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.switch(Route::Blocked, |_| ())
    }

    fn pass(&self) -> Result<(), HardwareError> {
        self.switch(Route::Pass, |_| ())
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        let smmu = &self.smmu;
        let bank = *domain.ops().driver().taken();
        self.switch(Route::Bank(bank.index), |state| {
            let taken = state.bank(bank.index);
            if let Some(taken) = taken.filter(|taken| taken.translates == Translates::No) {
                taken.translates = Translates::Yes;
                let tables = (domain.format(), domain.root());
                bank.translate(&smmu.registers, &smmu.features, tables, smmu.config.stalls);
            }
        })
    }
}
