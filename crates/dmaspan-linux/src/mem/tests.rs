use std::sync::PoisonError;
use std::thread;

use super::*;
use crate::hugetlb;

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
    assert!(text.contains("0x201000") && text.contains("0x200000"), "{text}");
    assert_eq!(error.errno(), Errno::EINVAL);
}

#[test]
fn stripes_have_huge_pages_and_base_pages_in_turn() {
    let (stripe, count) = (os::thp_size(), 5);
    let memory = Memory::striped(count * stripe).unwrap();
    assert_eq!((memory.kind(), memory.len()), (MemoryKind::Thp, count * stripe));
    memory.fill_words(0, memory.len(), |n| n).unwrap();
    memory.check_words(0, memory.len(), |n| n).unwrap();
    match crate::pagemap::huge_bytes(&memory) {
        Ok(0) => eprintln!("SKIP: the system gives no transparent huge pages"),
        // Fragmented memory may have too few.
        Ok(huge) => assert!(huge <= 3 * stripe && huge.is_multiple_of(stripe), "{huge}"),
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
    let _exclusive = hugetlb::TESTS.lock().unwrap_or_else(PoisonError::into_inner);
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
        let memory = Memory::new(kind, 4 << 20).unwrap();
        assert_eq!(memory.user_range().start().get() % kind.leaf_size(), 0);
        assert_eq!(memory.len(), 4 << 20);
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
