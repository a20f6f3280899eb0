//! Mapping memory of many pieces: scatter lists.

mod end;
mod layout;

use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::{fmt, iter, mem, slice};

use super::any::AnyTranslation;
use super::attrs::{Attrs, CpuSync};
use super::bounce::BouncePool;
use super::device::{Device, Policy};
use super::domain::translation::Sealed;
use super::domain::{Flush, Translation, map_into};
use super::error::Error;
use super::memory::{DmaMemory, Piece, Via};
use super::single::Refused;
use super::slots::{STRETCHES, Slots};
use super::stage::{FEW, STAGE, Stage};
use super::way::Way;
use crate::addr::{DmaAddr, Iova};
use crate::iommu::iova::{Align, Iovas, Request};
use crate::leak::{self, Held};
use crate::lg2;
use crate::platform::Id;
use crate::promise::Promise;
use crate::prot::{Coherency, Direction};
use crate::range::IovaRange;
use crate::span::SpanBuf;
use crate::swiotlb::Fill;
pub use end::UnmapListFailed;
use layout::{Layout, Need, Packing, Part};
pub(super) use layout::{Placed, Shape};

/// Bytes of a list that a device uses as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Segment {
    /// Where the device finds them.
    pub addr: DmaAddr,
    /// How many they are.
    pub len: u64,
}

/// A list of pieces that a device may use. It owns the memory: [`Device::unmap_list`] gives it
/// back.
///
/// Dropped, it leaks the memory and the IOVAs, and the device goes on using them.
#[must_use = "a mapping that is dropped is never unmapped, and its memory leaks"]
// IOVAs and memory come first, so that an unmap reads them in the pieces of 16 bytes in which they
// were moved: a CPU waits for what was stored in other pieces a moment ago.
#[repr(C)]
pub struct ListMapping<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    iovas: Option<Iovas>,
    /// Taken by the unmap; leaked where there was none.
    memory: Option<T::Memory>,
    len: u64,
    segments: usize,
    device: Id,
    /// Those of each bounced piece, in their order.
    slots: Vec<Slots<B::Slot>>,
    direction: Direction,
    flush: Flush,
    sync: CpuSync,
    fill: Fill,
}

impl<T: Translation, B: BouncePool> ListMapping<T, B> {
    /// Returns how many bytes are mapped, over all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always `false`: a mapping has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns how many segments the device was given.
    pub fn segment_count(&self) -> usize {
        self.segments
    }

    /// Returns which way the data goes.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// When hardware is told about its unmap.
    pub fn flush(&self) -> Flush {
        self.flush
    }

    /// Returns how many pieces have slots that stand in for them or for their ends.
    pub fn bounced(&self) -> usize {
        self.slots.len()
    }

    /// Its IOVAs, of which some may be free; `None` where no piece has any.
    pub fn iovas(&self) -> Option<IovaRange> {
        self.iovas.as_ref().map(Iovas::range)
    }

    fn pieces(&self) -> &[Piece] {
        self.memory.as_ref().map_or(&[], DmaMemory::pieces)
    }

    /// Where it begins, for an error.
    fn first(&self) -> DmaAddr {
        let own = self.pieces().first().map_or(0, |piece| piece.span.paddr().get());
        DmaAddr::new(self.iovas().map_or(own, |range| range.start().get()))
    }
}

impl<T: Translation, B: BouncePool> Drop for ListMapping<T, B> {
    // The mapping of a list that is ended is forgotten: nothing of this is on its way.
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        // A device may still use them.
        let (memory, slots) = (ManuallyDrop::new(self.memory.take()), mem::take(&mut self.slots));
        let slots = ManuallyDrop::new(slots);
        if let Some(memory) = &*memory {
            let iovas = ManuallyDrop::new(self.iovas.take());
            let range = iovas.as_ref().map(Iovas::range);
            let own = memory.pieces().first().map_or(0, |piece| piece.span.paddr().get());
            let addr = DmaAddr::new(range.map_or(own, |range| range.start().get()));
            let held = Held {
                iovas: range,
                memory: self.len,
                slots: if slots.is_empty() { 0 } else { self.len },
            };
            leak::dropped("the mapping of a list", "Device::unmap_list", addr, held);
        }
    }
}

/// The slots of the pieces that are bounced, and what a list needs.
type Prepared<S> = Result<(Vec<Slots<S>>, Need), Error>;

/// The IOVAs of a list, if it has any, and its memory; or why there are none.
type InPlace<H> = Result<(Option<Iovas>, H), Refused<H>>;

