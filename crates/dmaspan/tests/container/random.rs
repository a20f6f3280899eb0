//! Random operations, of everything that a container does at once, and what always holds of it.
//!
//! Mappings come and go in up to three domains of different formats and granules, for two owners
//! and in two spaces, while devices write, emulated devices pin, device memory is revoked, steps
//! fail, hardware does not answer and callers cancel. After each operation all is as a map of pages
//! says, whether it succeeded or not.
//!
//! `DMASPAN_RANDOM` says how many sequences there are.

mod check;
mod devices;
mod model;
mod script;
mod steps;
mod views;
mod watched;
mod world;

use std::collections::BTreeSet;

use dmaspan::Prot;
use dmaspan_sim::iotlb::Planted;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use model::{Mapped, Pages};
use script::{Fit, Op, Report, Script, Trouble, Troubles, script};
use views::PLANTED;
use world::{BARS, LARGE, World, bar_pages, place};

use crate::common::PROT;

/// How many sequences there are by default.
const FEW: u32 = 48;

impl<const BATCH: usize> World<BATCH> {
    fn new_mapping(&self, user: Pages, owner: u8, prot: Prot) -> Mapped {
        Mapped {
            user,
            owner: usize::from(owner) % 2,
            prot,
            pinned: None,
            vaddr_known: true,
            suspect: false,
            must: BTreeSet::new(),
            may: BTreeSet::new(),
        }
    }

    fn step(&mut self, op: Op, trouble: Trouble) -> u64 {
        match op {
            Op::Map { at, from, count, space, owner, prot, fit } => {
                let space = usize::from(space) % 2;
                let user = Pages { space, first: from.into(), count: count.into() };
                let new = self.new_mapping(user, owner, prot);
                self.map(place(at, self.model.g), new, fit, trouble)
            }
            Op::MapLarge { at, count, owner } => {
                let user = Pages { space: 0, first: LARGE, count: count.into() };
                let new = self.new_mapping(user, owner, PROT);
                let first = (1 << (31 - self.model.g)) + [0, 0, 1, 512][usize::from(at) % 4];
                self.map(first, new, Fit::Aligned, trouble)
            }
            Op::Unmap { pages, report } => {
                let pages = match report {
                    Report::Nothing => self.select(pages),
                    Report::Dirty => self.select_few(pages),
                };
                pages.map_or(0, |pages| self.unmap(pages, report, trouble))
            }
            Op::UnmapAll => self.unmap_all(trouble),
            Op::Attach { mut kind } => {
                if self.model.g == 12 {
                    let n = usize::from(kind.format) % views::FORMATS_4K.len();
                    kind.format = views::FORMATS_4K[n];
                }
                self.attach(kind, trouble)
            }
            Op::Detach { n } => self.detach(n, trouble),
            Op::Invalidate { pages } => {
                let pages = self.select(pages);
                pages.map_or(0, |pages| self.invalidate(Some(pages), trouble))
            }
            Op::InvalidateAll => self.invalidate(None, trouble),
            Op::Update { n, space, owner } => self.moves(n, space, owner, trouble),
            Op::Start | Op::Stop => self.tracks(op, trouble),
            Op::Get { pages, how } => {
                let pages = self.select_few(pages);
                pages.map_or(0, |pages| self.get(pages, how, trouble))
            }
            Op::Device { n, page, domain } => self.device_writes(n, page, domain),
            Op::Write { n, page } => self.writes(n, page, trouble),
            Op::Read { n, page } => self.reads(n, page, trouble),
            Op::AttachEmulated => self.attach_emulated(),
            Op::DetachEmulated => self.detach_emulated(),
            Op::Pin { n, page, count } => self.pin(n, page, count, trouble),
            Op::Unpin { n } => self.unpin(n),
            Op::Revoke { space, from, count } => {
                let (first, pages) = BARS[usize::from(from) % BARS.len()];
                let from = u64::from(from) / 2 % pages;
                let part = (first + from, u64::from(count).min(pages - from));
                self.revoke(usize::from(space) % 2, part, trouble);
                0
            }
            Op::Plug { space } => {
                let space = usize::from(space) % 2;
                for bar in 0..BARS.len() {
                    self.plug(space, bar);
                    self.model.users[space].extend(bar_pages(bar, self.model.g));
                }
                0
            }
        }
    }
}

/// Runs a script. Returns what can be seen after each step.
fn run<const BATCH: usize>(script: &Script) -> Vec<Vec<u64>> {
    let mut world = World::<BATCH>::new(script);
    let mut all = Vec::new();
    for &(op, trouble) in &script.steps {
        let outcome = world.step(op, trouble);
        let mut seen = world.check();
        seen.push(outcome);
        all.push(seen);
    }
    all
}

fn property(troubles: Troubles, test: impl Fn(&Script)) {
    let count = std::env::var("DMASPAN_RANDOM").map_or(FEW, |count| count.parse().unwrap());
    let config = Config { failure_persistence: None, ..Config::with_cases(count) };
    // The same sequences every time; more of them begin with these.
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&script(troubles), |script| {
        test(&script);
        Ok(())
    });
    result.unwrap_or_else(|failed| panic!("{failed}"));
}

#[test]
fn everything_is_as_a_map_of_pages_says_whatever_fails() {
    property(Troubles::Any, |script| {
        run::<1>(script);
        run::<3>(script);
        run::<512>(script);
    });
}

#[test]
fn nothing_depends_on_the_size_of_batches() {
    property(Troubles::OfAnyBatch, |script| {
        let expected = run::<512>(script);
        for found in [run::<1>(script), run::<2>(script), run::<3>(script)] {
            let steps = expected.iter().zip(&found).zip(&script.steps);
            for ((expected, found), (op, _)) in steps {
                assert_eq!(found, expected, "{op:?}");
            }
        }
    });
}

/// What hardware keeps that forgets one size too few is found: a frame loses its pin while a device
/// reaches it.
#[test]
fn a_size_of_leaves_that_an_unmap_loses_is_found() {
    for planted in [Planted::IgnoreSmallest, Planted::IgnoreLargest] {
        let found = std::thread::spawn(move || {
            PLANTED.set(planted);
            property(Troubles::OfAnyBatch, |script| drop(run::<512>(script)));
        });
        let report = found.join().expect_err("nobody noticed");
        let report = report.downcast_ref::<String>().expect("a report");
        assert!(report.contains("an IOTLB has"), "{planted:?}: {report}");
    }
}
