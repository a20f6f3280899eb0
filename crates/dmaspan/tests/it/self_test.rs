//! The cases of Linux's io-pgtable and generic_pt self-tests, for all granules.

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, Error, Format, Half, PageTable};
use dmaspan::{Iova, PhysAddr};

use crate::common::{PROT, arena, for_all_granules, free, map, range, span, table, unmap};

for_all_granules!(
    every_size_maps_looks_up_refuses_overlap_and_unmaps_at_every_width,
    the_last_block_of_the_input_space_maps,
    the_upper_half_maps_up_to_the_last_address,
    unmapping_many_blocks_over_full_tables_frees_all_of_them,
    unmapping_through_pages_stops_at_the_first_hole,
    a_mapping_over_a_large_boundary_has_the_fewest_leaves,
);

/// Page sizes of a table, as lengths.
fn sizes(page_sizes: u64) -> impl Iterator<Item = u64> {
    (0..64).map(|lg2| 1u64 << lg2).filter(move |size| page_sizes & size != 0)
}

const WIDTHS: [u32; 6] = [32, 36, 40, 42, 44, 48];

fn every_size_maps_looks_up_refuses_overlap_and_unmaps_at_every_width<const G: u32>() {
    for ias in WIDTHS {
        for oas in WIDTHS.into_iter().filter(|&oas| oas >= ias) {
            let format = ArmLpaeS1::<G>::new(ArmLpaeS1Config::new(ias, oas)).unwrap();
            let page_sizes = format.geometry().page_sizes;
            let memory = arena();
            let mut table = PageTable::new(format, memory.clone()).unwrap();
            let root_only = memory.tables();

            let step = 1u64 << 30;
            for hole in [42, step + 42, 2 * step + 42] {
                assert_eq!(table.whole().iova_to_phys(Iova::new(hole)), None);
            }
            for (n, size) in (0u64..).zip(sizes(page_sizes)).take_while(|(n, _)| *n < 3) {
                let iova = n * step.max(size);
                let (bytes, result) =
                    table.whole().map_pages(Iova::new(iova), PhysAddr::new(iova), size, 1, PROT);
                assert_eq!((bytes, result), (size, Ok(())));
                let (bytes, result) = table.whole().map_pages(
                    Iova::new(iova),
                    PhysAddr::new(iova + size),
                    size,
                    1,
                    PROT,
                );
                assert_eq!(bytes, 0);
                assert_eq!(result, Err(Error::Occupied { leaf: range(iova, size) }));
                let at =
                    |table: &mut PageTable<_, _>| table.whole().iova_to_phys(Iova::new(iova + 42));
                assert_eq!(at(&mut table), Some(PhysAddr::new(iova + 42)));
                let unmapped = table.whole().unmap_pages(Iova::new(iova), size, 1);
                assert_eq!((unmapped.bytes, unmapped.result), (size, Ok(())));
                free(&table, unmapped.retired);
                assert_eq!(at(&mut table), None);
                map(&mut table, iova, &[span(iova, size)], PROT).unwrap();
                assert_eq!(at(&mut table), Some(PhysAddr::new(iova + 42)));
                assert_eq!(unmap(&mut table, range(iova, size)).unwrap(), [span(iova, size)]);
            }
            let whole = table.geometry().aperture;
            let retired = table.whole().reclaim(whole).unwrap();
            free(&table, retired);
            assert_eq!(memory.tables(), root_only, "ias {ias}, oas {oas}: tables leaked");
            drop(table);
            assert_eq!(memory.tables(), 0);
        }
    }
}

fn the_last_block_of_the_input_space_maps<const G: u32>() {
    for ias in WIDTHS {
        for oas in WIDTHS.into_iter().filter(|&oas| oas >= ias) {
            let format = ArmLpaeS1::<G>::new(ArmLpaeS1Config::new(ias, oas)).unwrap();
            for size in sizes(format.geometry().page_sizes) {
                let mut table = PageTable::new(format.clone(), arena()).unwrap();
                let (iova, paddr) = ((1u64 << ias) - size, (1u64 << oas) - size);
                map(&mut table, iova, &[span(paddr, size)], PROT).unwrap();
                let last = Iova::new((1 << ias) - 1);
                assert_eq!(table.whole().iova_to_phys(last), Some(PhysAddr::new((1 << oas) - 1)));
                let unmapped = table.whole().unmap_pages(Iova::new(iova), size, 1);
                assert_eq!((unmapped.bytes, unmapped.result), (size, Ok(())));
                free(&table, unmapped.retired);
                assert_eq!(table.whole().iova_to_phys(last), None);
            }
        }
    }
}

