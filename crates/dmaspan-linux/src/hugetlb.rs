//! A reservation of hugetlb pages raises the pool of the system, and lowers it again by the same
//! number.
//!
//! The files are those of Documentation/admin-guide/mm/hugetlbpage.rst below
//! `/sys/kernel/mm/hugepages`. Where the kernel does not find contiguous memory for all pages that
//! are asked for, it grants fewer and says nothing, so the number is read back.
//!
//! A reservation holds a lock of the pool (flock(2) of its file `nr_hugepages`) from the reading of
//! the number until its pages are mapped, which [`HugetlbReservation::mapped`] says. So nobody who
//! takes the lock counts pages as free that another one is about to map, and no change is lost
//! between reading and writing. Programs that do not take the lock may still take pages, and a
//! change of theirs between the reading and the writing is overwritten.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::Errno;

use crate::mem::MemoryKind;
use crate::os::{self, Size};
use crate::sys::{self, Lock};

/// How long the pool's lock is waited for: longer than mapping memory takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long to wait between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(5);

/// The reason why hugetlb pages were not reserved. The pool is as before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReservationError {
    /// The kernel has no pool for this size.
    #[error(
        "this kernel has no hugetlb pages of {}: use another kind of memory",
        Size(*page_size)
    )]
    NoPool {
        /// The size asked for, in bytes.
        page_size: u64,
    },
    /// The pool may not be changed.
    #[error(
        "{pages} free hugetlb pages of {} are needed but only {free} exist, and this process may \
         not raise the number ({}): {}",
        Size(*page_size), os::words(*errno), advice(*page_size, *pages)
    )]
    NotPermitted {
        /// The size asked for, in bytes.
        page_size: u64,
        /// The number of free pages asked for.
        pages: u64,
        /// How many are free.
        free: u64,
        /// What the kernel answered.
        errno: Errno,
    },
    /// Fewer pages are free after the pool was raised than were asked for.
    #[error(
        "{granted} of {pages} hugetlb pages of {} are free: the kernel found no contiguous memory \
         for more, or another process took them: ask for less, end other programs that use them, \
         reserve early after boot, or try `echo 1 > /proc/sys/vm/compact_memory` as root first",
        Size(*page_size)
    )]
    NotGranted {
        /// The size asked for, in bytes.
        page_size: u64,
        /// The number of free pages asked for.
        pages: u64,
        /// How many were free at last.
        granted: u64,
    },
    /// Another reservation of the pool has not mapped its pages.
    #[error(
        "another process, or another reservation of this one, has reserved hugetlb pages of {} and \
         has not mapped them within {} s: wait for it or end it",
        Size(*page_size), waited.as_secs()
    )]
    Busy {
        /// The size asked for, in bytes.
        page_size: u64,
        /// How long its lock was waited for.
        waited: Duration,
    },
    /// The pool could not be read, locked or written.
    #[error(
        "the hugetlb pool of {} pages cannot be read, locked or written: {}",
        Size(*page_size), os::words(*errno)
    )]
    Unreadable {
        /// The size asked for, in bytes.
        page_size: u64,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl ReservationError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoPool { .. } => Errno::EINVAL,
            Self::NotGranted { .. } => Errno::ENOMEM,
            Self::Busy { .. } => Errno::EBUSY,
            Self::NotPermitted { errno, .. } | Self::Unreadable { errno, .. } => *errno,
        }
    }
}

/// Hugetlb pages that were made free, until it is dropped.
///
/// Drop it after the memory that uses the pages. If it goes first, the kernel keeps pages in use as
/// surplus ones and frees each when its memory goes.
///
/// The pool stays locked for other reservations until [`mapped`](Self::mapped) is called or this is
/// dropped: call it as soon as the memory exists.
///
/// A signal that ends the process skips the drop, as do `abort` and `exit`: the pool then stays
/// raised until somebody lowers `nr_hugepages`. The kernel ends the lock with the process.
///
/// ```no_run
/// use dmaspan_linux::{HugetlbReservation, Memory, MemoryKind};
///
/// let mut reservation = HugetlbReservation::new(2 << 20, 8)?;
/// let memory = Memory::new(MemoryKind::Hugetlb2M, 16 << 20)?;
/// reservation.mapped();
/// // ... the memory is used ...
/// drop(memory);
/// drop(reservation);
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "dropping a reservation gives the pages back"]
pub struct HugetlbReservation {
    pool: Pool,
    added: u64,
    /// Until the pages are mapped.
    lock: Option<PoolLock>,
}

