use std::num::NonZeroU32;

use super::*;

fn limits(max_segment: u32, boundary_mask: u64) -> LimitsBefore {
    LimitsBefore { max_segment: NonZeroU32::new(max_segment).unwrap(), boundary_mask }
}

fn map(buffer: &BufferBefore, offset: u64, len: u64, limits: LimitsBefore) -> Vec<EntryBefore> {
    let import = buffer.import(offset, len, Direction::ToDevice).unwrap();
    let mut entries = vec![EntryBefore::default(); 20_000];
    let used = map_sg(import, limits, &mut entries).unwrap();
    entries.truncate(used);
    entries
}

#[test]
fn eight_megabytes_of_hugepages_are_four_entries_however_many_bvecs() {
    let pages = apart(4);
    for coalescing in ALL {
        let buffer = buffer(&pages, 0, 4 * HUGE, all_of(9), coalescing);
        let entries = map(&buffer, 0, 4 * HUGE, LimitsBefore::NVME);
        assert_eq!(entries.len(), 4, "{coalescing:?}");
        let mut out = [[0; 2]; 4];
        assert_eq!(sgl(&entries, &mut out), Ok(4));
        assert_eq!(out[3].map(u64::from_le), [7 * HUGE, HUGE]);
        let mut out = vec![0; 2048];
        assert_eq!(prps(&entries, &mut out), Ok(2048));
        let addrs = out.iter().map(|prp| PhysAddr::new(u64::from_le(*prp)));
        assert!(addrs.eq(pages.iter().copied()));
    }
}

#[test]
fn entries_are_the_bytes_of_the_import_and_keep_the_limits() {
    let seed = 11;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for round in 0..200 {
        let order = u32::try_from(rng.below(4)).unwrap();
        let size = PAGE << order;
        let head = |n: u64| Span::new(PhysAddr::new(n * size), size).unwrap();
        // Among so few many touch.
        let spans: Vec<_> = (0..10).map(|_| head(rng.below(12))).collect();
        let pages = pages_of(&spans);
        let len = 10 * size;
        let buffer = buffer(&pages, 0, len, all_of(order), ALL[round % 3]);
        let offset = rng.below(len);
        let part = 1 + rng.below(len - offset);
        let max_segment = [512, 1000, 4096, 65_536, u32::MAX][round % 5];
        let boundary = [lg2::mask(9), lg2::mask(12), lg2::mask(14), u64::MAX][round % 4];
        let entries = map(&buffer, offset, part, limits(max_segment, boundary));
        assert_eq!(joined(entries.iter().copied()), expected(&pages, offset, part));
        for entry in &entries {
            assert!(entry.len > 0 && entry.len <= max_segment);
            let last = entry.addr + u64::from(entry.len) - 1;
            assert_eq!(entry.addr & !boundary, last & !boundary);
        }
        // None that touch could have been one, where no limit cuts a bvec.
        if max_segment == u32::MAX && boundary >= lg2::mask(12) && order == 0 {
            let runs = expected(&pages, offset, part);
            let blocks = |addr: u64| if boundary == u64::MAX { 0 } else { addr / (boundary + 1) };
            let fewest: u64 =
                runs.iter().map(|(addr, len)| blocks(addr + len - 1) - blocks(*addr) + 1).sum();
            assert_eq!(u64::try_from(entries.len()).unwrap(), fewest);
        }
    }
}

#[test]
fn an_entry_at_the_top_of_memory_goes_to_its_last_byte() {
    let page = PhysAddr::new(u64::MAX - PAGE + 1);
    let bvec = BvecBefore { page, len: 4096, offset: 0 };
    let buffer = BufferBefore::of_kernel(vec![bvec], Direction::Bidirectional);
    let entries = map(&buffer, 0, PAGE, LimitsBefore::NVME);
    assert_eq!(entries, [EntryBefore { addr: page.get(), len: 4096 }]);
    assert_eq!(map_direct(&mut entries.clone(), BusBefore::WHOLE), Ok(()));
    assert_eq!(map(&buffer, 0, PAGE, limits(1024, u64::MAX)).len(), 4);
    let mut out = [0];
    assert_eq!(prps(&entries, &mut out), Ok(1));
}

#[test]
fn a_device_behind_a_bus_gets_its_own_addresses_or_none() {
    let entry = EntryBefore { addr: 0x1000, len: 0x1000 };
    let mut entries = [entry];
    map_direct(&mut entries, BusBefore { offset: 0x8000_0000, last: 0x8000_1fff }).unwrap();
    assert_eq!(entries, [EntryBefore { addr: 0x8000_1000, len: 0x1000 }]);
    let near = BusBefore { offset: 0, last: 0x1ffe };
    let error = map_direct(&mut [entry], near).unwrap_err();
    assert_eq!(error.errno(), Errno::EIO);
    assert_eq!(error, RegbufBeforeError::OutOfReach { addr: 0x1000, len: 0x1000, last: 0x1ffe });
}

#[test]
fn prps_have_an_offset_in_the_first_page_and_whole_pages_in_the_middle() {
    let entry = |addr, len| EntryBefore { addr, len };
    let mut out = [0; 4];
    let entries = [entry(0x1ff0, 0x1010), entry(0x8000, 0x1004)];
    assert_eq!(prps(&entries, &mut out), Ok(4));
    assert_eq!(out.map(u64::from_le), [0x1ff0, 0x2000, 0x8000, 0x9000]);
    for entries in [
        [entry(0x1000, 0x800), entry(0x8000, 0x1000)],
        [entry(0x1000, 0x1000), entry(0x8010, 0x10)],
        [entry(0x1ffe, 2), entry(0x8000, 0x1000)],
    ] {
        assert_eq!(prps(&entries, &mut out).unwrap_err().errno(), Errno::EIO, "{entries:x?}");
    }
}

#[test]
fn too_little_room_is_refused() {
    let pages = apart(2);
    let buffer = buffer(&pages, 0, 2 * HUGE, all_of(9), Coalescing::None);
    let import = buffer.import(0, 2 * HUGE, Direction::ToDevice).unwrap();
    let no_room = |room| RegbufBeforeError::NoRoom { room };
    let mut one = [EntryBefore::default()];
    assert_eq!(map_sg(import, LimitsBefore::NVME, &mut one), Err(no_room(1)));
    assert_eq!(map_sg(import, LimitsBefore::NVME, &mut []), Err(no_room(0)));
    let entries = map(&buffer, 0, 2 * HUGE, LimitsBefore::NVME);
    assert_eq!(sgl(&entries, &mut [[0; 2]]), Err(no_room(1)));
    assert_eq!(prps(&entries, &mut [0; 1023]), Err(no_room(1023)));
}
