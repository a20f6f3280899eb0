//! `VFIO_IOMMU_DIRTY_PAGES`, and unmapping with a bitmap.

use dmaspan::container::Version;
use dmaspan::container::type1::uapi;
use dmaspan::{Errno, UserAddr};

use super::world::{Backing, PAGE, PAGES, READ_WRITE, USER, World, bytes, number};

const START: u32 = uapi::VFIO_IOMMU_DIRTY_PAGES_FLAG_START;
const STOP: u32 = uapi::VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP;
const GET: u32 = uapi::VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP;
const UNMAP: u32 = uapi::VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP;

const TOP_PAGE: u64 = u64::MAX - (PAGE - 1);
/// Where bitmaps lie: at an odd address, over two pages.
const DATA: u64 = USER + 32 * PAGE - 13;
const FILL: u8 = 0xa5;

/// First page and pages of what is mapped in these tests: words begun by a mapping, begun before
/// it, shared by several, and skipped.
const MAPPED: [(u64, u64); 6] = [(0, 3), (5, 1), (70, 60), (130, 7), (256, 2), (450, 1)];

fn mapped(mappings: &[(u64, u64)]) -> World {
    let world = World::new(Version::V2, Backing::Domain);
    for (page, pages) in mappings {
        world.map(READ_WRITE, USER, page * PAGE, pages * PAGE).unwrap();
    }
    world
}

fn switch(world: &World, flag: u32) {
    assert_eq!(world.ask(uapi::VFIO_IOMMU_DIRTY_PAGES, &mut bytes(&[8, flag], &[])), Ok(0));
}

/// `iova`, `size`, and the bitmap's page size, length and address.
fn get(world: &World, numbers: [u64; 5]) -> Result<u32, Errno> {
    world.ask(uapi::VFIO_IOMMU_DIRTY_PAGES, &mut bytes(&[48, GET], &numbers))
}

fn unmap(world: &World, numbers: [u64; 5]) -> Result<u64, Errno> {
    let mut arg = bytes(&[48, UNMAP], &numbers);
    let before = arg.clone();
    let result = world.ask(uapi::VFIO_IOMMU_UNMAP_DMA, &mut arg);
    if result.is_err() {
        assert_eq!(arg, before);
    }
    result.map(|_| number(&arg, 16))
}

/// Fills the bitmap's surroundings.
fn fill(world: &World) -> Vec<u8> {
    let before = vec![FILL; 256];
    world.space.write(UserAddr::new(DATA - 64), &before).unwrap();
    before
}

fn surroundings(world: &World) -> Vec<u8> {
    let mut bytes = vec![0; 256];
    world.space.read(UserAddr::new(DATA - 64), &mut bytes).unwrap();
    bytes
}

/// What Linux makes of memory around a bitmap at its byte 64, mapping by mapping.
fn as_linux_writes(mut memory: Vec<u8>, base: u64, mappings: &[(u64, u64)]) -> Vec<u8> {
    for (page, pages) in mappings {
        let bit = page - base;
        let mut words = vec![0u64; usize::try_from((pages + bit % 64).div_ceil(64)).unwrap()];
        for bit in bit % 64..bit % 64 + pages {
            words[usize::try_from(bit / 64).unwrap()] |= 1 << (bit % 64);
        }
        let at = 64 + usize::try_from(bit / 64 * 8).unwrap();
        if !bit.is_multiple_of(64) {
            words[0] |= number(&memory, at);
        }
        let stored: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        memory[at..at + stored.len()].copy_from_slice(&stored);
    }
    memory
}

#[test]
fn what_starts_and_stops_may_be_started_and_stopped_again() {
    let world = mapped(&MAPPED);
    let range = [0, PAGE * 512, PAGE, 64, DATA];
    assert_eq!(get(&world, range), Err(Errno::EINVAL), "not started");
    switch(&world, STOP);
    switch(&world, START);
    switch(&world, START);
    assert_eq!(get(&world, range), Ok(0));
    switch(&world, STOP);
    assert_eq!(get(&world, range), Err(Errno::EINVAL), "stopped");
    switch(&world, STOP);
    for flags in [0, START | STOP, START | GET, STOP | GET, 7, 8, 8 | START, 1 << 31] {
        let mut arg = bytes(&[48, flags], &range);
        let answer = world.ask(uapi::VFIO_IOMMU_DIRTY_PAGES, &mut arg);
        assert_eq!(answer, Err(Errno::EINVAL), "flags {flags:#x}");
    }
    for argsz in [0, 7, 8, 9, 47] {
        switch(&world, START);
        let mut arg = bytes(&[argsz, GET], &range);
        let answer = world.ask(uapi::VFIO_IOMMU_DIRTY_PAGES, &mut arg);
        assert_eq!(answer, Err(Errno::EINVAL), "argsz {argsz}");
    }
}

