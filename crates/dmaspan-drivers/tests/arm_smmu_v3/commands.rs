//! The commands that make hardware forget its caches, one by one.

use std::collections::BTreeSet;
use std::sync::Arc;

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};
use dmaspan::iommu::{Invalidation, IommuOps as _, Port as _, Scope, Tables};
use dmaspan::{Iova, IovaRange};
use dmaspan_drivers::arm_smmu_v3::SmmuV3Config;
use dmaspan_sim::rng::Rng;

use crate::hardware::Model;
use crate::setup::{DomainOf, Rig, S1};

/// Opcodes.
const NH_ASID: u64 = 0x11;
const NH_VA: u64 = 0x12;
const S2_IPA: u64 = 0x2a;

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

fn leaves(ranges: &[IovaRange], leaf_sizes: u64) -> Invalidation<'_> {
    Invalidation { scope: Scope::Ranges(ranges), leaf_sizes, tables: Tables::Kept }
}

/// A domain that a stream has, and no commands before.
fn attached(rig: &Rig) -> Arc<DomainOf<S1>> {
    let domain = rig.s1();
    // Dropped, the port leaves it there.
    rig.port::<S1>(1).translate(&domain).unwrap();
    rig.hardware.take();
    domain
}

/// NUM, SCALE and the number of domain 1.
fn numbered(opcode: u64, pages: u64, scale: u64) -> u64 {
    1 << 48 | scale << 20 | (pages - 1) << 12 | opcode
}

#[test]
fn the_stores_of_a_map_are_ordered_before_a_device_is_told_of_them() {
    let rig = Rig::new(Model::LARGE);
    let domain = attached(&rig);
    let before = rig.hardware.ordered();
    domain.ops().sync_map(range(0x4000_0000, 0x1000)).unwrap();
    assert_eq!(rig.hardware.ordered(), before + 1);
    assert!(rig.hardware.take().is_empty(), "hardware caches nothing that is absent");
}

#[test]
fn ranges_are_forgotten_by_few_commands() {
    let rig = Rig::new(Model::LARGE);
    let domain = attached(&rig);
    // TG 4K, TTL 3 and Leaf.
    let pages = 1 << 10 | 3 << 8 | 1;
    let cases = [
        (range(0x4000_0000, 1 << 30), 1 << 12, vec![[numbered(NH_VA, 1, 18), 0x4000_0000 | pages]]),
        // One page is no range.
        (range(0x5000, 0x1000), 1 << 12, vec![[numbered(NH_VA, 1, 0), 0x5001]]),
        (range(0x5000, 0x3000), 1 << 12, vec![[numbered(NH_VA, 3, 0), 0x5000 | pages]]),
        (
            range(0x5000, 0x21 << 12),
            1 << 12,
            vec![[numbered(NH_VA, 1, 0), 0x5001], [numbered(NH_VA, 1, 5), 0x6000 | pages]],
        ),
        // Blocks: TTL 2 and 1. Of two levels: none.
        (
            range(0x20_0000, 2 << 20),
            1 << 21,
            vec![[numbered(NH_VA, 1, 9), 0x20_0000 | 1 << 10 | 2 << 8 | 1]],
        ),
        (range(0, 1 << 30), 1 << 30, vec![[numbered(NH_VA, 1, 18), 1 << 10 | 1 << 8 | 1]]),
        (range(0, 2 << 21), 1 << 21 | 1 << 12, vec![[numbered(NH_VA, 1, 10), 1 << 10 | 1]]),
        // The most that one command names.
        (range(0, 1 << 48), 1 << 12, vec![[numbered(NH_VA, 32, 31), pages]]),
        // A group of 64K is of pages.
        (range(0, 0x1_0000), 1 << 16, vec![[numbered(NH_VA, 1, 4), pages]]),
    ];
    for (range, sizes, expected) in cases {
        domain.ops().invalidate(&leaves(&[range], sizes)).unwrap();
        assert_eq!(rig.hardware.take(), expected, "{range:?} of {sizes:#x}");
    }
    let ranges = [range(0, 4 << 20)];
    let detached = Invalidation { tables: Tables::Detached, ..leaves(&ranges, 1 << 12) };
    domain.ops().invalidate(&detached).unwrap();
    // Walks too, of whatever level.
    assert_eq!(rig.hardware.take(), [[numbered(NH_VA, 1, 10), 1 << 10]]);
    let all = Invalidation { scope: Scope::All, ..detached };
    domain.ops().invalidate(&all).unwrap();
    assert_eq!(rig.hardware.take(), [[1 << 48 | NH_ASID, 0]]);
}

