//! `VFIO_IOMMU_GET_INFO`, `VFIO_CHECK_EXTENSION` and what all containers answer.

use dmaspan::container::type1::{uapi, version_of};
use dmaspan::container::{Attach, CacheCoherency, Interrupts, Version};
use dmaspan::iommu::{RegionKind, ReservedRegion, ReservedRegions};
use dmaspan::{Errno, Prot};
use dmaspan_sim::fault::Faults;

use super::world::{Backing, LAST, PAGE, READ_WRITE, USER, World, half, info_arg, number, word};
use crate::common::{faulty_domain, range};

const FILL: u8 = 0xa5;

/// How long the whole answer is, as a short one says.
fn needed(world: &World) -> u32 {
    let mut arg = info_arg(16, 16);
    assert_eq!(world.ask(uapi::VFIO_IOMMU_GET_INFO, &mut arg), Ok(0));
    word(&arg, 0)
}

/// The capabilities of a whole answer: numbers and bodies with their padding.
fn capabilities(info: &[u8], needed: u32) -> Vec<(u16, Vec<u8>)> {
    let index = |at: u32| usize::try_from(at).unwrap();
    let mut found = Vec::new();
    let mut at = index(word(info, 16));
    while at != 0 {
        assert_eq!(at % 8, 0, "headers are aligned");
        assert_eq!(half(info, at + 2), 1, "version");
        let next = index(word(info, at + 4));
        let end = if next == 0 { index(needed) } else { next };
        found.push((half(info, at), info[at + 8..end].to_vec()));
        at = next;
    }
    found
}

#[test]
fn every_argsz_gets_what_it_has_room_for_and_no_byte_more() {
    for backing in [Backing::Domain, Backing::None] {
        let world = World::new(Version::V2, backing);
        let needed = needed(&world);
        assert_eq!(needed, if backing == Backing::Domain { 24 + 32 + 16 + 32 } else { 24 + 48 });
        let mut whole = info_arg(needed, 256);
        assert_eq!(world.ask(uapi::VFIO_IOMMU_GET_INFO, &mut whole), Ok(0));
        for argsz in 0..needed + 64 {
            let mut arg = info_arg(argsz, 256);
            let before = arg.clone();
            let result = world.ask(uapi::VFIO_IOMMU_GET_INFO, &mut arg);
            if argsz < 16 {
                assert_eq!(result, Err(Errno::EINVAL), "argsz {argsz}");
                assert_eq!(arg, before, "argsz {argsz}");
                continue;
            }
            assert_eq!(result, Ok(0));
            let flags = uapi::VFIO_IOMMU_INFO_PGSIZES | uapi::VFIO_IOMMU_INFO_CAPS;
            assert_eq!(word(&arg, 4), flags);
            assert_eq!(arg[8..16], whole[8..16], "page sizes");
            let written = if argsz < needed { argsz.min(24) } else { needed };
            let at = usize::try_from(written).unwrap();
            assert!(arg[at..].iter().all(|byte| *byte == FILL), "argsz {argsz}: overwritten");
            if argsz < needed {
                assert_eq!(word(&arg, 0), needed, "argsz {argsz}: what is needed");
                assert!(arg[16..at].iter().all(|byte| *byte == 0), "argsz {argsz}: cap_offset");
            } else {
                assert_eq!(word(&arg, 0), argsz);
                assert_eq!(arg[4..at], whole[4..at]);
            }
        }
    }
}

#[test]
fn an_argument_shorter_than_it_says_is_not_written() {
    let world = World::new(Version::V2, Backing::Domain);
    let needed = needed(&world);
    for len in 0..usize::try_from(needed).unwrap() {
        let mut arg = info_arg(needed, len);
        let before = arg.clone();
        assert_eq!(world.ask(uapi::VFIO_IOMMU_GET_INFO, &mut arg), Err(Errno::EFAULT), "{len}");
        assert_eq!(arg, before);
    }
}

#[test]
fn the_chain_has_migration_mappings_left_and_ranges() {
    let world = World::limited(Version::V2, Backing::Domain, u64::MAX, 10);
    let needed = needed(&world);
    let info = world.info();
    assert_eq!(number(&info, 8), (1 << 12) | (1 << 21) | (1 << 30));
    let found = capabilities(&info, needed);
    let ids: Vec<u16> = found.iter().map(|(id, _)| *id).collect();
    assert_eq!(
        ids,
        [
            uapi::VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION,
            uapi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
            uapi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
        ]
    );
    let [(_, migration), (_, avail), (_, ranges)] = &found[..] else { panic!("{found:?}") };
    let numbers = |body: &[u8]| -> Vec<u64> {
        (0..body.len()).step_by(8).map(|at| number(body, at)).collect()
    };
    assert_eq!(numbers(migration), [0, PAGE, 256 << 20]);
    assert_eq!((word(avail, 0), word(avail, 4)), (10, 0), "padding is written");
    assert_eq!((word(ranges, 0), word(ranges, 4)), (1, 0));
    assert_eq!(numbers(&ranges[8..]), [0, LAST]);

    world.map(READ_WRITE, USER, 0, PAGE).unwrap();
    let found = capabilities(&world.info(), needed);
    assert_eq!(word(&found[1].1, 0), 9, "one mapping fewer");
}

