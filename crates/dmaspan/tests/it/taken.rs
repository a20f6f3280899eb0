//! Unmaps of leaves that a plain list knows: they take, name and detach exactly what they say,
//! write all of it back, and look at no more tables than there are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::mem::take;
use std::ptr;
use std::sync::Arc;

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, Arena, ArenaList, ArmLpaeS1, ArmLpaeS1Config, ArmV7s, ArmV7sConfig, Error,
    Format, Fresh, NoTables, PageTable, Rest, Retired, TableAddr, TableMemory, TableShape, Word,
    X86_64, X86_64Config,
};
use dmaspan::{Coherency, Iova, IovaRange, PhysAddr, Promise, Span, SpanBuf, lg2};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::TableWords;
use parking_lot::Mutex;

use crate::common::{PROT, free, range, span};

/// Table memory whose hardware sees what was written back, and which counts looks at tables.
#[derive(Clone)]
struct Watched {
    inner: Arena,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// What hardware sees of tables in the tree, by their physical addresses.
    seen: BTreeMap<u64, Vec<u64>>,
    /// Where tables are, by their places in this process.
    tables: BTreeMap<usize, u64>,
    looks: u64,
    /// How often each cache line was written back.
    lines: BTreeMap<usize, u32>,
}

impl Watched {
    fn new() -> Self {
        let inner = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
        Self { inner, state: Arc::default() }
    }

    fn words(&self, paddr: u64, bytes: u64) -> Vec<u64> {
        let words = (paddr..paddr + bytes).step_by(8);
        words.map(|word| self.inner.read_u64(PhysAddr::new(word)).unwrap()).collect()
    }

    /// Everything was written back, besides these bits.
    fn check(&self, not_read: u64) {
        for (&paddr, seen) in &self.state.lock().seen {
            let words = self.words(paddr, 8 * seen.len() as u64);
            let is_seen = |(word, seen): (&u64, &u64)| word | not_read == seen | not_read;
            assert!(words.iter().zip(seen).all(is_seen), "{paddr:#x} was not written back");
        }
    }
}

// SAFETY: all tables are the arena's.
unsafe impl<W: Word> TableMemory<W> for Watched {
    type List = ArenaList;

    fn coherency(&self) -> Coherency {
        Coherency::NonCoherent
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        TableMemory::<W>::reserve(&self.inner, shape, count)
    }

    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut ArenaList,
    ) -> Option<Fresh<'_, W>> {
        self.inner.take(promise, shape, list)
    }

    fn publish(&self, mut fresh: Fresh<'_, W>) {
        let paddr = fresh.paddr().get();
        let bytes = size_of_val(fresh.words()) as u64;
        let place = ptr::from_ref(&*fresh.words()).addr();
        self.inner.publish(fresh);
        let mut state = self.state.lock();
        state.tables.insert(place, paddr);
        state.seen.insert(paddr, self.words(paddr, bytes));
    }

    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        self.state.lock().looks += 1;
        TableMemory::<W>::entries(&self.inner, table)
    }

    fn written(&self, _promise: Promise<'_>, entries: &[W::Atomic]) {
        assert!(!entries.is_empty(), "there is nothing to write back");
        let place = ptr::from_ref(entries).addr();
        let bytes = size_of_val(entries);
        let mut state = self.state.lock();
        for line in place >> 6..=(place + bytes - 1) >> 6 {
            *state.lines.entry(line).or_default() += 1;
        }
        let (&start, &paddr) = state.tables.range(..=place).next_back().unwrap();
        // Words of 8 bytes, whatever entries have.
        let (from, end) = ((place - start) & !7, (place - start + bytes).next_multiple_of(8));
        let words = self.words(paddr + from as u64, (end - from) as u64);
        state.seen.get_mut(&paddr).unwrap()[from / 8..end / 8].copy_from_slice(&words);
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        let paddr = table.paddr().get();
        assert!(self.state.lock().seen.remove(&paddr).is_some(), "{paddr:#x} is no table");
        TableMemory::<W>::retire(&self.inner, list, table);
    }

    fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList) {
        TableMemory::<W>::append(&self.inner, promise, list, other);
    }

    fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList) {
        TableMemory::<W>::free(&self.inner, promise, shape, list);
    }
}

/// A leaf, whose place the list of all has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leaf {
    lg2: u32,
    paddr: u64,
}