fn the_upper_half_maps_up_to_the_last_address<const G: u32>() {
    let config = ArmLpaeS1Config { half: Half::Upper, ..ArmLpaeS1Config::new(42, 48) };
    let format = ArmLpaeS1::<G>::new(config).unwrap();
    let granule = 1u64 << G;
    let mut table = PageTable::new(format, arena()).unwrap();
    let start = 0u64.wrapping_sub(3 * granule);
    map(&mut table, start, &[span(0, granule), span(granule * 8, 2 * granule)], PROT).unwrap();
    let top = Iova::new(u64::MAX);
    assert_eq!(table.whole().iova_to_phys(top), Some(PhysAddr::new(granule * 10 - 1)));
    assert_eq!(table.whole().iova_to_phys(Iova::new(granule)), None);
    let low = table.whole().map_pages(Iova::new(0), PhysAddr::new(0), granule, 1, PROT);
    assert!(matches!(low, (0, Err(Error::OutsideAperture { .. }))));
    let runs: Vec<_> = table.whole().walk(range(start, 3 * granule)).collect();
    assert_eq!(runs.len(), 2);
    assert_eq!(runs[1].range.last(), top);
    let spans = unmap(&mut table, range(start, 3 * granule)).unwrap();
    assert_eq!(spans, [span(0, granule), span(granule * 8, 2 * granule)]);
    // One page more is beyond the top.
    let over = table.whole().map_pages(Iova::new(start), PhysAddr::new(0), granule, 4, PROT);
    assert!(matches!(over, (0, Err(Error::Range(_)))));
}

/// The leak that the seed series mended in Linux.
fn unmapping_many_blocks_over_full_tables_frees_all_of_them<const G: u32>() {
    let memory = arena();
    let mut table = PageTable::new(crate::common::format::<G>(48, 48), memory.clone()).unwrap();
    let (granule, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let base = 4 * block;
    // A neighbour keeps the tables above alive, so that only the covered ones go.
    map(&mut table, 0, &[span(0, granule)], PROT).unwrap();
    let before = memory.tables();
    let count = 3 * block / granule;
    let (bytes, result) =
        table.whole().map_pages(Iova::new(base), PhysAddr::new(granule), granule, count, PROT);
    assert_eq!((bytes, result), (3 * block, Ok(())));
    assert_eq!(memory.tables(), before + 3);
    let unmapped = table.whole().unmap_pages(Iova::new(base), block, 3);
    assert_eq!((unmapped.bytes, unmapped.result), (3 * block, Ok(())));
    assert_eq!(unmapped.retired.range(), Some(range(base, 3 * block)));
    assert_eq!(unmapped.retired.leaf_sizes(), granule);
    assert!(unmapped.retired.has_tables());
    assert_eq!(memory.tables(), before + 3, "nothing is freed before the sync");
    free(&table, unmapped.retired);
    assert_eq!(memory.tables(), before);
}

fn unmapping_through_pages_stops_at_the_first_hole<const G: u32>() {
    let (granule, block) = (1u64 << G, 1u64 << (2 * G - 3));
    // The hole is at the start, in the middle of a table, at a table's first entry, in a table
    // behind a whole one, and a missing table.
    for hole in [0, 5 * granule, block, block + 7 * granule, 2 * block] {
        let mut table = table::<G>();
        let total = 3 * block;
        if hole > 0 {
            let count = hole / granule;
            let mapped =
                table.whole().map_pages(Iova::new(0), PhysAddr::new(granule), granule, count, PROT);
            assert_eq!(mapped, (hole, Ok(())));
        }
        if hole < 2 * block {
            let behind = hole + granule;
            let count = (total - behind) / granule;
            let mapped = table.whole().map_pages(
                Iova::new(behind),
                PhysAddr::new(granule),
                granule,
                count,
                PROT,
            );
            assert_eq!(mapped.1, Ok(()));
        }
        let unmapped = table.whole().unmap_pages(Iova::new(0), granule, total / granule);
        assert_eq!(unmapped.bytes, hole);
        let Err(Error::Hole { hole: found }) = unmapped.result else {
            panic!("{:?}", unmapped.result)
        };
        assert!(found.contains(Iova::new(hole)));
        let expected = (hole > 0).then(|| range(0, hole));
        assert_eq!(unmapped.retired.range(), expected);
        free(&table, unmapped.retired);
        let left: u64 =
            table.whole().walk(range(0, total)).map(|run| run.range.len_less_one() + 1).sum();
        assert_eq!(left, if hole < 2 * block { total - hole - granule } else { 0 });
    }
}

/// generic_pt's mixed case in the granule's own sizes.
fn a_mapping_over_a_large_boundary_has_the_fewest_leaves<const G: u32>() {
    let mut table = table::<G>();
    let block = 1u64 << (2 * G - 3);
    let granule = 1u64 << G;
    let start = 6 * block - 3 * granule;
    let len = 3 * granule + 4 * block + 5 * granule;
    map(&mut table, start, &[span(start, len)], PROT).unwrap();
    let census: Vec<_> = table.whole().census(range(start, len)).sizes().collect();
    assert_eq!(census, [(G, 8), (2 * G - 3, 4)]);
}

#[test]
fn generic_pt_page_size_boundary_case_maps_thirty_two_pages() {
    let mut table = table::<12>();
    map(&mut table, 0xfef8_0000, &[span(0x20_8b95_d000, 0x2_0000)], PROT).unwrap();
    let census = crate::common::contents(&mut table).1;
    assert_eq!(census, [(12, 32)]);
}

#[test]
fn generic_pt_mixed_case_maps_twenty_leaves() {
    let mut table = table::<12>();
    let (start, end) = (0x3_fe40_0000, 0x4_c060_0000);
    map(&mut table, start, &[span(start, end - start)], PROT).unwrap();
    let census = crate::common::contents(&mut table).1;
    assert_eq!(census, [(21, 17), (30, 3)]);
    assert_eq!(unmap(&mut table, range(start, end - start)).unwrap(), [span(start, end - start)]);
}
