//! The operations and what each must leave behind.

use dmaspan::io_pgtable::{self, Format, Gap};
use dmaspan::iommu::Error;
use dmaspan::pin::{Kind, SpanSink};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf, lg2};
use dmaspan_sim::model::Coverage;
use dmaspan_sim::walker::{Access, Walker as _};

use crate::judge::engine::{COPIES, Disagreement, Judge, Judged, agree};
use crate::judge::rig::Rig;

/// What is done to domains and streams.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Map {
        side: usize,
        iova: Iova,
        spans: Vec<Span>,
        prot: Prot,
    },
    /// Several ranges, under one sync.
    Unmap {
        side: usize,
        ranges: Vec<IovaRange>,
    },
    Protect {
        side: usize,
        range: IovaRange,
        prot: Prot,
    },
    Split {
        side: usize,
        at: Iova,
    },
    Switch {
        stream: usize,
        to: Option<usize>,
    },
    /// Only DMA.
    Probe,
}

/// DMA shows what came of as many ranges of an operation.
const MOST_SHOWN: usize = 3;
/// The whole state is compared after as many operations.
const ALL_COMPARED: u64 = 500;

impl<R: Rig> Judge<R> {
    /// One operation, with DMA before and after it.
    pub(crate) fn step(&mut self) -> Judged {
        let operation = self.choose();
        self.note(&operation);
        // What is used before may be cached, and must not be used after.
        let places = self.places(&operation);
        self.probe_all(&places)?;
        match operation {
            Operation::Map { side, iova, spans, prot } => {
                self.map(side, iova, &spans, prot)?;
                self.spoil(side, &places);
            }
            Operation::Unmap { side, ranges } => self.unmap(side, &ranges)?,
            Operation::Protect { side, range, prot } => self.protect(side, range, prot)?,
            Operation::Split { side, at } => self.split(side, at)?,
            Operation::Switch { stream, to } => self.attach(stream, to)?,
            Operation::Probe => {}
        }
        self.probe_all(&places)?;
        if self.done % ALL_COMPARED == ALL_COMPARED - 1 {
            self.compare_all()?;
        }
        self.heard_all()
    }

    fn choose(&mut self) -> Operation {
        if let Some(map) = self.next.take() {
            return map;
        }
        let side = self.choice(2);
        match self.rng.below(16) {
            0..5 => {
                let map = self.choose_map(side);
                self.make_room(map)
            }
            5..9 => {
                let count = 1 + self.rng.below(3);
                let mut ranges = vec![self.mapped(side)];
                for _ in 1..count {
                    let range = self.mapped(side);
                    if ranges.iter().all(|other| other.intersection(range).is_none()) {
                        ranges.push(range);
                    }
                }
                Operation::Unmap { side, ranges }
            }
            9..11 => Operation::Protect { side, range: self.mapped(side), prot: self.prot() },
            11 => Operation::Split { side, at: self.mapped(side).start() },
            12..15 => {
                let stream = self.choice(self.streams.len());
                let to = [None, Some(0), Some(1)][self.choice(3)];
                Operation::Switch { stream, to }
            }
            _ => Operation::Probe,
        }
    }

    pub(crate) fn choice(&mut self, of: usize) -> usize {
        self.rng.index(of)
    }

    fn prot(&mut self) -> Prot {
        [Prot::READ_WRITE, Prot::READ, Prot::READ_WRITE | Prot::CACHE][self.choice(3)]
    }

    fn window(&mut self) -> IovaRange {
        let which = self.choice(self.windows.len());
        self.windows[which]
    }

    /// A place for a run of `bytes`, aligned to `2^lg2`.
    fn place(&mut self, bytes: u64, lg2: u32) -> Iova {
        let window = self.window();
        let room = (window.len_less_one() - (bytes - 1)) >> lg2;
        // Often near a border of tables, where leaves and tables change.
        let at = match self.rng.below(3) {
            0 => self.rng.below(4) * (room / 4),
            _ => self.rng.below(room + 1),
        };
        Iova::new(window.start().get() + (at << lg2))
    }

    /// Memory for a run of `bytes` at `iova`, of which large leaves can be made if `alike`.
    fn memory_for(&mut self, iova: u64, bytes: u64, lg2: u32) -> PhysAddr {
        let memory = self.memory.span();
        let granule = R::Format::GRANULE_LG2;
        let alike = self.rng.below(3) > 0;
        let room = memory.len() - bytes;
        let offset = match alike {
            // The same place in a block as the address.
            true => {
                let within = iova & lg2::mask(lg2);
                let blocks = room.saturating_sub(within) >> lg2;
                (within + (self.rng.below(blocks + 1) << lg2)).min(room)
            }
            false => self.rng.below((room >> granule) + 1) << granule,
        };
        memory.paddr().wrapping_add(offset)
    }

