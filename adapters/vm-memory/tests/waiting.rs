//! Unmaps wait for accesses that they meet, and nobody else for anybody.

use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, iommu};
use dmaspan_vm_memory::{MOST_ENTRIES, TableIommu};
use vm_memory::{
    Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Iommu, IommuMemory, Permissions,
};

const PAGE: u64 = 0x1000;
const READ: Permissions = Permissions::Read;

type Behind = IommuMemory<GuestMemoryMmap, TableIommu<X86_64>>;

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(first * PAGE), count * PAGE).unwrap()
}

/// The bytes of so many pages.
fn bytes(pages: u64) -> usize {
    usize::try_from(pages * PAGE).unwrap()
}

fn empty() -> TableIommu<X86_64> {
    let tables = Arena::new(PhysAddr::new(1 << 45), 64 << 20);
    let format = X86_64::new(X86_64Config::new(48, 52)).unwrap();
    TableIommu::new(PageTable::new(format, tables).unwrap()).unwrap()
}

/// An IOMMU in which each of `count` pages leads to the next one, as one run of small leaves.
fn with_pages(count: u64) -> TableIommu<X86_64> {
    let iommu = empty();
    map(&iommu, 0, count);
    iommu
}

fn map(iommu: &TableIommu<X86_64>, first: u64, count: u64) {
    iommu.map(pages(first, count), GuestAddress((first + 1) * PAGE), Prot::READ_WRITE).unwrap();
}

/// What a byte of a page leads to.
fn reach(iommu: &TableIommu<X86_64>, page: u64) -> Option<u64> {
    let mut found = iommu.translate(GuestAddress(page * PAGE + 5), 1, READ).ok()?;
    found.next().map(|part| part.base.0)
}

fn behind(iommu: &TableIommu<X86_64>) -> Behind {
    let guest = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    IommuMemory::new(guest, iommu.clone(), true, ())
}

/// How many entries the IOTLBs have together, as the IOMMU shows itself.
fn entries(iommu: &TableIommu<X86_64>) -> usize {
    let shown = format!("{iommu:?}");
    let (_, behind) = shown.split_once("entries: ").unwrap();
    behind.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

/// Does on a thread of its own what must not wait. The time is that of the failure alone.
#[track_caller]
fn ends<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    result.recv_timeout(Duration::from_secs(8)).expect("it waits, or has failed")
}

/// Lets two threads take the CPUs from the others while `work` runs.
fn beside_busy_threads(work: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            });
        }
        let _stop = Stop(&stop);
        work();
    });
}

/// Stops threads, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_thread_that_misses_in_the_middle_of_its_own_access_is_answered() {
    let iommu = empty();
    for page in [0, 2, 4, 6] {
        map(&iommu, page, 1);
    }
    ends(move || {
        let first = iommu.translate(GuestAddress(0), 8, READ).unwrap();
        let second = iommu.translate(GuestAddress(2 * PAGE), 8, READ).unwrap();
        let error = iommu.translate(GuestAddress(PAGE), 8, READ).map(drop).unwrap_err();
        assert!(error.to_string().ends_with("a part is not mapped"), "{error}");
        let led: Vec<_> = first.chain(second).map(|part| part.base.0).collect();
        assert_eq!(led, [PAGE, 3 * PAGE]);
        // A copy between two buffers, page by page.
        let memory = behind(&iommu);
        memory.write_slice(b"to be copied", GuestAddress(4 * PAGE)).unwrap();
        let from = memory.get_slices(GuestAddress(4 * PAGE), 12, READ).unwrap();
        let to = memory.get_slices(GuestAddress(6 * PAGE), 12, Permissions::Write).unwrap();
        for (from, to) in from.zip(to) {
            from.unwrap().copy_to_volatile_slice(to.unwrap());
        }
        let mut copied = [0; 12];
        memory.read_slice(&mut copied, GuestAddress(6 * PAGE)).unwrap();
        assert_eq!(&copied, b"to be copied");
    });
}

#[test]
fn an_access_that_lasts_is_in_nobodys_way_but_its_own_pages() {
    let iommu = with_pages(8);
    let access = iommu.translate(GuestAddress(2 * PAGE), bytes(2), READ).unwrap();
    let other = iommu.clone();
    ends(move || {
        assert_eq!(reach(&other, 3), Some(4 * PAGE + 5));
        assert_eq!(reach(&other, 7), Some(8 * PAGE + 5));
        assert_eq!(reach(&other, 8), None);
        map(&other, 10, 1);
        assert_eq!(reach(&other, 10), Some(11 * PAGE + 5));
        // Pages of the same run, which the IOTLBs have as one entry.
        for page in [1, 4, 10] {
            assert_eq!(other.unmap(pages(page, 1)).unwrap(), PAGE);
            assert_eq!(reach(&other, page), None);
        }
    });
    thread::scope(|scope| {
        let unmap = scope.spawn(|| iommu.unmap(pages(3, 1)).unwrap());
        while iommu.walk(pages(3, 1)).count() != 0 {
            thread::yield_now();
        }
        // The unmap waits: nobody else does for it.
        let other = iommu.clone();
        ends(move || {
            assert_eq!(other.unmap(pages(7, 1)).unwrap(), PAGE);
            map(&other, 7, 1);
            assert_eq!(reach(&other, 7), Some(8 * PAGE + 5));
            assert_eq!(reach(&other, 2), Some(3 * PAGE + 5));
        });
        assert!(!unmap.is_finished());
        drop(access);
        assert_eq!(unmap.join().unwrap(), PAGE);
    });
    assert_eq!(reach(&iommu, 3), None);
}

