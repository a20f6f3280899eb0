//! Whether slots held what they should, once a turn is over.

use dmaspan::swiotlb::Fill;
use dmaspan::{Direction, HostAddr, Span, UserAddr, UserRange};

use super::plan::{Case, Copies};
use super::work::{SwiotlbBenchError, Way};

/// Who wrote bytes.
#[derive(Clone, Copy)]
enum By {
    /// Whoever owns the buffer.
    Owner = 1,
    /// The device.
    Device = 2,
}

/// The n-th word of a buffer: different in all buffers, and from what anybody else writes.
fn word(by: By, buffer: u64, n: u64) -> u64 {
    (by as u64) << 60 | buffer << 24 | n
}

/// Writes what its owner has into every buffer.
pub(super) fn fill(way: &impl Way, case: &Case) -> Result<(), SwiotlbBenchError> {
    (0..case.threads * case.depth).try_for_each(|buffer| {
        let (memory, at) = way.buffers().place(buffer);
        Ok(memory.fill_words(at, case.block, |n| word(By::Owner, buffer, n))?)
    })
}

/// Uses all slots as a device does, ends their mappings, and looks at every byte: at those of slots
/// before, at those of buffers afterwards. Buffers are as [`fill`] left them then.
///
/// # Errors
///
/// What is wrong first.
pub(super) fn check<W: Way>(
    way: &W,
    case: &Case,
    out: Vec<(u64, W::Mapped)>,
) -> Result<(), SwiotlbBenchError> {
    let mut spans: Vec<Span<HostAddr>> = out.iter().map(|(_, mapped)| W::span(mapped)).collect();
    apart(&mut spans)?;
    let slots = way.slots();
    let place = |slot: Span<HostAddr>| {
        let range = UserRange::from_len(UserAddr::new(slot.start().get()), slot.len())?;
        Ok::<u64, SwiotlbBenchError>(slots.offset_of(range)?)
    };
    let is_read = case.direction == Direction::FromDevice;
    let is_copied = case.copies == Copies::Made;
    let is_filled = is_copied && way.fill() == Fill::Copy;
    // Of a slot that was filled it writes half, and the rest has to stay as it is.
    let written = |span: Span<HostAddr>| if is_filled { span.len() / 2 } else { span.len() };
    for (buffer, mapped) in &out {
        let slot = W::span(mapped);
        if slot.len() != case.block {
            return Err(SwiotlbBenchError::Length { slot, len: case.block });
        }
        if is_filled {
            slots.check_words(place(slot)?, slot.len(), |n| word(By::Owner, *buffer, n))?;
        }
    }
    // Every slot is written before any buffer is looked at: one that is another's too shows.
    for (buffer, mapped) in out.iter().filter(|_| is_read) {
        let slot = W::span(mapped);
        slots.fill_words(place(slot)?, written(slot), |n| word(By::Device, *buffer, n))?;
    }
    for (buffer, mapped) in out {
        let words = written(W::span(&mapped)) / 8;
        way.unmap(mapped)?;
        let by = |n| if is_read && is_copied && n < words { By::Device } else { By::Owner };
        let (memory, at) = way.buffers().place(buffer);
        memory.check_words(at, case.block, |n| word(by(n), buffer, n))?;
        memory.fill_words(at, case.block, |n| word(By::Owner, buffer, n))?;
    }
    match way.used() {
        0 => Ok(()),
        bytes => Err(SwiotlbBenchError::Left { bytes }),
    }
}

