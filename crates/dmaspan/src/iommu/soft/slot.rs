//! A [`Slot`] is what a software IOMMU has of one device model: where its accesses go, and its
//! IOTLB.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use lock_api::{Mutex, MutexGuard};

use super::spans::{Needs, Spans};
use crate::addr::{Iova, PhysAddr};
use crate::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::io_pgtable::view::{NoRun, View};
use crate::io_pgtable::{Format, MappedRun, TableMemory};
use crate::iommu::fault::{FaultAccess, FaultReason};
use crate::iommu::gather::Gather;
use crate::iommu::ops::{HardwareError, Scope};
use crate::platform::Flag;
use crate::prot::Prot;
use crate::range::IovaRange;

/// Asked before a software IOMMU looks again whether an access of a device model has ended, with
/// the number of looks at this one access before: it passes some time, and says whether to go on.
pub type TryAgain = fn(tries: u64) -> bool;

/// Spins, and gives up on an access after some seconds.
pub(super) fn spin(tries: u64) -> bool {
    crate::atomic::spin_loop();
    tries < 1 << 26
}

/// Which of two wishes came first.
#[derive(Clone, Copy)]
pub(super) struct Ticket(u64);

/// Later than every [`Ticket`].
const NO_WISH: u64 = u64::MAX;

