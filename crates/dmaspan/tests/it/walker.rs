//! Byte-exactness: a walker that shares no code with the encoder reads the same.

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, Half, PageTable};
use dmaspan::{Coherency, Iova, PhysAddr};
use dmaspan_sim::walker::Checked as _;

use crate::common::{PROT, arena, for_all_granules, map, range, span, unmap, walker};

for_all_granules!(every_width_and_half_starts_at_the_right_level,);

fn every_width_and_half_starts_at_the_right_level<const G: u32>() {
    let most = if G == 16 { 52 } else { 48 };
    for input_bits in 25..=most {
        for half in [Half::Lower, Half::Upper] {
            for walks in [Coherency::Coherent, Coherency::NonCoherent] {
                let config =
                    ArmLpaeS1Config { half, walks, ..ArmLpaeS1Config::new(input_bits, most) };
                let format = ArmLpaeS1::<G>::new(config).unwrap();
                let mut table = PageTable::new(format, arena()).unwrap();
                let walker = walker(table.format(), table.root());
                assert_eq!(walker.input_range(), table.geometry().aperture);
                let aperture = table.geometry().aperture;
                let last_page = aperture.last().get() & !((1 << G) - 1);
                let paddr = (1u64 << most) - (1 << G);
                for (page, paddr) in [(aperture.start().get(), 0), (last_page, paddr)] {
                    map(&mut table, page, &[span(paddr, 1 << G)], PROT).unwrap();
                    let found = walker.strict_walk(table.memory(), Iova::new(page)).unwrap();
                    assert_eq!(found.paddr, PhysAddr::new(paddr), "{config:?}");
                    assert_eq!(
                        table.whole().iova_to_phys(Iova::new(page)),
                        Some(PhysAddr::new(paddr))
                    );
                }
            }
        }
    }
}

#[test]
fn addresses_above_48_bits_are_encoded_with_the_64k_granule() {
    let sizes = Some(ArmLpaeS1::<16>::PAGE_SIZES | ArmLpaeS1::<16>::CONTIGUOUS_SIZES);
    let config = ArmLpaeS1Config { page_sizes: sizes, ..ArmLpaeS1Config::new(52, 52) };
    let format = ArmLpaeS1::<16>::new(config).unwrap();
    // Tables above 48 bits too: the root and the links have them in other places than leaves.
    let high = dmaspan::io_pgtable::Arena::new(PhysAddr::new(0xd << 48 | 1 << 32), 16 << 20);
    let mut table = PageTable::new(format, high).unwrap();
    let walker = walker(table.format(), table.root());
    // A run over the border of bit 48, of pages and of a 4T block.
    let start = (1 << 48) - 0x3_0000;
    for (iova, paddr, len) in
        [(0x10_0000, start, 0x8_0000), (5 << 42, 0xf << 48, 1 << 42), (7 << 42, 0xa << 48, 1 << 34)]
    {
        map(&mut table, iova, &[span(paddr, len)], PROT).unwrap();
        for offset in (0..len).step_by((len / 8) as usize) {
            let found = walker.strict_walk(table.memory(), Iova::new(iova + offset)).unwrap();
            assert_eq!(found.paddr, PhysAddr::new(paddr + offset));
        }
        let runs: Vec<_> = table.whole().walk(range(iova, len)).collect();
        assert_eq!(runs.len(), 1, "one maximal run over the border");
        assert_eq!(unmap(&mut table, range(iova, len)).unwrap(), [span(paddr, len)]);
    }
}
