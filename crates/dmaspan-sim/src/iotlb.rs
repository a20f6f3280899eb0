//! An IOTLB that keeps every translation that hardware may keep.
//!
//! Real IOTLBs are small and forget soon, so a driver that forgets an invalidation mostly gets away
//! with it. This one never forgets anything by itself, and of what it is told only what the
//! commands of every architecture make hardware forget: a bug that some hardware shows, it shows.
//!
//! - Every leaf that a walk found stays until an invalidation names an address of it and its size.
//!   A leaf that refused an access stays too, since its entry is valid.
//! - A contiguous group answers as one leaf, and an invalidation drops those of its entries that
//!   have a named address: a TLB may hold it whole or entry by entry.
//! - Every table that a walk found stays as a link, also where the walk ended in a fault. A later
//!   miss goes on from the deepest link without reading the levels above, into a table that may
//!   have been detached or freed. Only an invalidation with [`Tables::Detached`] drops links.
//! - An absent entry is not kept, as Arm requires (DDI 0487, D8.16, "Translation Lookaside
//!   Buffers"), unless [`AbsentEntries::Cached`] asks for what VT-d may do in caching mode. Then
//!   [`IommuOps::sync_map`] must drop it.
//!
//! Where blocks of several sizes have an address, which breaks the rules of most architectures, the
//! smallest is used.
//!
//! # Why hardware forgets what this one does
//!
//! - Leaves, by address and size. SMMUv3: with TTL a command need only affect leaves of that
//!   level, and without a range it is for the leaf at its address, so that leaves smaller than the
//!   driver's step stay (IHI 0070, 4.4.1). SMMUv2: an operation is for the leaf at its address
//!   (IHI 0062, "TLB maintenance operations"). VT-d: the pages of the address mask AM (6.5.2.3).
//!   AMD: the pages that the address and S say (48882, 2.4.3). RISC-V: the leaf of the address
//!   ("IOTINVAL.VMA operands and operations").
//! - Entries of a contiguous group. Arm: the contiguous bit permits one TLB entry for all and
//!   demands none, so that each entry is a leaf (DDI 0487, D8.7).
//! - Links, by address, with [`Tables::Detached`]. SMMUv3: Leaf = 0 takes cached tables on the way
//!   to the address, Leaf = 1 need not (4.4.1). SMMUv2: operations that do not end in L. VT-d: IH
//!   = 0 takes the paging-structure caches, IH = 1 keeps them (6.5.2.3). AMD: PDE = 1 (2.4.3).
//! - Absent entries, by address. VT-d: in caching mode they are tagged and invalidated as others
//!   (6.1, 6.5.2.3), at a mapping as at its end, and have no size that an invalidation could name:
//!   those of the lowest tables as leaves, those above them as links, which IH = 1 keeps.
//! - Everything, with [`Scope::All`]. A command for an address space takes all that carries its
//!   tag, tables as well: CMD_TLBI_NH_ASID and CMD_TLBI_S12_VMALL (4.4), TLBIASID and TLBIVMID,
//!   VT-d's domain-selective granularity, which has no IH (6.5.2.3), AMD's whole address range
//!   with PDE, IOTINVAL without an address.
//! - Everything, with [`IommuOps::detach`]. The device's entry leads nowhere when its cached copy
//!   has been dropped (CMD_CFGI_STE, 4.3.1; INVALIDATE_DEVTAB_ENTRY, 2.4.2; VT-d's context cache,
//!   6.5.2.1; IODIR.INVAL_DDT), and then an address space is forgotten as above.
//!
//! Nothing else is dropped. Where a walk marks a leaf dirty, its new entry takes the place of the
//! old one: the same hardware that stores the mark reads it.
//!
//! Lock order: the accesses in flight before the state. An invalidation waits for every access that
//! runs inside [`Iotlb::with_translation`], as the contract of [`IommuOps`] demands.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use dmaspan::iommu::{HardwareError, Invalidation, IommuOps, Scope, Tables};
use dmaspan::{Address, Iova, IovaRange, PhysAddr, Prot, lg2};
use parking_lot::{Mutex, RwLock};

