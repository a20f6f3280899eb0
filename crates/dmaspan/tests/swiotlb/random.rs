//! Random histories of pools of all shapes, against a model.

use std::mem;

use dmaspan::swiotlb::{
    BouncedOf, Error, Fill, Growth, Lease, PoolConfig, PoolStats, SlotRequest, Wipe,
};
use dmaspan::{Direction, Span};
use proptest::prelude::*;

use crate::common::{original, span};
use crate::flat::{Flat, FlatRig, FlatSlot, Place, SOURCE, SOURCE_BYTES, part_mut, within};
use crate::model::Model;

/// A pool's shape.
#[derive(Clone, Debug)]
struct Shape {
    slot_lg2: u32,
    slots: Vec<u64>,
    /// In slots from 0; the highest of them ends with the address space.
    base: Option<u64>,
    areas: usize,
    wipe: Wipe,
    growth: Option<u64>,
}

#[derive(Clone, Debug)]
struct Step {
    kind: u8,
    place: (usize, usize),
    at: u64,
    len: u64,
    request: SlotRequest,
    reach: Option<u64>,
    pick: usize,
    part: (u64, u64),
}

fn shapes() -> impl Strategy<Value = Shape> {
    (6_u32..=16).prop_flat_map(|slot_lg2| {
        let most = ((1_u64 << 18) >> slot_lg2).min(700);
        (
            Just(slot_lg2),
            prop::collection::vec(1..=most, 1..=2),
            prop::option::of(0_u64..5000),
            1_usize..=8,
            prop_oneof![Just(Wipe::Never), Just(Wipe::Release)],
            prop::option::of(1..=most),
        )
            .prop_map(|(slot_lg2, slots, base, areas, wipe, growth)| Shape {
                slot_lg2,
                slots,
                base,
                areas,
                wipe,
                growth,
            })
    })
}

fn requests() -> impl Strategy<Value = SlotRequest> {
    let keep = prop_oneof![Just(0), Just(12), 0_u32..=16];
    let granule = prop_oneof![Just(0), Just(12), 0_u32..=17];
    let boundary = prop_oneof![Just(None), (6_u32..=20).prop_map(Some)];
    (keep, granule, boundary).prop_map(|(keep, granule, boundary)| SlotRequest {
        keep_bits: (1 << keep) - 1,
        granule: 1 << granule,
        last: u64::MAX,
        boundary: boundary.map(|lg2| 1 << lg2),
    })
}

fn steps() -> impl Strategy<Value = Step> {
    let len = prop_oneof![1_u64..=64, 1_u64..=8192, Just(4096_u64), 1_u64..=1 << 19];
    let at = prop_oneof![0_u64..1 << 19, (0_u64..128).prop_map(|page| page << 12)];
    let request = prop_oneof![Just(SlotRequest::default()), requests()];
    let reach = prop_oneof![3 => Just(None), 1 => (0_u64..1 << 18).prop_map(Some)];
    let place = (0_usize..9, 0_usize..3);
    (0_u8..24, place, at, len, request, reach, any::<usize>(), any::<(u64, u64)>()).prop_map(
        |(kind, place, at, len, request, reach, pick, part)| Step {
            kind,
            place,
            at,
            len,
            request,
            reach,
            pick,
            part,
        },
    )
}

enum Handle {
    Slot(FlatSlot),
    Bounced(BouncedOf<Place>),
    Lease(Lease<Flat, Place>),
}

/// What is out: the handle, its bytes, the whole slots, and the original.
struct Out {
    handle: Handle,
    data: Span,
    whole: Span,
    original: Span,
}

struct Runner {
    rig: FlatRig,
    model: Model,
    base: Vec<Span>,
    out: Vec<Out>,
    single: Vec<Span>,
    quarantined: u64,
    /// The most of each span that was held, and the most of all.
    high: (Vec<u64>, u64),
}

impl Runner {
    fn new(shape: &Shape) -> Self {
        let slot_bytes = 1 << shape.slot_lg2;
        let growth = shape.growth.map(|slots| Growth::new(slots * slot_bytes, 1 << 20));
        let config = PoolConfig { slot_bytes, areas: shape.areas, wipe: shape.wipe, growth };
        let mut at = shape.base.map_or_else(
            || 0_u64.wrapping_sub(shape.slots[0] * slot_bytes),
            |slots| slots * slot_bytes,
        );
        let mut base = Vec::new();
        for &slots in &shape.slots {
            base.push(span(at, slots * slot_bytes));
            at = (1 << 40) + slot_bytes;
        }
        let rig = FlatRig::new(base.clone(), config);
        let bytes = rig.memory.with(|state| state.bytes.clone());
        let model = Model { slot_bytes, spans: base.clone(), held: Vec::new(), bytes };
        let high = (vec![0; base.len()], 0);
        let (out, single) = (Vec::new(), Vec::new());
        Self { rig, model, base, out, single, quarantined: 0, high }
    }

