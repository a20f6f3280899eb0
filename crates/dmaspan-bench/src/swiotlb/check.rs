//! A check after each turn that slots held the bytes that they should.

use dmaspan::swiotlb::Fill;
use dmaspan::{Direction, HostAddr, Span, UserAddr, UserRange};
use dmaspan_linux::mem::CheckError;

use super::plan::Case;
use super::work::{Bounces, Buffers};
use crate::failed::Failed;

/// The writer of bytes.
#[derive(Clone, Copy)]
enum By {
    /// The owner of the buffer.
    Owner = 1,
    /// The device.
    Device = 2,
}

/// The n-th word of a buffer: different in all buffers, and from what anybody else writes.
fn word(by: By, buffer: u64, n: u64) -> u64 {
    (by as u64) << 60 | buffer << 24 | n
}

/// Writes what its owner has into every buffer.
pub(super) fn fill(buffers: Buffers, case: &Case) -> Result<(), Failed> {
    (0..case.threads * case.depth).try_for_each(|buffer| {
        let (memory, at) = buffers.place(buffer);
        Ok(memory.fill_words(at, case.block, |n| word(By::Owner, buffer, n))?)
    })
}

/// Uses all slots as a device does, ends their mappings, and looks at every byte: at those of slots
/// before, at those of buffers afterwards. Buffers are as [`fill`] left them then.
///
/// # Errors
///
/// What is wrong first.
pub(super) fn check<'p, W: Bounces>(
    pool: &'p W,
    buffers: Buffers,
    case: &Case,
    out: Vec<(u64, W::Mapped<'p>)>,
) -> Result<(), Failed> {
    let wrong = |error: CheckError| Failed::at("after a turn, in a slot or a buffer")(error);
    let mut spans: Vec<Span<HostAddr>> = out.iter().map(|(_, mapped)| W::span(mapped)).collect();
    apart(&mut spans)?;
    let slots = pool.slots();
    let place = |slot: Span<HostAddr>| {
        let range = UserRange::from_len(UserAddr::new(slot.start().get()), slot.len())?;
        slots.offset_of(range).map_err(Failed::at("a slot is elsewhere"))
    };
    let is_read = case.direction == Direction::FromDevice;
    let is_filled = case.copies && pool.fill(case) == Fill::Copy;
    // Of a slot that was filled it writes half, and the rest has to stay as it is.
    let written = |span: Span<HostAddr>| if is_filled { span.len() / 2 } else { span.len() };
    for (buffer, mapped) in &out {
        let slot = W::span(mapped);
        if slot.len() != case.block {
            let len = case.block;
            return Err(Failed::new(format_args!("the slot {slot} stands in for {len} bytes")));
        }
        if is_filled {
            let words = |n| word(By::Owner, *buffer, n);
            slots.check_words(place(slot)?, slot.len(), words).map_err(wrong)?;
        }
    }
    // Every slot is written before any buffer is looked at: one that is another's too shows.
    for (buffer, mapped) in out.iter().filter(|_| is_read) {
        let slot = W::span(mapped);
        slots.fill_words(place(slot)?, written(slot), |n| word(By::Device, *buffer, n))?;
    }
    for (buffer, mapped) in out {
        let words = written(W::span(&mapped)) / 8;
        pool.unmap(mapped, case)?;
        let by = |n| if is_read && case.copies && n < words { By::Device } else { By::Owner };
        let (memory, at) = buffers.place(buffer);
        memory.check_words(at, case.block, |n| word(by(n), buffer, n)).map_err(wrong)?;
        memory.fill_words(at, case.block, |n| word(By::Owner, buffer, n))?;
    }
    match pool.used() {
        0 => Ok(()),
        bytes => Err(Failed::new(format_args!("{bytes} bytes of slots are held after all unmaps"))),
    }
}