#[test]
fn a_thread_that_would_wait_for_its_own_access_is_told_so_and_nothing_is_unmapped() {
    let iommu = with_pages(4);
    ends(move || {
        let access = iommu.translate(GuestAddress(PAGE), bytes(2), READ).unwrap();
        for met in [pages(1, 1), pages(2, 2), pages(0, 4)] {
            let error = iommu.unmap(met).unwrap_err();
            assert!(matches!(error, iommu::Error::Hardware { range, .. } if range == met));
            assert!(error.to_string().contains("nothing was unmapped"), "{error}");
        }
        assert_eq!(iommu.walk(pages(0, 4)).count(), 1);
        assert_eq!(iommu.unmap(pages(0, 1)).unwrap(), PAGE);
        assert_eq!(iommu.unmap(pages(3, 1)).unwrap(), PAGE);
        assert_eq!(access.map(|part| part.length as u64).sum::<u64>(), 2 * PAGE);
        assert_eq!(iommu.unmap(pages(0, 4)).unwrap(), 2 * PAGE);
    });
}

#[test]
fn any_number_of_accesses_is_under_way_at_once() {
    let iommu = with_pages(1000);
    ends(move || {
        let mut accesses: Vec<_> = (0..1000)
            .map(|page| iommu.translate(GuestAddress(page * PAGE), 1, READ).unwrap())
            .collect();
        // Each second one ends, in no order.
        let mut n = 0;
        accesses.retain(|_| {
            n += 1;
            n % 2 == 0
        });
        for page in 0..1000 {
            assert_eq!(iommu.unmap(pages(page, 1)).is_ok(), page % 2 == 0, "page {page}");
        }
        for (access, page) in accesses.into_iter().zip((1..).step_by(2)) {
            assert_eq!(access.map(|part| part.base.0).collect::<Vec<_>>(), [(page + 1) * PAGE]);
        }
        assert_eq!(iommu.unmap(pages(0, 1000)).unwrap(), 500 * PAGE);
    });
}

#[test]
fn an_iotlb_uses_nothing_of_what_it_missed_the_unmaps_of() {
    for missed in [1, 2, 63, 64, 65, 200] {
        let iommu = with_pages(256);
        let other = iommu.clone();
        // This thread has all of it in its IOTLB, and another one takes pages away.
        assert_eq!(reach(&iommu, 0), Some(PAGE + 5));
        ends(move || {
            for page in 0..missed {
                other.unmap(pages(page, 1)).unwrap();
                if page % 2 == 0 {
                    other.map(pages(page, 1), GuestAddress(page << 20), Prot::READ).unwrap();
                }
            }
        });
        for page in 0..256 {
            let leads = match page {
                _ if page >= missed => Some((page + 1) * PAGE + 5),
                _ if page % 2 == 0 => Some((page << 20) + 5),
                _ => None,
            };
            assert_eq!(reach(&iommu, page), leads, "page {page} of {missed}");
        }
    }
}

#[test]
fn a_translation_that_is_refused_leaves_nothing_in_the_iotlbs() {
    let iommu = empty();
    // Backwards, so that no two pages join.
    let count = MOST_ENTRIES as u64 + 1;
    for page in 0..count {
        let to = GuestAddress((count - page) * PAGE);
        iommu.map(pages(page, 1), to, Prot::READ).unwrap();
    }
    let translate = |pages: u64| {
        let found = iommu.translate(GuestAddress(0), bytes(pages), READ);
        found.map(Iterator::count).map_err(|error| error.to_string())
    };
    let error = translate(count).unwrap_err();
    assert!(error.ends_with("it is of more than 65536 runs of memory"), "{error}");
    assert_eq!(entries(&iommu), 0);
    assert_eq!(iommu.unmap(pages(100, 1)).unwrap(), PAGE);
    let error = translate(200).unwrap_err();
    assert!(error.ends_with("a part is not mapped"), "{error}");
    assert_eq!(entries(&iommu), 0);
    iommu.map(pages(100, 1), GuestAddress(7 << 30), Prot::READ).unwrap();
    assert_eq!(translate(MOST_ENTRIES as u64), Ok(MOST_ENTRIES));
    assert_eq!(entries(&iommu), MOST_ENTRIES);
    // One more makes room.
    assert_eq!(reach(&iommu, MOST_ENTRIES as u64), Some(PAGE + 5));
    assert_eq!(entries(&iommu), 1);
}

