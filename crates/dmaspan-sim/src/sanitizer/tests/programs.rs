//! Random programs: correct ones, and with one bug.

use proptest::prelude::*;

use super::*;

/// How many mappings a program may have at once, each of eight pages at most in its own place.
const PLACES: usize = 12;
const ROOM: u64 = 8;

#[derive(Clone, Copy, Debug)]
enum Step {
    Map {
        place: usize,
        pages: u64,
    },
    Dma {
        place: usize,
        offset: u64,
    },
    Sync {
        place: usize,
    },
    Unmap {
        place: usize,
        tables: Tables,
    },
    /// Everything, or each range.
    Flush {
        all: bool,
    },
    /// Ends, and begins, with other flushes in between.
    Begin,
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let place = 0..PLACES;
    prop_oneof![
        3 => (place.clone(), 1..=ROOM).prop_map(|(place, pages)| Step::Map { place, pages }),
        3 => (place.clone(), 0..ROOM * PAGE)
            .prop_map(|(place, offset)| Step::Dma { place, offset }),
        1 => place.clone().prop_map(|place| Step::Sync { place }),
        3 => (place, any::<bool>()).prop_map(|(place, detach)| {
            Step::Unmap { place, tables: if detach { Tables::Detached } else { Tables::Kept } }
        }),
        1 => any::<bool>().prop_map(|all| Step::Flush { all }),
        1 => Just(Step::Begin),
        1 => Just(Step::End),
    ]
}

/// A driver that does everything in order, but for one bug.
struct Driver {
    sanitizer: Sanitizer,
    mapped: [Option<IovaRange>; PLACES],
    /// Unmapped, and what the flush must be like.
    waiting: Vec<(IovaRange, Tables)>,
    begun: Option<(Invalidating, Vec<(IovaRange, Tables)>)>,
    bug: Option<Bug>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    Skip,
    Early,
    Short,
    Kept,
    Twice,
    Leak,
    DmaAfter,
    SyncAfter,
}

impl Driver {
    fn new(bug: Option<Bug>) -> Self {
        let sanitizer = Sanitizer::default();
        Self { sanitizer, mapped: [None; PLACES], waiting: Vec::new(), begun: None, bug }
    }

    /// Plants the bug, if it is this and was not planted.
    fn plants(&mut self, bug: Bug) -> bool {
        self.bug.take_if(|planted| *planted == bug).is_some()
    }

    fn memory(range: IovaRange) -> Span {
        frames(range.start().get() / PAGE, range.checked_len().unwrap() / PAGE)
    }

    fn step(&mut self, step: Step) {
        let sanitizer = self.sanitizer.clone();
        match step {
            Step::Map { place, pages: count } => {
                let first = (1 + u64::try_from(place).unwrap()) * ROOM;
                let range = pages(first, count);
                let flying = self.begun.iter().flat_map(|(_, ranges)| ranges);
                let busy = self
                    .waiting
                    .iter()
                    .chain(flying)
                    .any(|(r, _)| r.intersection(pages(first, ROOM)).is_some());
                if self.mapped[place].is_none() && !busy {
                    sanitizer.on_alloc(range);
                    sanitizer.on_map(range, &[Self::memory(range)], Prot::READ_WRITE);
                    self.mapped[place] = Some(range);
                }
            }
            Step::Dma { place, offset } => {
                let Some(range) = self.mapped[place] else { return };
                let len = range.checked_len().unwrap();
                let offset = offset % len;
                let iova = Iova::new(range.start().get() + offset);
                sanitizer.on_dma(iova, len - offset, Access::Write);
            }
            Step::Sync { place } => {
                let Some(range) = self.mapped[place] else { return };
                sanitizer.on_sync(range, SyncFor::Cpu, Direction::Bidirectional);
            }
            Step::Unmap { place, tables } => {
                let Some(range) = self.mapped[place].take() else { return };
                self.unmap(range, tables);
            }
            Step::Flush { all } => {
                let waiting = std::mem::take(&mut self.waiting);
                if all {
                    let tables = Tables::Detached;
                    let scope = Scope::All;
                    sanitizer.on_invalidate(&Invalidation { scope, leaf_sizes: 0, tables });
                } else {
                    waiting.iter().for_each(|&(range, tables)| flush(&sanitizer, range, tables));
                }
                self.release(waiting);
            }
            Step::Begin if self.begun.is_none() => {
                let waiting = std::mem::take(&mut self.waiting);
                let ranges: Vec<_> = waiting.iter().map(|(range, _)| *range).collect();
                let scope = Scope::Ranges(&ranges);
                let tables = Tables::Detached;
                let what = Invalidation { scope, leaf_sizes: 0, tables };
                self.begun = Some((sanitizer.on_invalidate_begin(&what), waiting));
            }
            Step::Begin => {}
            Step::End => {
                let Some((begun, waiting)) = self.begun.take() else { return };
                sanitizer.on_invalidate_end(begun, Outcome::Done);
                self.release(waiting);
            }
        }
    }