/// A table, and a list of all that is in it.
struct World<F: Format> {
    table: PageTable<F, Watched>,
    rng: Rng,
    /// By their first addresses.
    leaves: BTreeMap<u64, Leaf>,
    /// Tables below the root: the level, and the first address that each translates.
    tables: BTreeSet<(u32, u64)>,
    roots: usize,
    window: IovaRange,
    /// log2 of the leaf sizes that are tried, ascending.
    sizes: Vec<u32>,
    /// Of a hundred stretches so many are holes.
    holes: u64,
    /// log2 of what the largest table in the window translates.
    largest: u32,
    next_paddr: u64,
}

/// How something is unmapped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// By pages of this size.
    Pages(u64),
    Spans,
    Resumed,
}

/// How an unmap ended that stopped, by what is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Hole(u64),
    Cut(IovaRange),
}

impl<F: Format> World<F> {
    fn new(format: F, seed: u64) -> Self {
        let memory = Watched::new();
        let geometry = format.geometry();
        let mut table = PageTable::new(format, memory.clone()).unwrap();
        let aperture = geometry.aperture;
        if F::GROWS {
            // It is as high as it can be, and its former roots have gone.
            let granule = lg2::size(F::GRANULE_LG2);
            let last = aperture.last().get() - (granule - 1);
            crate::common::map(&mut table, last, &[span(0, granule)], PROT).unwrap();
            crate::common::unmap(&mut table, range(last, granule)).unwrap();
            let retired = table.whole().reclaim(aperture).unwrap();
            free(&table, retired);
        }
        let (block, top) = (F::shift(1), geometry.top_level);
        // Around a border between tables of the second level, if there is one, or at an end; few
        // tables of pages, or those that have all of such a table below them.
        let is_wide = top >= 2 && seed % 2 == 1;
        let largest = if is_wide { F::shift(2) } else { block };
        let len = if is_wide { 2 << largest } else { 8 << block };
        let around = (top >= 2).then(|| lg2::size(F::shift(2)) - len.min(4 << block));
        let start = match seed % 3 {
            0 => around.unwrap_or(0),
            1 => 0,
            _ => aperture.last().get() - (len - 1),
        };
        let start = aperture.start().get().max(start);
        let most = F::shift(1) + 4;
        let sizes = (0..=most).filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0).collect();
        Self {
            roots: memory.inner.tables(),
            table,
            rng: Rng::new(seed),
            leaves: BTreeMap::new(),
            tables: BTreeSet::new(),
            window: range(start, len),
            sizes,
            holes: [10, 0, 0, 0, 2, 0][usize::try_from(seed % 6).unwrap()],
            largest,
            next_paddr: 0,
        }
    }

    fn memory(&self) -> &Watched {
        self.table.memory()
    }

    fn top(&self) -> u32 {
        self.table.geometry().top_level
    }

    /// Fills the window with leaves, where there are none.
    fn fill(&mut self) {
        let mut at = self.window.start().get();
        let last = self.window.last().get();
        let granule = lg2::size(F::GRANULE_LG2);
        loop {
            let leaf = self.leaves.get(&at).copied();
            let bytes = match leaf {
                Some(leaf) => lg2::size(leaf.lg2),
                None if self.rng.below(100) < self.holes => {
                    granule * (1 + self.rng.below(3)).min((last - at) / granule + 1)
                }
                None => self.map(at),
            };
            if last - at < bytes {
                break;
            }
            at += bytes;
        }
    }

    /// Maps leaves of some size there, and returns the bytes.
    fn map(&mut self, at: u64) -> u64 {
        let last = self.window.last().get();
        let end = self.leaves.range(at..).next().map_or(last, |(&next, _)| (next - 1).min(last));
        let is_wide = self.largest > F::shift(1);
        let most = match self.rng.below(8) {
            0..6 if is_wide => self.sizes.len() - 1,
            _ => self.rng.index(self.sizes.len()),
        };
        let fits = |lg2: &&u32| lg2::is_aligned(at, **lg2) && end - at >= lg2::mask(**lg2);
        let sizes: Vec<u32> = self.sizes[..=most].iter().filter(fits).copied().collect();
        for lg2 in sizes.into_iter().rev() {
            let size = lg2::size(lg2);
            let room = (end - at) / size + u64::from((end - at) % size == size - 1);
            let some = [1, 3, 9, 600][self.rng.index(4)];
            let count = room.min(1 + self.rng.below(some));
            if self.rng.below(3) == 0 || !lg2::is_aligned(self.next_paddr, lg2) {
                let memory = lg2::mask(31) & !lg2::mask(lg2);
                self.next_paddr = (self.rng.next() & memory).min(memory - count * size);
            }
            let (iova, paddr) = (Iova::new(at), PhysAddr::new(self.next_paddr));
            let (bytes, _) = self.table.whole().map_pages(iova, paddr, size, count, PROT);
            for n in 0..bytes / size {
                let leaf = Leaf { lg2, paddr: self.next_paddr + n * size };
                self.leaves.insert(at + n * size, leaf);
                for level in F::level_of(lg2)..self.top() {
                    let start = lg2::align_down(at + n * size, F::shift(level + 1));
                    self.tables.insert((level, start));
                }
            }
            if bytes != 0 {
                self.next_paddr = (self.next_paddr + bytes) & lg2::mask(31);
                return bytes;
            }
        }
        // An empty table is in the way of all that fits.
        lg2::size(F::GRANULE_LG2)
    }

    /// A range that mostly begins and ends where leaves or tables do.
    fn range(&mut self) -> IovaRange {
        let (first, last) = (self.window.start().get(), self.window.last().get());
        let border = |rng: &mut Rng| {
            let any = first + rng.next() % (last - first + 1);
            let lg2 = [F::GRANULE_LG2, F::GRANULE_LG2, F::shift(1), self.largest, F::shift(1) + 1];
            let at = lg2::align_down(any, lg2[rng.index(lg2.len())]);
            match self.leaves.range(..=at).next_back() {
                Some((&start, leaf)) if at - start < lg2::size(leaf.lg2) && rng.below(8) > 0 => {
                    start
                }
                _ => at,
            }
        };
        let start = border(&mut self.rng).max(first);
        let end = match self.rng.below(4) {
            // Some leaves.
            0 | 1 => {
                let most = [3, 20, 200][self.rng.index(3)];
                let count = self.rng.below(most);
                let some = self.leaves.range(start..).nth(usize::try_from(count).unwrap());
                some.map_or(last, |(&at, leaf)| at + lg2::mask(leaf.lg2))
            }
            2 => last,
            _ => border(&mut self.rng).wrapping_sub(1),
        };
        let least = start + lg2::mask(F::GRANULE_LG2);
        IovaRange::new(Iova::new(start), Iova::new(end.clamp(least, last))).unwrap()
    }

    /// The leaf that an address is in.
    fn leaf_at(&self, at: u64) -> Option<(u64, Leaf)> {
        let (&start, &leaf) = self.leaves.range(..=at).next_back()?;
        (at - start < lg2::size(leaf.lg2)).then_some((start, leaf))
    }

    /// How far whole leaves go in a range: behind the last of them, and what is there.
    fn whole_leaves(&self, range: IovaRange) -> (u64, Option<Stop>) {
        let mut at = range.start().get();
        loop {
            let Some((start, leaf)) = self.leaf_at(at) else { return (at, Some(Stop::Hole(at))) };
            let mask = lg2::mask(leaf.lg2);
            if start != at || range.last().get() - at < mask {
                let block = IovaRange::new(Iova::new(start), Iova::new(start + mask)).unwrap();
                return (at, Some(Stop::Cut(block)));
            }
            if range.last().get() - at == mask {
                return (at.wrapping_add(mask + 1), None);
            }
            at += mask + 1;
        }
    }

    /// The level of the table whose entries are all that is there, each a leaf by itself, and which
    /// has others.
    fn only_table(&self, range: IovaRange) -> Option<u32> {
        let (first, last) = (range.start().get(), range.last().get());
        let level = F::level_of(self.leaf_at(first)?.1.lg2);
        let (shift, table) = (F::shift(level), F::shift(level + 1));
        let mut next = first;
        for (&at, leaf) in self.leaves.range(first..=last) {
            if at != next || leaf.lg2 != shift {
                return None;
            }
            next = at.wrapping_add(lg2::size(leaf.lg2));
        }
        let is_part = first >> table == last >> table && last - first < lg2::mask(table);
        (is_part && next == last.wrapping_add(1)).then_some(level)
    }

    /// The sizes of all leaves that begin there.
    fn sizes_in(&self, range: IovaRange) -> u64 {
        let leaves = self.leaves.range(range.start().get()..=range.last().get());
        leaves.fold(0, |all, (_, leaf)| all | lg2::size(leaf.lg2))
    }

    /// What an unmap of `asked` must have taken away, if it says this; frees the tables.
    fn took(
        &mut self,
        how: How,
        asked: IovaRange,
        taken: Option<IovaRange>,
        sizes: u64,
        retired: Retired<ArenaList>,
    ) {
        assert_eq!((retired.range(), retired.leaf_sizes()), (taken, sizes));
        assert_eq!(retired.is_empty(), taken.is_none());
        let memory = self.memory().clone();
        let (looks, lines) = {
            let mut state = memory.state.lock();
            (take(&mut state.looks), take(&mut state.lines))
        };
        let (first, last) = (asked.start().get(), asked.last().get());
        let met = self.tables.iter().filter(|&&(level, start)| {
            start <= last && first - first.min(start) <= lg2::mask(F::shift(level + 1))
        });
        let (met, path) = (met.count() as u64, u64::from(self.top()) + 1);
        assert!(looks <= 2 * met + 3 * path, "{looks} looks at {met} tables");
        if let (Some(level), true) = (self.only_table(asked), taken == Some(asked)) {
            let size = lg2::size(F::shift(level));
            let walks = match how {
                How::Pages(asked) if asked == size => 1,
                How::Resumed if level == 0 => 1,
                How::Pages(_) | How::Resumed => 3,
                How::Spans => 2,
            };
            let most = walks * (path - u64::from(level));
            assert!(looks <= most, "{looks} looks at the only table, and not {most}");
        }
        let Some(taken) = taken else {
            assert!(lines.is_empty() && !retired.has_tables());
            return;
        };
        let (first, last) = (taken.start().get(), taken.last().get());
        let gone = self.tables.iter().copied().filter(|&(level, start)| {
            first <= start && start <= last && last - start >= lg2::mask(F::shift(level + 1))
        });
        let gone: Vec<_> = gone.collect();
        gone.iter().for_each(|it| assert!(self.tables.remove(it)));
        assert_eq!(retired.has_tables(), !gone.is_empty(), "{gone:x?}");
        let before = memory.inner.tables();
        free(&self.table, retired);
        assert_eq!(before - memory.inner.tables(), gone.len(), "{gone:x?}");
        assert_eq!(memory.inner.tables(), self.roots + self.tables.len());
        let leaves: Vec<u64> = self.leaves.range(first..=last).map(|(&at, _)| at).collect();
        // One run of entries in each table.
        let mut is_single = gone.is_empty();
        let mut next = first;
        for at in leaves {
            let leaf = self.leaves.remove(&at).unwrap();
            is_single &= at == next && leaf.lg2 == F::shift(F::level_of(leaf.lg2));
            next = at.wrapping_add(lg2::size(leaf.lg2));
        }
        let most = lines.values().max();
        assert!(!is_single || most.is_none_or(|&most| most == 1), "{lines:?}");
    }

    fn expect_error(&self, error: &Error, stop: Stop) {
        match (error, stop) {
            (Error::Hole { hole }, Stop::Hole(at)) => {
                assert!(hole.contains(Iova::new(at)), "{hole} at {at:#x}");
                assert!(self.leaf_at(hole.start().get()).is_none());
                assert!(self.leaf_at(hole.last().get()).is_none());
            }
            (Error::WouldSplit { leaf }, Stop::Cut(block)) => assert_eq!(*leaf, block),
            _ => panic!("{error} for {stop:x?}"),
        }
    }

    /// Takes out the tables that became empty.
    fn reclaim(&mut self) {
        let retired = self.table.whole().reclaim(self.window).unwrap();
        free(&self.table, retired);
        let leaves = &self.leaves;
        self.tables.retain(|&(level, start)| {
            let last = start + lg2::mask(F::shift(level + 1));
            leaves.range(start..=last).next().is_some()
        });
        assert_eq!(self.memory().inner.tables(), self.roots + self.tables.len());
    }

    /// A look at all that is left.
    fn check(&mut self) {
        let mut counts = BTreeMap::<u32, u64>::new();
        self.leaves.values().for_each(|leaf| *counts.entry(leaf.lg2).or_default() += 1);
        let whole = self.table.whole();
        let census: BTreeMap<_, _> = whole.census(self.window).sizes().collect();
        assert_eq!(census, counts);
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        for (&at, leaf) in &self.leaves {
            let bytes = lg2::size(leaf.lg2);
            match runs.last_mut() {
                Some((start, paddr, len)) if *start + *len == at && *paddr + *len == leaf.paddr => {
                    *len += bytes;
                }
                _ => runs.push((at, leaf.paddr, bytes)),
            }
        }
        let found = whole
            .walk(self.window)
            .map(|run| (run.range.start().get(), run.paddr.get(), run.range.len_less_one() + 1));
        assert_eq!(found.collect::<Vec<_>>(), runs);
        self.memory().check(F::WRITTEN_BACK.bits());
    }

    /// Begins to count anew.
    fn forget(&self) {
        let mut state = self.memory().state.lock();
        (state.looks, state.lines) = (0, BTreeMap::new());
    }

    /// Unmaps up to the first that is in the way.
    fn unmap_pages(&mut self) {
        let asked = self.range();
        let sizes = self.sizes.iter().map(|&lg2| lg2::size(lg2)).filter(|size| {
            let ends = asked.start().get() | asked.last().get().wrapping_add(1);
            ends & (size - 1) == 0
        });
        let sizes: Vec<u64> = sizes.collect();
        let Some(&size) = sizes.get(self.rng.index(sizes.len().max(1))) else { return };
        let (end, stop) = self.whole_leaves(asked);
        let count = asked.len_less_one() / size + 1;
        let gone = self.table.whole().unmap_pages(asked.start(), size, count);
        assert_eq!(gone.bytes, end.wrapping_sub(asked.start().get()));
        match stop {
            None => assert_eq!(gone.result, Ok(())),
            Some(stop) => self.expect_error(&gone.result.unwrap_err(), stop),
        }
        let taken = (end != asked.start().get()).then(|| range(asked.start().get(), gone.bytes));
        let sizes = taken.map_or(0, |taken| self.sizes_in(taken));
        self.took(How::Pages(size), asked, taken, sizes, gone.retired);
    }

    /// Unmaps by a buffer, in which there may be a span already that the first one joins. Others
    /// are unmapped between two steps at times.
    fn unmap_spans(&mut self) {
        let asked = self.range();
        let room = [1, 2, 3, 8, 700][self.rng.index(5)];
        let mut room = vec![span(0, 1); room];
        let mut buf = SpanBuf::new(&mut room);
        if self.rng.below(3) == 0 {
            let before = match self.leaf_at(asked.start().get()) {
                Some((_, leaf)) if leaf.paddr > 0 && self.rng.below(2) == 0 => leaf.paddr - 1,
                _ => 1 << 40,
            };
            buf.push(span(before, 1)).unwrap();
        }
        let before = buf.spans().to_vec();
        let (_, stop) = self.whole_leaves(asked);
        let unmapped = match (self.table.whole().unmap(asked, &mut buf), stop) {
            (Ok(unmapped), None) => unmapped,
            (Err(error), Some(stop)) => {
                self.expect_error(&error, stop);
                assert_eq!(buf.spans(), before);
                let nothing = {
                    let mut state = self.memory().state.lock();
                    state.looks = 0;
                    state.lines.is_empty()
                };
                assert!(nothing, "a refused unmap writes nothing");
                return;
            }
            (unmapped, stop) => panic!("{unmapped:?}, and there is {stop:x?}"),
        };
        let mut rest = self.step(How::Spans, asked, &before, &buf, unmapped.retired, unmapped.rest);
        while let Some(left) = rest {
            if self.rng.below(4) == 0 {
                self.unmap_pages();
            }
            if self.rng.below(8) > 0 {
                buf.clear();
            }
            let (asked, before) = (left.range(), buf.spans().to_vec());
            let unmapped = self.table.whole().resume(left, &mut buf);
            if buf.len() == buf.capacity() && unmapped.retired.is_empty() {
                buf.clear();
            }
            rest = self.step(How::Resumed, asked, &before, &buf, unmapped.retired, unmapped.rest);
        }
    }

    /// What a step of an unmap did.
    fn step(
        &mut self,
        how: How,
        asked: IovaRange,
        before: &[Span],
        buf: &SpanBuf<'_>,
        retired: Retired<ArenaList>,
        rest: Option<Rest>,
    ) -> Option<Rest> {
        let mut spans = before.to_vec();
        let (mut full_at, mut next, mut has_holes) = (None, asked.start().get(), false);
        for (&at, leaf) in self.leaves.range(asked.start().get()..=asked.last().get()) {
            has_holes |= at != next;
            let more = span(leaf.paddr, lg2::size(leaf.lg2));
            match spans.last().and_then(|last| last.join(more)) {
                Some(joined) => *spans.last_mut().unwrap() = joined,
                None if spans.len() < buf.capacity() => spans.push(more),
                None => {
                    full_at = Some(at);
                    break;
                }
            }
            next = at.wrapping_add(lg2::size(leaf.lg2));
        }
        has_holes |= full_at.is_none() && next != asked.last().get().wrapping_add(1);
        if !buf.is_empty() {
            assert_eq!(buf.spans(), spans);
        }
        let taken = match full_at {
            None => Some(asked),
            Some(at) if at == asked.start().get() => None,
            Some(at) => IovaRange::new(asked.start(), Iova::new(at - 1)),
        };
        let left = full_at.and_then(|at| IovaRange::new(Iova::new(at), asked.last()));
        assert_eq!(rest.as_ref().map(Rest::range), left);
        // Below a hole there may be tables of any level.
        let sizes = match taken {
            _ if has_holes => self.table.geometry().page_sizes,
            Some(taken) => self.sizes_in(taken),
            None => 0,
        };
        self.took(how, asked, taken, sizes, retired);
        rest
    }
}

