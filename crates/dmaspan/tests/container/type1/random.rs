//! Requests at random: against the oracle, and of bytes that mean nothing.

use dmaspan::container::Version;
use dmaspan::container::type1::uapi;
use proptest::prelude::*;

use super::oracle::{Map, Oracle, Unmap};
use super::world::{Backing, LAST, PAGE, PAGES, USER, World, map_arg, number, unmap_arg};

#[derive(Clone, Copy, Debug)]
enum Request {
    Map(Map),
    Unmap(Unmap),
}

/// Addresses that meet often: few pages, the ends of spaces, and a little beside.
fn iova() -> impl Strategy<Value = u64> {
    let near = prop_oneof![
        8 => Just(0), 1 => Just(LAST - 15 * PAGE), 1 => Just(0u64.wrapping_sub(16 * PAGE)),
    ];
    (near, 0..20u64, odd())
        .prop_map(|(base, page, odd)| base.wrapping_add(page * PAGE).wrapping_add(odd))
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => (0..8u64, odd()).prop_map(|(pages, odd)| (pages * PAGE).wrapping_add(odd)),
        1 => Just(0u64.wrapping_sub(PAGE)),
        1 => any::<u64>(),
    ]
}

fn odd() -> impl Strategy<Value = u64> {
    prop_oneof![20 => Just(0), 1 => Just(1), 1 => Just(u64::MAX), 1 => Just(PAGE / 2)]
}

fn vaddr() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => (0..PAGES, odd()).prop_map(|(page, odd)| (USER + page * PAGE).wrapping_add(odd)),
        1 => Just(0u64.wrapping_sub(2 * PAGE)),
        1 => any::<u64>(),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let flags = prop_oneof![12 => 1..4u32, 2 => 0..8u32, 1 => any::<u32>()];
    let argsz = prop_oneof![12 => Just(32), 1 => 0..40u32, 1 => any::<u32>()];
    let map = (argsz, flags, vaddr(), iova(), size())
        .prop_map(|(argsz, flags, vaddr, iova, size)| Map { argsz, flags, vaddr, iova, size });
    let all = uapi::VFIO_DMA_UNMAP_FLAG_ALL;
    let flags = prop_oneof![
        12 => Just(0), 4 => Just(uapi::VFIO_DMA_UNMAP_FLAG_VADDR), 1 => Just(all), 2 => 0..8u32,
        1 => any::<u32>(),
    ];
    let argsz = prop_oneof![12 => Just(24), 1 => 0..40u32, 1 => any::<u32>()];
    let unmap = (argsz, flags, iova(), size(), any::<bool>()).prop_map(
        |(argsz, flags, iova, size, zero)| {
            let all = flags & uapi::VFIO_DMA_UNMAP_FLAG_ALL != 0 && zero;
            let (iova, size) = if all { (0, 0) } else { (iova, size) };
            Unmap { argsz, flags, iova, size }
        },
    );
    prop_oneof![2 => map.prop_map(Request::Map), 1 => unmap.prop_map(Request::Unmap)]
}

/// Structures of any length with numbers that a request may have, and without.
fn structure() -> impl Strategy<Value = Vec<u8>> {
    let words = vec![0, 1, 3, 8, 16, 24, 32, 48, 4096, u32::MAX];
    let word = prop_oneof![4 => proptest::sample::select(words), 1 => any::<u32>()];
    let number = prop_oneof![2 => iova(), 2 => size(), 1 => vaddr(), 1 => any::<u64>()];
    let numbers = proptest::collection::vec(number, 0..8);
    let shaped = (word, 0..9u32, numbers, 0..4usize).prop_map(|(argsz, flags, numbers, cut)| {
        let mut bytes = super::world::bytes(&[argsz, flags], &numbers);
        bytes.truncate(bytes.len() - cut);
        bytes
    });
    prop_oneof![4 => shaped, 1 => proptest::collection::vec(any::<u8>(), 0..96)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn requests_in_any_order_are_answered_as_the_oracle_does(
        requests in proptest::collection::vec(request(), 1..80),
        version in proptest::sample::select(&[Version::V1, Version::V2][..]),
        backing in proptest::sample::select(&[Backing::Domain, Backing::None][..]),
    ) {
        let world = World::limited(version, backing, u64::MAX, 6);
        let domain = (backing == Backing::Domain).then_some(LAST);
        let v2 = version == Version::V2;
        let mut oracle = Oracle { v2, domain, max_mappings: 6, mapped: Vec::new() };
        for request in requests {
            match request {
                Request::Map(map) => {
                    let Map { argsz, flags, vaddr, iova, size } = map;
                    let mut arg = map_arg(argsz, flags, vaddr, iova, size);
                    let answer = world.ask(uapi::VFIO_IOMMU_MAP_DMA, &mut arg);
                    prop_assert_eq!(answer, oracle.map(map).map(|()| 0), "{:?}", map);
                }
                Request::Unmap(unmap) => {
                    let Unmap { argsz, flags, iova, size } = unmap;
                    let mut arg = unmap_arg(argsz, flags, iova, size);
                    let answer = world.ask(uapi::VFIO_IOMMU_UNMAP_DMA, &mut arg);
                    let answer = answer.map(|_| number(&arg, 16));
                    prop_assert_eq!(answer, oracle.unmap(unmap), "{:?}", unmap);
                }
            }
            prop_assert_eq!(world.container.mappings(), oracle.mapped.len());
        }
        world.unmap_all().unwrap();
        prop_assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
        prop_assert_eq!(world.memory.violations(), []);
    }

    #[test]
    fn bytes_that_mean_nothing_change_nothing(
        requests in proptest::collection::vec((0..20u32, structure()), 1..60),
        version in proptest::sample::select(&[Version::V1, Version::V2][..]),
        backing in proptest::sample::select(&[Backing::Domain, Backing::None][..]),
    ) {
        let world = World::limited(version, backing, 16 * PAGE, 4);
        world.map(3, USER, 0, 2 * PAGE).unwrap();
        world.map(1, USER + 8 * PAGE, 4 * PAGE, PAGE).unwrap();
        for (request, arg) in requests {
            let before = world.snapshot();
            let mut written = arg.clone();
            let answer = world.ask(uapi::VFIO_GET_API_VERSION + request, &mut written);
            prop_assert_eq!(written.len(), arg.len());
            if answer.is_err() {
                prop_assert_eq!(&written, &arg, "request {}", request);
                prop_assert_eq!(world.snapshot(), before, "request {} of {:x?}", request, arg);
            }
        }
        world.unmap_all().unwrap();
        prop_assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
    }
}