impl Ticket {
    /// The next one. Those who may wish something of the same device models draw it under a lock.
    pub(super) fn draw() -> Self {
        static NEXT: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Device models in the order in which they came, by numbers that they keep: so that somebody comes
/// by all of them who does not hold the lock of the list all the while.
pub(super) struct Models<F: Format, M: TableMemory<F::Word>> {
    list: Vec<(u64, Arc<Slot<F, M>>)>,
    next: u64,
}

impl<F: Format, M: TableMemory<F::Word>> Models<F, M> {
    pub(super) const fn new() -> Self {
        Self { list: Vec::new(), next: 0 }
    }

    /// Enters a device model, and lets go of those that are gone.
    pub(super) fn add(&mut self, slot: &Arc<Slot<F, M>>) -> Result<(), HardwareError> {
        self.list.retain(|(_, other)| !other.gone.load(Ordering::Relaxed));
        if self.iter().any(|other| Arc::ptr_eq(other, slot)) {
            return Ok(());
        }
        let no_memory = HardwareError { what: "no memory to keep track of a device", status: 0 };
        self.list.try_reserve(1).map_err(|_| no_memory)?;
        self.list.push((self.next, Arc::clone(slot)));
        self.next += 1;
        Ok(())
    }

    pub(super) fn remove(&mut self, slot: &Arc<Slot<F, M>>) {
        self.list.retain(|(_, other)| !Arc::ptr_eq(other, slot));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Slot<F, M>>> {
        self.list.iter().map(|(_, slot)| slot)
    }

    /// What the next one that comes will have for its number.
    pub(super) fn end(&self) -> u64 {
        self.next
    }

    /// The first one with a number of `number` or more.
    fn from(&self, number: u64) -> Option<(u64, Arc<Slot<F, M>>)> {
        let at = self.list.partition_point(|&(other, _)| other < number);
        self.list.get(at).cloned()
    }
}

/// Calls `with` with each device model of a list that came before the number `end`, without the
/// lock of the list: what takes long is in nobody's way.
pub(super) fn each<F: Format, M: TableMemory<F::Word>, L>(
    lock: &Mutex<Flag, L>,
    models: impl Fn(&L) -> &Models<F, M>,
    end: u64,
    mut with: impl FnMut(&Slot<F, M>) -> Result<(), HardwareError>,
) -> Result<(), HardwareError> {
    let mut number = 0;
    loop {
        let found = models(&lock.lock()).from(number);
        let Some((at, slot)) = found.filter(|&(at, _)| at < end) else { return Ok(()) };
        with(&slot)?;
        number = at + 1;
    }
}

/// The tables that device models walk, and who they are.
pub(super) struct Walks<F: Format, M: TableMemory<F::Word>> {
    view: View<F, M>,
    /// A [`Phase`], set under the lock of the device models.
    phase: AtomicU32,
    /// Those that an invalidation reaches. The lock is held for a few steps at each, and by nobody
    /// who waits.
    pub(super) models: Mutex<Flag, Models<F, M>>,
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

impl<F: Format, M: TableMemory<F::Word>> Walks<F, M> {
    pub(super) fn new(view: View<F, M>) -> Self {
        let phase = AtomicU32::new(Phase::Made as u32);
        Self { view, phase, models: Mutex::new(Models::new()) }
    }

    pub(super) fn view(&self) -> &View<F, M> {
        &self.view
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Release);
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Made,
            1 => Phase::Serves,
            _ => Phase::Ended,
        }
    }

    /// The run that a device's access begins in, in one walk. The access to all of `range` has yet
    /// to be permitted.
    fn run(&self, range: IovaRange, access: FaultAccess) -> Result<MappedRun, FaultReason> {
        if self.phase() != Phase::Serves {
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
    /// Whether it goes through tables that their domain has taken away.
    fn has_ended(&self) -> bool {
        matches!(self, Self::Tables(walks) if walks.phase() == Phase::Ended)
    }

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
///
/// An access holds the lock of the state, as long as the device model takes for it, so everybody
/// else only tries that. Who finds it taken leaves a wish. Before its next access the device model
/// fulfils the wishes that there are, and if it begins none, whoever waits does. So a wait is for
/// one access, which began before, however many come behind it.
pub(super) struct Slot<F: Format, M: TableMemory<F::Word>> {
    /// Held while the device model walks or uses what it found, so that whoever holds it knows that
    /// no access is under way.
    pub(super) state: Mutex<Flag, State<F, M>>,
    /// The ticket of the oldest wish that is left, or [`NO_WISH`].
    since: AtomicU64,
    /// Held for a few steps alone.
    wishes: Mutex<Flag, Wishes<F, M>>,
    /// Whether there is no device model any more.
    pub(super) gone: AtomicBool,
}

/// What a device model does before its next access.
struct Wishes<F: Format, M: TableMemory<F::Word>> {
    /// It forgets these ranges, or everything.
    forget: [IovaRange; Gather::<()>::MAX_RANGES],
    /// How many ranges there are. More than there is room for are everything.
    count: usize,
    /// It goes elsewhere.
    route: Option<Route<F, M>>,
    /// By which change of its stream it was last told to.
    change: u64,
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
        let forget = [IovaRange::ALL; Gather::<()>::MAX_RANGES];
        let wishes = Wishes { forget, count: 0, route: None, change: 0 };
        Self {
            state: Mutex::new(state),
            since: AtomicU64::new(NO_WISH),
            wishes: Mutex::new(wishes),
            gone: AtomicBool::new(false),
        }
    }

    /// The state, for an access or what is as short: with all wishes fulfilled.
    #[inline(always)]
    pub(super) fn begin(&self) -> MutexGuard<'_, Flag, State<F, M>> {
        let mut state = self.state.lock();
        if self.has_wishes() {
            self.fulfil(&mut state);
        }
        state
    }

    #[cold]
    fn fulfil(&self, state: &mut MutexGuard<'_, Flag, State<F, M>>) {
        while self.has_wishes() {
            let released = self.heed(state);
            // May be the last to have the memory of the tables: not under the lock.
            MutexGuard::unlocked(state, || drop(released));
        }
    }

    #[inline(always)]
    fn has_wishes(&self) -> bool {
        self.since.load(Ordering::Acquire) != NO_WISH
    }

    /// Enters a wish, under the lock of them.
    fn enter(&self, ticket: Ticket) {
        let since = self.since.load(Ordering::Relaxed);
        self.since.store(since.min(ticket.0), Ordering::Release);
    }

    /// Fulfils all wishes. Returns the way that accesses went before.
    fn heed(&self, state: &mut State<F, M>) -> Option<Route<F, M>> {
        let mut wishes = self.wishes.lock();
        let count = mem::take(&mut wishes.count);
        state.forget(wishes.forget.get(..count).map_or(Scope::All, Scope::Ranges));
        let blocked = || state.route.has_ended().then_some(Route::Blocked);
        let route = wishes.route.take().or_else(blocked);
        self.since.store(NO_WISH, Ordering::Release);
        route.map(|route| state.change(route))
    }

    /// Has the device model forget what `scope` names before its next access.
    pub(super) fn ask_to_forget(&self, scope: Scope<'_>, ticket: Ticket) {
        let mut wishes = self.wishes.lock();
        let count = wishes.count;
        wishes.count = usize::MAX;
        if let Scope::Ranges(ranges) = scope
            && let Some(places) = wishes.forget.get_mut(count..count.saturating_add(ranges.len()))
        {
            places.copy_from_slice(ranges);
            wishes.count = count + ranges.len();
        }
        self.enter(ticket);
    }

    /// Has it go elsewhere before its next access, unless a later change of its stream has. Then
    /// that is waited for: an access may go the former way until it is fulfilled.
    pub(super) fn ask_to_go(&self, route: Route<F, M>, change: u64, ticket: Ticket) {
        let mut wishes = self.wishes.lock();
        self.enter(ticket);
        let superseded = if change < wishes.change {
            Some(route)
        } else {
            wishes.change = change;
            wishes.route.replace(route)
        };
        drop(wishes);
        drop(superseded);
    }

    /// Has it forget what `scope` names: now, or before its next access, which is to be waited for
    /// with the ticket.
    pub(super) fn forget(&self, scope: Scope<'_>, ticket: &mut Option<Ticket>) {
        // Looked at first: an exchange takes the line from the device model each time.
        if !self.state.is_locked()
            && let Some(mut state) = self.state.try_lock()
            && !self.has_wishes()
        {
            return state.forget(scope);
        }
        self.ask_to_forget(scope, *ticket.get_or_insert_with(Ticket::draw));
    }

    /// Waits until all is fulfilled that was wished with tickets up to this: for the access that is
    /// under way, and no other.
    pub(super) fn wait(&self, ticket: Ticket, again: TryAgain) -> Result<(), HardwareError> {
        let mut tries = 0;
        while self.since.load(Ordering::Acquire) <= ticket.0 {
            if !self.state.is_locked()
                && let Some(mut state) = self.state.try_lock()
            {
                let released = self.heed(&mut state);
                drop(state);
                drop(released);
                break;
            }
            if !again(tries) {
                let what = "a device model did not end its access, so that the software IOMMU \
                            cannot forget what it uses";
                return Err(HardwareError { what, status: tries });
            }
            tries += 1;
        }
        Ok(())
    }
}

impl<F: Format, M: TableMemory<F::Word>> State<F, M> {
    /// Lets accesses go elsewhere, from the next one on.
    pub(super) fn change(&mut self, route: Route<F, M>) -> Route<F, M> {
        self.spans.clear();
        mem::replace(&mut self.route, route)
    }

    fn forget(&mut self, scope: Scope<'_>) {
        match scope {
            Scope::All => self.spans.clear(),
            Scope::Ranges(ranges) => ranges.iter().for_each(|&range| self.spans.forget(range)),
        }
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::io_pgtable::{Arena, ArmLpaeS1};

    #[test]
    fn a_change_that_a_later_one_overtook_waits_for_the_access_that_began_before_both() {
        let slot = Slot::<ArmLpaeS1<12>, Arena>::new(Route::Pass);
        let [first, second] = [Ticket::draw(), Ticket::draw()];
        let access = slot.state.lock();
        slot.ask_to_go(Route::Blocked, 2, second);
        slot.ask_to_go(Route::Pass, 1, first);
        assert!(slot.wait(first, |_| false).is_err());
        drop(access);
        slot.wait(first, |_| false).unwrap();
        assert!(matches!(slot.begin().route, Route::Blocked));
    }
}