/// The parts of a list, as a device gets them.
struct Parts<'a, T: Translation, B: BouncePool> {
    device: &'a Device<T, B>,
    pieces: slice::Iter<'a, Piece>,
    slots: slice::Iter<'a, Slots<B::Slot>>,
}

/// A piece of a list, how a device gets it, and the slots where it is bounced.
struct Given<'a, S> {
    piece: Piece,
    part: Part,
    slots: Option<&'a Slots<S>>,
}

impl<'a, T: Translation, B: BouncePool> Parts<'a, T, B> {
    #[inline(always)]
    fn next_given(&mut self) -> Option<Given<'a, B::Slot>> {
        let &piece = self.pieces.next()?;
        let (part, slots) = match self.device.way(piece) {
            Ok(Way::Straight) => (Part::Passed(piece.span), None),
            Ok(Way::Bounced) => {
                let slots = self.slots.next();
                let span = self.device.lies(piece.span, slots);
                let part =
                    if self.device.is_direct() { Part::Passed(span) } else { Part::Placed(span) };
                (part, slots)
            }
            // Refused before anything is given an address.
            Ok(Way::Translated) | Err(_) => (Part::Placed(piece.span), None),
        };
        Some(Given { piece, part, slots })
    }
}

impl<T: Translation, B: BouncePool> Iterator for Parts<'_, T, B> {
    type Item = Part;

    #[inline(always)]
    fn next(&mut self) -> Option<Part> {
        self.next_given().map(|given| given.part)
    }
}

/// The segments of a list that is mapped: from [`Device::segments`].
pub struct ListSegments<'a, T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    layout: Layout<Parts<'a, T, B>>,
    left: usize,
}

impl<T: Translation, B: BouncePool> Iterator for ListSegments<'_, T, B> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        let segment = self.layout.next()?;
        self.left = self.left.saturating_sub(1);
        Some(segment)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T: Translation, B: BouncePool> ExactSizeIterator for ListSegments<'_, T, B> {}

