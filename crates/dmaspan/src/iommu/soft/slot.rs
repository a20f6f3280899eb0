//! A [`Slot`] is what a software IOMMU has of one device model: where its accesses go, and its
//! IOTLB.

use alloc::sync::Arc;
use alloc::vec::Vec;

use lock_api::{Mutex, MutexGuard};

use super::spans::{Needs, Spans};
use crate::addr::{Iova, PhysAddr};
use crate::atomic::{AtomicBool, Ordering};
use crate::io_pgtable::view::{NoRun, View};
use crate::io_pgtable::{Format, MappedRun, TableMemory};
use crate::iommu::fault::{FaultAccess, FaultReason};
use crate::iommu::ops::HardwareError;
use crate::platform::Flag;
use crate::prot::Prot;
use crate::range::IovaRange;

/// Asked before a software IOMMU tries again to end what a device model is in the middle of, with
/// the number of tries before: it passes some time, and says whether to go on.
pub type TryAgain = fn(tries: u64) -> bool;

/// Spins, and gives up after some tenths of a second.
pub(super) fn spin(tries: u64) -> bool {
    crate::atomic::spin_loop();
    tries < 1 << 24
}

/// Locks what a device model may hold as long as an access takes.
pub(super) fn wait_for<T>(
    lock: &Mutex<Flag, T>,
    again: TryAgain,
) -> Result<MutexGuard<'_, Flag, T>, HardwareError> {
    let mut tries = 0;
    loop {
        // Looked at first: an exchange takes the line from the device model each time.
        if !lock.is_locked()
            && let Some(guard) = lock.try_lock()
        {
            return Ok(guard);
        }
        if !again(tries) {
            let what = "a device model did not end its access, so that the software IOMMU cannot \
                        forget what it uses";
            return Err(HardwareError { what, status: tries });
        }
        tries += 1;
    }
}

/// The tables that device models walk, and who they are.
pub(super) struct Walks<F: Format, M: TableMemory<F::Word>> {
    view: View<F, M>,
    /// Whether the tables may be walked: between the begin of their domain and its end.
    serves: AtomicBool,
    pub(super) slots: Mutex<Flag, Slots<F, M>>,
}

/// The device models of a domain.
pub(super) struct Slots<F: Format, M: TableMemory<F::Word>> {
    pub(super) phase: Phase,
    list: Vec<Arc<Slot<F, M>>>,
}

/// What became of a software IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has no domain yet.
    Made,
    /// It serves the domain of its table.
    Serves,
    /// That has taken its tables away.
    Ended,
}

impl<F: Format, M: TableMemory<F::Word>> Slots<F, M> {
    /// Enters a device model, which an invalidation reaches from now on, and lets go of those that
    /// are gone.
    pub(super) fn add(&mut self, slot: &Arc<Slot<F, M>>) -> Result<(), HardwareError> {
        self.list.retain(|other| !other.gone.load(Ordering::Relaxed));
        if self.list.iter().any(|other| Arc::ptr_eq(other, slot)) {
            return Ok(());
        }
        let no_memory = HardwareError { what: "no memory to keep track of a device", status: 0 };
        self.list.try_reserve(1).map_err(|_| no_memory)?;
        self.list.push(Arc::clone(slot));
        Ok(())
    }

    /// Forgets a device model, which does not walk these tables any more.
    pub(super) fn remove(&mut self, slot: &Arc<Slot<F, M>>) {
        self.list.retain(|other| !Arc::ptr_eq(other, slot));
    }

    /// Those that there are.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Slot<F, M>>> {
        self.list.iter()
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
    }
}

impl<F: Format, M: TableMemory<F::Word>> Walks<F, M> {
    pub(super) fn new(view: View<F, M>) -> Self {
        let slots = Slots { phase: Phase::Made, list: Vec::new() };
        Self { view, serves: AtomicBool::new(false), slots: Mutex::new(slots) }
    }

    pub(super) fn view(&self) -> &View<F, M> {
        &self.view
    }

    /// Sets whether the tables may be walked, under the lock of the slots.
    pub(super) fn set_phase(&self, slots: &mut Slots<F, M>, phase: Phase) {
        slots.phase = phase;
        self.serves.store(phase == Phase::Serves, Ordering::Release);
    }

    /// The run that a device's access begins in, in one walk. The access to all of `range` has yet
    /// to be permitted.
    fn run(&self, range: IovaRange, access: FaultAccess) -> Result<MappedRun, FaultReason> {
        if !self.serves.load(Ordering::Acquire) {
            return Err(FaultReason::Blocked);
        }
        let found = match (self.view.tracks_dirty(), access) {
            (false, _) => self.view.run(range.start()),
            // What is kept with `WRITE` is marked. So it ends where the write does.
            (true, FaultAccess::Write) => self.view.written(range),
            (true, _) => self.view.run(range.start()).map(|run| {
                let prot = run.prot.difference(Prot::WRITE);
                MappedRun { prot, ..run }
            }),
        };
        found.map_err(|none| match none {
            NoRun::Absent => FaultReason::Translation,
            NoRun::Corrupt => FaultReason::Tables,
        })
    }
}

