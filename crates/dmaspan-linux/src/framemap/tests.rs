use super::*;
use crate::MemoryKind;

/// A page of the running kernel.
fn page() -> u64 {
    crate::sys::page_size()
}

fn memory(pages: u64) -> Memory {
    Memory::new(MemoryKind::Base, pages * page()).unwrap()
}

fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

#[test]
fn every_byte_is_found_and_its_neighbours_outside_are_not() {
    let memory = memory(4);
    let spans = [span(0x9000, 0x2000), span(0x1000, 0x1000), span(0x8_0000_0000, 0x1000)];
    let map = FrameMap::new(&memory, memory.sub_range(0, 0x4000).unwrap(), &spans).unwrap();
    assert_eq!(map.len(), 3);
    assert_eq!(map.locate(PhysAddr::new(0x9000)), Some((0, 0x2000)));
    assert_eq!(map.locate(PhysAddr::new(0xafff)), Some((0x1fff, 1)));
    assert_eq!(map.locate(PhysAddr::new(0x1000)), Some((0x2000, 0x1000)));
    assert_eq!(map.locate(PhysAddr::new(0x8_0000_0fff)), Some((0x3fff, 1)));
    for outside in [0, 0xfff, 0x2000, 0x8fff, 0xb000, 0x7_ffff_ffff, 0x8_0000_1000, u64::MAX] {
        assert_eq!(map.locate(PhysAddr::new(outside)), None, "{outside:#x}");
    }
}

#[test]
fn many_scattered_spans_agree_with_a_plain_search() {
    let count = 512;
    let memory = memory(count);
    // Frames in a scattered order, with gaps and one far away.
    let frame = |n: u64| if n == 7 { 1 << 30 } else { 3 + (n * 389) % 1021 };
    let spans: Vec<Span> = (0..count).map(|n| span(frame(n) * page(), page())).collect();
    let map = FrameMap::new(&memory, memory.user_range(), &spans).unwrap();
    assert!(map.blocks.len() <= spans.len() + 1);
    for number in 0..1100 {
        let expected =
            (0..count).find(|n| frame(*n) == number).map(|n| (n * page() + 5, page() - 5));
        assert_eq!(map.locate(PhysAddr::new(number * page() + 5)), expected, "frame {number}");
    }
    assert_eq!(map.locate(PhysAddr::new(page() << 30)), Some((7 * page(), page())));
}

#[test]
fn one_span_at_any_address_is_a_map() {
    let memory = memory(1);
    for start in [0, page(), 1 << 63, u64::MAX - page() + 1] {
        let map = FrameMap::new(&memory, memory.user_range(), &[span(start, page())]).unwrap();
        assert_eq!(map.locate(PhysAddr::new(start + 8)), Some((8, page() - 8)));
        assert_eq!(map.locate(PhysAddr::new(start.wrapping_sub(1))), None);
        assert_eq!(map.locate(PhysAddr::new(start.wrapping_add(page()))), None);
    }
}

#[test]
fn a_part_of_the_memory_begins_at_its_offset() {
    let memory = memory(4);
    let range = memory.sub_range(page() + 16, page()).unwrap();
    let map = FrameMap::new(&memory, range, &[span(0x5010, page())]).unwrap();
    assert_eq!(map.locate(PhysAddr::new(0x5010)), Some((page() + 16, page())));
}

#[test]
fn one_frame_twice_is_refused_and_named() {
    let memory = memory(3);
    let (first, second) = (span(0x1000, 0x2000), span(0x2000, 0x1000));
    let range = memory.sub_range(0, 0x3000).unwrap();
    let error = FrameMap::new(&memory, range, &[second, first]).unwrap_err();
    assert_eq!(error, FrameMapError::Overlap { first: 0x1000, second: 0 });
    assert_eq!(error.errno(), Errno::EEXIST);
}

#[test]
fn spans_of_another_length_are_refused() {
    let memory = memory(2);
    let range = memory.user_range();
    let short = FrameMap::new(&memory, range, &[span(0, page())]).unwrap_err();
    assert_eq!(short, FrameMapError::Length { range, spans_len: page() });
    let none = FrameMap::<PhysAddr>::new(&memory, range, &[]).unwrap_err();
    assert_eq!(none, FrameMapError::Length { range, spans_len: 0 });
    let long = [span(0, u64::MAX), span(0, u64::MAX)];
    assert!(FrameMap::new(&memory, range, &long).is_err());
}