use crate::walker::{
    Access, Fault, FaultKind, NotATable, TableLink, TableWords, Translated, WalkPath, Walker,
    block_around,
};

pub(crate) mod blocks;
pub(crate) mod leaves;
#[cfg(test)]
mod tests;

use blocks::BlockMap;
use leaves::{CachedLeaf, LeafCache};

/// Says whether absent entries are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AbsentEntries {
    /// They are not: what was mapped is seen at once.
    #[default]
    NotCached,
    /// They are, as in VT-d's caching mode: what was mapped is seen after `sync_map`.
    Cached,
}

/// A bug of the hardware, for tests of those who should notice it: invalidations that answer `Ok`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Planted {
    /// No bug.
    #[default]
    None,
    /// Leaves are not forgotten.
    IgnoreLeaves,
    /// Where leaves of several sizes are named, those of the smallest are not forgotten: what a
    /// gather does that loses one of them.
    IgnoreSmallest,
    /// The same with the largest.
    IgnoreLargest,
    /// Links to tables are not forgotten.
    IgnoreTables,
    /// Nothing is forgotten.
    IgnoreAll,
}

/// Says what an [`Iotlb`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IotlbConfig {
    /// Whether absent entries are cached.
    pub absent: AbsentEntries,
    /// What [`IommuOps::max_ranges`] answers.
    pub max_ranges: usize,
}

impl Default for IotlbConfig {
    fn default() -> Self {
        Self { absent: AbsentEntries::NotCached, max_ranges: 64 }
    }
}

/// Says what an [`Iotlb`] did so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct IotlbCounters {
    /// Translations answered from a cached leaf or a cached absent entry.
    pub hits: u64,
    /// Translations that were not.
    pub misses: u64,
    /// Walks, each of which read at least one entry or failed to.
    pub walks: u64,
    /// Walks that began at a cached link.
    pub walks_from_link: u64,
    /// Translations that faulted.
    pub faults: u64,
    /// Invalidations asked for with ranges.
    pub invalidations_by_range: u64,
    /// Invalidations asked for with everything.
    pub invalidations_of_all: u64,
    /// Invalidations of either kind that were for detached tables too.
    pub invalidations_of_tables: u64,
    /// Invalidations that failed, as asked for.
    pub invalidations_failed: u64,
    /// Ranges named in invalidations.
    pub ranges_invalidated: u64,
    /// Leaves dropped.
    pub leaves_dropped: u64,
    /// Links dropped.
    pub links_dropped: u64,
    /// `sync_map` calls.
    pub sync_maps: u64,
}

/// An answer of the IOTLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// What the address translates to.
    pub paddr: PhysAddr,
    /// Everything that the entry covers; it is contiguous in physical memory.
    pub block: IovaRange,
    /// What the entry permits.
    pub prot: Prot,
}

/// A cached leaf that the tables contradict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleLeaf {
    /// The first address where they do.
    pub iova: Iova,
    /// What the cached entry covers.
    pub block: IovaRange,
    /// What the cached entry says of `iova`.
    pub cached: PhysAddr,
    /// What the tables say; a different permission may be all that differs.
    pub tables: Result<PhysAddr, Fault>,
}

/// An IOTLB over a walker and the tables that it reads. Clones share everything.
///
/// It is the IOMMU of one domain, for the domain as [`IommuOps`] and for devices as
/// [`translate`](Self::translate).
pub struct Iotlb<W, T> {
    shared: Arc<Shared<W, T>>,
}

struct Shared<W, T> {
    walker: W,
    tables: T,
    config: IotlbConfig,
    /// Held for reading while an access uses its translation, and for writing by invalidations.
    in_flight: RwLock<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    leaves: LeafCache,
    links: BlockMap<TableLink>,
    /// The level of each absent entry.
    absent: BlockMap<u8>,
    counters: IotlbCounters,
    invalidations_to_fail: u64,
    sync_maps_to_fail: u64,
    planted: Planted,
    /// Whether the tables are not this IOMMU's any more: every access faults.
    detached: bool,
}