impl HugetlbReservation {
    /// Sees to it that `pages` pages of `page_size` bytes are free, and locks the pool until they
    /// are [`mapped`](Self::mapped). Raises nothing where they are free already.
    ///
    /// Waits for up to a minute while another reservation of the pool is not mapped. One of the
    /// same thread counts too, so two at once of one page size need a call of `mapped` between.
    ///
    /// # Errors
    ///
    /// [`ReservationError`] where the pool cannot be raised so far; what was raised is given back.
    pub fn new(page_size: u64, pages: u64) -> Result<Self, ReservationError> {
        Self::from_pool(Pool::of(page_size)?, pages, PATIENCE)
    }

    fn from_pool(pool: Pool, pages: u64, patience: Duration) -> Result<Self, ReservationError> {
        let page_size = pool.page_size;
        let lock = Some(pool.lock(patience)?);
        let before = pool.counts()?;
        let missing = pages.saturating_sub(before.free);
        if missing == 0 {
            return Ok(Self { pool, added: 0, lock });
        }
        let not_granted = |granted| ReservationError::NotGranted { page_size, pages, granted };
        let target = before.total.checked_add(missing).ok_or(not_granted(before.free))?;
        if let Err(errno) = pool.set(target) {
            return Err(match errno {
                Errno::EPERM | os::EACCES => {
                    ReservationError::NotPermitted { page_size, pages, free: before.free, errno }
                }
                // More pages than the number of pages can say.
                Errno::EINVAL | Errno::ERANGE => not_granted(before.free),
                _ => ReservationError::Unreadable { page_size, errno },
            });
        }
        let after = pool.counts()?;
        let added = after.persistent.saturating_sub(before.persistent);
        if after.free < pages {
            pool.lower(added);
            return Err(not_granted(after.free));
        }
        Ok(Self { pool, added, lock })
    }

    /// Says that the memory that uses the pages exists, so that others may reserve pages of this
    /// size. They stay reserved until this is dropped.
    pub fn mapped(&mut self) {
        self.lock = None;
    }

    /// Returns what memory of this kind and length needs; `None` where it needs no hugetlb pages.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn for_memory(kind: MemoryKind, len_bytes: u64) -> Result<Option<Self>, ReservationError> {
        if !kind.is_hugetlb() {
            return Ok(None);
        }
        let page_size = kind.page_size();
        Self::new(page_size, len_bytes.div_ceil(page_size)).map(Some)
    }

    /// By how many pages the pool was raised, and will be lowered.
    pub fn added(&self) -> u64 {
        self.added
    }
}

impl Drop for HugetlbReservation {
    fn drop(&mut self) {
        if self.added == 0 {
            return;
        }
        // A pool that cannot be locked is lowered all the same: it would stay raised for ever.
        let _lock = self.lock.take().or_else(|| self.pool.lock(PATIENCE).ok());
        self.pool.lower(self.added);
    }
}

/// The sizes of hugetlb pages that this kernel has, in bytes, the smallest first.
///
/// ```
/// for size in dmaspan_linux::hugetlb::page_sizes() {
///     println!("{} KiB", size / 1024);
/// }
/// ```
pub fn page_sizes() -> Vec<u64> {
    let folders = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let size = |name: &str| {
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        kib.checked_mul(1024).filter(|size| size.is_power_of_two())
    };
    let mut sizes: Vec<u64> =
        folders.filter_map(|folder| size(folder.file_name().to_str()?)).collect();
    sizes.sort_unstable();
    sizes
}

/// What a user does who needs `pages` more free pages.
pub(crate) fn advice(page_size: u64, pages: u64) -> String {
    let path = pool_dir(page_size).join("nr_hugepages");
    let counts = Pool::of(page_size).and_then(|pool| pool.counts());
    let target =
        counts.map_or(pages, |now| now.total.saturating_add(pages.saturating_sub(now.free)));
    format!("`echo {target} > {}` as root", path.display())
}

fn pool_dir(page_size: u64) -> PathBuf {
    PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_size / 1024))
}

