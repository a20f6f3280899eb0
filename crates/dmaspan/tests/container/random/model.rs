//! The model of a container: a map of pages, and the rules of VFIO.

use std::collections::{BTreeMap, BTreeSet};

use dmaspan::account::Counting;
use dmaspan::container::Version;
use dmaspan::{Errno, Prot};

use super::views::{Facts, Kind};

/// Mappings that there may be.
pub(crate) const MAX_MAPPINGS: usize = 10;
/// Owners and spaces.
pub(crate) const OWNERS: usize = 2;

/// What is behind a page of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    Memory(u64),
    ReadOnly(u64),
    Device(u64),
    Hole,
}

impl Behind {
    pub(crate) fn memory(self) -> Option<u64> {
        match self {
            Self::Memory(paddr) | Self::ReadOnly(paddr) => Some(paddr),
            Self::Device(_) | Self::Hole => None,
        }
    }

    pub(crate) fn paddr(self) -> Option<u64> {
        match self {
            Self::Device(paddr) => Some(paddr),
            other => other.memory(),
        }
    }
}

/// Pages of a user: where they begin in which space, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    pub(crate) space: usize,
    pub(crate) first: u64,
    pub(crate) count: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub(crate) user: Pages,
    pub(crate) owner: usize,
    pub(crate) prot: Prot,
    /// What is pinned and mapped, page by page: holes where devices were taken away.
    pub(crate) pinned: Option<Vec<Behind>>,
    pub(crate) vaddr_known: bool,
    /// Hardware that did not answer may use it: it may or may not be there for ever.
    pub(crate) suspect: bool,
    /// Pages that must be reported as written, and those that may be.
    pub(crate) must: BTreeSet<u64>,
    pub(crate) may: BTreeSet<u64>,
}

impl Mapped {
    pub(crate) fn mark_all(&mut self) {
        self.may = (0..self.user.count).collect();
    }

    /// Memory that is pinned: number of the page and frame.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (u64, u64)> {
        let pinned = self.pinned.as_deref().unwrap_or_default();
        (0..).zip(pinned).filter_map(|(n, behind)| Some((n, behind.memory()?)))
    }
}

/// What a mapping was that hardware may use for ever.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) was: Mapped,
    /// Whether all of it stays charged, as after an unmap.
    pub(crate) whole: bool,
}

/// What an emulated device has pinned.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// The IOVAs, in pages.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// For each page its owner, where it is in a space, and what is there.
    pub(crate) pages: Vec<(usize, (usize, u64), Behind)>,
    /// Whether domains had charged each page when it was pinned.
    pub(crate) charged: Vec<bool>,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) g: u32,
    pub(crate) version: Version,
    pub(crate) counting: Counting,
    /// In pages.
    pub(crate) limit: u64,
    pub(crate) users: Vec<BTreeMap<u64, Behind>>,
    /// By first page.
    pub(crate) mapped: BTreeMap<u64, Mapped>,
    pub(crate) gone: BTreeMap<u64, Gone>,
    pub(crate) domains: Vec<Facts>,
    pub(crate) tracking: bool,
    pub(crate) held: Vec<Held>,
    pub(crate) emulated: bool,
}

/// For what an operation may be refused; for nothing where it must succeed.
pub(crate) type Refusals = Vec<Errno>;

impl Model {
    pub(crate) fn behind(&self, user: Pages) -> Vec<Behind> {
        let at = |page| self.users[user.space].get(&page).copied().unwrap_or(Behind::Hole);
        (user.first..user.first + user.count).map(at).collect()
    }