/// log2 of what an absent entry of the lowest table is for: those of VT-d and AMD alone are cached.
const PAGE_LG2: u32 = 12;

/// How often an entry may change under a walk that updates it. More is no race but a bug.
const UPDATE_TRIES: u32 = 1000;

impl<W: Walker, T: TableWords> Iotlb<W, T> {
    /// An empty IOTLB that behaves as Arm's may.
    pub fn new(walker: W, tables: T) -> Self {
        Self::with_config(walker, tables, IotlbConfig::default())
    }

    /// An empty IOTLB.
    pub fn with_config(walker: W, tables: T, config: IotlbConfig) -> Self {
        let (in_flight, state) = (RwLock::new(()), Mutex::default());
        Self { shared: Arc::new(Shared { walker, tables, config, in_flight, state }) }
    }

    /// The walker.
    pub fn walker(&self) -> &W {
        &self.shared.walker
    }

    /// Returns what the walker reads.
    pub fn tables(&self) -> &T {
        &self.shared.tables
    }

    /// Translates, from the caches where they have the address.
    ///
    /// The answer may be stale as soon as this returns; an access that must not outlive an
    /// invalidation goes through [`with_translation`](Self::with_translation).
    ///
    /// # Errors
    ///
    /// [`Fault`].
    pub fn translate(&self, iova: Iova, access: Access) -> Result<Hit, Fault> {
        let mut state = self.shared.state.lock();
        let answer = if state.detached {
            Err(Fault { kind: FaultKind::Translation, level: 0, iova, access })
        } else {
            self.translate_locked(&mut state, iova, access)
        };
        if answer.is_err() {
            state.counters.faults += 1;
        }
        answer
    }

    /// Translates and calls `f` with the answer. No invalidation returns while `f` runs.
    ///
    /// # Context
    ///
    /// `f` must neither translate nor invalidate: it may wait for itself.
    ///
    /// # Errors
    ///
    /// [`Fault`]; then `f` is not called.
    pub fn with_translation<R>(
        &self,
        iova: Iova,
        access: Access,
        f: impl FnOnce(Hit) -> R,
    ) -> Result<R, Fault> {
        let _accessing = self.shared.in_flight.read();
        self.translate(iova, access).map(f)
    }

    /// The hooks of a domain whose devices reach memory by addresses `A`, such as those of a
    /// process. The IOTLB itself is the hooks of one whose devices reach it by physical ones.
    pub fn reaching<A: Address>(&self) -> Reaching<A, W, T> {
        Reaching { iotlb: self.clone(), addresses: PhantomData }
    }

    /// Returns what was done so far.
    pub fn counters(&self) -> IotlbCounters {
        self.shared.state.lock().counters
    }

    /// Returns how many leaves are cached.
    pub fn cached_leaves(&self) -> usize {
        self.shared.state.lock().leaves.len()
    }

    /// Returns how many links to tables are cached.
    pub fn cached_links(&self) -> usize {
        self.shared.state.lock().links.len()
    }

    /// Makes the next `count` invalidations fail and forget nothing.
    pub fn fail_next_invalidations(&self, count: u64) {
        self.shared.state.lock().invalidations_to_fail = count;
    }

    /// Makes the next `count` calls of `sync_map` fail and do nothing.
    pub fn fail_next_sync_maps(&self, count: u64) {
        self.shared.state.lock().sync_maps_to_fail = count;
    }

    /// Plants a bug: from now on invalidations answer `Ok` and do less than they say.
    pub fn drop_invalidations(&self, planted: Planted) {
        self.shared.state.lock().planted = planted;
    }