/// NUM, SCALE and the address of each command, against the sum that the manual has.
#[test]
fn ranges_of_any_length_are_covered_exactly_by_fields_that_have_room() {
    let rig = Rig::new(Model::LARGE);
    let domain = attached(&rig);
    let mut rng = Rng::new(1);
    let large =
        (12..48).flat_map(|lg2| [1u64 << lg2, 3 << lg2, 33 << lg2]).filter(|len| *len <= 1 << 48);
    let random = (0..200).map(|_| (1 + (rng.next() >> 28)) << 12);
    for len in large.chain(random).filter(|len| *len < 1 << 48) {
        for (start, tables) in [(0, Tables::Kept), (0x7000, Tables::Detached)] {
            let ranges = [range(start, len)];
            let what = Invalidation { tables, ..leaves(&ranges, 1 << 12) };
            domain.ops().invalidate(&what).unwrap();
            let mut next = start;
            for [fields, address] in rig.hardware.take() {
                assert_eq!(fields & !(0x1f << 12 | 0x1f << 20), numbered(NH_VA, 1, 0), "{len:#x}");
                assert_eq!(address & !0xfff, next, "{len:#x}");
                assert_eq!(address & 1 != 0, tables == Tables::Kept);
                next += ((fields >> 12 & 0x1f) + 1) << (fields >> 20 & 0x1f) << 12;
            }
            assert_eq!(next, start + len);
        }
    }
    assert_eq!(domain.ops().max_ranges(), dmaspan::iommu::Gather::<()>::MAX_RANGES);
    // Tables of which no range is known.
    let none = Invalidation { tables: Tables::Detached, ..leaves(&[], 0) };
    domain.ops().invalidate(&none).unwrap();
    assert_eq!(rig.hardware.take(), [[1 << 48 | NH_ASID, 0]]);
}

#[test]
fn without_ranges_each_leaf_is_named_until_all_is_cheaper() {
    let config = SmmuV3Config { lg2_commands: 19, ..Default::default() };
    let idr3 = 0;
    let rig = Rig::with(Model { idr3, ..Model::LARGE }, config);
    let domain = attached(&rig);
    domain.ops().invalidate(&leaves(&[range(0x5000, 0x2000)], 1 << 12)).unwrap();
    let named = |address: u64| [1 << 48 | NH_VA, address | 1];
    assert_eq!(rig.hardware.take(), [named(0x5000), named(0x6000)]);
    // By the leaf, by the smallest, and a group by its pages.
    let count = |len: u64, sizes: u64| {
        domain.ops().invalidate(&leaves(&[range(0, len)], sizes)).unwrap();
        rig.hardware.take().len()
    };
    assert_eq!(count(8 << 21, 1 << 21), 8);
    assert_eq!(count(1 << 21, 1 << 21 | 1 << 12), 512);
    assert_eq!(count(1 << 16, 1 << 16), 16);
    assert_eq!(count(513 << 12, 1 << 12), 1);
    assert_eq!(count(1 << 30, 1 << 12), 1);
    // In a smaller queue not more than fit with the sync.
    let rig = Rig::new(Model { idr3, ..Model::LARGE });
    let domain = attached(&rig);
    for (pages, commands) in [(255, 255), (256, 1)] {
        domain.ops().invalidate(&leaves(&[range(0, pages << 12)], 1 << 12)).unwrap();
        assert_eq!(rig.hardware.take().len(), commands);
    }
}

#[test]
fn walks_to_tables_that_were_empty_are_forgotten_beside_large_leaves() {
    let rig = Rig::with(Model { idr3: 0, ..Model::LARGE }, SmmuV3Config::default());
    let domain = attached(&rig);
    // A leaf of 1 GiB elsewhere, and two tables of pages that had none.
    let ranges = [range(0x4020_0000, 4 << 20)];
    let what = Invalidation { tables: Tables::Detached, ..leaves(&ranges, 1 << 30) };
    domain.ops().invalidate(&what).unwrap();
    let named = |address: u64| [1 << 48 | NH_VA, address];
    assert_eq!(rig.hardware.take(), [named(0x4020_0000), named(0x4040_0000)]);
}

#[test]
fn a_level_is_named_only_where_all_of_its_leaves_lie_in_the_range() {
    let rig = Rig::new(Model::LARGE);
    let domain = attached(&rig);
    // Hardware need not look for a block at an address inside of one.
    for (start, len) in [(0x20_1000, 2 << 20), (0x20_0000, (2 << 20) + 0x2000)] {
        domain.ops().invalidate(&leaves(&[range(start, len)], 1 << 21)).unwrap();
        for command in rig.hardware.take() {
            assert_eq!(command[1] >> 8 & 0b11, 0, "{command:x?}");
        }
    }
}