    fn choose_map(&mut self, side: usize) -> Operation {
        let granule = R::Format::GRANULE_LG2;
        let block = self.choice(self.sizes.len());
        let block = self.sizes[block];
        let table = 1u64 << R::Format::LG2_ENTRIES;
        let (bytes, align) = match self.rng.below(4) {
            0 => (lg2::size(block), block),
            1 => ((table - 4 + self.rng.below(9)) << granule, granule),
            _ => ((1 + self.rng.below(40)) << granule, granule),
        };
        let iova = self.place(bytes, align);
        let pieces = 1 + self.rng.below(7).saturating_sub(3);
        let mut spans = Vec::new();
        let mut done = 0;
        while done < bytes {
            let left = bytes - done;
            let len = match spans.len() as u64 + 1 >= pieces {
                true => left,
                false => (1 + self.rng.below(left >> granule)) << granule,
            };
            let paddr = self.memory_for(iova.get() + done, len, block);
            spans.push(Span::new(paddr, len).expect("it is not empty"));
            done += len;
        }
        Operation::Map { side, iova, spans, prot: self.prot() }
    }

    /// Often what is in the way of a mapping is unmapped before: no large leaf would ever be made.
    fn make_room(&mut self, map: Operation) -> Operation {
        let Operation::Map { side, iova, spans, .. } = &map else { return map };
        let bytes = spans.iter().map(|span| span.len()).sum();
        let range = IovaRange::from_len(*iova, bytes).expect("it is in the window");
        let runs = self.sides[*side].model.runs(range);
        if runs.is_empty() || self.rng.below(2) == 0 {
            return map;
        }
        let ranges = runs.into_iter().map(|run| run.iova).collect();
        let unmap = Operation::Unmap { side: *side, ranges };
        self.next = Some(map);
        unmap
    }

    /// A range, mostly one that is mapped: a whole run of the model or some of it.
    fn mapped(&mut self, side: usize) -> IovaRange {
        let granule = R::Format::GRANULE_LG2;
        let window = self.window();
        let runs = self.sides[side].model.runs(window);
        if runs.is_empty() || self.rng.below(10) == 0 {
            let bytes = (1 + self.rng.below(20)) << granule;
            let start = self.place(bytes, granule);
            return IovaRange::from_len(start, bytes).expect("it is in the window");
        }
        let run = runs[self.choice(runs.len())].iova;
        if self.rng.below(2) == 0 {
            return run;
        }
        let granules = (run.len_less_one() >> granule) + 1;
        let from = self.rng.below(granules);
        let count = 1 + self.rng.below(granules - from);
        let start = run.start().wrapping_add(from << granule);
        IovaRange::from_len(start, count << granule).expect("it is in the run")
    }

    /// Where DMA shows what an operation did.
    fn places(&mut self, operation: &Operation) -> Vec<Iova> {
        let mut ranges: Vec<IovaRange> = match operation {
            Operation::Map { iova, spans, .. } => {
                let bytes = spans.iter().map(|span| span.len()).sum();
                IovaRange::from_len(*iova, bytes).into_iter().collect()
            }
            Operation::Unmap { ranges, .. } => ranges.clone(),
            Operation::Protect { range, .. } => vec![*range],
            Operation::Split { at, .. } => vec![IovaRange::point(*at)],
            Operation::Switch { .. } | Operation::Probe => Vec::new(),
        };
        while ranges.len() > MOST_SHOWN {
            let one = self.choice(ranges.len());
            ranges.swap_remove(one);
        }
        let mut places = Vec::new();
        for range in ranges {
            let inside = self.rng.below(range.len_less_one().max(1));
            places.push(range.start().wrapping_add(inside));
            match self.rng.below(4) {
                0 => places.push(range.start()),
                1 => places.push(range.last()),
                2 => places.extend(range.last().checked_add(1)),
                _ => places.extend(range.start().get().checked_sub(1).map(Iova::new)),
            }
        }
        let warm = self.choice(self.warm.len().max(1));
        if let Some(&iova) = self.warm.get(warm) {
            places.push(iova);
        }
        for place in &mut places {
            *place = Iova::new(lg2::align_down(place.get(), 2));
        }
        places.retain(|&place| self.aperture.contains(place));
        places
    }

    /// Spoils the leaves at these places, if a bug is planted there.
    fn spoil(&self, side: usize, places: &[Iova]) {
        let Some(spoil) = self.spoil else { return };
        let side = &self.sides[side];
        for &iova in places.iter().filter(|&&iova| side.model.lookup(iova).is_some()) {
            let walked = self.rig.walker(&side.domain).walk(&self.tables, iova, Access::Read);
            if let Ok(leaf) = walked {
                spoil(self.rig.pci().machine().ram(), &leaf.step);
            }
        }
    }