/// That no two spans have a byte in common.
fn apart(spans: &mut [Span<HostAddr>]) -> Result<(), SwiotlbBenchError> {
    spans.sort_unstable_by_key(|span| span.start());
    match spans.windows(2).find(|two| two[0].last() >= two[1].start()) {
        Some(two) => Err(SwiotlbBenchError::Overlap { one: two[0], other: two[1] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use crate::models::uncopied::Uncopied;
    use dmaspan_linux::{BounceMemory, Memory};

    use super::super::plan::Order;
    use super::super::work::{self, Before, Buffers, Now, Slots, Vanilla};
    use super::*;
    use crate::swiotlb::load::{self, Measured};

    const CASE: Case = Case {
        name: "test",
        label: "test",
        threads: 2,
        block: 4096,
        depth: 3,
        order: Order::Queue,
        direction: Direction::FromDevice,
        fill: Fill::Copy,
        copies: Copies::Made,
    };
    const POOL: u64 = 1 << 20;

    /// What a pool does wrong.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fault {
        None,
        /// It loses a slot.
        Leaks,
        /// All buffers have the same slot.
        Shares,
        /// Slots are short.
        Short,
        /// It copies a slot back though its owner says that the device wrote less.
        Fills,
    }

    struct Faulty<W: Way> {
        way: W,
        fault: Fault,
        first: Mutex<Option<Span<HostAddr>>>,
        leaked: AtomicBool,
    }

    impl<W: Way> Way for Faulty<W> {
        const NAME: &'static str = "faulty";

        type Mapped = (W::Mapped, Span<HostAddr>);

        fn map<R>(
            &self,
            buffer: u64,
            then: impl FnOnce(Self::Mapped) -> R,
        ) -> Result<R, SwiotlbBenchError> {
            let mapped = self.way.map(buffer, |mapped| mapped)?;
            let span = W::span(&mapped);
            let first = *self.first.lock().unwrap().get_or_insert(span);
            let span = match self.fault {
                Fault::Shares => first,
                Fault::Short => Span::new(span.start(), span.len() - 8)?,
                _ => span,
            };
            Ok(then((mapped, span)))
        }

        fn unmap(&self, (mapped, _): Self::Mapped) -> Result<(), SwiotlbBenchError> {
            if self.fault == Fault::Leaks && !self.leaked.swap(true, Ordering::Relaxed) {
                return Ok(());
            }
            self.way.unmap(mapped)
        }

        fn span((_, span): &Self::Mapped) -> Span<HostAddr> {
            *span
        }

        fn fill(&self) -> Fill {
            match self.fault {
                Fault::Fills => Fill::Copy,
                _ => self.way.fill(),
            }
        }

        fn used(&self) -> u64 {
            self.way.used()
        }

        fn slots(&self) -> &Memory {
            self.way.slots()
        }

        fn buffers(&self) -> Buffers {
            self.way.buffers()
        }
    }

    /// What a turn says of a pool that has a fault, in a case.
    fn turn(way: impl Way, fault: Fault, case: &Case) -> Result<(), SwiotlbBenchError> {
        let way = Faulty { way, fault, first: Mutex::default(), leaked: AtomicBool::default() };
        fill(&way, case)?;
        load::turn(&way, case, Duration::ZERO, &mut Measured::default())
    }

    fn buffers(case: &Case) -> Buffers {
        Buffers::new(work::leak(case.bytes()).unwrap(), case)
    }

    /// The pool of dmaspan with a fault.
    fn now(fault: Fault, case: &Case) -> Result<(), SwiotlbBenchError> {
        let slots = work::slots(POOL).unwrap();
        turn(Now::new(slots, 2, buffers(case), case).unwrap(), fault, case)
    }

    /// Both pools without one.
    fn are_right<M: Slots>(case: &Case, wrap: impl Fn(BounceMemory) -> M) {
        let memory = || wrap(work::slots(POOL).unwrap());
        let before = Before::new(memory()).unwrap();
        turn(Vanilla::new(&before, buffers(case), case), Fault::None, case).unwrap();
        let now = Now::new(memory(), 2, buffers(case), case).unwrap();
        turn(now, Fault::None, case).unwrap();
    }

    #[test]
    fn both_pools_do_what_they_should_in_every_order_and_direction() {
        for (order, depth) in [(Order::Queue, 3), (Order::Burst, 5), (Order::Burst, 1)] {
            for direction in [Direction::FromDevice, Direction::ToDevice] {
                let case = Case { order, depth, direction, ..CASE };
                are_right(&case, |slots| slots);
                are_right(&Case { copies: Copies::LeftOut, ..case }, Uncopied);
            }
        }
        are_right(&Case { fill: Fill::Overwritten, ..CASE }, |slots| slots);
    }

    #[test]
    fn whatever_a_pool_does_wrong_is_found() {
        let fails = |fault, case: &Case| now(fault, case).unwrap_err();
        assert!(matches!(fails(Fault::Shares, &CASE), SwiotlbBenchError::Overlap { .. }));
        assert!(matches!(fails(Fault::Short, &CASE), SwiotlbBenchError::Length { .. }));
        assert!(matches!(fails(Fault::Leaks, &CASE), SwiotlbBenchError::Left { bytes: 4096 }));
        let overwritten = Case { fill: Fill::Overwritten, ..CASE };
        assert!(matches!(fails(Fault::Fills, &overwritten), SwiotlbBenchError::Content(_)));
        // Nothing is copied where it should be.
        for direction in [Direction::ToDevice, Direction::FromDevice] {
            let case = Case { direction, ..CASE };
            let slots = Uncopied(work::slots(POOL).unwrap());
            let way = Now::new(slots, 2, buffers(&case), &case).unwrap();
            let found = turn(way, Fault::None, &case);
            assert!(matches!(found, Err(SwiotlbBenchError::Content(_))), "{found:?}");
        }
    }

    #[test]
    fn no_two_words_are_alike() {
        assert_ne!(word(By::Owner, 1, 2), word(By::Owner, 2, 1));
        assert_ne!(word(By::Owner, 1, 2), word(By::Device, 1, 2));
        assert_ne!(word(By::Owner, 1, (1 << 15) - 1), word(By::Owner, 2, 0));
    }
}
