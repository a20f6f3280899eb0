//! Buffers, sizes and ends: what goes wrong at the edges.

use dmaspan::{Errno, Iova, PhysAddr, iommu};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::walker::Checked as _;

use crate::common::{PROT, for_all_granules, free, map, range, span, table, unmap};
use crate::failures::faulty_domain;

for_all_granules!(
    a_buffer_without_room_makes_no_progress_and_no_change,
    leaf_sizes_are_named_for_every_batch,
    leaves_that_join_the_last_span_of_a_buffer_are_named,
    every_page_size_of_every_width_is_one_leaf,
    addresses_outside_the_aperture_are_nobodys,
    a_rest_is_resumed_only_where_it_came_from,
    a_domain_begins_empty_and_ends_detached,
);

fn a_buffer_without_room_makes_no_progress_and_no_change<const G: u32>() {
    let g = 1u64 << G;
    let mut table = table::<G>();
    map(&mut table, 0, &[span(3 * g, g), span(9 * g, g), span(5 * g, g)], PROT).unwrap();
    let before = crate::common::contents(&mut table);
    let mut room = [span(0x77 * g, g)];
    for room in [&mut [][..], &mut room[..]] {
        let mut buf = dmaspan::SpanBuf::new(room);
        let _ = buf.push(span(0x77 * g, g));
        let unmapped = table.whole().unmap(range(0, 2 * g), &mut buf).unwrap();
        assert!(unmapped.retired.is_empty());
        let rest = unmapped.rest.unwrap();
        assert_eq!(rest.range(), range(0, 2 * g));
        let again = table.whole().resume(rest, &mut buf);
        assert!(again.retired.is_empty() && again.rest.is_some());
        assert_eq!(crate::common::contents(&mut table), before);
    }
}

fn leaf_sizes_are_named_for_every_batch<const G: u32>() {
    let g = 1u64 << G;
    let mut table = table::<G>();
    let spans: Vec<_> = (0..20).map(|n| span(2 * n * g, g)).collect();
    map(&mut table, 0, &spans, PROT).unwrap();
    let mut room = dmaspan::SpanBuf::room::<8>();
    let mut buf = dmaspan::SpanBuf::new(&mut room);
    let mut unmapped = table.whole().unmap(range(0, 20 * g), &mut buf).unwrap();
    let mut batches = 0;
    loop {
        batches += 1;
        assert_eq!(unmapped.retired.leaf_sizes(), g);
        buf.clear();
        free(&table, unmapped.retired);
        let Some(rest) = unmapped.rest else { break };
        unmapped = table.whole().resume(rest, &mut buf);
    }
    assert_eq!(batches, 3);
}

/// No span was added by them: they became a part of the one that the buffer had.
fn leaves_that_join_the_last_span_of_a_buffer_are_named<const G: u32>() {
    let g = 1u64 << G;
    let mut table = table::<G>();
    map(&mut table, 0, &[span(3 * g, 2 * g), span(9 * g, g)], PROT).unwrap();
    let mut room = dmaspan::SpanBuf::room::<1>();
    let mut buf = dmaspan::SpanBuf::new(&mut room);
    buf.push(span(2 * g, g)).unwrap();
    let unmapped = table.whole().unmap(range(0, 3 * g), &mut buf).unwrap();
    assert_eq!(buf.spans(), [span(2 * g, 3 * g)]);
    let retired = unmapped.retired;
    assert_eq!((retired.range(), retired.leaf_sizes()), (Some(range(0, 2 * g)), g));
    assert_eq!(unmapped.rest.unwrap().range(), range(2 * g, g));
    free(&table, retired);
}