    /// Writes somewhere, as the CPU or a device does.
    fn scribble(&mut self, at: Span, value: u64) {
        let byte = |n: u64| value.wrapping_mul(n + 3).to_le_bytes()[2];
        let bytes: Vec<_> = (0..at.len()).map(byte).collect();
        self.rig.memory.write(at.paddr().get(), &bytes);
        part_mut(&mut self.model.bytes, at).copy_from_slice(&bytes);
    }

    /// A slot is one, disjoint from the others.
    fn taken(&mut self, handle: Handle, data: Span, original: Span, request: &SlotRequest) {
        let pool = self
            .model
            .spans
            .iter()
            .any(|span| span.paddr() <= data.paddr() && data.last() <= span.last());
        let whole = if pool {
            assert_eq!(self.model.objection(data, original, request), None, "{data} {request:x?}");
            self.model.whole(data, request).unwrap()
        } else {
            assert!(!self.model.has_place(original, request), "{data} was not needed");
            let (start, len) = self.rig.memory.with(|state| {
                let (base, bytes) = state.bytes.last().unwrap();
                (*base, u64::try_from(bytes.len()).unwrap())
            });
            let single = span(start, len);
            self.model.add(single);
            let all = mem::replace(&mut self.model.spans, vec![single]);
            assert_eq!(self.model.objection(data, original, request), None, "{data} {request:x?}");
            self.model.spans = all;
            self.single.push(single);
            single
        };
        self.model.take(data, whole);
        self.out.push(Out { handle, data, whole, original });
    }

    /// A pool refuses only what has no place.
    fn refused(&mut self, error: Error, original: Span, request: &SlotRequest) {
        assert!(!self.model.has_place(original, request), "{error}: {original} {request:x?}");
        let held = mem::take(&mut self.model.held);
        let ever = self.model.has_place(original, request);
        self.model.held = held;
        match error {
            Error::Full { len, free } => {
                assert!(ever, "full, and no place were it empty: {original} {request:x?}");
                let stats = self.rig.pool.stats();
                assert_eq!((len, free), (original.len(), stats.free_bytes()));
            }
            Error::TooLong { len, max } => {
                assert!(!ever && len == original.len() && len > max);
            }
            Error::Unreachable { last, lowest } => assert!(!ever && last < lowest),
            Error::Unfit { .. } => assert!(!ever, "{original} {request:x?}"),
            other => panic!("{other}"),
        }
    }

    fn request(&self, step: &Step) -> SlotRequest {
        let start = self.base[0].paddr().get();
        let last = step.reach.map_or(u64::MAX, |reach| start.saturating_add(reach));
        SlotRequest { last, ..step.request }
    }

    fn take(&mut self, step: &Step) {
        let (request, source) = (self.request(step), span(SOURCE + step.at, step.len));
        match self.rig.pool.take(original(SOURCE + step.at, step.len), &request) {
            Ok(slot) => {
                let data = slot.span();
                self.taken(Handle::Slot(slot), data, source, &request);
            }
            Err(error) => self.refused(error, source, &request),
        }
    }

    fn take_all(&mut self, step: &Step) {
        let (request, mut slots) = (self.request(step), Vec::new());
        let len = (step.len / 16).max(1);
        let sources: Vec<_> =
            (0..step.part.0 % 6).map(|n| span(SOURCE + step.at + n * len, len)).collect();
        let originals = sources.iter().map(|at| original(at.paddr().get(), at.len()));
        if self.rig.pool.take_all(originals, &request, &mut slots).is_ok() {
            assert_eq!(slots.len(), sources.len());
            if self.rig.pool.config().growth.is_some() {
                // Which of them had to have memory of their own is not told.
                let _: Vec<_> = slots.drain(..).map(|slot| self.rig.pool.release(slot)).collect();
                return self.forget_free();
            }
            for (slot, source) in slots.into_iter().zip(sources) {
                let data = slot.span();
                self.taken(Handle::Slot(slot), data, source, &request);
            }
            return;
        }
        assert_eq!(slots.len(), 0);
        self.forget_free();
    }