/// The lock of a pool, until it is dropped.
struct PoolLock(File);

impl fmt::Debug for PoolLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolLock").finish_non_exhaustive()
    }
}

impl Drop for PoolLock {
    fn drop(&mut self) {
        // A child that was forked has the open file too, so closing it here may not end the lock.
        // Unlocking what is locked does not fail; where the kernel has no locks nothing is locked.
        let _ = sys::lock(&self.0, Lock::Released);
    }
}

/// The pages of one size.
#[derive(Debug)]
struct Pool {
    dir: PathBuf,
    page_size: u64,
}

/// How many pages a pool has.
#[derive(Clone, Copy, Debug)]
struct Counts {
    /// All pages, with surplus ones.
    total: u64,
    /// Those that stay in the pool when they are freed: what `nr_hugepages` sets.
    persistent: u64,
    /// Free ones that no mapping has a claim on.
    free: u64,
}

impl Pool {
    fn of(page_size: u64) -> Result<Self, ReservationError> {
        let dir = pool_dir(page_size);
        if page_size < 1024 || !dir.is_dir() {
            return Err(ReservationError::NoPool { page_size });
        }
        Ok(Self { dir, page_size })
    }

    fn counts(&self) -> Result<Counts, ReservationError> {
        let read = |name: &str| {
            os::read_number(&self.dir.join(name)).map_err(|error| ReservationError::Unreadable {
                page_size: self.page_size,
                errno: os::errno(&error),
            })
        };
        let total = read("nr_hugepages")?;
        Ok(Counts {
            total,
            persistent: total.saturating_sub(read("surplus_hugepages")?),
            free: read("free_hugepages")?.saturating_sub(read("resv_hugepages")?),
        })
    }

