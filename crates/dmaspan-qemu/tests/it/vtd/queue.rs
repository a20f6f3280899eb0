//! The commands that hardware is told: their number, and the fate of those that it does not
//! understand.

use std::sync::Arc;

use dmaspan::io_pgtable::{PageTable, VtdSs};
use dmaspan::iommu::{Domain, Target};
use dmaspan::{PhysAddr, Span};
use dmaspan_drivers::vtd::Stage;

use crate::vtd::rig::{Caching, Kind, Legacy, RW, Rig, commands, map, of_every_kind, to, unmap};

of_every_kind!(
    an_unmap_of_2_gibibytes_is_one_command_an_aligned_block,
    a_command_that_is_not_understood_is_an_error_and_the_next_one_works,
    many_threads_unmap_at_once,
);

const WAIT: u64 = 5;

/// The commands besides the waits.
fn told(rig: &Rig) -> Vec<(u64, u64)> {
    commands(&rig.tap).into_iter().filter(|&(kind, _)| kind != WAIT).collect()
}

fn an_unmap_of_2_gibibytes_is_one_command_an_aligned_block<K: Kind>() {
    let Some(rig) = Rig::new::<K>() else { return };
    let domain = rig.domain::<K>();
    let (stream, _) = rig.stream::<K::Format>(1);
    stream.attach(to(&domain)).expect("it is attached");
    let two = Span::new(PhysAddr::new(0), 2 << 30).expect("a span");
    // The model forgets up to 1 GiB by a command.
    assert_eq!(rig.iommu.features().most_pages_lg2(), Some(18));
    let kind = if K::STAGE == Stage::First { 6 } else { 2 };
    map(&domain, 2 << 30, two, RW);
    rig.tap.take();
    unmap(&domain, 2 << 30, 2 << 30);
    assert_eq!(told(&rig), [(kind, 3); 2]);
    // A page, and nearly a block: one command each.
    let page = Span::new(PhysAddr::new(0), 0x1000).expect("a span");
    map(&domain, 0x1000, page, RW);
    rig.tap.take();
    unmap(&domain, 0x1000, 0x1000);
    assert_eq!(told(&rig), [(kind, 3)]);
    let odd = Span::new(PhysAddr::new(0), (1 << 30) - 0x2000).expect("a span");
    map(&domain, 0x1000, odd, RW);
    rig.tap.take();
    unmap(&domain, 0x1000, (1 << 30) - 0x2000);
    assert_eq!(told(&rig), [(kind, 3)], "the block around it");
}

#[test]
fn an_unmap_of_1_gibibyte_of_4k_pages_is_one_command_and_a_wait() {
    let Some(rig) = Rig::new::<Legacy>() else { return };
    let mut config = rig.iommu.second_stage_config().expect("it has one");
    config.page_sizes = Some(1 << 12);
    let format = VtdSs::new(config).expect("a format");
    let table = PageTable::new(format, rig.tables.clone()).expect("a root");
    let ops = rig.iommu.ops(Stage::Second).expect("there is a number");
    let domain = Arc::new(Domain::new(table, ops).expect("it is empty"));
    let (stream, _) = rig.stream::<VtdSs>(1);
    stream.attach(to(&domain)).expect("it is attached");
    let span = Span::new(PhysAddr::new(0), 1 << 30).expect("a span");
    map(&domain, 1 << 30, span, RW);
    rig.tap.take();
    unmap(&domain, 1 << 30, 1 << 30);
    let passed = rig.tap.take();
    assert_eq!(passed.len(), 2);
    assert_eq!(passed[0][1], 1 << 30 | 18, "2^18 pages, and the walks to them");
    // Of some pages the leaves alone.
    map(&domain, 1 << 30, Span::new(PhysAddr::new(0), 0x8000).expect("a span"), RW);
    map(&domain, (1 << 30) + 0x8000, Span::new(PhysAddr::new(0), 0x8000).expect("a span"), RW);
    rig.tap.take();
    unmap(&domain, 1 << 30, 0x8000);
    assert_eq!(rig.tap.take()[0][1], 1 << 30 | 1 << 6 | 3);
}

#[test]
fn mappings_are_told_in_caching_mode_alone() {
    let Some(rig) = Rig::new::<Caching>() else { return };
    let domain = rig.domain::<Caching>();
    rig.tap.take();
    map(&domain, 0x8000, Span::new(PhysAddr::new(0), 0x8000).expect("a span"), RW);
    assert_eq!(told(&rig), [(2, 3)]);
    let Some(rig) = Rig::new::<Legacy>() else { return };
    let domain = rig.domain::<Legacy>();
    rig.tap.take();
    map(&domain, 0x8000, Span::new(PhysAddr::new(0), 0x8000).expect("a span"), RW);
    assert_eq!(told(&rig), []);
}

fn a_command_that_is_not_understood_is_an_error_and_the_next_one_works<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let domain = rig.domain::<K>();
    let (stream, heard) = rig.stream::<K::Format>(1);
    let buffer = rig.buffer(0x1000);
    map(&domain, 0x4000, buffer.span(), RW);
    stream.attach(to(&domain)).expect("it is attached");
    assert!(rig.reaches(0x4000, &buffer));
    for turn in 0..300 {
        // More often than the queue is long.
        rig.tap.set_edit(Some(Box::new(|command| {
            if command[0] & 0xf != WAIT {
                command[0] = 0xf;
            }
        })));
        let error = stream.replace(Target::Blocked).expect_err("it was not told");
        assert!(error.to_string().contains("an invalidation failed"), "{error}");
        rig.tap.set_edit(None);
        stream.detach().expect("the queue works");
        assert!(turn > 2 || !rig.reaches(0x4000, &buffer));
        stream.attach(to(&domain)).expect("the queue works");
        assert!(turn > 2 || rig.reaches(0x4000, &buffer));
    }
    assert!(rig.reaches(0x4000, &buffer));
    unmap(&domain, 0x4000, 0x1000);
    assert!(!rig.reaches(0x4000, &buffer));
    rig.faults(&heard);
}

fn many_threads_unmap_at_once<K: Kind>() {
    let Some(rig) = Rig::new::<K>() else { return };
    let domain = rig.domain::<K>();
    let (stream, _) = rig.stream::<K::Format>(1);
    stream.attach(to(&domain)).expect("it is attached");
    let page = Span::new(PhysAddr::new(0), 0x1000).expect("a span");
    rig.tap.take();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let domain = &domain;
            scope.spawn(move || {
                for turn in 0..100 {
                    let iova = (thread << 30) + (turn << 12);
                    map(domain, iova, page, RW);
                    unmap(domain, iova, 0x1000);
                }
            });
        }
    });
    let passed = commands(&rig.tap);
    let waits = passed.iter().filter(|&&(kind, _)| kind == WAIT).count();
    assert!(waits >= 400 && passed.len() == 2 * waits, "{waits} waits, {}", passed.len());
}