    /// Free slots were held for a moment, and may have been written.
    fn forget_free(&mut self) {
        self.reset_high_water();
        let actual = self.rig.memory.with(|state| state.bytes.clone());
        for held in self.model.held.iter().chain([&span(SOURCE, SOURCE_BYTES)]) {
            assert_eq!(
                crate::flat::part(&actual, *held),
                crate::flat::part(&self.model.bytes, *held)
            );
        }
        self.model.bytes = actual;
    }

    fn map(&mut self, step: &Step) {
        let (request, source) = (self.request(step), span(SOURCE + step.at, step.len));
        let (direction, fill) = match step.pick % 4 {
            0 => (Direction::ToDevice, Fill::Copy),
            1 => (Direction::FromDevice, Fill::Copy),
            2 => (Direction::Bidirectional, Fill::Copy),
            _ => (Direction::FromDevice, Fill::Overwritten),
        };
        let from = original(SOURCE + step.at, step.len);
        match self.rig.pool.map(from, direction, fill, &request) {
            Ok(bounced) => {
                let data = bounced.span();
                self.taken(Handle::Bounced(bounced), data, source, &request);
                if fill == Fill::Copy {
                    self.model.copy(source, data);
                }
            }
            Err(error) => self.refused(error, source, &request),
        }
    }

    fn lease(&mut self, step: &Step) {
        let request = self.request(step);
        match self.rig.pool.lease(step.len, &request) {
            Ok(lease) => {
                let data = lease.span();
                let none = span(0, step.len);
                self.taken(Handle::Lease(lease), data, none, &request);
                part_mut(&mut self.model.bytes, data).fill(0);
            }
            Err(error) => self.refused(error, span(0, step.len), &request),
        }
    }

    /// A part is synced, and nothing else.
    fn sync(&mut self, step: &Step) {
        let Some(index) = self.pick(step) else { return };
        let Out { handle: Handle::Bounced(bounced), data, original, .. } = &self.out[index] else {
            return;
        };
        let (data, original, pool) = (*data, *original, &self.rig.pool);
        let offset = step.part.0 % data.len();
        let len = step.part.1 % (data.len() - offset) + 1;
        let (slot, cpu) = (within(data, offset, len), within(original, offset, len));
        if step.kind.is_multiple_of(2) {
            let synced = pool.sync_for_cpu(bounced, offset, len);
            let direction = bounced.direction();
            match synced {
                Ok(()) => self.model.copy(slot, cpu),
                refused => assert_eq!(
                    (refused, direction),
                    (Err(Error::Direction { direction }), Direction::ToDevice)
                ),
            }
        } else {
            pool.sync_for_device(bounced, offset, len).unwrap();
            if bounced.direction() != Direction::FromDevice {
                self.model.copy(cpu, slot);
            }
        }
    }

    fn pick(&self, step: &Step) -> Option<usize> {
        step.pick.checked_rem(self.out.len())
    }

    /// What a device wrote, and was asked for, reaches the original.
    fn end(&mut self, step: &Step) {
        let Some(index) = self.pick(step) else { return };
        let Out { handle, data, whole, original } = self.out.swap_remove(index);
        match handle {
            Handle::Slot(slot) if step.kind == 0 => {
                self.quarantined += whole.len();
                return self.rig.pool.quarantine(slot).unwrap();
            }
            Handle::Slot(slot) => self.rig.pool.release(slot).unwrap(),
            Handle::Lease(lease) => drop(lease),
            Handle::Bounced(bounced) => {
                let written = match (bounced.direction(), bounced.fill()) {
                    (Direction::ToDevice, _) => 0,
                    (_, Fill::Copy) => data.len(),
                    (_, Fill::Overwritten) => step.part.0 % (data.len() + 1),
                };
                if written != 0 {
                    self.model.copy(within(data, 0, written), within(original, 0, written));
                }
                match bounced.fill() {
                    Fill::Copy => self.rig.pool.unmap(bounced).unwrap(),
                    Fill::Overwritten => self.rig.pool.unmap_written(bounced, written).unwrap(),
                }
            }
        }
        self.model.release(whole);
        if self.rig.pool.config().wipe == Wipe::Release {
            part_mut(&mut self.model.bytes, whole).fill(0);
        }
        if self.single.contains(&whole) {
            self.single.retain(|single| *single != whole);
            self.model.remove(whole);
        }
    }

