//! Random maps, unmaps, revocations, faults and pins against a flat list of pages.

use std::collections::BTreeMap;

use super::spaces::Kinds;
use super::*;
use crate::rng::Rng;
use crate::walker::Access;

/// Pages of the space that is played with: four leaves of 2M.
const PAGES: u64 = 2048;
const BAR: u64 = 1 << 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Mapped { paddr: u64, kind: Kind, rights: Rights },
    Revoked,
}

struct Play {
    rng: Rng,
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    pinner: SimPinner,
    folios: Vec<Span>,
    pages: BTreeMap<u64, Page>,
}

impl Play {
    fn new(seed: u64) -> Self {
        let books = if seed.is_multiple_of(2) { Books::Exact } else { Books::Folios };
        let memory = SimMemory::with_books(PhysAddr::new(0), 32 << 20, 12, books).unwrap();
        let memory = Arc::new(memory);
        let folios = memory.allocate_folios(&[9, 9, 4, 4, 0, 0, 0, 5, 8, 0], seed).unwrap();
        let holes = if seed.is_multiple_of(3) { Holes::FoundOnTheWay } else { Holes::FoundFirst };
        Self {
            rng: Rng::new(seed),
            space: Arc::new(SimSpace::new(Arc::clone(&memory))),
            pinner: SimPinner::new(Arc::clone(&memory)).with_holes(holes),
            memory,
            folios,
            pages: BTreeMap::new(),
        }
    }

    /// Large pieces are as aligned as they may be half of the time.
    fn place(&mut self, pages: u64) -> u64 {
        let align = [1, 1, 16, 512][usize::try_from(self.rng.below(4)).unwrap()];
        self.rng.below(PAGES - pages.min(PAGES - 1)) / align * align
    }

    fn range(&mut self) -> (u64, u64) {
        let below = 1 << self.rng.below(12);
        let pages = 1 + self.rng.below(below);
        (self.place(pages), pages)
    }

    fn options(&mut self) -> MapOptions {
        MapOptions {
            rights: [Rights::ReadOnly, Rights::ReadWrite][usize::from(self.rng.below(4) > 0)],
            population: [Population::Lazy, Population::Eager][usize::from(self.rng.below(2) > 0)],
            max_leaf_lg2: [63, 63, 21, 16, 12][usize::try_from(self.rng.below(5)).unwrap()],
        }
    }

    fn write_down(&mut self, page: u64, span: Span, kind: Kind, rights: Rights) {
        for number in 0..span.len() >> 12 {
            let paddr = span.paddr().get() + (number << 12);
            self.pages.insert(page + number, Page::Mapped { paddr, kind, rights });
        }
    }

    fn map(&mut self) {
        let options = self.options();
        let count = 1 + self.rng.below(4);
        let mut spans = Vec::new();
        for _ in 0..count {
            let folio = self.folios[usize::try_from(self.rng.below(10)).unwrap()];
            let skipped = self.rng.below(2) * self.rng.below(folio.len() >> 12);
            spans.push(folio.skip(skipped << 12).unwrap());
        }
        let total = spans.iter().map(|span| span.len() >> 12).sum();
        let mut page = self.place(total);
        self.space.map_with(UserAddr::new(page << 12), &spans, options).unwrap();
        for span in spans {
            self.write_down(page, span, Kind::Memory, options.rights);
            page += span.len() >> 12;
        }
    }

    fn map_device(&mut self) {
        let ((page, pages), options) = (self.range(), self.options());
        let offset = if self.rng.below(2) == 0 { page } else { self.rng.below(1024) };
        let bar = Span::new(PhysAddr::new(BAR + (offset << 12)), pages << 12).unwrap();
        self.space.map_device_with(UserAddr::new(page << 12), bar, options).unwrap();
        self.write_down(page, bar, Kind::Mmio, options.rights);
    }

    fn take_away(&mut self, fate: Option<Page>) {
        let (page, pages) = self.range();
        let range = user(page << 12, pages << 12);
        match fate {
            None => self.space.unmap(range),
            Some(_) => self.space.zap(range),
        }
        for number in page..page + pages {
            if self.pages.remove(&number).is_some()
                && let Some(revoked) = fate
            {
                self.pages.insert(number, revoked);
            }
        }
    }

    fn fault(&mut self) {
        let page = self.rng.below(PAGES);
        let access = [Access::Read, Access::Write][usize::from(self.rng.below(2) > 0)];
        let at = UserAddr::new((page << 12) + self.rng.below(0x1000));
        let refused = self.refusal(at, access);
        assert_eq!(self.space.fault(at, access).err(), refused);
        if refused.is_none() {
            let Some(Page::Mapped { paddr, kind, .. }) = self.pages.get(&page) else { panic!() };
            let found = self.space.frame_at(at).map(|(paddr, _, kind)| (paddr.get(), kind));
            assert_eq!(found, Some((paddr + at.get() % 0x1000, *kind)));
        }
    }

