//! Work on a range of memory by several threads, each of which does a part.

use std::iter;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};

use dmaspan::Errno;

use crate::os;

/// Cuts `begin..end` into about `most` parts of at least `least` bytes each, as offsets and
/// lengths. All but the first begin at multiples of `leaf`.
pub(crate) fn cut(begin: u64, end: u64, leaf: u64, least: u64, most: usize) -> Vec<(u64, u64)> {
    let len = end.saturating_sub(begin);
    let most = u64::try_from(most).unwrap_or(1).max(1);
    let count = (len / least).clamp(1, most);
    let step = len.div_ceil(count).next_multiple_of(leaf);
    let mut parts = Vec::new();
    let mut at = begin;
    while at < end {
        let next = os::align_down(at.saturating_add(step), leaf).clamp(at + 1, end);
        parts.push((at, next - at));
        at = next;
    }
    parts
}

/// Calls `one` for each part, by so many threads, this one among them: each takes the next part
/// that nobody has. Where there are no threads to be had, the others do their work. All are done
/// when it returns.
///
/// # Errors
///
/// An error of a part; `EIO` where a thread panicked. The other parts are done all the same.
pub(crate) fn for_each<P: Sync>(
    name: &str,
    threads: usize,
    parts: &[P],
    one: impl Fn(&P) -> Result<(), Errno> + Sync,
) -> Result<(), Errno> {
    for_each_by(|| Builder::new().name(name.to_owned()), threads, parts, one)
}

/// As [`for_each`], by threads that are built so.
fn for_each_by<P: Sync>(
    builder: impl Fn() -> Builder,
    threads: usize,
    parts: &[P],
    one: impl Fn(&P) -> Result<(), Errno> + Sync,
) -> Result<(), Errno> {
    let next = AtomicUsize::new(0);
    let work = || {
        let take = || parts.get(next.fetch_add(1, Ordering::Relaxed));
        iter::from_fn(take).map(&one).fold(Ok(()), Result::and)
    };
    let others = threads.min(parts.len()).saturating_sub(1);
    if others == 0 {
        return work();
    }
    thread::scope(|scope| {
        let spawn = |_| builder().spawn_scoped(scope, work).ok();
        let others: Vec<_> = (0..others).filter_map(spawn).collect();
        let result = work();
        let ended = others.into_iter().map(|other| other.join().unwrap_or(Err(Errno::EIO)));
        ended.fold(result, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    const M64: u64 = 64 << 20;
    const G1: u64 = 1 << 30;

    #[test]
    fn small_ranges_are_one_part() {
        assert_eq!(cut(0, 2 * M64 - 4096, 2 << 20, M64, 16), [(0, 2 * M64 - 4096)]);
        assert_eq!(cut(4096, 8192, 2 << 20, M64, 16), [(4096, 4096)]);
        assert_eq!(cut(0, 8 * M64, 2 << 20, M64, 1), [(0, 8 * M64)]);
        assert_eq!(cut(0, 0, 4096, M64, 4), []);
    }

    #[test]
    fn parts_are_disjoint_whole_and_begin_at_leaves() {
        for (begin, end, leaf) in [
            (0, 2 * M64, 2 << 20),
            (4096, 7 * M64 + 12288, 2 << 20),
            (3 << 20, 33 * M64, 2 << 20),
            (0, 5 * G1, G1),
            (0, 3 * M64 + 4096, 4096),
        ] {
            for most in 1..40 {
                let parts = cut(begin, end, leaf, M64.max(leaf), most);
                assert!(parts.len() <= most + 1, "{parts:?}");
                let mut at = begin;
                for (n, (start, len)) in parts.iter().enumerate() {
                    assert_eq!(*start, at);
                    assert!(*len > 0 && (n == 0 || start.is_multiple_of(leaf)), "{parts:?}");
                    at += len;
                }
                assert_eq!(at, end);
            }
        }
        assert_eq!(cut(0, 5 * G1, G1, G1, 16).len(), 5);
        assert_eq!(cut(0, 4 * M64, 2 << 20, M64, 2), [(0, 2 * M64), (2 * M64, 2 * M64)]);
    }

    /// Does parts by so many threads and says which were done, as bits. One of 7 fails.
    fn run(
        builder: impl Fn() -> Builder,
        threads: usize,
        parts: &[u32],
    ) -> (Result<(), Errno>, u32) {
        let done = AtomicU32::new(0);
        let result = for_each_by(builder, threads, parts, |part| {
            done.fetch_or(1 << part, Ordering::Relaxed);
            if *part == 7 { Err(Errno::EFAULT) } else { Ok(()) }
        });
        (result, done.into_inner())
    }

    #[test]
    fn every_part_is_done_whichever_fails() {
        for threads in 0..5 {
            for parts in [[7, 1, 2], [1, 7, 2], [1, 2, 7]] {
                assert_eq!(run(Builder::new, threads, &parts), (Err(Errno::EFAULT), 0x86));
            }
            assert_eq!(run(Builder::new, threads, &[0, 1, 2, 3]), (Ok(()), 0xf));
            assert_eq!(run(Builder::new, threads, &[]), (Ok(()), 0));
        }
    }

    #[test]
    fn a_thread_that_panics_is_an_error() {
        let caller = thread::current().id();
        let begun = AtomicU32::new(0);
        let result = for_each("dmaspan-test", 2, &[(), ()], |()| {
            // Each thread has one of the two parts.
            begun.fetch_add(1, Ordering::Relaxed);
            while begun.load(Ordering::Relaxed) < 2 {
                thread::yield_now();
            }
            assert_eq!(thread::current().id(), caller, "a thread that panics");
            Ok(())
        });
        assert_eq!(result, Err(Errno::EIO));
    }

    #[test]
    fn the_caller_does_what_no_thread_can_be_had_for() {
        // No address space has room for such a stack.
        let none = || Builder::new().stack_size(1 << 60);
        assert!(none().spawn(|| ()).is_err());
        assert_eq!(run(none, 3, &[0, 1, 2]), (Ok(()), 0x7));
        assert_eq!(run(none, 3, &[0, 7, 2]), (Err(Errno::EFAULT), 0x85));
    }
}