    fn grow(&mut self) {
        let grown: u64 = self.model.spans[self.base.len()..].iter().map(|span| span.len()).sum();
        let counted = grown + self.single.iter().map(|span| span.len()).sum::<u64>();
        let Some(growth) = self.rig.pool.config().growth else {
            assert!(matches!(self.rig.pool.grow(), Err(Error::GrowthLimit { limit: 0, .. })));
            return;
        };
        match self.rig.pool.grow() {
            Ok(span) => {
                assert!(counted + growth.step <= growth.limit && span.len() == growth.step);
                self.model.spans.push(span);
                self.model.add(span);
            }
            Err(Error::GrowthLimit { bytes, limit }) => {
                assert!(counted + bytes > limit && bytes == growth.step);
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn shrink(&mut self) {
        let mut bytes = 0;
        for grown in self.model.spans.split_off(self.base.len()) {
            let inside =
                |held: &&Span| grown.paddr() <= held.paddr() && held.last() <= grown.last();
            if self.model.held.iter().find(inside).is_some() {
                self.model.spans.push(grown);
            } else {
                self.model.remove(grown);
                bytes += grown.len();
            }
        }
        assert_eq!(self.rig.pool.shrink(), bytes);
    }

    fn write(&mut self, step: &Step) {
        let at = match self.pick(step) {
            // A device, anywhere in the whole slots.
            Some(index) if step.kind.is_multiple_of(2) => self.out[index].whole,
            _ => span(SOURCE, SOURCE_BYTES),
        };
        let offset = step.part.0 % at.len();
        let len = step.part.1 % (at.len() - offset).min(5000) + 1;
        let len = len.min(at.len() - offset);
        self.scribble(within(at, offset, len), step.part.0 ^ step.part.1);
    }

    fn run(&mut self, step: &Step) {
        self.rig.place.set(step.place.0, step.place.1);
        match step.kind {
            0 | 1 | 9 | 10 | 11 => self.end(step),
            2..=4 => self.take(step),
            5 => self.take_all(step),
            6..=8 => self.map(step),
            12 | 13 => self.lease(step),
            14..=17 => self.sync(step),
            18..=21 => self.write(step),
            22 => self.grow(),
            _ if step.pick.is_multiple_of(2) => self.shrink(),
            _ => self.reset_high_water(),
        }
        self.check();
    }

    fn reset_high_water(&mut self) {
        self.rig.pool.reset_high_water();
        self.high = (vec![0; self.base.len()], self.model.used());
    }

    /// Every byte, and the statistics.
    fn check(&mut self) {
        let equal = self.rig.memory.with(|state| state.bytes == self.model.bytes);
        assert!(equal, "bytes that should be otherwise");
        let held_of = |span: &Span| -> u64 {
            let held = self.model.held.iter();
            held.filter(|held| span.paddr() <= held.paddr() && held.last() <= span.last())
                .map(|held| held.len())
                .sum()
        };
        let now: Vec<_> = self.base.iter().map(held_of).collect();
        for (high, now) in self.high.0.iter_mut().zip(&now) {
            *high = (*high).max(*now);
        }
        self.high.1 = self.high.1.max(self.model.used());
        let PoolStats { bytes, used, high_water, grown, single, quarantined, leaked, .. } =
            self.rig.pool.stats();
        let lens = |spans: &[Span]| spans.iter().map(|span| span.len()).sum::<u64>();
        assert_eq!(bytes, lens(&self.model.spans));
        assert_eq!(used, self.model.used());
        assert_eq!(grown, lens(&self.model.spans[self.base.len()..]));
        assert_eq!((single, quarantined), (lens(&self.single), self.quarantined));
        assert_eq!(leaked, 0);
        assert!(high_water >= self.high.1);
        let is_base = self.rig.pool.config().growth.is_none();
        assert!(!is_base || high_water <= lens(&self.base));
        if self.rig.pool.config().areas == 1 && self.rig.pool.config().growth.is_none() {
            assert_eq!(high_water, self.high.0.iter().sum::<u64>());
        }
    }

    /// All is given back, and then all memory is free again.
    fn finish(mut self) {
        let step = Step {
            kind: 1,
            place: (0, 0),
            at: 0,
            len: 1,
            request: SlotRequest::default(),
            reach: None,
            pick: 0,
            part: (0, 0),
        };
        while !self.out.is_empty() {
            self.run(&step);
        }
        assert_eq!(self.rig.pool.stats().used, self.quarantined);
        let is_lost = usize::from(self.quarantined != 0);
        let FlatRig { memory, pool, .. } = self.rig;
        drop(pool);
        assert_eq!(memory.values(), 1 + is_lost);
        let shared = memory.with(|state| state.shared.len());
        assert_eq!(shared == 0, is_lost == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn what_holds_of_slots_holds_after_any_history(
        shape in shapes(),
        steps in prop::collection::vec(steps(), 1..80),
    ) {
        let mut runner = Runner::new(&shape);
        for step in &steps {
            runner.run(step);
        }
        runner.finish();
    }
}