    /// The cached leaves in `range` that the tables contradict: absent now, elsewhere, or
    /// permitting less. In the order of their addresses.
    ///
    /// Between an unmap and its sync there may be some; after it there may be none.
    pub fn stale_leaves(&self, range: IovaRange) -> Vec<StaleLeaf> {
        let state = self.shared.state.lock();
        let mut stale: Vec<StaleLeaf> = state
            .leaves
            .leaves_in(range)
            .filter_map(|(block, leaf)| self.contradiction(block, &leaf))
            .collect();
        stale.sort_unstable_by_key(|leaf| (leaf.iova, leaf.block.start()));
        stale
    }

    /// The cached links to tables for addresses of `range` that no walk from the root finds there
    /// any more. In the order of their addresses.
    pub fn stale_links(&self, range: IovaRange) -> Vec<TableLink> {
        let state = self.shared.state.lock();
        let is_stale = |link: &TableLink| {
            let mut path = WalkPath::new();
            // A fault behind the link does not matter; the path has what was read before it.
            let _ = self.fresh_walk(link.block.start(), &mut path);
            !path.iter().any(|step| step.link == *link)
        };
        let links = state.links.blocks_in(range).map(|(_, link)| *link);
        let mut stale: Vec<TableLink> = links.filter(is_stale).collect();
        stale.sort_unstable_by_key(|link| (link.block.start(), link.level));
        stale
    }

    fn fresh_walk(&self, iova: Iova, path: &mut WalkPath) -> Result<Translated, Fault> {
        let root = self.shared.walker.root(iova, Access::Read)?;
        self.shared.walker.walk_from(&self.shared.tables, root, iova, Access::Read, path)
    }

    fn contradiction(&self, block: IovaRange, cached: &CachedLeaf) -> Option<StaleLeaf> {
        let mut next = Some(block.start());
        while let Some(iova) = next.filter(|iova| block.contains(*iova)) {
            let offset = iova.get() - block.start().get();
            let expected = PhysAddr::new(cached.paddr).wrapping_add(offset);
            let walked = self.fresh_walk(iova, &mut WalkPath::new());
            let agreed = walked.ok().filter(|leaf| {
                leaf.paddr == expected && leaf.prot.contains(cached.prot - Prot::NOEXEC)
            });
            let Some(leaf) = agreed else {
                let tables = walked.map(|leaf| leaf.paddr);
                return Some(StaleLeaf { iova, block, cached: expected, tables });
            };
            next = leaf.leaf.last().checked_add(1);
        }
        None
    }

    fn translate_locked(
        &self,
        state: &mut State,
        iova: Iova,
        access: Access,
    ) -> Result<Hit, Fault> {
        if let Some((lg2, leaf)) = state.leaves.get(iova) {
            // A clean entry cannot answer the first write: hardware goes to the tables to mark it.
            let marks_dirty = leaf.clean && access == Access::Write;
            if !marks_dirty || !self.shared.walker.permits(leaf.prot, access) {
                state.counters.hits += 1;
                return self.answer(&leaf, lg2, iova, access);
            }
        } else if let Some((_, &level)) = state.absent.get(iova) {
            state.counters.hits += 1;
            return Err(Fault { kind: FaultKind::Translation, level, iova, access });
        }
        state.counters.misses += 1;
        let translation = self.walk_and_keep(state, iova, access)?;
        let written =
            access == Access::Write && self.shared.walker.permits(translation.prot, access);
        let leaf = CachedLeaf {
            paddr: lg2::align_down(translation.paddr.get(), translation.group_lg2),
            prot: translation.prot,
            level: translation.level,
            clean: translation.clean && !written,
            entry_lg2: translation.leaf_lg2,
        };
        state.leaves.insert(iova, translation.group_lg2, leaf);
        self.answer(&leaf, translation.group_lg2, iova, access)
    }

