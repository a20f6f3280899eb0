//! A user's address space over simulated memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dmaspan::pin::Kind;
use dmaspan::{PhysAddr, Span, UserAddr, UserRange, lg2};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use super::mm::{Fate, FaultError, Mm};
use super::vma::{Backing, MapOptions, Object, Population, Presence, Rights, Vma};
use super::{SimMemory, cpu_table::Leaf};
use crate::walker::Access;

/// How often a fault that answers "again" is tried before that counts as a failure.
pub const FAULT_TRIES: u32 = 16;

/// Contiguous user memory that is contiguous in physical memory too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserSpan {
    /// The user's addresses.
    pub user: UserRange,
    /// Where the first of them is.
    pub paddr: PhysAddr,
}

/// Names a listener of [`SimSpace::on_zap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(u64);

/// A user's address space, as a kernel's `mm`: ranges that are mapped, and the CPU's page tables,
/// which say what of them is populated.
///
/// Owners share it by handles ([`Arc`]); [`share`](Self::share) maps the same memory in another
/// one. It owns no frames. Unmapping does not free them, as pages of a process live on while they
/// are pinned.
///
/// Pinning takes the lock of the tables for reading, so that threads pin at the same time; mapping,
/// unmapping and faults take it for writing.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::pin::Kind;
/// use dmaspan::{PhysAddr, Span, UserAddr};
/// use dmaspan_sim::memory::{Rights, SimMemory, SimSpace};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let memory = Arc::new(SimMemory::new(PhysAddr::new(0), 1 << 20, 12)?);
///     let space = SimSpace::new(memory);
///     // A BAR of 32 GiB, in 32 leaves of 1 GiB.
///     let bar = Span::new(PhysAddr::new(0x20_0000_0000), 32 << 30)?;
///     let user = UserAddr::new(0x7f00_0000_0000);
///     space.map_device(user, bar, Rights::ReadWrite).ok_or("no room")?;
///     let (paddr, leaf_bytes, kind) = space.frame_at(user.wrapping_add(0x5000)).ok_or("a hole")?;
///     assert_eq!((paddr.get(), leaf_bytes, kind), (0x20_0000_5000, 1 << 30, Kind::Mmio));
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct SimSpace {
    id: u64,
    memory: Arc<SimMemory>,
    pub(super) mm: RwLock<Mm>,
    listeners: Mutex<Listeners>,
    faults: AtomicU64,
    /// How many of the next faults answer "again".
    transient: AtomicU32,
}

#[derive(Default)]
struct Listeners {
    next: u64,
    all: Vec<(ListenerId, Listener)>,
}

type Listener = Arc<dyn Fn(UserRange) + Send + Sync>;

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} listeners", self.all.len())
    }
}