#[test]
fn the_iotlbs_of_all_threads_have_no_more_entries_together_than_they_may() {
    const EACH: u64 = MOST_ENTRIES as u64 / 3;
    let iommu = empty();
    for page in 0..4 * EACH {
        iommu.map(pages(page, 1), GuestAddress((4 * EACH - page) * PAGE), Prot::READ).unwrap();
    }
    for thread in 0..4 {
        thread::scope(|scope| {
            scope.spawn(|| {
                for page in thread * EACH..(thread + 1) * EACH {
                    assert!(reach(&iommu, page).is_some());
                }
            });
        });
        assert!(entries(&iommu) <= MOST_ENTRIES, "{} entries", entries(&iommu));
    }
    // Nor where unmaps cut one entry into ever more.
    let iommu = empty();
    map(&iommu, 0, 3 * MOST_ENTRIES as u64);
    for page in (0..3 * MOST_ENTRIES as u64).step_by(2) {
        iommu.unmap(pages(page, 1)).unwrap();
        assert!(reach(&iommu, page + 1).is_some());
    }
    assert!(entries(&iommu) <= MOST_ENTRIES, "{} entries", entries(&iommu));
}

/// Threads that read again and again: `from` says which pages a thread reads in which round.
/// Meanwhile `unmaps` runs. Returns how many accesses were answered, and how many refused.
fn while_devices_read(
    iommu: &TableIommu<X86_64>,
    threads: u64,
    from: impl Fn(u64, u64) -> (u64, u64) + Sync,
    unmaps: impl FnOnce(),
) -> [u64; 2] {
    let memory = &behind(iommu);
    let counts = [const { AtomicU64::new(0) }; 2];
    let (from, stop) = (&from, AtomicBool::new(false));
    beside_busy_threads(|| {
        thread::scope(|scope| {
            for thread in 0..threads {
                let (counts, stop) = (&counts, &stop);
                scope.spawn(move || {
                    let mut buf = vec![0; 1 << 16];
                    for round in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                        let (first, count) = from(thread, round);
                        let buf = &mut buf[..bytes(count)];
                        let done = memory.read_slice(buf, GuestAddress(first * PAGE));
                        counts[usize::from(done.is_err())].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let _stop = Stop(&stop);
            while counts[0].load(Ordering::Relaxed) < 2 * threads {
                thread::yield_now();
            }
            unmaps();
        });
    });
    counts.map(AtomicU64::into_inner)
}

/// Every unmap succeeds beside threads that read without a pause, of pages that they read and of
/// pages that nobody does.
fn unmaps_beside_readers(threads: u64, unmaps: u64) {
    let iommu = with_pages(32);
    let reads = |thread, round| if round % 4 == 0 { (16, 1) } else { (thread, 8) };
    let [read, _] = while_devices_read(&iommu, threads, reads, || {
        for n in 0..unmaps {
            let page = if n % 2 == 0 { 16 } else { 31 };
            assert_eq!(iommu.unmap(pages(page, 1)).unwrap(), PAGE, "unmap {n}");
            assert_eq!(reach(&iommu, page), None);
            map(&iommu, page, 1);
        }
    });
    assert!(read >= 2 * threads);
}

#[test]
fn every_unmap_succeeds_beside_eight_threads_that_read_without_a_pause() {
    unmaps_beside_readers(8, 32);
}

#[test]
#[ignore = "takes minutes: `ci --full` runs it"]
fn thousands_of_unmaps_succeed_beside_readers_of_any_number() {
    for threads in [1, 2, 4, 8, 16, 64] {
        unmaps_beside_readers(threads, 20_000);
    }
}

#[test]
fn a_device_is_let_in_nowhere_again_while_the_unmap_of_it_waits() {
    const THREADS: usize = 8;
    let iommu = with_pages(1);
    let access = iommu.translate(GuestAddress(0), 8, READ).unwrap();
    let returned = AtomicBool::new(false);
    let stop = AtomicBool::new(false);
    // Of each device: accesses that were refused, and those that were answered behind that.
    let refused: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];
    let again = AtomicU64::new(0);
    beside_busy_threads(|| {
        thread::scope(|scope| {
            let (iommu, stop, again) = (&iommu, &stop, &again);
            for refused in &refused {
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        match reach(iommu, 0) {
                            Some(_) => again.fetch_add(
                                u64::from(refused.load(Ordering::Relaxed) != 0),
                                Ordering::Relaxed,
                            ),
                            None => refused.fetch_add(1, Ordering::Relaxed),
                        };
                        thread::yield_now();
                    }
                });
            }
            let _stop = Stop(stop);
            let unmap = scope.spawn(|| {
                let bytes = iommu.unmap(pages(0, 1));
                returned.store(true, Ordering::SeqCst);
                bytes
            });
            // Every device goes on to be answered, and the unmap to wait.
            while refused.iter().any(|count| count.load(Ordering::Relaxed) < 100) {
                assert!(!returned.load(Ordering::SeqCst), "it waits for the access");
                thread::yield_now();
            }
            assert!(!returned.load(Ordering::SeqCst), "it waits for the access");
            drop(access);
            assert_eq!(unmap.join().unwrap().unwrap(), PAGE);
        });
    });
    assert_eq!(again.into_inner(), 0);
}