    fn refusal(&self, at: UserAddr, access: Access) -> Option<FaultError> {
        match (self.pages.get(&(at.get() >> 12)), access) {
            (None, _) => Some(FaultError::Hole { at }),
            (Some(Page::Revoked), _) => Some(FaultError::Revoked { at }),
            (Some(Page::Mapped { rights: Rights::ReadOnly, .. }), Access::Write) => {
                Some(FaultError::ReadOnly { at })
            }
            (Some(Page::Mapped { .. }), _) => None,
        }
    }

    /// What a pin should push, and the first address that it may not touch.
    fn expected(
        &self,
        range: UserRange,
        access: Access,
    ) -> (Vec<(Kind, Span)>, Option<FaultError>) {
        let mut pushed: Vec<(Kind, Span)> = Vec::new();
        let (mut next, last) = (range.start().get(), range.last().get());
        while next <= last {
            if let Some(refused) = self.refusal(UserAddr::new(next), access) {
                return (pushed, Some(refused));
            }
            let Some(Page::Mapped { paddr, kind, .. }) = self.pages.get(&(next >> 12)) else {
                panic!()
            };
            let end = last.min(next | 0xfff);
            let paddr = PhysAddr::new(paddr + next % 0x1000);
            let span = Span::new(paddr, end - next + 1).unwrap();
            let before = pushed.last_mut().filter(|(before, _)| before == kind);
            match before.and_then(|(_, before)| Some((before.join(span)?, before))) {
                Some((joined, before)) => *before = joined,
                None => pushed.push((*kind, span)),
            }
            next = end + 1;
        }
        (pushed, None)
    }

    fn pin(&mut self) {
        let (page, pages) = self.range();
        // Somewhere in the first and the last page.
        let start = (page << 12) + self.rng.below(0x1000);
        let last = ((page + pages - 1) << 12) + self.rng.below(0x1000);
        let range = user(start, last.saturating_sub(start) + 1);
        let prot = [Prot::READ, Prot::READ_WRITE][usize::from(self.rng.below(2) > 0)];
        let access = if prot == Prot::READ { Access::Read } else { Access::Write };
        let (expected, refused) = self.expected(range, access);
        let lookups = self.pinner.lookups();
        let mut pushed = Kinds(Vec::new());
        let pinned = match self.pinner.pin(&self.space, range, prot, &mut pushed) {
            Ok(pinned) => {
                assert_eq!(refused, None);
                assert_eq!(self.pinner.lookups() - lookups, self.leaves(range));
                Some(pinned)
            }
            Err(failed) => {
                let error = refused.map(|refused| SimPinError::new(range, refused));
                assert_eq!(Some(failed.error), error.map(PinError::Failed));
                failed.pin
            }
        };
        let Some(mut pinned) = pinned else {
            assert!(pushed.0.is_empty());
            return;
        };
        assert_eq!(pushed.0, expected);
        self.check_pins(&pushed.0);
        for (kind, span) in pushed.0.into_iter().rev() {
            let middle = self.rng.below(span.len());
            let low = Span::new(span.paddr(), middle).ok();
            for part in [span.skip(middle), low].into_iter().flatten() {
                self.pinner.unpin(promise(), &mut pinned, &[part], kind, Dirty::Clean);
            }
        }
        assert_eq!(pinned.bytes_left(), 0);
        self.pinner.release(promise(), pinned);
        assert_eq!((self.memory.pinned_frames(), self.memory.violations()), (0, vec![]));
    }

    fn check_pins(&self, pushed: &[(Kind, Span)]) {
        for (kind, span) in pushed {
            let pins = self.memory.pins(span.paddr());
            match kind {
                Kind::Memory => assert!(pins.is_some_and(|pins| pins > 0)),
                Kind::Mmio => assert_eq!(pins, None),
            }
        }
    }

    /// How many leaves map a range.
    fn leaves(&self, range: UserRange) -> u64 {
        let (mut next, mut leaves) = (range.start().get(), 0);
        while next <= range.last().get() {
            let (_, bytes, _) = self.space.frame_at(UserAddr::new(next)).unwrap();
            next = (next | (bytes - 1)) + 1;
            leaves += 1;
        }
        leaves
    }
}

#[test]
fn a_space_is_what_a_flat_list_of_pages_says() {
    for seed in 0..60 {
        let mut play = Play::new(seed);
        for _ in 0..150 {
            match play.rng.below(10) {
                0..=2 => play.map(),
                3 => play.map_device(),
                4 => play.take_away(None),
                5 => play.take_away(Some(Page::Revoked)),
                6 => play.fault(),
                _ => play.pin(),
            }
        }
    }
}