#[test]
fn a_domain_that_no_stream_had_yet_is_forgotten_whole() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    domain.ops().invalidate(&leaves(&[range(0x5000, 0x1000)], 1 << 12)).unwrap();
    assert_eq!(rig.hardware.take(), [[1 << 48 | NH_ASID, 0]]);
}

/// The granules that commands name.
fn covered(commands: &[[u64; 2]], granule_lg2: u32) -> BTreeSet<u64> {
    let mut all = BTreeSet::new();
    for &[first, second] in commands {
        assert!(matches!(first & 0xff, NH_VA | S2_IPA), "{first:#x}");
        let start = second >> 12 << 12 >> granule_lg2;
        let granules = if second >> 10 & 0b11 == 0 {
            assert_eq!(first >> 12 & 0x1fff, 0, "a range without its granule");
            1
        } else {
            assert_eq!(second >> 10 & 0b11, u64::from(granule_lg2 - 10) / 2);
            ((first >> 12 & 0x1f) + 1) << (first >> 20 & 0x1f)
        };
        // A range of one granule without a level is reserved.
        let nothing = first >> 12 & 0x1fff == 0 && second >> 8 & 0b11 == 0;
        assert!(!nothing || second >> 10 & 0b11 == 0, "{first:#x} {second:#x}");
        all.extend(start..start + granules);
    }
    all
}

fn exactly_what_was_unmapped<const G: u32>(model: Model) {
    let rig = Rig::with(model, SmmuV3Config { lg2_commands: 10, ..Default::default() });
    let config = rig.smmu.stage1_config(G).unwrap();
    let domain = rig.domain(ArmLpaeS1::<G>::new(config).unwrap());
    rig.port::<ArmLpaeS1<G>>(1).translate(&domain).unwrap();
    rig.hardware.take();
    let mut rng = Rng::new(u64::from(G));
    for _ in 0..300 {
        let ranges: Vec<IovaRange> = (0..=rng.below(3))
            .map(|_| {
                let lg2_most = rng.below(8);
                range(rng.below(1 << 20) << G, (rng.below(1 << lg2_most) + 1) << G)
            })
            .collect();
        domain.ops().invalidate(&leaves(&ranges, 1 << G)).unwrap();
        let expected: BTreeSet<u64> =
            ranges.iter().flat_map(|r| r.start().get() >> G..=r.last().get() >> G).collect();
        assert_eq!(covered(&rig.hardware.take(), G), expected, "{ranges:?}");
    }
}

#[test]
fn commands_cover_what_was_unmapped_and_nothing_else() {
    for idr3 in [1 << 10, 0] {
        let model = Model { idr3, ..Model::LARGE };
        exactly_what_was_unmapped::<12>(model);
        exactly_what_was_unmapped::<14>(model);
        exactly_what_was_unmapped::<16>(model);
    }
}

#[test]
fn the_whole_space_and_its_top_are_bounded() {
    for idr3 in [1 << 10, 0] {
        let rig = Rig::new(Model { idr3, ..Model::LARGE });
        let domain = attached(&rig);
        for first in [0, 1, u64::MAX] {
            let range = IovaRange::new(Iova::new(first), Iova::new(u64::MAX)).unwrap();
            for sizes in [0, 1, 1 << 12, 1 << 63, u64::MAX] {
                domain.ops().invalidate(&leaves(&[range], sizes)).unwrap();
                let count = rig.hardware.take().len();
                assert!((1..=255).contains(&count), "{count} commands");
            }
        }
    }
}

#[test]
fn a_stage_1_of_fewer_bits_says_so() {
    let rig = Rig::new(Model::LARGE);
    let config = ArmLpaeS1Config::new(39, 40);
    let domain = rig.domain(S1::new(config).unwrap());
    let port = rig.port::<S1>(1);
    port.translate(&domain).unwrap();
    let descriptor = rig.entry(1).unwrap()[0] & 0xf_ffff_ffff_ffc0;
    // T0SZ 25, IPS 0b010.
    let word = rig.memory.read(descriptor).unwrap();
    assert_eq!((word & 0x3f, word >> 32 & 0b111), (25, 2));
    let wide = rig.domain(ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(52, 48)).unwrap());
    assert!(rig.port::<ArmLpaeS1<16>>(2).accepts(&wide).is_err(), "VAX is 48 bits");
    let large = rig.domain(ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(48, 52)).unwrap());
    assert!(rig.port::<ArmLpaeS1<16>>(2).accepts(&large).is_err(), "OAS is 48 bits");
}