impl SimSpace {
    /// An address space without memory.
    pub fn new(memory: Arc<SimMemory>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mm = RwLock::new(Mm::new(memory.granule_lg2()));
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            memory,
            mm,
            listeners: Mutex::default(),
            faults: AtomicU64::new(0),
            transient: AtomicU32::new(0),
        }
    }

    /// The memory behind it.
    pub fn memory(&self) -> &Arc<SimMemory> {
        &self.memory
    }

    /// A number that no other space of this process has or had.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// [`map_with`](Self::map_with) the default options.
    pub fn map(&self, start: UserAddr, spans: &[Span]) -> Option<UserRange> {
        self.map_with(start, spans, MapOptions::default())
    }

    /// Puts spans of memory at `start`, one behind the other, instead of what was there. Returns
    /// what they occupy; `None`, with nothing changed, where they do not fit below the top, are
    /// none or not frames of this memory, or where `start` is no multiple of the granule.
    ///
    /// # Context
    ///
    /// No listener's call on this thread, which would wait for itself where the range is in use.
    pub fn map_with(
        &self,
        start: UserAddr,
        spans: &[Span],
        options: MapOptions,
    ) -> Option<UserRange> {
        let frames = |span: &Span| self.memory.frames_of(*span).is_some();
        if !lg2::is_aligned(start.get(), self.memory.granule_lg2()) || !spans.iter().all(frames) {
            return None;
        }
        let bytes = spans.iter().try_fold(0u64, |sum, span| sum.checked_add(span.len()))?;
        let user = UserRange::from_len(start, bytes).ok()?;
        let object = Arc::new(Object::new(spans));
        self.insert(user, Backing::Memory { object, offset: 0 }, options);
        Some(user)
    }

    /// [`map_device_with`](Self::map_device_with) these rights and the default options.
    pub fn map_device(&self, start: UserAddr, device: Span, rights: Rights) -> Option<UserRange> {
        self.map_device_with(start, device, MapOptions { rights, ..MapOptions::default() })
    }

    /// Puts a range of a device, such as a PCI BAR, at `start` instead of what was there: what
    /// Linux calls a pfnmap. Its leaves are as large as the alignment of both addresses permits.
    /// Nothing of it is pinned or charged. What is written there is kept, and other spaces over the
    /// same memory see it.
    ///
    /// Returns what it occupies; `None`, with nothing changed, where it does not fit below the top,
    /// where an address or the length is no multiple of the granule, or where it touches memory.
    pub fn map_device_with(
        &self,
        start: UserAddr,
        device: Span,
        options: MapOptions,
    ) -> Option<UserRange> {
        let user = UserRange::from_len(start, device.len()).ok()?;
        let values = start.get() | device.paddr().get() | device.len();
        if !lg2::is_aligned(values, self.memory.granule_lg2()) || self.memory.touches(device) {
            return None;
        }
        self.memory.devices.add(device);
        self.insert(user, Backing::Device { paddr: device.paddr() }, options);
        Some(user)
    }

    fn insert(&self, user: UserRange, backing: Backing, options: MapOptions) {
        let MapOptions { rights, population, max_leaf_lg2 } = options;
        let vma = Vma { user, backing, rights, presence: Presence::Backed, max_leaf_lg2 };
        let mut mm = self.empty(user);
        if population == Population::Eager {
            mm.populate(&self.memory, &vma);
        }
        mm.vmas.insert(vma);
    }

    /// The tables, with nothing mapped in `range`. Each turn unmaps what somebody else has mapped
    /// there meanwhile.
    fn empty(&self, range: UserRange) -> RwLockWriteGuard<'_, Mm> {
        loop {
            let mm = self.mm.write();
            if mm.vmas.overlapping(range).next().is_none() {
                return mm;
            }
            drop(mm);
            self.unmap(range);
        }
    }

    /// Maps what `range` maps at `at` of another space over the same memory, with the same rights,
    /// instead of what was there: its pages are shared, as those of a file are. Leaves there are
    /// entered by faults. Returns what it occupies; `None`, with nothing changed, where it does not
    /// fit below the top, an address is no multiple of the granule, or the memory is another.
    pub fn share(&self, range: UserRange, other: &Self, at: UserAddr) -> Option<UserRange> {
        let user = UserRange::from_len(at, range.checked_len()?).ok()?;
        let values = range.start().get() | at.get() | range.checked_len()?;
        if !lg2::is_aligned(values, self.memory.granule_lg2())
            || !Arc::ptr_eq(&self.memory, &other.memory)
        {
            return None;
        }
        let cut = |vma: &Vma| {
            let vma = vma.cut(range)?;
            let start = at.wrapping_add(vma.user.start().get() - range.start().get());
            let last = at.wrapping_add(vma.user.last().get() - range.start().get());
            Some(Vma { user: UserRange::new(start, last)?, ..vma })
        };
        let shared: Vec<Vma> = self.mm.read().vmas.overlapping(range).filter_map(cut).collect();
        let mut mm = other.empty(user);
        shared.into_iter().for_each(|vma| mm.vmas.insert(vma));
        Some(user)
    }

    /// Takes a range out, in whole granules. Listeners are told before it goes.
    ///
    /// A leaf that reaches out of the range is dropped whole. What stays mapped of it is entered
    /// again by faults, in smaller leaves.
    ///
    /// # Context
    ///
    /// No lock that a listener takes.
    pub fn unmap(&self, range: UserRange) {
        self.take_away(range, Fate::Unmapped);
    }

    /// Revokes what a range maps, as a driver does whose device goes away or is reset: it leaves
    /// the CPU's tables after the listeners were told, and faults find nothing until something is
    /// mapped there again. In whole granules.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap).
    pub fn zap(&self, range: UserRange) {
        self.take_away(range, Fate::Revoked);
    }

    fn take_away(&self, range: UserRange, fate: Fate) {
        let mut mm = self.mm.write();
        let range = mm.outward(range);
        if !mm.begin_to_go(range) {
            return;
        }
        // From here on no pin finds the range. A pin that found it before has told its sink, so a
        // listener knows of all there is to revoke.
        drop(mm);
        let listeners: Vec<Listener> =
            self.listeners.lock().all.iter().map(|(_, listener)| Arc::clone(listener)).collect();
        listeners.iter().for_each(|listener| listener(range));
        self.mm.write().gone(range, fate);
    }

    /// Has `listener` called with each range before that leaves the CPU's tables: an MMU notifier.
    /// No lock is held then, so that it may wait for pins under way. What it may not do is take
    /// away ranges or map over them.
    pub fn on_zap(&self, listener: Box<dyn Fn(UserRange) + Send + Sync>) -> ListenerId {
        let mut listeners = self.listeners.lock();
        let id = ListenerId(listeners.next);
        listeners.next += 1;
        listeners.all.push((id, Arc::from(listener)));
        id
    }

    /// Undoes [`on_zap`](Self::on_zap). A call under way goes on.
    pub fn forget_listener(&self, id: ListenerId) {
        self.listeners.lock().all.retain(|(known, _)| *known != id);
    }

    /// Returns what is mapped in a range, in order and cut to it, whether populated or not.
    ///
    /// # Errors
    ///
    /// The first address without memory, where the range has a hole.
    pub fn resolve(&self, range: UserRange) -> Result<Vec<UserSpan>, UserAddr> {
        let mm = self.mm.read();
        mm.check(range, Access::Read).map_err(|error| error.at())?;
        let mut found: Vec<UserSpan> = Vec::new();
        for vma in mm.vmas.overlapping(range).filter_map(|vma| vma.cut(range)) {
            let mut next = Some(vma.user.start());
            while let Some(at) = next.filter(|at| vma.user.contains(*at)) {
                let (user, paddr) = vma.run(at);
                found.push(UserSpan { user, paddr });
                next = user.last().checked_add(1);
            }
        }
        Ok(found)
    }

    /// Returns how many bytes of `range` are memory, populated or not. O(mappings).
    pub fn memory_bytes(&self, range: UserRange) -> u64 {
        let mm = self.mm.read();
        let memory = mm.vmas.overlapping(range).filter(|vma| vma.kind() == Kind::Memory);
        let bytes = memory.filter_map(|vma| vma.user.intersection(range)?.checked_len());
        bytes.fold(0, u64::saturating_add)
    }

    /// Returns what the CPU's tables say of an address: where it is, how many bytes its leaf maps
    /// and of which kind that is. `None` where no leaf maps it; a [`fault`](Self::fault) may enter
    /// one.
    ///
    /// One walk from the root, as Linux's `follow_pfnmap_start` (mm/memory.c).
    pub fn frame_at(&self, at: UserAddr) -> Option<(PhysAddr, u64, Kind)> {
        let (paddr, leaf) = self.mm.read().find(at)?;
        Some((paddr, lg2::size(u32::from(leaf.size_lg2)), leaf.kind))
    }

    /// Enters the largest leaf that maps `at`, as a fault of the CPU would. Returns how many bytes
    /// it maps. Tried once: [`FaultError::Again`] is the caller's to repeat.
    ///
    /// # Errors
    ///
    /// [`FaultError`] where the access is not permitted. Nothing was changed.
    pub fn fault(&self, at: UserAddr, access: Access) -> Result<u64, FaultError> {
        let leaf = self.fault_once(&mut self.mm.write(), at, access)?;
        Ok(lg2::size(u32::from(leaf.size_lg2)))
    }

    /// Returns how many faults there were, those included that failed or must be tried again.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Has the next `count` faults answer [`FaultError::Again`].
    pub fn inject_transient_faults(&self, count: u32) {
        self.transient.store(count, Ordering::Relaxed);
    }

    fn fault_once(&self, mm: &mut Mm, at: UserAddr, access: Access) -> Result<Leaf, FaultError> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let fewer = |count: u32| count.checked_sub(1);
        let transient = self.transient.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        match transient {
            Ok(_) => Err(FaultError::Again { at }),
            Err(_) => mm.fault(&self.memory, at, access),
        }
    }

    /// Enters a leaf for `at`, trying a bounded number of times.
    pub(super) fn fault_in(
        &self,
        mm: &mut Mm,
        at: UserAddr,
        access: Access,
    ) -> Result<Leaf, FaultError> {
        let mut result = Err(FaultError::Again { at });
        for _ in 0..FAULT_TRIES {
            result = self.fault_once(mm, at, access);
            if !matches!(result, Err(FaultError::Again { .. })) {
                break;
            }
        }
        result
    }

    /// Reads as the user does.
    ///
    /// # Errors
    ///
    /// The first address that cannot be read; where it is a hole, nothing was read.
    pub fn read(&self, start: UserAddr, buf: &mut [u8]) -> Result<(), UserAddr> {
        self.read_bytes(start, buf).map_err(|error| error.at())
    }

    /// Writes as the user does.
    ///
    /// # Errors
    ///
    /// The first address that cannot be written; where it is a hole or may only be read, nothing
    /// was written.
    pub fn write(&self, start: UserAddr, buf: &[u8]) -> Result<(), UserAddr> {
        self.write_bytes(start, buf).map_err(|error| error.at())
    }

    pub(super) fn read_bytes(&self, start: UserAddr, buf: &mut [u8]) -> Result<(), FaultError> {
        let (memory, mut rest) = (&self.memory, buf);
        self.each_part(start, rest.len(), Access::Read, |paddr, kind, len| {
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(len);
            rest = behind;
            match kind {
                Kind::Memory => memory.cpu_read(paddr, here).is_ok(),
                Kind::Mmio => memory.devices.read(paddr, here).is_ok(),
            }
        })
    }

    pub(super) fn write_bytes(&self, start: UserAddr, buf: &[u8]) -> Result<(), FaultError> {
        let (memory, mut rest) = (&self.memory, buf);
        self.each_part(start, rest.len(), Access::Write, |paddr, kind, len| {
            let (here, behind) = rest.split_at(len);
            rest = behind;
            match kind {
                Kind::Memory => memory.cpu_write(paddr, here).is_ok(),
                Kind::Mmio => memory.devices.write(paddr, here).is_ok(),
            }
        })
    }

    /// Calls `f` with each part of an access that one leaf maps, in order, until it answers
    /// `false`: nothing answers there.
    fn each_part(
        &self,
        start: UserAddr,
        len: usize,
        access: Access,
        mut f: impl FnMut(PhysAddr, Kind, usize) -> bool,
    ) -> Result<(), FaultError> {
        let hole = FaultError::Hole { at: start };
        let mut left = u64::try_from(len).map_err(|_| hole)?;
        if left == 0 {
            return Ok(());
        }
        let range = UserRange::from_len(start, left).map_err(|_| hole)?;
        // For writing, so that nothing changes between the check and the last byte.
        let mut mm = self.mm.write();
        mm.check(range, access)?;
        let mut at = start;
        while left > 0 {
            let leaf = match mm.find(at) {
                Some((_, leaf)) => leaf,
                None => self.fault_in(&mut mm, at, access)?,
            };
            let behind = lg2::mask(u32::from(leaf.size_lg2)) & !at.get();
            let here = left.min(behind.saturating_add(1));
            if !f(leaf.at(at.get()), leaf.kind, usize::try_from(here).unwrap_or(usize::MAX)) {
                return Err(FaultError::Hole { at });
            }
            left -= here;
            at = at.wrapping_add(here);
        }
        Ok(())
    }
}
