use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;

use dmaspan::Prot;
use dmaspan::regbuf::HostMemory;

use super::adopt::is_shared;
use super::*;
use crate::hugetlb::{self, HugetlbReservation};

fn page() -> u64 {
    sys::page_size()
}

#[test]
fn every_name_is_parsed_back_and_others_are_refused() {
    for kind in MemoryKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    let error = "huge".parse::<MemoryKind>().unwrap_err();
    assert!(error.to_string().contains("\"huge\""), "{error}");
    assert!(error.to_string().contains("hugetlb-1g"), "{error}");
}

#[test]
fn a_length_that_is_no_multiple_of_the_page_size_names_both() {
    let error = Memory::new(MemoryKind::Thp, os::thp_size() + page()).unwrap_err();
    assert!(matches!(error, MemoryError::Length { kind: MemoryKind::Thp, .. }));
    let text = error.to_string();
    let both = [os::thp_size() + page(), os::thp_size()].map(|bytes| format!("{bytes:#x}"));
    assert!(both.iter().all(|bytes| text.contains(bytes)), "{text}");
    assert_eq!(error.errno(), Errno::EINVAL);
}

#[test]
fn stripes_have_huge_pages_and_base_pages_in_turn() {
    let stripe = os::thp_size();
    // Huge pages of 512 MiB are many bytes: fewer of them, and not all of each.
    let (count, part) = if stripe > 32 << 20 { (3, 32 << 20) } else { (5, stripe) };
    let memory = Memory::striped(count * stripe).unwrap();
    assert_eq!((memory.kind(), memory.len()), (MemoryKind::Thp, count * stripe));
    let starts = || (0..count).map(|n| n * stripe);
    starts().for_each(|at| memory.fill_words(at, part, |n| at + n).unwrap());
    starts().for_each(|at| memory.check_words(at, part, |n| at + n).unwrap());
    match crate::pagemap::huge_bytes(&memory) {
        Ok(0) => eprintln!("SKIP: the system gives no transparent huge pages"),
        // Fragmented memory may have too few.
        Ok(huge) => {
            let most = count.div_ceil(2) * stripe;
            assert!(huge <= most && huge.is_multiple_of(stripe), "{huge}");
        }
        Err(error) => eprintln!("SKIP: {error}"),
    }
    assert!(matches!(Memory::striped(stripe + page()), Err(MemoryError::Length { .. })));
}

#[test]
fn no_memory_is_empty() {
    for kind in MemoryKind::ALL {
        assert_eq!(Memory::new(kind, 0).unwrap_err(), MemoryError::Empty { kind });
    }
}

#[test]
fn more_than_the_system_has_is_an_error_and_no_signal() {
    let error = Memory::new(MemoryKind::Base, 1 << 50).unwrap_err();
    assert!(matches!(error, MemoryError::TooMuch { .. }), "{error}");
    assert_eq!(error.errno(), Errno::ENOMEM);
}