/// Where the accesses of a device model go.
pub(super) enum Route<F: Format, M: TableMemory<F::Word>> {
    /// Nowhere.
    Blocked,
    /// To the addresses that they name.
    Pass,
    /// Through tables.
    Tables(Arc<Walks<F, M>>),
}

impl<F: Format, M: TableMemory<F::Word>> Route<F, M> {
    /// Whether it goes through these tables.
    pub(super) fn is_through(&self, walks: &Arc<Walks<F, M>>) -> bool {
        matches!(self, Self::Tables(own) if Arc::ptr_eq(own, walks))
    }
}

impl<F: Format, M: TableMemory<F::Word>> Clone for Route<F, M> {
    fn clone(&self) -> Self {
        match self {
            Self::Blocked => Self::Blocked,
            Self::Pass => Self::Pass,
            Self::Tables(walks) => Self::Tables(Arc::clone(walks)),
        }
    }
}

/// One device model.
pub(super) struct Slot<F: Format, M: TableMemory<F::Word>> {
    /// Held while the device model walks or uses what it found, so that whoever holds it knows that
    /// no access is under way.
    pub(super) state: Mutex<Flag, State<F, M>>,
    /// Whether there is no device model any more.
    pub(super) gone: AtomicBool,
}

/// What only the holder of a slot's lock has.
pub(super) struct State<F: Format, M: TableMemory<F::Word>> {
    pub(super) spans: Spans,
    route: Route<F, M>,
    pub(super) misses: u64,
}

impl<F: Format, M: TableMemory<F::Word>> Slot<F, M> {
    pub(super) fn new(route: Route<F, M>) -> Self {
        let state = State { spans: Spans::default(), route, misses: 0 };
        Self { state: Mutex::new(state), gone: AtomicBool::new(false) }
    }
}

impl<F: Format, M: TableMemory<F::Word>> State<F, M> {
    /// Lets accesses go elsewhere, from the next one on.
    pub(super) fn change(&mut self, route: Route<F, M>) -> Route<F, M> {
        self.spans.clear();
        core::mem::replace(&mut self.route, route)
    }

    /// Where accesses go.
    pub(super) fn route(&self) -> &Route<F, M> {
        &self.route
    }

    /// The span of memory that the access to `range` begins in.
    pub(super) fn translate(
        &mut self,
        range: IovaRange,
        access: FaultAccess,
    ) -> Result<MappedRun, FaultReason> {
        let needs = needs(access);
        if let Some(kept) = self.spans.at(range.start())
            && needs.are_met(kept.prot)
        {
            return Ok(kept);
        }
        // Also where less is permitted than is needed: tables may permit more by now.
        self.miss(range, access, needs)
    }

    #[cold]
    fn miss(
        &mut self,
        range: IovaRange,
        access: FaultAccess,
        needs: Needs,
    ) -> Result<MappedRun, FaultReason> {
        self.misses = self.misses.wrapping_add(1);
        let run = match &self.route {
            Route::Blocked => return Err(FaultReason::Blocked),
            Route::Pass => half_around(range.start()),
            Route::Tables(walks) => walks.run(range, access)?,
        };
        if !needs.are_met(run.prot) {
            return Err(FaultReason::Permission);
        }
        self.spans.insert(run);
        Ok(run)
    }
}

/// What an access needs. Device models are as devices that Arm calls unprivileged.
#[inline(always)]
pub(super) const fn needs(access: FaultAccess) -> Needs {
    match access {
        FaultAccess::Read => Needs::new(Prot::READ, Prot::PRIV),
        FaultAccess::Write => Needs::new(Prot::WRITE, Prot::PRIV),
        FaultAccess::Execute => Needs::new(Prot::READ, Prot::PRIV.union(Prot::NOEXEC)),
    }
}

/// The half of the address space that has `iova`, which leads to itself. All of it would have a
/// length that no span has.
fn half_around(iova: Iova) -> MappedRun {
    const HALF: u64 = 1 << 63;
    let start = iova.get() & HALF;
    let (start, last) = (Iova::new(start), Iova::new(start | (HALF - 1)));
    let range = IovaRange::new(start, last).unwrap_or(IovaRange::point(iova));
    let paddr = PhysAddr::new(range.start().get());
    MappedRun { range, paddr, prot: Prot::READ_WRITE }
}