    /// Locks the pool against other reservations, of this process and of others (flock(2), which
    /// needs no permission to write).
    fn lock(&self, patience: Duration) -> Result<PoolLock, ReservationError> {
        let page_size = self.page_size;
        let failed = |errno| ReservationError::Unreadable { page_size, errno };
        let file = File::open(self.dir.join("nr_hugepages"));
        let file = file.map_err(|error| failed(os::errno(&error)))?;
        let begin = Instant::now();
        loop {
            match sys::lock(&file, Lock::Tried) {
                // A kernel without file locks (CONFIG_FILE_LOCKING): nobody takes any.
                Ok(()) | Err(os::ENOSYS) => return Ok(PoolLock(file)),
                Err(os::EAGAIN) if begin.elapsed() < patience => thread::sleep(PAUSE),
                Err(os::EAGAIN) => {
                    return Err(ReservationError::Busy { page_size, waited: patience });
                }
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    fn set(&self, pages: u64) -> Result<(), Errno> {
        let path: &Path = &self.dir.join("nr_hugepages");
        fs::write(path, pages.to_string()).map_err(|error| os::errno(&error))
    }

    /// Takes `added` pages from the number there is now, which others may have changed meanwhile.
    fn lower(&self, added: u64) {
        if added == 0 {
            return;
        }
        if let Ok(now) = self.counts() {
            // Destroying cannot fail: what cannot be written stays raised.
            let _ = self.set(now.persistent.saturating_sub(added));
        }
    }
}

#[cfg(test)]
#[path = "../tests/turn/mod.rs"]
mod turn;
#[cfg(test)]
pub(crate) use turn::turn;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    const SIZE: u64 = 2 << 20;

    #[test]
    fn reservation_gives_back_what_it_took() {
        let _turn = turn();
        let Ok(pool) = Pool::of(SIZE) else { return eprintln!("SKIP: no pool of 2 MiB pages") };
        let before = pool.counts().unwrap();
        let reservation = match HugetlbReservation::new(SIZE, before.free + 4) {
            Ok(reservation) => reservation,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        assert_eq!(reservation.added(), 4);
        assert!(pool.counts().unwrap().free >= before.free + 4);
        drop(reservation);
        assert_eq!(pool.counts().unwrap().persistent, before.persistent);
    }

    #[test]
    fn pages_that_are_free_already_are_not_reserved_again() {
        let _turn = turn();
        let mut first = match HugetlbReservation::new(SIZE, 2) {
            Ok(first) => first,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        first.mapped();
        let second = HugetlbReservation::new(SIZE, 2).unwrap();
        assert_eq!(second.added(), 0);
        drop(second);
        assert!(first.pool.counts().unwrap().free >= 2);
    }

    /// Plain files that stand for a pool with 5 pages, of which 2 are free: asking a real one for
    /// more than there is would take the memory of the whole system meanwhile.
    fn plain_pool(name: &str) -> Pool {
        let dir = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        for (name, count) in [("nr", "5"), ("free", "3"), ("resv", "1"), ("surplus", "0")] {
            fs::write(dir.join(format!("{name}_hugepages")), count).unwrap();
        }
        Pool { dir, page_size: SIZE }
    }

    fn again(pool: &Pool) -> Pool {
        Pool { dir: pool.dir.clone(), page_size: pool.page_size }
    }

    #[test]
    fn more_than_the_kernel_grants_is_refused_and_given_back() {
        let pool = plain_pool("grants");
        let error = HugetlbReservation::from_pool(again(&pool), 10, PATIENCE).unwrap_err();
        assert_eq!(pool.counts().unwrap().total, 5);
        fs::remove_dir_all(pool.dir).unwrap();
        let expected = ReservationError::NotGranted { page_size: SIZE, pages: 10, granted: 2 };
        assert_eq!(error, expected);
        assert_eq!(error.errno(), Errno::ENOMEM);
        let text = error.to_string();
        assert!(text.contains("2 MiB") && text.contains("another process took them"), "{text}");
    }

    #[test]
    fn a_pool_is_locked_until_the_pages_are_mapped() {
        let pool = plain_pool("locked");
        let reserve = |patience| HugetlbReservation::from_pool(again(&pool), 2, patience);
        let mut first = reserve(Duration::ZERO).unwrap();
        let busy = ReservationError::Busy { page_size: SIZE, waited: Duration::ZERO };
        assert_eq!(reserve(Duration::ZERO).unwrap_err(), busy);
        assert_eq!(busy.errno(), Errno::EBUSY);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| reserve(PATIENCE).unwrap());
            thread::sleep(4 * PAUSE);
            assert!(!waiting.is_finished());
            first.mapped();
            drop(waiting.join().unwrap());
        });
        drop(reserve(Duration::ZERO).unwrap());
        fs::remove_dir_all(pool.dir).unwrap();
    }

    #[test]
    fn a_refusal_gives_sizes_and_reasons_in_words() {
        let error = ReservationError::NotPermitted {
            page_size: SIZE,
            pages: 4,
            free: 0,
            errno: os::EACCES,
        };
        let text = error.to_string();
        assert!(text.contains("pages of 2 MiB are needed"), "{text}");
        assert!(text.contains("(Permission denied)"), "{text}");
    }

    #[test]
    fn a_reservation_that_goes_first_leaves_the_memory_its_pages() {
        let _turn = turn();
        let reservation = match HugetlbReservation::for_memory(MemoryKind::Hugetlb2M, 2 * SIZE) {
            Ok(reservation) => reservation.unwrap(),
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        let memory = Memory::new(MemoryKind::Hugetlb2M, 2 * SIZE).unwrap();
        memory.fill_words(0, 2 * SIZE, |n| n).unwrap();
        drop(reservation);
        memory.check_words(0, 2 * SIZE, |n| n).unwrap();
    }

    #[test]
    fn a_reservation_takes_back_what_it_added_whatever_others_added_meanwhile() {
        let pool = plain_pool("takes-back");
        let reservation = HugetlbReservation { pool: again(&pool), added: 4, lock: None };
        // It made 9 of the 5, and another one 16 of those.
        pool.set(16).unwrap();
        drop(reservation);
        assert_eq!(pool.counts().unwrap().total, 12);
        fs::remove_dir_all(pool.dir).unwrap();
    }

    #[test]
    fn a_size_without_a_pool_is_refused() {
        let error = HugetlbReservation::new(12345, 1).unwrap_err();
        assert_eq!(error, ReservationError::NoPool { page_size: 12345 });
        assert!(HugetlbReservation::for_memory(MemoryKind::Base, 4096).unwrap().is_none());
    }

    #[test]
    fn the_advice_names_the_file_and_the_number() {
        let text = advice(SIZE, 1 << 30);
        assert!(text.starts_with("`echo "), "{text}");
        assert!(text.contains("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"), "{text}");
    }
}