fn run<F: Format + Debug>(format: impl Fn() -> F) {
    for seed in 0..9 {
        let mut world = World::new(format(), seed);
        let is_wide = world.largest > F::shift(1);
        for round in 0..if is_wide { 4 } else { 14 } {
            world.fill();
            world.forget();
            for _ in 0..3 {
                if world.rng.below(2) == 0 {
                    world.unmap_pages();
                } else {
                    world.unmap_spans();
                }
            }
            // Otherwise pages are mapped below those.
            if is_wide || round % 2 == 0 {
                world.reclaim();
            }
            world.check();
        }
    }
}

#[test]
fn unmaps_of_consecutive_groups_take_name_and_detach_what_they_say() {
    run(|| {
        let page_sizes = Some(1 << 12 | 1 << 16 | 1 << 21 | 1 << 25);
        ArmLpaeS1::<12>::new(ArmLpaeS1Config { page_sizes, ..ArmLpaeS1Config::new(39, 48) })
            .unwrap()
    });
}

#[test]
fn unmaps_of_repeated_entries_take_name_and_detach_what_they_say() {
    run(|| {
        let page_sizes = Some(ArmV7s::PAGE_SIZES);
        ArmV7s::new(ArmV7sConfig { page_sizes, ..ArmV7sConfig::new(32, 32) }).unwrap()
    });
}