    #[expect(unsafe_code, reason = "devices are let at the judge's memory")]
    fn map(&mut self, side: usize, iova: Iova, spans: &[Span], prot: Prot) -> Judged {
        let granted = self.granted(prot);
        let Self { sides, .. } = self;
        let side = &mut sides[side];
        // SAFETY: 1. One thread uses the domains. 2. The memory is reached by atomics alone, and
        // lives longer than the streams.
        let mapped = unsafe { side.domain.map_spans(iova, spans, prot) };
        let expected = side.model.map(iova, spans, granted);
        match mapped.map_err(|failed| failed.error) {
            Ok(()) => agree!(expected.is_ok(), "mapped over what is mapped: {expected:?}"),
            Err(Error::Table(io_pgtable::Error::Occupied { .. })) => {
                agree!(expected.is_err(), "refused as occupied, and it is free");
            }
            Err(error) => return Err(Disagreement(format!("not mapped: {error}"))),
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "the judge owns all addresses")]
    fn unmap(&mut self, side: usize, ranges: &[IovaRange]) -> Judged {
        let side = &mut self.sides[side];
        let mut gather = side.domain.gather();
        for &range in ranges {
            let covered = side.model.covered(range);
            let mut room = SpanBuf::room::<4>();
            let mut buf = SpanBuf::new(&mut room);
            let mut spans: Vec<Span> = Vec::new();
            // SAFETY: one thread uses the domains.
            let unmapped = unsafe { side.domain.unmap(range, &mut buf) };
            let mut unsynced = match unmapped {
                Ok(unsynced) => unsynced,
                Err(Error::Table(io_pgtable::Error::Hole { .. })) => {
                    agree!(covered != Coverage::All, "a hole in {range}, which has none");
                    continue;
                }
                Err(Error::Table(io_pgtable::Error::WouldSplit { leaf })) => {
                    agree!(!range.covers(leaf), "{leaf} would be split, which is in {range}");
                    continue;
                }
                Err(error) => return Err(Disagreement(format!("not unmapped: {error}"))),
            };
            loop {
                for &span in buf.spans() {
                    SpanSink::push(&mut spans, span, Kind::Memory).expect("a vector has room");
                }
                buf.clear();
                let (more, rest) = unsynced.into_gather();
                // SAFETY: both are of this domain.
                unsafe { side.domain.merge(&mut gather, more) };
                let Some(rest) = rest else { break };
                // SAFETY: one thread uses the domains.
                unsynced = unsafe { side.domain.resume(rest, &mut buf) };
            }
            agree!(covered == Coverage::All, "{range} was unmapped, and has holes");
            let expected = side.model.unmap(range);
            agree!(spans == expected, "{range} gave {spans:?}, and was {expected:?}");
        }
        // SAFETY: the gather is of this domain.
        let synced = unsafe { side.domain.sync(gather) };
        synced.map(drop).map_err(|failed| Disagreement(format!("not synced: {failed:?}")))
    }

    #[expect(unsafe_code, reason = "the judge owns all addresses")]
    fn protect(&mut self, side: usize, range: IovaRange, prot: Prot) -> Judged {
        let granted = self.granted(prot);
        let side = &mut self.sides[side];
        let covered = side.model.covered(range);
        // SAFETY: 1. One thread uses the domains. 2. The memory may be written.
        match unsafe { side.domain.protect(range, prot, Gap::Accept) } {
            Ok(()) => {
                agree!(covered == Coverage::All, "{range} was protected, and has holes");
                for run in side.model.runs(range) {
                    let spans = side.model.unmap(run.iova);
                    let again = side.model.map(run.iova.start(), &spans, granted);
                    agree!(again.is_ok(), "the model refuses: {again:?}");
                }
            }
            Err(Error::Table(io_pgtable::Error::Hole { .. })) => {
                agree!(covered != Coverage::All, "a hole in {range}, which has none");
            }
            Err(Error::Table(io_pgtable::Error::WouldSplit { leaf })) => {
                agree!(!range.covers(leaf), "{leaf} would be split, which is in {range}");
            }
            Err(error) => return Err(Disagreement(format!("not protected: {error}"))),
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "the judge owns all addresses")]
    fn split(&mut self, side: usize, at: Iova) -> Judged {
        let side = &mut self.sides[side];
        // SAFETY: one thread uses the domains.
        match unsafe { side.domain.split(at, Gap::Accept) } {
            Ok(()) => Ok(()),
            Err(Error::Table(io_pgtable::Error::Hole { .. })) => {
                agree!(side.model.lookup(at).is_none(), "a hole at {at}, which is mapped");
                Ok(())
            }
            Err(error) => Err(Disagreement(format!("not split: {error}"))),
        }
    }

    /// Each run of the models, and the addresses around it, by the walker and by a device.
    fn compare_all(&mut self) -> Judged {
        for side in 0..self.sides.len() {
            self.attach(side, Some(side))?;
            self.attach(COPIES, Some(side))?;
            for window in self.windows.clone() {
                let runs = self.sides[side].model.runs(window);
                for run in runs.into_iter().map(|run| run.iova) {
                    let word = |iova: u64| Iova::new(lg2::align_down(iova, 2));
                    let (first, last) = (run.start().get(), run.last().get());
                    let around = [first.checked_sub(1), last.checked_add(1)];
                    for iova in around.into_iter().flatten().chain([first, last]).map(word) {
                        if self.aperture.contains(iova) {
                            self.write_at(side, iova)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
