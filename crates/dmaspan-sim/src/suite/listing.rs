//! Walks and dumps: what a table says of itself, beside what hardware finds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::io_pgtable::{Arena, Format, Word};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::space::{range, span};
use super::survey::{self, Seen};
use super::tree::{PROT, Tree, WordOf, claim, free};
use super::{Subject, each, share};
use crate::fuzz::Pair;
use crate::modelled::{agree, granted};
use crate::rng::Rng;

/// A line of a dump for programs.
struct Line<'t> {
    kind: &'t str,
    values: HashMap<&'t str, &'t str>,
}

impl<'t> Line<'t> {
    fn parse(line: &'t str) -> Self {
        let mut words = line.split(' ');
        let kind = words.next().unwrap();
        let values = words.map(|word| word.split_once('=').expect(line)).collect();
        Self { kind, values }
    }

    fn get(&self, key: &str) -> &'t str {
        self.values.get(key).unwrap_or_else(|| panic!("no {key} in a line `{}`", self.kind))
    }

    fn number(&self, key: &str) -> u64 {
        let text = self.get(key);
        match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
            None => text.parse().unwrap(),
        }
    }

    fn range(&self) -> IovaRange {
        let at = |key| Iova::new(self.number(key));
        IovaRange::new(at("first"), at("last")).unwrap()
    }

    fn prot(&self) -> Prot {
        let names = self.get("prot").split('|');
        names.map(|name| Prot::from_name(name).unwrap()).collect()
    }
}

/// What a dump for programs has in it.
#[derive(Default)]
struct Drawn {
    /// Links and the root.
    tables: usize,
    /// All leaves, one by one.
    leaves: Vec<Seen>,
    /// For each line below the root its entry's word, and where what it translates begins.
    words: Vec<(u64, u64)>,
}

/// Reads a dump, and finds each word of it where hardware would read it.
fn read<W: Word>(text: &str, arena: &Arena, aperture: IovaRange, shift: fn(u32) -> u32) -> Drawn {
    let mut lines = text.lines().map(Line::parse);
    let tree = lines.next().unwrap();
    assert_eq!((tree.kind, tree.range()), ("tree", aperture));
    let root = lines.next().unwrap();
    assert_eq!(root.kind, "table");
    let mut tables = HashMap::from([(root.number("level"), root.number("at"))]);
    let mut drawn = Drawn { tables: 1, ..Drawn::default() };
    let mut next = Some(aperture.start().get());
    for line in lines {
        let (level, index, word) =
            (line.number("level"), line.number("index"), line.number("word"));
        let entry = PhysAddr::new(tables[&level] + (index << W::LG2_BYTES));
        let found = arena.load::<W>(entry).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(word, found.bits(), "the word at {entry}");
        let range = line.range();
        let (start, last) = (range.start().get(), range.last().get());
        assert!(next.is_some_and(|next| next <= start), "{range} is out of order");
        drawn.words.push((word, start));
        match line.kind {
            "link" => {
                tables.insert(level - 1, line.number("table"));
                drawn.tables += 1;
                next = Some(start);
            }
            "leaf" => {
                let (size, entry) =
                    (line.number("size"), lg2::size(shift(level.try_into().unwrap())));
                assert_eq!(line.number("entries"), (last - start) / entry + 1);
                for n in 0..=(last - start) / size {
                    let start = Iova::new(start + n * size);
                    let paddr = PhysAddr::new(line.number("paddr") + n * size);
                    let range = IovaRange::from_len(start, size).unwrap();
                    drawn.leaves.push(Seen { range, paddr, prot: line.prot() });
                }
                next = last.checked_add(1);
            }
            kind => panic!("a line `{kind}`"),
        }
    }
    drawn
}

/// The dumps of a tree have all that hardware finds in it, by as many lines as it has runs, and no
/// table but its own.
#[track_caller]
fn check_dumps<S: Subject>(tree: &Tree<S>) {
    let lines = tree.table.dump().lines().to_string();
    let aperture = tree.space.aperture;
    let drawn = read::<WordOf<S>>(&lines, &tree.arena, aperture, S::Format::shift);
    assert_eq!(drawn.leaves, tree.leaves(), "the dump and the walker disagree:\n{lines}");
    assert_eq!(drawn.tables, tree.arena.tables(), "not all tables are drawn:\n{lines}");
    // The picture has the same, line by line.
    let picture = tree.table.dump().to_string();
    let manual = tree.table.format().manual();
    let mut drawn_lines = picture.lines();
    assert!(drawn_lines.next().unwrap().starts_with(manual.title), "{picture}");
    let (root, _) = tree.table.root_and_level();
    assert!(drawn_lines.next().unwrap().ends_with(&format!(" at {root}")), "{picture}");
    let digits = 2 + (2 << WordOf::<S>::LG2_BYTES);
    for (word, start) in drawn.words {
        let line = drawn_lines.next().unwrap();
        let parts = [format!(" {word:#0digits$x}"), format!(": {start:#x}..=")];
        assert!(parts.iter().all(|part| line.contains(part)), "{parts:?} in `{line}`");
    }
    assert_eq!(drawn_lines.next(), None);
}