#[test]
fn unmaps_of_a_tree_that_grew_take_name_and_detach_what_they_say() {
    run(|| AmdV1::new(AmdV1Config::new(48, 48)).unwrap());
}

#[test]
fn unmaps_of_single_entries_take_name_and_detach_what_they_say() {
    run(|| X86_64::new(X86_64Config::new(48, 48)).unwrap());
}

#[test]
fn all_of_64_bits_is_taken_away_at_once() {
    let memory = Watched::new();
    let config = AmdV1Config { first_levels: 6, ..AmdV1Config::new(64, 52) };
    let format = AmdV1::new(config).unwrap();
    let mut table = PageTable::new(format, memory.clone()).unwrap();
    // As much as there is memory, again and again.
    let (size, count) = (1u64 << 48, 1 << 4);
    for n in 0..1 << 12 {
        let at = Iova::new(n * count * size);
        let mapped = table.whole().map_pages(at, PhysAddr::new(0), size, count, PROT);
        assert_eq!(mapped, (count * size, Ok(())));
    }
    let mut room = vec![span(0, 1); 1 << 12];
    let mut buf = SpanBuf::new(&mut room);
    let unmapped = table.whole().unmap(IovaRange::ALL, &mut buf).unwrap();
    assert!(unmapped.rest.is_none() && buf.spans().iter().all(|&it| it == span(0, 1 << 52)));
    assert_eq!((buf.len(), unmapped.retired.range()), (1 << 12, Some(IovaRange::ALL)));
    assert_eq!(unmapped.retired.leaf_sizes(), size);
    free(&table, unmapped.retired);
    assert_eq!((table.walk(IovaRange::ALL).count(), memory.inner.tables()), (0, 1));
}