    fn answer(
        &self,
        leaf: &CachedLeaf,
        lg2: u32,
        iova: Iova,
        access: Access,
    ) -> Result<Hit, Fault> {
        if !self.shared.walker.permits(leaf.prot, access) {
            return Err(Fault { kind: FaultKind::Permission, level: leaf.level, iova, access });
        }
        let paddr = PhysAddr::new(leaf.paddr).wrapping_add(iova.get() & lg2::mask(lg2));
        Ok(Hit { paddr, block: block_around(iova, lg2), prot: leaf.prot })
    }

    /// Walks from the deepest link that is cached, and caches what may be cached on the way.
    fn walk_and_keep(
        &self,
        state: &mut State,
        iova: Iova,
        access: Access,
    ) -> Result<Translated, Fault> {
        let from = match state.links.get(iova) {
            Some((_, link)) => {
                state.counters.walks_from_link += 1;
                *link
            }
            None => self.shared.walker.root(iova, access)?,
        };
        let mut not_updated = None;
        for _ in 0..UPDATE_TRIES {
            state.counters.walks += 1;
            let mut path = WalkPath::new();
            let walked =
                self.shared.walker.walk_from(&self.shared.tables, from, iova, access, &mut path);
            self.keep_path(state, from, &path, &walked);
            let translation = walked?;
            let Some(update) = translation.update else { return Ok(translation) };
            let (kind, level) = (FaultKind::ExternalAbort, translation.level);
            match self.shared.tables.exchange_u64(update.entry_paddr, update.old, update.new) {
                Ok(found) if found == update.old => return Ok(translation),
                // Software changed the entry since it was read.
                Ok(_) => {
                    let why = NotATable::ReadOnly { paddr: update.entry_paddr };
                    not_updated = Some(Fault { kind: kind(why), level, iova, access });
                }
                Err(why) => return Err(Fault { kind: kind(why), level, iova, access }),
            }
        }
        let level = from.level;
        Err(not_updated.unwrap_or(Fault { kind: FaultKind::Translation, level, iova, access }))
    }

    /// Caches the links of a walk and, where that is asked for, the absent entry at its end.
    fn keep_path(
        &self,
        state: &mut State,
        from: TableLink,
        path: &WalkPath,
        walked: &Result<Translated, Fault>,
    ) {
        state.links.keep_path(from, path);
        if self.shared.config.absent == AbsentEntries::Cached
            && let Err(Fault { kind: FaultKind::Translation, iova, level, .. }) = walked
            && let Some(step) = path.last()
        {
            state.absent.insert(*iova, step.entry_lg2, *level);
        }
    }
}

impl<W, T> Clone for Iotlb<W, T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<W: fmt::Debug, T> fmt::Debug for Iotlb<W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("Iotlb")
            .field("walker", &self.shared.walker)
            .field("config", &self.shared.config)
            .field("cached_leaves", &state.leaves.len())
            .field("cached_links", &state.links.len())
            .field("counters", &state.counters)
            .finish_non_exhaustive()
    }
}

// SAFETY:
// 1. Where `invalidate` returns `Ok`, every cached leaf of a named size and every absent entry that
//    intersects the scope was removed under the state's lock, and every such link where tables were
//    detached; links to tables that are still in place lead to what is true. Walks run under that
//    lock: none that began before can add an entry afterwards. A planted bug breaks this on
//    purpose, for tests.
// 2. Accesses use a translation while they hold `in_flight` for reading, and `invalidate` holds it
//    for writing, so every access through an older translation has completed.
#[expect(unsafe_code, reason = "the trait is a promise about devices, kept as said above")]
unsafe impl<W, T> IommuOps for Iotlb<W, T>
where
    W: Walker + Send + Sync,
    T: TableWords + Send + Sync,
{
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let _accesses_done = self.shared.in_flight.write();
        self.shared.state.lock().invalidate(what)
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        let state = &mut *self.shared.state.lock();
        state.counters.sync_maps += 1;
        take_failure(&mut state.sync_maps_to_fail, "the simulated sync of a mapping failed")?;
        state.absent.remove(range);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        let _accesses_done = self.shared.in_flight.write();
        let mut state = self.shared.state.lock();
        state.invalidate(&Invalidation {
            scope: Scope::All,
            leaf_sizes: 0,
            tables: Tables::Detached,
        })?;
        state.detached = true;
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        self.shared.config.max_ranges
    }
}