/// A table that several look at, through `&self`, says what hardware finds, whatever was mapped,
/// unmapped, protected and reclaimed: by walks, by look-ups and by dumps.
pub fn walks_and_dumps_show_what_hardware_finds<S: Subject>() {
    each::<S>(|format| {
        let arena = super::tree::arena();
        let sapling = Tree::<S>::sapling(format.clone(), arena.clone(), arena);
        assert_eq!(
            sapling.table.dump().to_string().lines().count(),
            2,
            "a root with nothing in it"
        );
        let mut rng = Rng::new(21);
        for _ in 0..share::<S>(16) {
            let tree = Tree::<S>::new(format.clone());
            let bytes = rng.index(800);
            let bytes = rng.bytes(bytes);
            let mut pair = Pair::new(&tree.table, &bytes);
            pair.run();
            let (model, window) = (pair.model.clone(), pair.window);
            drop(pair);
            let aperture = tree.space.aperture;
            agree(tree.table.walk(aperture), &model, aperture);
            agree(tree.table.walk(window), &model, window);
            for run in model.runs(window) {
                let offset = rng.below(run.iova.len_less_one()) & run.iova.len_less_one();
                let iova = run.iova.start().wrapping_add(offset);
                let walked = survey::translate(&tree.walker(), &tree.arena, iova);
                assert_eq!(tree.table.iova_to_phys(iova), walked.map(|found| found.paddr));
            }
            check_dumps(&tree);
        }
    });
}

/// Leaves that follow each other are one line of a dump and one run of a walk, over any borders of
/// sizes that a walk has and of tables that a dump has, and however many there are.
pub fn leaves_that_follow_each_other_are_one_run<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let chunk = tree.space.chunk();
        let start = tree.space.nth(chunk, 1).unwrap();
        let granule = tree.space.granule();
        // Pages alone, one by one, so that nothing but the walk joins them.
        let pages = (lg2::size(chunk) / granule + 3).min(5000);
        for page in 0..pages {
            let (done, result) =
                tree.map_pages(start + page * granule, page * granule, granule, 1, PROT);
            assert_eq!((done, result), (granule, Ok(())));
        }
        let runs: Vec<_> = tree.table.walk(tree.space.aperture).collect();
        let [run] = runs[..] else { panic!("{runs:?}") };
        assert_eq!(run.range, range(start, pages * granule));
        assert_eq!(run.prot, granted(tree.table.format(), PROT));
        let lines = tree.table.dump().lines().to_string();
        let leaves = lines.lines().filter(|line| line.starts_with("leaf")).count() as u64;
        let entries = lg2::size(S::Format::LG2_ENTRIES);
        let tables = (start / granule + pages - 1) / entries - start / granule / entries + 1;
        let tables = if tree.space.top_level == 0 { 1 } else { tables };
        assert_eq!(leaves, tables, "a line for each table:\n{lines}");
        // A part of it, which begins and ends inside of it.
        let part = range(start + granule, 2 * granule);
        let runs: Vec<_> = tree.table.walk(part).map(|run| (run.range, run.paddr.get())).collect();
        assert_eq!(runs, [(part, granule)]);
        let lines = tree.table.dump().of(part).lines().to_string();
        let shown: Vec<_> =
            lines.lines().map(Line::parse).filter(|line| line.kind == "leaf").collect();
        let [leaf] = &shown[..] else { panic!("{lines}") };
        assert_eq!((leaf.range(), leaf.number("paddr")), (part, granule));
    });
}

/// While a thread maps and unmaps whole tables beside it, a walk has all that stays, and it and a
/// dump show each address where it may be, or not at all. In the end no table is missing.
pub fn walks_beside_a_thread_that_maps_show_what_is_mapped<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let (chunk, base) = (lg2::size(tree.space.chunk()), tree.space.aperture.start().get());
        let at = |n: u64| range(base + n * chunk, chunk);
        // Everything leads to its distance from the start.
        let map = |tree: &Tree<S>, n: u64| {
            let owned = claim(&tree.table, at(n));
            owned.map_spans(at(n).start(), &[span(n * chunk, chunk)], PROT).unwrap();
        };
        map(&tree, 0);
        map(&tree, 3);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let (tree, done) = (&tree, &done);
            scope.spawn(move || {
                for _ in 0..share::<S>(300) {
                    map(tree, 1);
                    map(tree, 2);
                    for n in [1, 2] {
                        let unmapped = claim(&tree.table, at(n)).unmap_pages(
                            at(n).start(),
                            tree.space.granule(),
                            chunk / tree.space.granule(),
                        );
                        assert_eq!(unmapped.result, Ok(()));
                        free(&tree.table, unmapped.retired);
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                look(tree, base, &[at(0), at(3)]);
            }
        });
        look(&tree, base, &[at(0), at(3)]);
        for n in [0, 3] {
            tree.unmap(at(n)).unwrap();
        }
        tree.reclaim();
        assert_eq!(tree.arena.tables(), 1, "tables that waited for a walk are missing");
    });
}

/// A walk and a dump show each address at its distance from `base`, and have all of `stable`.
fn look<S: Subject>(tree: &Tree<S>, base: u64, stable: &[IovaRange]) {
    let runs: Vec<_> = tree.table.walk(tree.space.aperture).collect();
    assert!(runs.windows(2).all(|pair| pair[0].range.last() < pair[1].range.start()), "{runs:?}");
    for run in &runs {
        assert_eq!(run.paddr.get(), run.range.start().get() - base, "{runs:?}");
    }
    let has = |range: &IovaRange| runs.iter().any(|run| run.range.covers(*range));
    assert!(stable.iter().all(has), "{stable:?} in {runs:?}");
    let lines = tree.table.dump().lines().to_string();
    for line in lines.lines().map(Line::parse).filter(|line| line.kind == "leaf") {
        assert_eq!(line.number("paddr"), line.number("first") - base, "{lines}");
    }
    let leaves: Vec<_> =
        lines.lines().map(Line::parse).filter(|line| line.kind == "leaf").collect();
    for part in stable {
        let inside = leaves.iter().filter_map(|leaf| leaf.range().intersection(*part));
        let bytes: u64 = inside.map(|range| range.len_less_one() + 1).sum();
        assert_eq!(bytes, part.len_less_one() + 1, "{part} in {lines}");
    }
    assert!(!lines.contains("corrupt"), "{lines}");
}