    /// What all domains translate and no device has reserved, piece by piece of the space.
    pub(crate) fn iova_ranges(&self) -> Vec<(u64, u64)> {
        let mut cuts: BTreeSet<u64> = [0].into();
        let mut cut = |start: u64, last: u64| {
            cuts.insert(start);
            cuts.extend(last.checked_add(1));
        };
        for facts in &self.domains {
            cut(facts.aperture.start().get(), facts.aperture.last().get());
            facts.reserved.iter().for_each(|&(start, last)| cut(start, last));
        }
        let free = |at: u64| {
            let inside = |facts: &Facts| facts.aperture.contains(dmaspan::Iova::new(at));
            let taken = |facts: &Facts| {
                facts.reserved.is_some_and(|(start, last)| (start..=last).contains(&at))
            };
            self.domains.iter().all(|facts| inside(facts) && !taken(facts))
        };
        let cuts: Vec<u64> = cuts.into_iter().collect();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (n, &start) in cuts.iter().enumerate() {
            let last = cuts.get(n + 1).map_or(u64::MAX, |next| next - 1);
            match ranges.last_mut() {
                _ if !free(start) => {}
                Some((_, end)) if end.checked_add(1) == Some(start) => *end = last,
                _ => ranges.push((start, last)),
            }
        }
        ranges
    }

    /// Page sizes as users see them.
    pub(crate) fn page_sizes(&self) -> u64 {
        let all = self.domains.iter().fold(u64::MAX, |all, facts| all & facts.page_sizes);
        let page = 1 << self.g;
        let visible = all & !(page - 1);
        if all & (page - 1) != 0 { visible | page } else { visible }
    }

    /// What overlaps pages, in order: its first page, how many, and whether it is gone.
    pub(crate) fn overlapping(&self, first: u64, count: u64) -> Vec<(u64, u64, bool)> {
        let mapped = self.mapped.iter().map(|(&at, mapped)| (at, mapped.user.count, false));
        let gone = self.gone.iter().map(|(&at, gone)| (at, gone.was.user.count, true));
        let mut all: Vec<_> = mapped.chain(gone).collect();
        all.retain(|&(at, pages, _)| at < first + count && first < at + pages);
        all.sort_unstable();
        all
    }

    /// Pins by frame, those that there are and those that there may be besides.
    pub(crate) fn pins(&self) -> (BTreeMap<u64, u32>, BTreeMap<u64, u32>) {
        let (mut pins, mut more) = (BTreeMap::new(), BTreeMap::new());
        let frames = self.mapped.values().flat_map(Mapped::frames).map(|(_, frame)| frame);
        let held = self.held.iter().flat_map(|held| &held.pages);
        let held = held.filter_map(|(_, _, behind)| behind.memory());
        frames.chain(held).for_each(|frame| *pins.entry(frame).or_default() += 1);
        for (_, frame) in self.gone.values().flat_map(|gone| gone.was.frames()) {
            *more.entry(frame).or_default() += 1;
        }
        (pins, more)
    }

    /// Pages charged to an owner, at least and at most.
    pub(crate) fn charged(&self, owner: usize) -> (u64, u64) {
        let (whole, part): (Vec<_>, Vec<_>) = self.gone.values().partition(|gone| gone.whole);
        let all = self.mapped.values().chain(whole.into_iter().map(|gone| &gone.was));
        let least = self.count(owner, all);
        // What was lost while it was mapped has what was charged by then, as an estimate.
        let part = part.iter().filter(|gone| gone.was.owner == owner);
        (least, least + part.map(|gone| gone.was.frames().count() as u64).sum::<u64>())
    }