    fn unmap(&mut self, range: IovaRange, tables: Tables) {
        let sanitizer = self.sanitizer.clone();
        let long = range.checked_len() > Some(PAGE);
        if self.plants(Bug::Leak) {
            return;
        }
        if self.plants(Bug::Early) {
            flush(&sanitizer, range, tables);
            sanitizer.on_unmap(range, tables);
            return self.release(vec![(range, tables)]);
        }
        sanitizer.on_unmap(range, tables);
        if self.plants(Bug::Skip) {
            return self.release(vec![(range, tables)]);
        }
        if long && self.plants(Bug::Short) {
            let len = range.checked_len().unwrap() - PAGE;
            flush(&sanitizer, IovaRange::from_len(range.start(), len).unwrap(), tables);
            return self.release(vec![(range, tables)]);
        }
        if tables == Tables::Detached && self.plants(Bug::Kept) {
            flush(&sanitizer, range, Tables::Kept);
            return self.release(vec![(range, tables)]);
        }
        if self.plants(Bug::Twice) {
            sanitizer.on_unmap(range, tables);
        }
        if self.plants(Bug::DmaAfter) {
            sanitizer.on_dma(range.last(), 1, Access::Read);
        }
        if self.plants(Bug::SyncAfter) {
            sanitizer.on_sync(range, SyncFor::Device, Direction::Bidirectional);
        }
        self.waiting.push((range, tables));
    }

    fn release(&self, ranges: Vec<(IovaRange, Tables)>) {
        for (range, _) in ranges {
            self.sanitizer.on_free(Self::memory(range));
            self.sanitizer.on_release(range);
        }
    }

    fn run(mut self, steps: &[Step]) -> (Option<Bug>, Vec<Finding>) {
        steps.iter().for_each(|&step| self.step(step));
        (0..PLACES).for_each(|place| self.step(Step::Unmap { place, tables: Tables::Detached }));
        self.step(Step::End);
        self.step(Step::Flush { all: false });
        (self.bug, self.sanitizer.finish())
    }
}

fn is_of(kind: FindingKind, bug: Bug) -> bool {
    use {Cached::*, Cause::*};
    match kind {
        FindingKind::LateFlush { cached: Leaf, cause, .. } => match bug {
            // What was flushed when it was mapped before may be what the history has.
            Bug::Skip => matches!(cause, NoFlush | FlushBeforeUnmap),
            Bug::Early => cause == FlushBeforeUnmap,
            Bug::Short => cause == TooShort,
            _ => false,
        },
        // Memory and leaf were found first, and then the walk.
        FindingKind::LateFlush { cached: Walk, cause: TablesKept, .. } => bug == Bug::Kept,
        FindingKind::LateFlush { cached: Walk, .. } => {
            matches!(bug, Bug::Skip | Bug::Early | Bug::Short)
        }
        FindingKind::DoubleUnmap => bug == Bug::Twice,
        FindingKind::Leak | FindingKind::AlreadyMapped { .. } => bug == Bug::Leak,
        FindingKind::UseAfterUnmap { .. } => bug == Bug::DmaAfter,
        FindingKind::SyncOutside { .. } => bug == Bug::SyncAfter,
        FindingKind::MissingFlush { .. } => {
            matches!(bug, Bug::Skip | Bug::Early | Bug::Short | Bug::Kept)
        }
        _ => false,
    }
}

proptest! {
    #[test]
    fn nothing_is_found_in_correct_programs(steps in prop::collection::vec(step(), 0..200)) {
        let (_, found) = Driver::new(None).run(&steps);
        prop_assert_eq!(found, []);
    }

    #[test]
    fn a_bug_anywhere_in_a_program_is_found(
        before in prop::collection::vec(step(), 0..100),
        bug in prop::sample::select(vec![
            Bug::Skip, Bug::Early, Bug::Short, Bug::Kept,
            Bug::Twice, Bug::Leak, Bug::DmaAfter, Bug::SyncAfter,
        ]),
        after in prop::collection::vec(step(), 0..100),
    ) {
        let mut driver = Driver::new(None);
        before.iter().for_each(|&step| driver.step(step));
        prop_assert_eq!(driver.sanitizer.errors(), []);
        driver.bug = Some(bug);
        let (left, found) = driver.run(&after);
        match left {
            // The program had no place for it.
            Some(_) => prop_assert_eq!(found, []),
            None => {
                prop_assert!(!found.is_empty(), "{:?} was not found", bug);
                for finding in found {
                    prop_assert!(is_of(finding.kind, bug), "{:?}:\n{}", bug, finding);
                }
            }
        }
    }
}