/// That no two spans have a byte in common.
fn apart(spans: &mut [Span<HostAddr>]) -> Result<(), Failed> {
    spans.sort_unstable_by_key(|span| span.start());
    match spans.windows(2).find(|two| two[0].last() >= two[1].start()) {
        Some(two) => Err(Failed::new(format_args!(
            "the slots {} and {} overlap and are both held",
            two[0], two[1]
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use dmaspan_linux::{Memory, UserPlatform};

    use super::super::plan::Order;
    use super::super::work;
    use super::*;
    use crate::models::spin::Spinning;
    use crate::models::swiotlb_before::Patches;
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
        copies: true,
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

    struct Faulty<W: Bounces> {
        pool: W,
        fault: Fault,
        first: Mutex<Option<Span<HostAddr>>>,
        leaked: AtomicBool,
    }

    impl<W: Bounces> Bounces for Faulty<W> {
        type Mapped<'p>
            = (W::Mapped<'p>, Span<HostAddr>)
        where
            Self: 'p;

        fn map<'p, R>(
            &'p self,
            buffer: (Buffers, u64),
            case: &Case,
            then: impl FnOnce(Self::Mapped<'p>) -> R,
        ) -> Result<R, Failed> {
            let mapped = self.pool.map(buffer, case, |mapped| mapped)?;
            let span = W::span(&mapped);
            let first = *self.first.lock().unwrap().get_or_insert(span);
            let span = match self.fault {
                Fault::Shares => first,
                Fault::Short => Span::new(span.start(), span.len() - 8)?,
                _ => span,
            };
            Ok(then((mapped, span)))
        }

        fn unmap(&self, (mapped, _): Self::Mapped<'_>, case: &Case) -> Result<(), Failed> {
            if self.fault == Fault::Leaks && !self.leaked.swap(true, Ordering::Relaxed) {
                return Ok(());
            }
            self.pool.unmap(mapped, case)
        }

        fn span((_, span): &Self::Mapped<'_>) -> Span<HostAddr> {
            *span
        }

        fn fill(&self, case: &Case) -> Fill {
            match self.fault {
                Fault::Fills => Fill::Copy,
                _ => self.pool.fill(case),
            }
        }

        fn used(&self) -> u64 {
            self.pool.used()
        }

        fn slots(&self) -> &Memory {
            self.pool.slots()
        }
    }

    /// What a turn says of a pool that has a fault, in a case.
    fn turn(pool: impl Bounces, fault: Fault, case: &Case) -> Result<(), Failed> {
        let pool = Faulty { pool, fault, first: Mutex::default(), leaked: AtomicBool::default() };
        let buffers = Buffers::new(work::leak(case.bytes()).unwrap(), case);
        fill(buffers, case)?;
        load::turn(&pool, buffers, case, Duration::ZERO, &mut Measured::default())
    }

    /// The pool of dmaspan with a fault.
    fn now(fault: Fault, case: &Case) -> Result<(), Failed> {
        turn(work::now::<true, _>(POOL, 2, UserPlatform).unwrap(), fault, case)
    }

    /// All pools without one.
    fn are_right<const COPIED: bool>(case: &Case) {
        for (areas, bitmap, latest) in [
            (1, false, false),
            (2, false, false),
            (1, true, false),
            (1, false, true),
            (2, true, true),
        ] {
            let patches = Patches { areas, bitmap, latest };
            let pool = work::before::<COPIED, Spinning>(POOL, patches).unwrap();
            turn(pool, Fault::None, case).unwrap();
        }
        let vanilla = work::before::<COPIED, UserPlatform>(POOL, Patches::NONE).unwrap();
        turn(vanilla, Fault::None, case).unwrap();
        turn(work::now::<COPIED, _>(POOL, 2, Spinning).unwrap(), Fault::None, case).unwrap();
        turn(work::now::<COPIED, _>(POOL, 2, UserPlatform).unwrap(), Fault::None, case).unwrap();
    }

    #[test]
    fn both_pools_do_what_they_should_in_every_order_and_direction() {
        for (order, depth) in [(Order::Queue, 3), (Order::Burst, 5), (Order::Burst, 1)] {
            for direction in [Direction::FromDevice, Direction::ToDevice] {
                let case = Case { order, depth, direction, ..CASE };
                are_right::<true>(&case);
                are_right::<false>(&Case { copies: false, ..case });
            }
        }
        are_right::<true>(&Case { fill: Fill::Overwritten, ..CASE });
    }

    #[test]
    fn whatever_a_pool_does_wrong_is_found() {
        let fails = |fault, case: &Case, words: &str| {
            let error = now(fault, case).unwrap_err().to_string();
            assert!(error.contains(words), "{fault:?}: {error}");
        };
        fails(Fault::Shares, &CASE, "overlap and are both held");
        fails(Fault::Short, &CASE, "stands in for 4096 bytes");
        fails(Fault::Leaks, &CASE, "4096 bytes of slots are held");
        let overwritten = Case { fill: Fill::Overwritten, ..CASE };
        fails(Fault::Fills, &overwritten, "after a turn, in a slot or a buffer: ");
        // Nothing is copied where it should be.
        for direction in [Direction::ToDevice, Direction::FromDevice] {
            let case = Case { direction, ..CASE };
            let uncopied = work::now::<false, _>(POOL, 2, UserPlatform).unwrap();
            let found = turn(uncopied, Fault::None, &case).unwrap_err();
            assert!(found.to_string().contains("after a turn, in a slot"), "{found}");
        }
    }

    #[test]
    fn no_two_words_are_alike() {
        assert_ne!(word(By::Owner, 1, 2), word(By::Owner, 2, 1));
        assert_ne!(word(By::Owner, 1, 2), word(By::Device, 1, 2));
        assert_ne!(word(By::Owner, 1, (1 << 15) - 1), word(By::Owner, 2, 0));
    }
}