#[test]
fn every_get_is_checked_as_linux_does() {
    let world = mapped(&MAPPED);
    switch(&world, START);
    let before = fill(&world);
    let all = 512 * PAGE;
    let (bad, wraps, fault) = (Errno::EINVAL, Errno::EOVERFLOW, Errno::EFAULT);
    let cases = [
        // Size, then wrapping, then the bitmap.
        ([0, 0, PAGE, 64, DATA], bad),
        ([u64::MAX, 0, PAGE, 0, DATA], bad),
        ([TOP_PAGE, 2 * PAGE, PAGE, 64, DATA], wraps),
        ([TOP_PAGE, 2 * PAGE, PAGE, 0, u64::MAX], wraps),
        ([TOP_PAGE + 1, PAGE, 0, 0, 0], wraps),
        ([0, all, PAGE, 0, DATA], bad),
        ([0, all, PAGE, 63, DATA], bad),
        ([0, 65 * PAGE, PAGE, 15, DATA], bad),
        ([0, all, PAGE, (256 << 20) + 1, DATA], bad),
        ([0, all, PAGE, 64, u64::MAX - 62], bad),
        ([0, PAGE / 2, PAGE, 64, DATA], bad),
        // Pages.
        ([0, all, 0, 64, DATA], bad),
        ([0, all, 2 * PAGE, 64, DATA], bad),
        ([0, all, PAGE / 2, 128, DATA], bad),
        ([0, all, PAGE + 1, 1 << 20, DATA], bad),
        ([0, all, 1 << 63, 64, DATA], bad),
        ([PAGE / 2, all, PAGE, 64, DATA], bad),
        ([0, all + 8, PAGE, 128, DATA], bad),
        // Parts of mappings, before the client's memory.
        ([PAGE, all, PAGE, 64, DATA], bad),
        ([0, 2 * PAGE, PAGE, 64, DATA], bad),
        ([0, 100 * PAGE, PAGE, 64, 0], bad),
        ([0, all, PAGE, 64, 0], fault),
        ([0, all, PAGE, 64, USER + PAGES * PAGE - 16], fault),
    ];
    for (numbers, errno) in cases {
        assert_eq!(get(&world, numbers), Err(errno), "{numbers:x?}");
    }
    assert_eq!(surroundings(&world), before, "nothing was written");
    // A bitmap may be longer than needed, and as long as bitmaps get.
    assert_eq!(get(&world, [0, all, PAGE, 256 << 20, DATA]), Ok(0));
    // Nothing is written for what is not mapped, wherever that would be.
    assert_eq!(get(&world, [1 << 30, all, PAGE, 64, 8]), Ok(0));
    assert_eq!(get(&world, [TOP_PAGE, PAGE, PAGE, 8, 8]), Ok(0));
}

#[test]
fn a_bitmap_is_written_word_by_word_as_linux_writes_it() {
    for (base, pages) in [(0, 512), (4, 508), (70, 60), (69, 70), (200, 312), (3, 2)] {
        let world = mapped(&MAPPED);
        switch(&world, START);
        let within = |&&(page, len): &&(u64, u64)| page >= base && page + len <= base + pages;
        let mappings: Vec<_> = MAPPED.iter().filter(within).copied().collect();
        let before = fill(&world);
        let expected = as_linux_writes(before, base, &mappings);
        assert_eq!(get(&world, [base * PAGE, pages * PAGE, PAGE, 64, DATA]), Ok(0));
        assert_eq!(surroundings(&world), expected, "{pages} pages from {base} on");

        fill(&world);
        let unmapped: u64 = mappings.iter().map(|(_, pages)| pages * PAGE).sum();
        let answer = unmap(&world, [base * PAGE, pages * PAGE, PAGE, 64, DATA]);
        assert_eq!(answer, Ok(unmapped));
        assert_eq!(surroundings(&world), expected, "unmapped {pages} pages from {base} on");
        assert_eq!(world.container.mappings(), MAPPED.len() - mappings.len());
    }
}

#[test]
fn an_unmap_whose_bitmap_is_wrong_unmaps_nothing() {
    let world = mapped(&MAPPED);
    let all = 512 * PAGE;
    assert_eq!(unmap(&world, [0, all, PAGE, 64, DATA]), Err(Errno::EINVAL), "not tracked");
    switch(&world, START);
    let before = world.snapshot();
    let (bad, fault) = (Errno::EINVAL, Errno::EFAULT);
    let cases = [
        // The bitmap, then the range.
        ([TOP_PAGE, 2 * PAGE, PAGE, 0, DATA], bad),
        ([TOP_PAGE, 2 * PAGE, PAGE, 8, DATA], Errno::EOVERFLOW),
        ([TOP_PAGE, 2 * PAGE, 2 * PAGE, 8, DATA], Errno::EOVERFLOW),
        ([0, all, PAGE, 63, DATA], bad),
        ([0, all, PAGE, (256 << 20) + 1, DATA], bad),
        ([0, all, PAGE, 64, u64::MAX - 62], bad),
        ([0, all, 0, 64, DATA], bad),
        ([0, all, 2 * PAGE, 64, DATA], bad),
        ([0, 0, PAGE, 64, DATA], bad),
        ([PAGE / 2, all, PAGE, 64, DATA], bad),
        ([0, 2 * PAGE, PAGE, 64, 0], bad),
        ([0, all, PAGE, 64, 0], fault),
        // All but the last word can be written.
        ([0, all, PAGE, 64, USER + PAGES * PAGE - 63], fault),
    ];
    for (numbers, errno) in cases {
        assert_eq!(unmap(&world, numbers), Err(errno), "{numbers:x?}");
        assert_eq!(world.snapshot(), before, "{numbers:x?}");
    }
    // Of nothing there is nothing to write.
    assert_eq!(unmap(&world, [1 << 30, all, PAGE, 64, 8]), Ok(0));
    assert_eq!(unmap(&world, [0, all, PAGE, 64, DATA]), Ok(74 * PAGE));
    assert_eq!(world.memory.pinned_frames(), 0);
}