#[test]
fn too_few_huge_pages_are_an_error_that_says_what_to_do() {
    let pages = 1 << 20;
    for kind in [MemoryKind::Hugetlb2M, MemoryKind::MemfdHugetlb2M] {
        let error = Memory::new(kind, pages * kind.page_size()).unwrap_err();
        if matches!(error, MemoryError::Unsupported { .. }) {
            eprintln!("SKIP: {error}");
            continue;
        }
        assert!(matches!(error, MemoryError::NoHugePages { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("hugepages-2048kB/nr_hugepages"), "{text}");
    }
}

#[test]
fn refused_huge_pages_take_no_memory_of_other_threads() {
    let _turn = hugetlb::turn();
    let pages = 16;
    for kind in [MemoryKind::Hugetlb2M, MemoryKind::MemfdHugetlb2M] {
        thread::scope(|scope| {
            let refused = scope.spawn(move || {
                for _ in 0..10_000 {
                    if Memory::new(kind, pages * kind.page_size()).is_ok() {
                        return eprintln!("SKIP: {pages} huge pages are free");
                    }
                }
            });
            // Many at once, so that gaps elsewhere are used up and a new one is found at once.
            while !refused.is_finished() {
                let mut held = Vec::new();
                for n in 0..200_u64 {
                    let memory = Memory::new(MemoryKind::Base, page()).unwrap();
                    memory.fill_words(0, memory.len(), |_| n).unwrap();
                    held.push((memory, n));
                }
                for (memory, n) in held {
                    memory.check_words(0, memory.len(), |_| n).unwrap();
                }
            }
        });
    }
}

#[test]
fn a_kernel_without_files_in_memory_is_named_as_such() {
    let text = MemoryError::mapping(MemoryKind::Memfd, page(), os::ENOSYS).to_string();
    assert!(text.contains("no memfd_create"), "{text}");
    let text = MemoryError::mapping(MemoryKind::Hugetlb1G, 1 << 30, Errno::ENOENT).to_string();
    assert!(text.contains("no hugetlb-1g memory with pages of 1 GiB"), "{text}");
}

#[test]
fn a_limit_that_keeps_memory_from_being_mapped_is_named() {
    for (kind, errno, limit) in [
        (MemoryKind::Base, Errno::ENOMEM, "ulimit -v"),
        (MemoryKind::Thp, Errno::ENOMEM, "vm.overcommit_memory"),
        (MemoryKind::Memfd, os::EMFILE, "ulimit -n"),
        (MemoryKind::Memfd, os::ENFILE, "/proc/sys/fs/file-max"),
    ] {
        let error = MemoryError::mapping(kind, 1 << 20, errno);
        let text = error.to_string();
        assert!(text.contains("1 MiB") && text.contains(limit), "{text}");
        assert_eq!(error.errno(), errno);
    }
}

#[test]
fn memory_is_aligned_to_its_leaves() {
    for kind in [MemoryKind::Thp, MemoryKind::Base, MemoryKind::Memfd] {
        let len = 2 * os::thp_size();
        let memory = Memory::new(kind, len).unwrap();
        assert_eq!(memory.user_range().start().get() % kind.leaf_size(), 0);
        assert_eq!(memory.len(), len);
        assert_eq!(memory.kind(), kind);
        assert_eq!(memory.page_size(), kind.page_size());
    }
}

#[test]
fn bytes_at_any_offset_and_length_come_back_and_neighbours_stay() {
    let memory = Memory::new(MemoryKind::Base, page()).unwrap();
    for offset in 0..17_u64 {
        for len in 0..33_usize {
            memory.fill_words(0, page(), |_| u64::MAX).unwrap();
            let bytes: Vec<u8> = (0..len).map(|n| u8::try_from(n).unwrap()).collect();
            memory.write(offset, &bytes).unwrap();
            let mut all = vec![0; 64];
            memory.read(0, &mut all).unwrap();
            let first = usize::try_from(offset).unwrap();
            assert_eq!(&all[first..first + len], &bytes);
            assert!(all[..first].iter().chain(&all[first + len..]).all(|byte| *byte == 0xff));
            let mut part = vec![0xee; len];
            memory.read(offset, &mut part).unwrap();
            assert_eq!(part, bytes);
        }
    }
}

#[test]
fn accesses_beyond_the_end_are_refused_and_the_last_byte_is_not() {
    let memory = Memory::new(MemoryKind::Base, page()).unwrap();
    memory.write(page() - 1, &[7]).unwrap();
    let mut byte = [0];
    memory.read(page() - 1, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    memory.read(page(), &mut []).unwrap();
    let outside = |offset, len| AccessError::OutOfBounds { offset, len, memory_len: page() };
    assert_eq!(memory.write(page(), &[1]), Err(outside(page(), 1)));
    assert_eq!(memory.read(page() + 1, &mut []), Err(outside(page() + 1, 0)));
    assert_eq!(memory.read(u64::MAX, &mut [0; 2]), Err(outside(u64::MAX, 2)));
    assert_eq!(memory.read_u64(page()), Err(outside(page(), 8)));
    assert_eq!(memory.fill_words(u64::MAX - 7, 16, |_| 0), Err(outside(u64::MAX - 7, 16)));
    assert_eq!(memory.write_u64(4, 0), Err(AccessError::Misaligned { offset: 4, len: 8 }));
    assert_eq!(memory.sub_range(8, page()), Err(outside(8, page())));
}

#[test]
fn a_check_names_the_first_word_that_differs() {
    let memory = Memory::new(MemoryKind::Base, 2 * page()).unwrap();
    memory.fill_words(page(), page(), |n| n * 3).unwrap();
    memory.check_words(page(), page(), |n| n * 3).unwrap();
    memory.check_words(0, page(), |_| 0).unwrap();
    memory.write_u64(page() + 80, 1).unwrap();
    let differs = CheckError::Differs { offset: page() + 80, expected: 30, found: 1 };
    assert_eq!(memory.check_words(page(), page(), |n| n * 3), Err(differs));
}

#[test]
fn writers_of_parts_of_one_word_lose_nothing() {
    let memory = Memory::new(MemoryKind::Base, page()).unwrap();
    thread::scope(|scope| {
        for lane in 0..4_u8 {
            let memory = &memory;
            scope.spawn(move || {
                for n in 0..=255 {
                    memory.write(u64::from(lane), &[n]).unwrap();
                    let mut byte = [0];
                    memory.read(u64::from(lane), &mut byte).unwrap();
                    assert_eq!(byte, [n]);
                }
            });
        }
    });
}

#[test]
fn a_range_outside_the_memory_names_both() {
    let memory = Memory::new(MemoryKind::Base, page()).unwrap();
    let whole = memory.user_range();
    assert_eq!(memory.offset_of(whole), Ok(0));
    let range = UserRange::from_len(whole.start(), page() + 1).unwrap();
    let error = memory.offset_of(range).unwrap_err();
    assert_eq!(error, OutsideMemory { range, memory: whole });
    assert!(error.to_string().contains(&range.to_string()));
    assert!(error.to_string().contains(&whole.to_string()));
}

#[test]
fn adopted_memory_is_not_made_and_is_no_name() {
    assert_eq!(Memory::new(MemoryKind::Adopted, page()).unwrap_err(), MemoryError::NotMade);
    assert!("adopted".parse::<MemoryKind>().is_err());
}

/// A file in memory, of so many base pages.
fn memfd(pages: u64) -> File {
    let file = File::from(sys::memfd(c"test", 0).unwrap());
    file.set_len(pages * page()).unwrap();
    file
}

#[test]
fn a_file_is_mapped_from_an_offset_and_shared() {
    let file = memfd(8);
    let memory = Memory::from_file(file.try_clone().unwrap(), 2 * page(), 3 * page()).unwrap();
    assert_eq!((memory.kind(), memory.len()), (MemoryKind::Adopted, 3 * page()));
    assert_eq!(memory.page_size(), page());
    assert_eq!(memory.file().unwrap().1, 2 * page());
    assert!(!memory.is_populated());
    memory.write(5, b"hello").unwrap();
    let mut bytes = [0; 5];
    std::os::unix::fs::FileExt::read_at(&file, &mut bytes, 2 * page() + 5).unwrap();
    assert_eq!(&bytes, b"hello");
    memory.populate().unwrap();
    assert!(memory.is_populated());
    // Holes have pages now, and what was written stays.
    assert_eq!(file.metadata().unwrap().blocks() * 512, 3 * page());
    memory.read(5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
}

#[test]
fn a_file_that_is_open_for_reading_is_memory_that_is_only_read() {
    use std::os::fd::AsRawFd;
    let file = memfd(4);
    let again = || File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let refused = Memory::from_file(again(), 0, page()).unwrap_err();
    assert_eq!(refused, AdoptError::System { len: page(), errno: os::EACCES });
    let memory = ReadOnlyMemory::from_file(again(), page(), 2 * page()).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"hello", 2 * page() - 2).unwrap();
    let mut bytes = [0; 5];
    memory.read(page() - 2, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    assert!(memory.read(2 * page() - 2, &mut bytes).is_err());
    let memory: &dyn HostMemory = &memory;
    let len = u64::try_from(memory.slice().len()).unwrap();
    assert_eq!((memory.access(), len), (Prot::READ, 2 * page()));
    assert!(memory.write(0, &[0]).is_err());
}

#[test]
fn memory_whose_file_was_handed_out_is_not_exclusive_without_the_file_either() {
    let memory = Memory::new(MemoryKind::Memfd, page()).unwrap();
    let _other = memory.file().unwrap().0.try_clone_to_owned().unwrap();
    let refused = ExclusiveMemory::try_from(memory.without_file()).unwrap_err();
    assert_eq!(refused, NotExclusive::FileShared);
}

#[test]
fn part_of_adopted_memory_is_populated() {
    let file = memfd(8);
    let memory = Memory::from_file(file.try_clone().unwrap(), 0, 8 * page()).unwrap();
    let range = memory.sub_range(2 * page() + 5, page()).unwrap();
    memory.populate_range(range).unwrap();
    assert_eq!(file.metadata().unwrap().blocks() * 512, 2 * page());
    assert!(!memory.is_populated());
    let outside = UserRange::from_len(range.start(), 8 * page()).unwrap();
    assert_eq!(memory.populate_range(outside).unwrap_err().errno, Errno::EFAULT);
    memory.populate_range(memory.user_range()).unwrap();
    assert!(memory.is_populated());
}

#[test]
fn a_large_file_can_have_huge_pages() {
    let leaf = MemoryKind::Adopted.leaf_size();
    let file = memfd(4 * leaf / page());
    for (offset, len) in [(0, leaf), (leaf, 2 * leaf)] {
        let memory = Memory::from_file(file.try_clone().unwrap(), offset, len).unwrap();
        assert_eq!(memory.user_range().start().get() % leaf, 0);
    }
}

#[test]
fn files_that_cannot_be_adopted_are_refused_with_the_reason() {
    let file = || memfd(8);
    let refused = |file: File, offset, len| Memory::from_file(file, offset, len).unwrap_err();
    let page_size = page();
    assert_eq!(refused(file(), 0, 0), AdoptError::Empty { page_size });
    let unaligned = AdoptError::Unaligned { start: 512, len: page(), page_size };
    assert_eq!(refused(file(), 512, page()), unaligned);
    let unaligned = AdoptError::Unaligned { start: 0, len: 512, page_size };
    assert_eq!(refused(file(), 0, 512), unaligned);
    let (offset, len, file_len) = (7 * page(), 2 * page(), 8 * page());
    assert_eq!(refused(file(), offset, len), AdoptError::TooShort { offset, len, file_len });
    let start = page().wrapping_neg();
    assert_eq!(refused(file(), start, 2 * page()), AdoptError::TooLong { start, len: 2 * page() });

    let path = std::env::current_exe().unwrap();
    let on_disk = refused(File::open(path).unwrap(), 0, page());
    // A target directory may be on a tmpfs.
    assert!(on_disk == AdoptError::NotInMemory || on_disk.errno() == os::EACCES, "{on_disk}");
    let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
    assert_eq!(refused(device, 0, page()), AdoptError::NotInMemory);

    let file = file();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let read_only = refused(File::open(path).unwrap(), 0, page());
    assert_eq!(read_only, AdoptError::System { len: page(), errno: os::EACCES });
    assert!(read_only.to_string().contains("reading and writing"), "{read_only}");
}

#[test]
fn a_file_that_became_shorter_is_an_error_of_populating() {
    let file = memfd(8);
    let memory = Memory::from_file(file.try_clone().unwrap(), 0, 8 * page()).unwrap();
    file.set_len(4 * page()).unwrap();
    let error = memory.populate().unwrap_err();
    assert_eq!((error.errno, error.range), (Errno::EFAULT, memory.user_range()));
    assert!(error.to_string().contains("shorter"), "{error}");
    assert!(!memory.is_populated());
}

#[test]
fn a_file_on_hugetlbfs_has_the_pages_of_its_file_system() {
    let _turn = hugetlb::turn();
    let kind = MemoryKind::MemfdHugetlb2M;
    let len = 2 * kind.page_size();
    let mut reserved = match HugetlbReservation::for_memory(kind, len) {
        Ok(reservation) => reservation,
        Err(error) => return eprintln!("SKIP: {error}"),
    };
    let first = Memory::new(kind, len).unwrap();
    reserved.iter_mut().for_each(HugetlbReservation::mapped);
    let file = || first.file().unwrap().0.try_clone_to_owned().unwrap();
    let page_size = kind.page_size();
    let memory = Memory::from_file(file(), page_size, page_size).unwrap();
    assert_eq!(memory.page_size(), page_size);
    assert_eq!(memory.user_range().start().get() % page_size, 0);
    first.write_u64(page_size + 8, 9).unwrap();
    assert_eq!(memory.read_u64(8), Ok(9));
    let refused = Memory::from_file(file(), page(), page_size).unwrap_err();
    assert_eq!(refused, AdoptError::Unaligned { start: page(), len: page_size, page_size });
}

#[test]
fn too_few_huge_pages_for_a_file_are_an_error_that_says_what_to_do() {
    let kind = MemoryKind::MemfdHugetlb2M;
    let file = match sys::memfd(c"test", kind.memfd_flags().unwrap()) {
        Ok(file) => File::from(file),
        Err(errno) => return eprintln!("SKIP: {errno}"),
    };
    let (pages, page_size) = (1 << 20, kind.page_size());
    file.set_len(pages * page_size).unwrap();
    let error = Memory::from_file(file, 0, pages * page_size).unwrap_err();
    assert_eq!(error, AdoptError::NoHugePages { len: pages * page_size, page_size, pages });
    assert!(error.to_string().contains("hugepages-2048kB/nr_hugepages"), "{error}");
}

#[test]
#[expect(unsafe_code, reason = "brings memory by its address")]
fn foreign_memory_is_kept_until_it_is_dropped() {
    struct Kept(Memory, Arc<std::sync::atomic::AtomicU32>);
    impl Drop for Kept {
        fn drop(&mut self) {
            assert_eq!(self.0.read_u64(8), Ok(3));
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    let drops = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let owned = Memory::new(MemoryKind::Base, 2 * page()).unwrap();
    let (start, range) = (owned.mapping().start(), owned.user_range());
    let keep = Kept(owned, drops.clone());
    // SAFETY:
    // 1. `keep` owns the memory, which is accessed by atomic words alone.
    let memory = unsafe { Memory::foreign(start, 2 * page(), keep) }.unwrap();
    assert_eq!((memory.user_range(), memory.page_size()), (range, page()));
    assert!(memory.file().is_none());
    memory.populate().unwrap();
    memory.write_u64(8, 3).unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(memory);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

/// Brings `len` bytes of `owned`, `skip` behind its start, with a file.
#[expect(unsafe_code, reason = "brings memory by its address")]
fn brought(
    owned: &Arc<Memory>,
    skip: u64,
    len: u64,
    file: File,
    offset: u64,
) -> Result<Memory, AdoptError> {
    assert!(owned.sub_range(skip, len).is_ok());
    let start = owned.mapping().start().as_ptr().wrapping_add(usize::try_from(skip).unwrap());
    let (start, keep) = (NonNull::new(start).unwrap(), Arc::clone(owned));
    // SAFETY:
    // 1. It is in `owned` (asserted), which is kept, and accessed by atomic words alone.
    unsafe { Memory::foreign_with_file(start, len, file, offset, keep) }
}

#[test]
fn foreign_memory_has_the_file_that_is_mapped_there() {
    let file = memfd(8);
    let again = || file.try_clone().unwrap();
    let owned = Arc::new(Memory::from_file(again(), 2 * page(), 4 * page()).unwrap());
    let memory = brought(&owned, page(), 2 * page(), again(), 3 * page()).unwrap();
    assert_eq!(memory.file().unwrap().1, 3 * page());
    let part = memory.sub_range(page() + 8, 8).unwrap();
    assert_eq!(memory.file_of(part).unwrap().1, 4 * page() + 8);
    assert_eq!(ExclusiveMemory::try_from(memory).unwrap_err(), NotExclusive::Adopted);
    assert_eq!(Arc::strong_count(&owned), 1);
    // All of it.
    brought(&owned, 0, 4 * page(), again(), 2 * page()).unwrap();
    let start = owned.user_range().start().get();
    let refused = |file, offset| brought(&owned, 0, page(), file, offset).unwrap_err();
    let not_shared = |offset| AdoptError::NotShared { start, len: page(), offset };
    assert_eq!(refused(again(), 3 * page()), not_shared(3 * page()));
    assert_eq!(refused(memfd(8), 2 * page()), not_shared(2 * page()));
    let device = File::open("/dev/zero").unwrap();
    assert_eq!(refused(device, 2 * page()), AdoptError::NotInMemory);
    let anonymous = Arc::new(Memory::new(MemoryKind::Base, page()).unwrap());
    let other = brought(&anonymous, 0, page(), again(), 0).unwrap_err();
    assert!(matches!(other, AdoptError::NotShared { .. }) && other.errno() == Errno::EINVAL);
    assert_eq!(Arc::strong_count(&owned), 1);
}

#[test]
fn a_line_of_maps_says_whether_a_mapping_is_the_files() {
    let file = memfd(8);
    let metadata = file.metadata().unwrap();
    let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
    let of = format!("{major:02x}:{minor:02x} {}", metadata.ino());
    let range =
        |pages: u64| UserRange::from_len(UserAddr::new(0x7000_0000), pages * 0x1000).unwrap();
    let is =
        |maps: &str, pages| is_shared(&maps.replace("OF", &of), range(pages), &metadata, 0x2000);
    let whole = "1000-2000 r--p 00000000 00:00 0\n70000000-70003000 rw-s 00002000 OF  /memfd:x\n";
    assert!(is(whole, 3) && is(whole, 1) && !is(whole, 4));
    let before = "6ffff000-70003000 rw-s 00001000 OF /memfd:x (deleted)\n";
    assert!(is(before, 3));
    let two = "70000000-70001000 rw-s 00002000 OF x\n70001000-70003000 r--s 00003000 OF x\n";
    assert!(is(two, 3));
    for wrong in [
        "70000000-70003000 rw-p 00002000 OF x",
        "70000000-70003000 rw-s 00001000 OF x",
        "70000000-70003000 rw-s 00002000 00:00 0",
        "70001000-70003000 rw-s 00003000 OF x",
        "70000000-70001000 rw-s 00002000 OF x\n70002000-70003000 rw-s 00004000 OF x",
        "70000000-70001000 rw-s 00002000 OF x\n70001000-70003000 rw-s 00002000 OF x",
        "70000000-70003000 rw-s",
        "nonsense\n\n-",
        "",
    ] {
        assert!(!is(wrong, 3), "{wrong}");
    }
}

#[test]
#[expect(unsafe_code, reason = "brings memory by its address")]
fn foreign_memory_of_parts_of_pages_is_refused() {
    let owned = Memory::new(MemoryKind::Base, 2 * page()).unwrap();
    let start = owned.mapping().start();
    let addr = owned.user_range().start().get();
    for (skip, len) in [(8, page()), (0, page() - 8), (0, 0)] {
        let start = NonNull::new(start.as_ptr().wrapping_add(skip)).unwrap();
        // SAFETY:
        // 1. `owned` outlives it, and is accessed by atomic words alone.
        let refused = unsafe { Memory::foreign(start, len, ()) }.unwrap_err();
        let (start, page_size) = (addr + u64::try_from(skip).unwrap(), page());
        let expected = match len {
            0 => AdoptError::Empty { page_size },
            len => AdoptError::Unaligned { start, len, page_size },
        };
        assert_eq!(refused, expected);
    }
}

#[test]
fn memory_that_others_may_have_is_not_exclusive() {
    let refused = |memory| ExclusiveMemory::try_from(memory).unwrap_err();
    let file = memfd(1);
    let adopted = Memory::from_file(file, 0, page()).unwrap();
    assert_eq!(refused(adopted), NotExclusive::Adopted);
    let shared = Memory::new(MemoryKind::Memfd, page()).unwrap();
    assert!(shared.file().is_some());
    assert_eq!(refused(shared), NotExclusive::FileShared);
    for kind in [MemoryKind::Memfd, MemoryKind::Base] {
        ExclusiveMemory::try_from(Memory::new(kind, page()).unwrap()).unwrap();
    }
}