    fn count<'m>(&self, owner: usize, all: impl Iterator<Item = &'m Mapped>) -> u64 {
        let pages = all.filter(|mapped| mapped.owner == owner).flat_map(|mapped| {
            let Pages { space, first, .. } = mapped.user;
            mapped.frames().map(move |(n, frame)| ((space, first + n), frame))
        });
        let mappings = self.counting == Counting::Mappings;
        let held = self.held.iter().flat_map(|held| held.pages.iter().zip(&held.charged));
        let held = held.filter(|((by, _, _), charged)| *by == owner && !(mappings && **charged));
        let held = held.filter_map(|((_, user, behind), _)| Some((*user, behind.memory()?)));
        let pages = pages.chain(held);
        let count = match self.counting {
            Counting::Ranges => pages.map(|(user, _)| user).collect::<BTreeSet<_>>().len(),
            Counting::Mappings => pages.count(),
            Counting::Frames => pages.map(|(_, frame)| frame).collect::<BTreeSet<_>>().len(),
        };
        count as u64
    }

    /// Why pinning a mapping that is not pinned may be refused, others being pinned already.
    pub(crate) fn refusals_of_pin(&self, first: u64) -> Refusals {
        let mapped = &self.mapped[&first];
        let mut refusals = Refusals::new();
        let writes = mapped.prot.contains(Prot::WRITE);
        let bad = |behind: &Behind| match behind {
            Behind::Hole => true,
            Behind::ReadOnly(_) => writes,
            Behind::Memory(_) | Behind::Device(_) => false,
        };
        let behind = self.behind(mapped.user);
        if behind.iter().any(bad) {
            refusals.push(Errno::EFAULT);
        }
        let mut with = self.clone();
        with.mapped.get_mut(&first).unwrap().pinned = Some(behind);
        if with.charged(mapped.owner).1 > self.limit {
            refusals.push(Errno::ENOMEM);
        }
        refusals
    }

    /// Why a map may be refused, by the rules in the order of `vfio_dma_do_map`.
    pub(crate) fn refusals_of_map(&self, first: u64, new: &Mapped) -> Refusals {
        let count = new.user.count;
        if let Some(&(_, _, gone)) = self.overlapping(first, count).first() {
            return vec![if gone { Errno::EBUSY } else { Errno::EEXIST }];
        }
        if self.mapped.len() + self.gone.len() >= MAX_MAPPINGS {
            return vec![Errno::ENOSPC];
        }
        let (start, last) = (first << self.g, ((first + count) << self.g) - 1);
        let covers = |&(from, to): &(u64, u64)| from <= start && last <= to;
        if !self.iova_ranges().iter().any(covers) {
            return vec![Errno::EINVAL];
        }
        if self.domains.is_empty() {
            return Refusals::new();
        }
        let mut with = self.clone();
        with.mapped.insert(first, new.clone());
        with.refusals_of_pin(first)
    }

    /// What an unmap of pages takes, or why it is refused.
    pub(crate) fn reached(&self, first: u64, count: u64) -> Result<Vec<u64>, Errno> {
        let all = self.overlapping(first, count);
        let live = all.iter().filter(|(_, _, gone)| !gone);
        match self.version {
            Version::V1 if all.first().is_some_and(|&(at, _, _)| at < first) => Ok(Vec::new()),
            Version::V1 => Ok(live.map(|&(at, _, _)| at).filter(|at| *at >= first).collect()),
            Version::V2 => {
                let whole = |&&(at, pages, _): &&(u64, u64, bool)| {
                    first <= at && at + pages <= first + count
                };
                if live.clone().all(|found| whole(&found)) {
                    Ok(live.map(|&(at, _, _)| at).collect())
                } else {
                    Err(Errno::EINVAL)
                }
            }
        }
    }

    /// Why attaching may be refused.
    pub(crate) fn refusals_of_attach(&self, facts: Facts, kind: Kind) -> Refusals {
        if !kind.isolated {
            return vec![Errno::EPERM];
        }
        if self.mapped.values().any(|mapped| !mapped.vaddr_known) {
            return vec![Errno::EBUSY];
        }
        let mut with = self.clone();
        with.domains.push(facts);
        let ranges = with.iova_ranges();
        let misfits = |(&first, mapped): (&u64, &Mapped)| {
            let (start, end) = (first << self.g, (first + mapped.user.count) << self.g);
            !ranges.iter().any(|&(from, to)| from <= start && end - 1 <= to)
        };
        if with.page_sizes() == 0 || ranges.is_empty() || self.mapped.iter().any(misfits) {
            return vec![Errno::EINVAL];
        }
        if !self.domains.is_empty() {
            return Refusals::new();
        }
        let mut refusals = Refusals::new();
        let firsts: Vec<u64> = self.mapped.keys().copied().collect();
        for first in firsts {
            refusals.extend(with.refusals_of_pin(first));
            with.pin(first);
        }
        refusals
    }

    pub(crate) fn pin(&mut self, first: u64) {
        let behind = self.behind(self.mapped[&first].user);
        self.mapped.get_mut(&first).unwrap().pinned = Some(behind);
    }

    /// Whether devices' writes are not told apart: everything in a domain is reported.
    pub(crate) fn assumes_written(&self) -> bool {
        !self.domains.iter().all(|facts| facts.marks)
    }
}