#[test]
fn without_a_domain_pages_are_the_cpus_and_no_range_is_named() {
    for version in [Version::V1, Version::V2] {
        let world = World::new(version, Backing::None);
        let info = world.info();
        assert_eq!(number(&info, 8), !(PAGE - 1));
        let found = capabilities(&info, needed(&world));
        let ids: Vec<u16> = found.iter().map(|(id, _)| *id).collect();
        let expected =
            [uapi::VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION, uapi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL];
        assert_eq!(ids, expected);
    }
}

#[test]
fn extensions_are_those_of_type1() {
    let world = World::new(Version::V2, Backing::None);
    let there = [
        uapi::VFIO_TYPE1_IOMMU,
        uapi::VFIO_TYPE1V2_IOMMU,
        uapi::VFIO_DMA_CC_IOMMU,
        uapi::VFIO_UNMAP_ALL,
        uapi::VFIO_UPDATE_VADDR,
    ];
    for extension in (0..64).chain([1 << 31, 1 << 32, (1 << 32) + 1, u64::MAX]) {
        let expected = Ok(u32::from(there.contains(&extension)));
        let asked = world.ask(uapi::VFIO_CHECK_EXTENSION, &mut extension.to_ne_bytes());
        assert_eq!(asked, expected, "extension {extension}");
        if let Ok(short) = u32::try_from(extension) {
            let asked = world.ask(uapi::VFIO_CHECK_EXTENSION, &mut short.to_ne_bytes());
            assert_eq!(asked, expected, "extension {extension} in 4 bytes");
        }
    }
    assert_eq!(world.ask(uapi::VFIO_CHECK_EXTENSION, &mut [1, 0, 0]), Err(Errno::EFAULT));
}

#[test]
fn requests_of_others_are_no_requests() {
    let world = World::new(Version::V2, Backing::Domain);
    assert_eq!(world.ask(uapi::VFIO_GET_API_VERSION, &mut []), Ok(0));
    let mut kind = uapi::VFIO_TYPE1V2_IOMMU.to_ne_bytes();
    assert_eq!(world.ask(uapi::VFIO_SET_IOMMU, &mut kind), Err(Errno::EINVAL), "it is set");
    let known = [0, 1, 2, 12, 13, 14, 17].map(|number| 0x3b64 + number);
    for request in (0x3b00..0x3c00).chain([0, 1, u32::MAX, 0xc018_3b71]) {
        if !known.contains(&request) {
            assert_eq!(world.ask(request, &mut [0xff; 64]), Err(Errno::ENOTTY), "{request:#x}");
        }
    }
}

#[test]
fn kinds_of_iommus_are_versions() {
    let versions: Vec<_> = (0..8).map(version_of).collect();
    let (v1, v2) = (Some(Version::V1), Some(Version::V2));
    assert_eq!(versions, [None, v1, None, v2, None, None, v2, None]);
}

#[test]
fn what_is_attached_limits_pages_ranges_and_coherency() {
    let world = World::new(Version::V2, Backing::None);
    let coherent = || world.ask(uapi::VFIO_CHECK_EXTENSION, &mut 4u64.to_ne_bytes());
    let mut regions = ReservedRegions::new();
    for (start, len) in [(0xfee0_0000, 1 << 20), (0, 0x4000)] {
        let range = range(start, len);
        let kind = RegionKind::Msi;
        regions.insert(ReservedRegion { range, kind, prot: Prot::WRITE }).unwrap();
    }
    let enforced = Attach::new(Interrupts::Isolated).coherency(CacheCoherency::Enforced);
    let (domain, ..) = faulty_domain::<14>(&Faults::none());
    world.container.attach(domain, enforced.regions(regions)).unwrap();
    assert_eq!(coherent(), Ok(1));

    let info = world.info();
    assert_eq!(number(&info, 8), (1 << 14) | (1 << 25));
    let needed = needed(&world);
    assert_eq!(needed, 24 + 32 + 16 + 48);
    let found = capabilities(&info, needed);
    assert_eq!(number(&found[0].1, 8), 1 << 14, "a bit for each of the smallest pages");
    let ranges = &found[2].1;
    assert_eq!((word(ranges, 0), word(ranges, 4)), (2, 0));
    let numbers: Vec<u64> = (8..ranges.len()).step_by(8).map(|at| number(ranges, at)).collect();
    assert_eq!(numbers, [0x4000, 0xfedf_ffff, 0xfef0_0000, LAST]);
    for (iova, size) in [(0, 0x4000), (0, 0x8000), (0xfedf_c000, 0x8000), (0xfee0_0000, 0x4000)] {
        let answer = world.map(READ_WRITE, USER, iova, size);
        assert_eq!(answer, Err(Errno::EINVAL), "at {iova:#x}");
    }
    assert_eq!(world.map(READ_WRITE, USER, 0x4000, PAGE), Err(Errno::EINVAL), "pages of 16K");

    let (domain, ..) = faulty_domain::<14>(&Faults::none());
    world.container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    assert_eq!(coherent(), Ok(0), "one of two enforces it");
}