fn every_page_size_of_every_width_is_one_leaf<const G: u32>() {
    use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, Format, PageTable};
    let most = if G == 16 { 52 } else { 48 };
    let all = ArmLpaeS1::<G>::PAGE_SIZES | ArmLpaeS1::<G>::CONTIGUOUS_SIZES;
    for input_bits in 25..=most {
        let config = ArmLpaeS1Config::new(input_bits, most);
        // All sizes that this width takes, one by one.
        let sizes = (0..64).map(|lg2| 1u64 << lg2).filter(|size| all & size != 0);
        let taken = sizes.filter(|&size| {
            let page_sizes = Some(size | 1 << G);
            ArmLpaeS1::<G>::new(ArmLpaeS1Config { page_sizes, ..config }).is_ok()
        });
        let page_sizes = Some(taken.fold(0, |all, size| all | size));
        let format = ArmLpaeS1::<G>::new(ArmLpaeS1Config { page_sizes, ..config }).unwrap();
        let sizes = format.geometry().page_sizes;
        for size in (0..64).map(|lg2| 1u64 << lg2).filter(|size| sizes & size != 0) {
            let mut table = PageTable::new(format.clone(), crate::common::arena()).unwrap();
            let iova = (1u64 << input_bits).saturating_sub(size);
            let mapped = table.whole().map_pages(Iova::new(iova), PhysAddr::new(0), size, 1, PROT);
            assert_eq!(mapped, (size, Ok(())), "{input_bits} bits, {size:#x}");
            let walker = crate::common::walker(table.format(), table.root());
            let last = Iova::new(iova + size - 8);
            let found = walker.strict_walk(table.memory(), last).unwrap();
            assert_eq!((found.paddr, found.group), (PhysAddr::new(size - 8), range(iova, size)));
            assert_eq!(unmap(&mut table, range(iova, size)).unwrap(), [span(0, size)]);
        }
    }
}

fn addresses_outside_the_aperture_are_nobodys<const G: u32>() {
    let mut table = table::<G>();
    map(&mut table, 0, &[span(1 << G, 1 << G)], PROT).unwrap();
    let everything = dmaspan::IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
    // SAFETY: nobody else uses the table.
    let owned = unsafe { table.claim(everything) };
    assert_eq!(owned.iova_to_phys(Iova::new(1 << 48)), None);
    assert_eq!(owned.walk(everything).count(), 1);
    assert_eq!(owned.census(everything).total(), 1);
}

fn a_rest_is_resumed_only_where_it_came_from<const G: u32>() {
    let g = 1u64 << G;
    let mut one = table::<G>();
    // Elsewhere in memory, so that the roots differ.
    let elsewhere = dmaspan::io_pgtable::Arena::new(PhysAddr::new(1 << 32), 1 << 21);
    let format = crate::common::format::<G>(48, 48);
    let mut other = dmaspan::io_pgtable::PageTable::new(format, elsewhere).unwrap();
    let spans = [span(0, g), span(2 * g, g), span(4 * g, g)];
    map(&mut one, 0, &spans, PROT).unwrap();
    map(&mut other, 0, &spans, PROT).unwrap();
    let before = crate::common::contents(&mut other);
    let mut room = dmaspan::SpanBuf::room::<1>();
    let mut buf = dmaspan::SpanBuf::new(&mut room);
    let unmapped = one.whole().unmap(range(0, 3 * g), &mut buf).unwrap();
    free(&one, unmapped.retired);
    buf.clear();
    let refused = other.whole().resume(unmapped.rest.unwrap(), &mut buf);
    assert!(refused.retired.is_empty() && buf.is_empty());
    assert_eq!(crate::common::contents(&mut other), before);
    // Nor by somebody who owns another range.
    // SAFETY: nobody else uses the table.
    let owned = unsafe { one.claim(range(64 * g, g)) };
    let refused = owned.resume(refused.rest.unwrap(), &mut buf);
    assert!(refused.retired.is_empty() && buf.is_empty());
    let done = one.whole().resume(refused.rest.unwrap(), &mut buf);
    assert_eq!(buf.spans(), [span(2 * g, g)]);
    free(&one, done.retired);
}

fn a_domain_begins_empty_and_ends_detached<const G: u32>() {
    use dmaspan_sim::walker::Access;
    let mut table = table::<G>();
    map(&mut table, 0, &[span(0, 1 << G)], PROT).unwrap();
    let iotlb = dmaspan_sim::iotlb::Iotlb::new(
        crate::common::walker(table.format(), table.root()),
        table.memory().clone(),
    );
    let refused = iommu::Domain::new(table, iotlb).unwrap_err();
    assert_eq!(refused.errno(), Errno::EEXIST);
    let (domain, tables, iotlb) = faulty_domain::<G>(&Faults::none());
    // SAFETY: nobody else uses the domain, and its device touches no memory.
    unsafe { domain.map_spans(Iova::new(0), &[span(0, 1 << G)], PROT) }.unwrap();
    assert!(iotlb.translate(Iova::new(0), Access::Read).is_ok());
    drop(domain);
    assert_eq!(tables.tables(), 0);
    // The tables are others' memory by now, and hardware does not look.
    assert!(iotlb.translate(Iova::new(0), Access::Read).is_err());
}
