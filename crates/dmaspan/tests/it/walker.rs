//! Byte-exactness: a walker that shares no code with the encoder reads the same.

use std::collections::BTreeMap;

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, Half, PageTable};
use dmaspan::{Coherency, Iova, PhysAddr, Prot};
use dmaspan_sim::walker::Walker as _;
use dmaspan_sim::walker::{Access, FaultKind};

use crate::common::{PROT, arena, for_all_granules, map, range, span, unmap, walker, with_groups};

for_all_granules!(
    permissions_and_memory_types_read_back,
    leaves_of_every_size_are_architectural,
    every_width_and_half_starts_at_the_right_level,
    what_was_unmapped_faults,
);

fn permissions_and_memory_types_read_back<const G: u32>() {
    let g = 1u64 << G;
    let mut table = PageTable::new(crate::common::format::<G>(48, 48), arena()).unwrap();
    let walker = walker(table.format(), table.root());
    let prots = [
        Prot::READ,
        Prot::READ_WRITE,
        Prot::READ | Prot::CACHE,
        Prot::READ_WRITE | Prot::CACHE | Prot::NOEXEC,
        Prot::READ_WRITE | Prot::MMIO | Prot::NOEXEC,
        Prot::READ | Prot::PRIV,
    ];
    for (n, prot) in (1u64..).zip(prots) {
        map(&mut table, n * g, &[span(n * 16 * g, g)], prot).unwrap();
        let found: Vec<_> = table.whole().walk(range(n * g, g)).collect();
        assert_eq!(found[0].prot, prot);
        let read = walker.strict_walk(table.memory(), Iova::new(n * g + 8)).unwrap();
        assert_eq!(read.prot, prot, "as the manual reads it");
        assert_eq!(read.paddr, PhysAddr::new(n * 16 * g + 8));
        let write = walker.walk(table.memory(), Iova::new(n * g), Access::Write);
        let permitted = prot.contains(Prot::WRITE) && !prot.contains(Prot::PRIV);
        assert_eq!(write.is_ok(), permitted, "{prot:?}");
    }
    // Stage 1 cannot express write-only, and says what it granted instead.
    map(&mut table, 64 * g, &[span(0, g)], Prot::WRITE).unwrap();
    let found: Vec<_> = table.whole().walk(range(64 * g, g)).collect();
    assert_eq!(found[0].prot, Prot::READ_WRITE);
}

fn leaves_of_every_size_are_architectural<const G: u32>() {
    let format = with_groups::<G>();
    let page_sizes = dmaspan::io_pgtable::Format::geometry(&format).page_sizes;
    for lg2 in (0..64).filter(|lg2| page_sizes & (1 << lg2) != 0) {
        let size = 1u64 << lg2;
        let mut table = PageTable::new(format.clone(), arena()).unwrap();
        let walker = walker(table.format(), table.root());
        let (iova, paddr) = (3 * size, 5 * size);
        map(&mut table, iova, &[span(paddr, size)], PROT).unwrap();
        for offset in [0, 8, size / 2, size - 1] {
            let found = walker.strict_walk(table.memory(), Iova::new(iova + offset)).unwrap();
            assert_eq!(found.paddr, PhysAddr::new(paddr + offset), "2^{lg2}");
            assert_eq!(found.group, range(iova, size), "2^{lg2}");
            assert_eq!(
                table.whole().iova_to_phys(Iova::new(iova + offset)),
                Some(PhysAddr::new(paddr + offset))
            );
        }
        walker.check_contiguous_group(table.memory(), Iova::new(iova)).unwrap();
        let census = walker.census(table.memory(), range(iova, size)).unwrap();
        assert_eq!(census, BTreeMap::from([(lg2, 1)]));
        assert_eq!(unmap(&mut table, range(iova, size)).unwrap(), [span(paddr, size)]);
        assert!(walker.walk(table.memory(), Iova::new(iova), Access::Read).is_err());
    }
}

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

fn what_was_unmapped_faults<const G: u32>() {
    let g = 1u64 << G;
    let mut table = PageTable::new(crate::common::format::<G>(48, 48), arena()).unwrap();
    let walker = walker(table.format(), table.root());
    map(&mut table, 0, &[span(0, 4 * g)], PROT).unwrap();
    unmap(&mut table, range(g, 2 * g)).unwrap();
    for (n, mapped) in [(0, true), (1, false), (2, false), (3, true)] {
        let found = walker.walk(table.memory(), Iova::new(n * g), Access::Read);
        match found {
            Ok(_) => assert!(mapped),
            Err(fault) => {
                assert!(!mapped);
                assert_eq!(fault.kind, FaultKind::Translation);
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
    let high = dmaspan_sim::Arena::new(PhysAddr::new(0xd << 48 | 1 << 32), 16 << 20);
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