/// An [`Iotlb`] as the hooks of a domain whose devices reach memory by addresses `A`; from
/// [`Iotlb::reaching`].
pub struct Reaching<A, W, T> {
    iotlb: Iotlb<W, T>,
    addresses: PhantomData<fn() -> A>,
}

impl<A, W: fmt::Debug, T> fmt::Debug for Reaching<A, W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reaching").field(&self.iotlb).finish()
    }
}

// SAFETY: every hook is the IOTLB's. It translates to numbers and accesses nothing by them.
#[expect(unsafe_code, reason = "the trait is a promise about devices, which the IOTLB keeps")]
unsafe impl<A, W, T> IommuOps for Reaching<A, W, T>
where
    A: Address,
    W: Walker + Send + Sync,
    T: TableWords + Send + Sync,
{
    type Address = A;

    forward! { iotlb:
        fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError>;
        fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError>;
        fn detach(&self) -> Result<(), HardwareError>;
        fn max_ranges(&self) -> usize;
    }
}

impl State {
    fn invalidate(&mut self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        match what.scope {
            Scope::Ranges(ranges) => {
                self.counters.invalidations_by_range += 1;
                let count = u64::try_from(ranges.len()).unwrap_or(u64::MAX);
                self.counters.ranges_invalidated += count;
            }
            Scope::All => self.counters.invalidations_of_all += 1,
        }
        if what.tables == Tables::Detached {
            self.counters.invalidations_of_tables += 1;
        }
        if self.invalidations_to_fail > 0 {
            self.counters.invalidations_failed += 1;
        }
        take_failure(&mut self.invalidations_to_fail, "the simulated invalidation failed")?;
        self.forget(what);
        Ok(())
    }

    /// The module's table says why hardware forgets it.
    fn forget(&mut self, what: &Invalidation<'_>) {
        let sizes = match self.planted {
            Planted::None | Planted::IgnoreTables => Some(what.leaf_sizes),
            Planted::IgnoreSmallest => Some(without_smallest(what.leaf_sizes)),
            Planted::IgnoreLargest => Some(without_largest(what.leaf_sizes)),
            Planted::IgnoreLeaves | Planted::IgnoreAll => None,
        };
        let forgets_links = !matches!(self.planted, Planted::IgnoreTables | Planted::IgnoreAll);
        match what.scope {
            Scope::Ranges(ranges) => {
                for &range in ranges {
                    if let Some(sizes) = sizes {
                        self.counters.leaves_dropped += self.leaves.forget(range, sizes);
                        let all = what.tables == Tables::Detached;
                        self.absent.remove_sizes(range, |lg2| all || lg2 == PAGE_LG2);
                    }
                    if what.tables == Tables::Detached && forgets_links {
                        self.counters.links_dropped += self.links.remove(range);
                    }
                }
            }
            Scope::All => {
                if sizes.is_some() {
                    self.counters.leaves_dropped += self.leaves.clear();
                    self.absent.clear();
                }
                if forgets_links {
                    self.counters.links_dropped += self.links.clear();
                }
            }
        }
    }
}

/// The sizes but for the smallest of several.
const fn without_smallest(sizes: u64) -> u64 {
    if sizes.count_ones() > 1 { sizes & (sizes - 1) } else { sizes }
}

/// The sizes but for the largest of several.
const fn without_largest(sizes: u64) -> u64 {
    if sizes.count_ones() > 1 { sizes ^ lg2::size(sizes.ilog2()) } else { sizes }
}

fn take_failure(left: &mut u64, what: &'static str) -> Result<(), HardwareError> {
    match left.checked_sub(1) {
        Some(fewer) => {
            *left = fewer;
            Err(HardwareError { what, status: 1 })
        }
        None => Ok(()),
    }
}
