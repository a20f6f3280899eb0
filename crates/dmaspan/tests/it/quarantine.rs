//! Hardware that does not answer, and what is taken back then.

use dmaspan::iommu::{self, Scope};
use dmaspan::{Errno, Iova, PhysAddr};
use dmaspan_sim::fault::Faults;

use crate::common::{PROT, for_all_granules, free, map, range, span, table, unmap};
use crate::failures::faulty_domain;

for_all_granules!(
    a_mapping_that_hardware_was_not_told_about_is_taken_back,
    a_mapping_that_could_not_be_taken_back_is_handed_to_the_caller,
    what_is_retired_names_its_range_and_leaf_sizes,
    a_withdrawn_mapping_leaves_the_tables_that_were_there,
    exactly_the_tables_that_are_missing_suffice,
);

fn a_mapping_that_hardware_was_not_told_about_is_taken_back<const G: u32>() {
    let (domain, tables, iotlb) = faulty_domain::<G>(&Faults::none());
    let block = 1u64 << (2 * G - 3);
    iotlb.fail_next_sync_maps(1);
    // SAFETY: nobody else uses the domain, and its device touches no memory.
    let failed = unsafe { domain.map_spans(Iova::new(0), &[span(1 << G, block)], PROT) };
    let failed = failed.unwrap_err();
    assert!(
        matches!(failed.error, iommu::Error::Hardware { range: r, .. } if r == range(0, block))
    );
    assert_eq!(failed.error.errno(), Errno::EIO);
    assert!(failed.unsynced.is_none());
    let census = {
        use dmaspan_sim::walker::{Access, Walker};
        iotlb.walker().walk(&tables, Iova::new(0), Access::Read)
    };
    assert!(census.is_err(), "nothing translates");
}

fn a_mapping_that_could_not_be_taken_back_is_handed_to_the_caller<const G: u32>() {
    let g = 1u64 << G;
    let (domain, _, iotlb) = faulty_domain::<G>(&Faults::none());
    // SAFETY: nobody else uses the domain, and its device touches no memory.
    unsafe { domain.map_spans(Iova::new(8 * g), &[span(0, g)], PROT) }.unwrap();
    for fail_sync_map in [true, false] {
        let (start, len) = if fail_sync_map { (0, 4 * g) } else { (4 * g, 8 * g) };
        iotlb.fail_next_sync_maps(u64::from(fail_sync_map));
        iotlb.fail_next_invalidations(1);
        let spans = [span(g, g), span(16 * g, len - g)];
        // SAFETY: as above.
        let failed = unsafe { domain.map_spans(Iova::new(start), &spans, PROT) }.unwrap_err();
        let gather = failed.unsynced.expect("hardware may use it still");
        let invalidation = gather.invalidation();
        let Scope::Ranges(ranges) = invalidation.scope else { panic!("one range") };
        assert_eq!(ranges, [range(start, 4 * g)], "what was mapped before the collision");
        assert_eq!(invalidation.leaf_sizes, g);
        // SAFETY: the gather is this domain's.
        assert!(unsafe { domain.sync(gather) }.is_ok());
    }
}

fn what_is_retired_names_its_range_and_leaf_sizes<const G: u32>() {
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let mut table = table::<G>();
    let all = range(block - 3 * g, 3 * g + 2 * block);
    map(&mut table, block - 3 * g, &[span(block - 3 * g, 3 * g + 2 * block)], PROT).unwrap();
    let mut room = dmaspan::SpanBuf::room::<4>();
    let unmapped = table.whole().unmap(all, &mut dmaspan::SpanBuf::new(&mut room)).unwrap();
    assert_eq!(unmapped.retired.range(), Some(all));
    assert_eq!(unmapped.retired.leaf_sizes(), g | block);
    free(&table, unmapped.retired);

    map(&mut table, block - 3 * g, &[span(block - 3 * g, 3 * g + 2 * block)], PROT).unwrap();
    let pages = table.whole().unmap_pages(Iova::new(block - 3 * g), g, 2);
    assert_eq!(pages.retired.range(), Some(range(block - 3 * g, 2 * g)));
    assert_eq!(pages.retired.leaf_sizes(), g);
    free(&table, pages.retired);
    // A page, a block, and a hole behind them.
    let pages = table.whole().unmap_pages(Iova::new(block - g), g, 1 + 3 * block / g);
    assert_eq!(pages.bytes, g + 2 * block);
    assert_eq!(pages.retired.range(), Some(range(block - g, g + 2 * block)));
    assert_eq!(pages.retired.leaf_sizes(), g | block);
    free(&table, pages.retired);
}

fn a_withdrawn_mapping_leaves_the_tables_that_were_there<const G: u32>() {
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let mut table = table::<G>();
    // A table that is empty, because it was unmapped in parts; and a page behind it.
    map(&mut table, block, &[span(0, g)], PROT).unwrap();
    unmap(&mut table, range(block, g)).unwrap();
    map(&mut table, 2 * block, &[span(0, g)], PROT).unwrap();
    let tables = table.memory().tables();
    let spans = [span(g, block), span(8 * block, g)];
    let error = map(&mut table, block, &spans, PROT).unwrap_err();
    assert_eq!(error.errno(), Errno::EEXIST);
    assert_eq!(table.memory().tables(), tables);
}

fn exactly_the_tables_that_are_missing_suffice<const G: u32>() {
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    // Few spans and many, that share tables: the bound for many is not exact, and must not refuse.
    for count in [3, 40] {
        let spans: Vec<_> = (0..count).map(|n| span(3 * n * g, g)).collect();
        let at = 5 * block - 2 * g;
        let probe = dmaspan::io_pgtable::Arena::new(PhysAddr::new(0), 64 << 20);
        let format = crate::common::format::<G>(48, 48);
        let mut first = dmaspan::io_pgtable::PageTable::new(format.clone(), probe.clone()).unwrap();
        map(&mut first, at, &spans, PROT).unwrap();
        // A smaller root takes as much, since the tables behind it are aligned.
        let needed = u64::try_from(probe.tables()).unwrap() * g;
        for (room, fits) in [(needed, true), (needed - g, false)] {
            let tight = dmaspan::io_pgtable::Arena::new(PhysAddr::new(0), room);
            let mut table =
                dmaspan::io_pgtable::PageTable::new(format.clone(), tight.clone()).unwrap();
            let result = map(&mut table, at, &spans, PROT);
            assert_eq!(result.is_ok(), fits, "{result:?}");
            if !fits {
                assert_eq!(result.unwrap_err().errno(), Errno::ENOMEM);
                assert_eq!(tight.tables(), 1);
            }
        }
    }
}