impl<T: Translation, B: BouncePool> fmt::Debug for ListSegments<'_, T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListSegments").field("left", &self.left).finish_non_exhaustive()
    }
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Maps all pieces of a memory, as [`map_list_with`](Self::map_list_with) does by default.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{Device, DeviceConfig, Direct, DmaMemory, NoPool, Piece, Segment};
    /// use dmaspan::platform::OneThread;
    /// use dmaspan::{Direction, PhysAddr, Span};
    ///
    /// struct Packet([Piece; 2]);
    ///
    /// // SAFETY: a packet owns its pieces, and nothing refers to them.
    /// unsafe impl DmaMemory for Packet {
    ///     fn pieces(&self) -> &[Piece] {
    ///         &self.0
    ///     }
    /// }
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let ram = Span::new(PhysAddr::new(0), 1 << 30)?;
    ///     let direct = Arc::new(Direct::<Packet, _>::new(ram, OneThread));
    ///     let device = Device::new(direct, NoPool, DeviceConfig::bits(32))?;
    ///     let piece = |addr, len| Span::new(PhysAddr::new(addr), len).map(Piece::memory);
    ///     let packet = Packet([piece(0x1000, 64)?, piece(0x8000, 1400)?]);
    ///     let mut segments = vec![Segment::default(); device.list_room(packet.pieces())?];
    ///     let mapping = device.map_list(packet, Direction::ToDevice, &mut segments)?;
    ///     let given = &segments[..mapping.segment_count()];
    ///     assert_eq!(given.iter().map(|segment| segment.len).collect::<Vec<_>>(), [64, 1400]);
    ///     let _unmapped = device.unmap_list(mapping)?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed.
    #[inline]
    #[track_caller]
    pub fn map_list(
        &self,
        memory: T::Memory,
        direction: Direction,
        segments: &mut [Segment],
    ) -> Result<ListMapping<T, B>, Refused<T::Memory>> {
        self.map_list_with(memory, direction, segments, Attrs::default())
    }

    /// Maps all pieces of a memory, and writes what the device is to be given to the beginning of
    /// `segments`: as many as the mapping's [`segment_count`](ListMapping::segment_count), which
    /// have all bytes of the list in their order.
    ///
    /// The list has one range of IOVAs, and hardware is told once. The granules of its pieces
    /// follow each other there, so that pieces which end and begin on granules become one segment,
    /// up to the device's [`max_segment`](super::DeviceLimits::max_segment) and
    /// [`boundary`](super::DeviceLimits::boundary) (Linux's `iommu_dma_map_sg`,
    /// drivers/iommu/dma-iommu.c). A piece that would cross a boundary is moved behind it; what is
    /// left out before it leads nowhere, unlike in Linux. What has an address of its own on the bus
    /// takes no IOVAs and is never joined. Where nothing is translated no pieces are joined.
    ///
    /// As many segments as there are pieces are room enough where no piece is longer than
    /// `max_segment`, nor, with what lies before it in its granule, than the boundary, nor crosses
    /// one by an address of its own. A longer piece is cut into several, on granules, where Linux
    /// hands the device a segment beyond its limits: the pieces here are as long as memory is
    /// contiguous, and a driver that had to cut them would need a list of its own.
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed, `segments` neither: [`Error::Overwrites`];
    /// [`Error::EmptyList`]; [`Error::SegmentRoom`] with the room that is needed;
    /// [`Error::NoRoom`] where there is no memory for the slots of so many bounced pieces;
    /// [`Error::ListWraps`]; and what [`map_single_with`](Self::map_single_with) refuses, for the
    /// first piece that it refuses.
    ///
    /// # Context
    ///
    /// As [`map_single_with`](Self::map_single_with). Allocates where pieces are bounced, to keep
    /// their slots, and otherwise nothing.
    #[track_caller]
    pub fn map_list_with(
        &self,
        memory: T::Memory,
        direction: Direction,
        segments: &mut [Segment],
        attrs: Attrs,
    ) -> Result<ListMapping<T, B>, Refused<T::Memory>> {
        let (slots, need) = match self.prepare(memory.pieces(), segments.len(), direction, attrs) {
            Ok(prepared) => prepared,
            Err(error) => return Err(Refused { error, memory: Some(memory) }),
        };
        if self.config.coherency == Coherency::NonCoherent {
            self.give_list(memory.pieces(), &slots, attrs.sync);
        }
        let (iovas, memory) = match self.place(&slots, need, memory, direction, attrs) {
            Ok(placed) => placed,
            Err(refused) => {
                slots.into_iter().for_each(|of| self.withdraw(of, refused.memory.as_ref()));
                return Err(refused);
            }
        };
        // Where the memory or the pool panics, a device may use it.
        let memory = ManuallyDrop::new(memory);
        let base = iovas.as_ref().map_or(0, |iovas| iovas.range().start().get());
        let mut count = 0;
        let mut places = segments.iter_mut();
        let write = |segment| {
            if let Some(place) = places.next() {
                *place = segment;
            }
            count += 1;
        };
        match need.packing {
            Packing::Dense => self.shape().each_dense(memory.pieces(), base, write),
            Packing::Loose => self.layout(memory.pieces(), &slots, base).for_each(write),
        }
        let flush = if slots.is_empty() && iovas.is_some() {
            self.flush_as(attrs.flush)
        } else {
            Flush::Strict
        };
        Ok(ListMapping {
            len: need.bytes,
            segments: count,
            direction,
            flush,
            sync: attrs.sync,
            fill: attrs.fill,
            device: self.id(),
            slots,
            iovas,
            memory: Some(ManuallyDrop::into_inner(memory)),
        })
    }

    /// Returns how many segments a list has, and so how much room [`map_list`](Self::map_list)
    /// needs, if none of its pieces is bounced to a slot that lies worse than the piece. Nothing is
    /// mapped.
    ///
    /// # Errors
    ///
    /// As of [`map_list_with`](Self::map_list_with), as far as they follow from the list.
    pub fn list_room(&self, pieces: &[Piece]) -> Result<usize, Error> {
        if pieces.is_empty() {
            return Err(Error::EmptyList);
        }
        for &piece in pieces {
            self.way(piece)?;
        }
        Ok(self.need(pieces, &[])?.segments)
    }

    /// The segments of a list, once more.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device.
    pub fn segments<'a>(
        &'a self,
        mapping: &'a ListMapping<T, B>,
    ) -> Result<ListSegments<'a, T, B>, Error> {
        self.check_list(mapping)?;
        let base = mapping.iovas().map_or(0, |range| range.start().get());
        let layout = self.layout(mapping.pieces(), &mapping.slots, base);
        Ok(ListSegments { layout, left: mapping.segments })
    }

    fn check_list(&self, mapping: &ListMapping<T, B>) -> Result<(), Error> {
        if mapping.device == self.id() {
            return Ok(());
        }
        Err(Error::Foreign { addr: mapping.first() })
    }

    /// Slots for what has to be bounced, filled, and what the list needs.
    #[inline(always)]
    fn prepare(
        &self,
        pieces: &[Piece],
        room: usize,
        direction: Direction,
        attrs: Attrs,
    ) -> Prepared<B::Slot> {
        if attrs.fill == Fill::Overwritten && direction != Direction::FromDevice {
            return Err(Error::Overwrites { direction });
        }
        if pieces.is_empty() {
            return Err(Error::EmptyList);
        }
        let mut slots = Vec::new();
        let need = match self.dense(pieces, room) {
            Some(need) => Ok(need),
            None => self.bounce_list(pieces, &mut slots, attrs.fill),
        };
        let error = match need {
            Ok(need) if need.segments <= room => return Ok((slots, need)),
            Ok(need) => Error::SegmentRoom { room, needed: need.segments },
            Err(error) => error,
        };
        slots.into_iter().for_each(|of| self.release(of));
        Err(error)
    }

    /// Adds slots for what has to be bounced.
    #[inline(always)]
    fn bounce_list(
        &self,
        pieces: &[Piece],
        slots: &mut Vec<Slots<B::Slot>>,
        fill: Fill,
    ) -> Result<Need, Error> {
        for (n, &piece) in pieces.iter().enumerate() {
            if self.way(piece)? == Way::Bounced {
                if slots.is_empty() && self.bounce_whole(&pieces[n..], slots, fill) {
                    break;
                }
                let pieces = slots.len() + 1;
                slots.try_reserve(1).map_err(|_| Error::NoRoom { pieces })?;
                slots.push(self.bounce(piece.span, self.config.limits.keep_bits, fill)?);
            }
        }
        self.need(pieces, slots)
    }

    /// What a list needs that lies densely, none of which is bounced.
    #[inline(always)]
    fn dense(&self, pieces: &[Piece], room: usize) -> Option<Need> {
        if self.is_direct() {
            return None;
        }
        let need = self.shape().dense(pieces, room)?;
        // Its ends are all that may share granules with others.
        let is_straight = match self.policy {
            Policy::Free => true,
            Policy::Granules => need.bytes == need.iovas,
            Policy::Pool => false,
        };
        is_straight.then_some(need)
    }

    #[inline(always)]
    fn need(&self, pieces: &[Piece], slots: &[Slots<B::Slot>]) -> Result<Need, Error> {
        self.layout(pieces, slots, 0).need().map_err(|piece| Error::ListWraps { piece })
    }

    /// Maps what has IOVAs, in one range of them.
    #[inline(always)]
    #[track_caller]
    fn place(
        &self,
        slots: &[Slots<B::Slot>],
        need: Need,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> InPlace<T::Memory> {
        if need.iovas == 0 {
            return Ok((None, memory));
        }
        // Aligned naturally, no boundary lies elsewhere than where the layout saw it.
        let limit = Iova::new(self.config.limits.last);
        let request = Request { bytes: need.iovas, align: Align::Natural, limit };
        let iovas = match self.translation.alloc(request) {
            Ok(iovas) => iovas,
            Err(error) => return Err(Refused { error, memory: Some(memory) }),
        };
        let fill = |translation: &T, memory: &T::Memory, range: IovaRange| {
            let (pieces, base) = (memory.pieces(), range.start());
            if need.packing == Packing::Dense
                && let Some(first) = pieces.first()
            {
                let offset = first.span.paddr().get() & lg2::mask(translation.granule_lg2());
                self.observe_bytes(base.wrapping_add(offset), need.bytes);
            }
            match need.packing {
                Packing::Dense if pieces.len() <= FEW => {
                    self.fill_dense::<FEW>(translation, pieces, base, direction, attrs)
                }
                Packing::Dense => {
                    self.fill_dense::<STAGE>(translation, pieces, base, direction, attrs)
                }
                Packing::Loose => {
                    self.fill(translation, self.parts(pieces, slots), base, direction, attrs)
                }
            }
        };
        let by = self.caller();
        let (iovas, memory) = map_into(&*self.translation, iovas, memory, by, fill)?;
        Ok((Some(iovas), memory))
    }

    /// Maps the granules of a dense list, by a call for every `N` runs.
    #[inline(always)]
    fn fill_dense<const N: usize>(
        &self,
        translation: &T,
        pieces: &[Piece],
        base: Iova,
        direction: Direction,
        attrs: Attrs,
    ) -> Result<(), Error> {
        let shape = self.shape();
        let prot = self.prot(Via::Memory, direction, attrs.privilege);
        let Some((first, rest)) = pieces.split_first() else { return Ok(()) };
        let mut room = SpanBuf::room::<N>();
        let mut stage = SpanBuf::new(&mut room);
        // `open` may still grow, and goes to `next`.
        let (mut start, mut next, mut open) = (base, base, shape.whole(first.span));
        let mut rest = rest.iter();
        loop {
            let more = rest.next().map(|piece| shape.whole(piece.span));
            if let Some(whole) = more
                && open.last().wrapping_add(1) == whole.paddr()
                && let Some(joined) = open.join(whole)
            {
                open = joined;
                continue;
            }
            if stage.len() == N {
                translation.map(Promise::kept(), start, stage.spans(), prot)?;
                start = next;
                stage.clear();
            }
            // There is room.
            let _ = stage.push_apart(open);
            let Some(whole) = more else { break };
            next = next.wrapping_add(open.len());
            open = whole;
        }
        translation.map(Promise::kept(), start, stage.spans(), prot)
    }

    /// Maps the granules of the parts, by as few calls as there are gaps, changes of permissions
    /// and full stages.
    #[inline(always)]
    fn fill(
        &self,
        translation: &T,
        mut parts: Parts<'_, T, B>,
        base: Iova,
        direction: Direction,
        attrs: Attrs,
    ) -> Result<(), Error> {
        let shape = self.shape();
        let mut room = SpanBuf::room::<STAGE>();
        let mut stage = Stage::new(translation, &mut room);
        let mut ends = SpanBuf::room::<STRETCHES>();
        // Behind everything that has a place.
        let mut next = 0;
        while let Some(Given { piece, part, slots }) = parts.next_given() {
            let Part::Placed(span) = part else { continue };
            // All of them have a place: it was counted.
            let Some(Placed { at, offset, whole }) = shape.place(&mut next, span) else {
                break;
            };
            let at = base.wrapping_add(at);
            self.observe_bytes(at.wrapping_add(offset), span.len());
            let prot = self.prot(piece.via, direction, attrs.privilege);
            let wholes = match slots {
                None => slice::from_ref(&whole),
                Some(_) => self.wholes(piece.span, slots, &mut ends)?,
            };
            stage.add(at, wholes, prot)?;
        }
        stage.map()
    }

    /// Writes caches back of all that a device is given.
    #[cold]
    fn give_list(&self, pieces: &[Piece], slots: &[Slots<B::Slot>], sync: CpuSync) {
        for (piece, slots) in self.with_slots(pieces, slots) {
            self.give_piece(piece, slots, sync);
        }
    }

    /// Whether a sync has anything to do.
    #[inline(always)]
    fn cares(&self, slots: &[Slots<B::Slot>]) -> bool {
        self.config.coherency == Coherency::NonCoherent || !slots.is_empty()
    }

    /// The pieces, each with its slots.
    fn with_slots<'a>(
        &'a self,
        pieces: &'a [Piece],
        slots: &'a [Slots<B::Slot>],
    ) -> impl Iterator<Item = (Piece, Option<&'a Slots<B::Slot>>)> {
        let mut parts = self.parts(pieces, slots);
        iter::from_fn(move || parts.next_given().map(|given| (given.piece, given.slots)))
    }

    #[inline(always)]
    fn parts<'a>(&'a self, pieces: &'a [Piece], slots: &'a [Slots<B::Slot>]) -> Parts<'a, T, B> {
        Parts { device: self, pieces: pieces.iter(), slots: slots.iter() }
    }

    #[inline(always)]
    fn layout<'a>(
        &'a self,
        pieces: &'a [Piece],
        slots: &'a [Slots<B::Slot>],
        base: u64,
    ) -> Layout<Parts<'a, T, B>> {
        Layout::new(self.shape(), self.parts(pieces, slots), base)
    }

    #[inline(always)]
    pub(super) fn shape(&self) -> Shape {
        let limits = &self.config.limits;
        Shape {
            granule_lg2: self.translation.granule_lg2(),
            window: limits.boundary.map_or(u64::MAX, |boundary| boundary - 1),
            max_segment: limits.max_segment,
        }
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for ListMapping<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListMapping")
            .field("len", &self.len)
            .field("segments", &self.segments)
            .field("direction", &self.direction)
            .field("iovas", &self.iovas())
            .finish_non_exhaustive()
    }
}
