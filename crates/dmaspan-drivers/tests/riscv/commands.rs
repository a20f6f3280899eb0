//! The command queue: what goes in, and what becomes of it.

use std::sync::Arc;
use std::thread;

use dmaspan::iommu::{HardwareError, Invalidation, IommuOps as _, Scope, Tables as Detached};
use dmaspan::{Iova, IovaRange};
use dmaspan_drivers::Error;
use dmaspan_drivers::riscv::RiscvIommuConfig;

use crate::hardware::{
    BASE_FORMAT, CMD_ILL, CMD_TO, CQMF, FIRST, Fake, Fault, SECOND, Tables, domain,
};
use crate::host::PATIENCE;

const FENCE: [u64; 2] = [2 | 1 << 12 | 1 << 13, 0];
const PSCID_1: u64 = 1 | 1 << 32 | 1 << 12;
const GSCID_1: u64 = 1 | 1 << 7 | 1 << 33 | 1 << 44;
const AV: u64 = 1 << 10;
/// Bit 73 of a command: the address says the size of a range.
const RANGE: u64 = 1 << 9;
/// `capabilities`: S and NL.
const RANGES: u64 = 1 << 43;
const NON_LEAF: u64 = 1 << 42;

fn range(start: u64, bytes: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), bytes).unwrap()
}

fn invalidate(
    domain: &Tables,
    ranges: &[IovaRange],
    tables: Detached,
) -> Result<(), HardwareError> {
    let scope = Scope::Ranges(ranges);
    domain.ops().invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables })
}

#[test]
fn the_stores_of_a_map_are_ordered_before_a_device_is_told_of_them() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let domain = domain(&iommu, FIRST);
    fake.take();
    let before = fake.state.lock().ordered;
    domain.ops().sync_map(range(0x1000, 0x1000)).unwrap();
    assert_eq!(fake.state.lock().ordered, before + 1);
    assert!(fake.take().is_empty(), "hardware caches nothing that is absent");
}

#[test]
fn an_invalidation_names_few_pages_and_more_than_that_as_a_whole() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    for (stage, operands) in [(FIRST, PSCID_1), (SECOND, GSCID_1)] {
        let domain = domain(&iommu, stage);
        fake.take();
        let all = [[operands, 0], FENCE];
        let two = [range(0x12_3456_7000, 0x1000), range(u64::MAX - 0xfff, 0x1000)];
        invalidate(&domain, &two, Detached::Kept).unwrap();
        let page = |address: u64| [operands | AV, address >> 12 << 10];
        assert_eq!(fake.take(), [page(0x12_3456_7000), page(u64::MAX), FENCE]);
        invalidate(&domain, &two, Detached::Detached).unwrap();
        assert_eq!(fake.take(), all, "walks are forgotten, too");
        // 32 pages, and one more. So many ranges are asked for at once.
        let ranges: Vec<_> = (0..33).map(|n| range(n << 30, 0x1000)).collect();
        assert_eq!(domain.ops().max_ranges(), 32);
        for (count, commands) in [(32, 33), (33, 2)] {
            invalidate(&domain, &ranges[..count], Detached::Kept).unwrap();
            assert_eq!(fake.take().len(), commands);
        }
        invalidate(&domain, &[range(0, 0x1f000), range(1 << 30, 0x1000)], Detached::Kept).unwrap();
        assert_eq!(fake.take().len(), 33);
        invalidate(&domain, &[range(0, 0x1f000), range(1 << 30, 0x2000)], Detached::Kept).unwrap();
        assert_eq!(fake.take(), all);
        for whole in [
            range(0, 1 << 30),
            range(0, 1 << 63),
            IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap(),
        ] {
            invalidate(&domain, &[whole], Detached::Kept).unwrap();
            assert_eq!(fake.take(), all, "{whole}");
        }
        let what = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Detached::Kept };
        domain.ops().invalidate(&what).unwrap();
        assert_eq!(fake.take(), all);
        domain.ops().detach().unwrap();
        assert_eq!(fake.take(), all);
    }
}

/// The pages that a command names, by its address ("Address Range Invalidation Extension"): the
/// first and the last.
fn named([operands, address]: [u64; 2]) -> (u64, u64) {
    assert_ne!(operands & AV, 0, "{operands:#x}");
    let page = address >> 10;
    match address & RANGE {
        0 => (page, page),
        _ => {
            // Up to the first 0, and that too.
            let below = (2 << page.trailing_ones()) - 1;
            (page & !below, page | below)
        }
    }
}

#[test]
fn hardware_that_takes_ranges_gets_one_or_two_blocks_for_each() {
    let fake = Fake::new(BASE_FORMAT | RANGES);
    let iommu = fake.driver();
    for (stage, operands) in [(FIRST, PSCID_1), (SECOND, GSCID_1)] {
        let domain = domain(&iommu, stage);
        fake.take();
        // As the manual has it: 8 KiB is a 0 alone.
        let told = |ranges: &[IovaRange]| {
            invalidate(&domain, ranges, Detached::Kept).unwrap();
            fake.take()
        };
        assert_eq!(told(&[range(0x5000, 0x1000)]), [[operands | AV, 5 << 10], FENCE]);
        assert_eq!(told(&[range(0x4000, 0x2000)]), [[operands | AV, 4 << 10 | RANGE], FENCE]);
        let sixteen = [operands | AV, 0b1_0111 << 10 | RANGE];
        assert_eq!(told(&[range(0x1_0000, 0x1_0000)]), [sixteen, FENCE]);
        let gibibyte = [operands | AV, (1 << 18 | 0x1_ffff) << 10 | RANGE];
        assert_eq!(told(&[range(1 << 30, 1 << 30)]), [gibibyte, FENCE]);
        let everything = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
        assert_eq!(told(&[everything]), [[operands, 0], FENCE]);
        for (first, count) in [(1, 6), (3, 698), (1, 1 << 18), (0x7_ffff, 2), ((1 << 52) - 9, 9)] {
            let mut commands = told(&[range(first << 12, count << 12)]);
            assert_eq!(commands.pop(), Some(FENCE));
            assert!(commands.len() <= 2, "{commands:x?}");
            let (mut next, mut pages) = (first, 0);
            for command in commands {
                let (from, last) = named(command);
                assert!(from <= next && next <= last, "{first:#x} {from:#x} {last:#x}");
                pages += last - from + 1;
                next = last + 1;
            }
            assert!(next >= first + count && pages < 2 * count, "{first:#x} {count:#x}");
        }
        // Of each of eight ranges both blocks.
        let ranges: Vec<_> = (0..8u64).map(|n| range((n << 40) + 0x1000, 1 << 30)).collect();
        assert_eq!(told(&ranges).len(), 17);
    }
}

#[test]
fn tables_that_went_are_forgotten_by_address_where_hardware_can() {
    const NL: u64 = 1 << 34;
    for (capabilities, ranges) in [(NON_LEAF, false), (NON_LEAF | RANGES, true), (RANGES, true)] {
        let fake = Fake::new(BASE_FORMAT | capabilities);
        let iommu = fake.driver();
        for (stage, operands) in [(FIRST, PSCID_1), (SECOND, GSCID_1)] {
            let domain = domain(&iommu, stage);
            fake.take();
            let two = [range(0x20_0000, 0x20_0000), range(0x8000_0000, 0x1000)];
            invalidate(&domain, &two, Detached::Detached).unwrap();
            let commands = fake.take();
            if capabilities & NON_LEAF == 0 {
                assert_eq!(commands, [[operands, 0], FENCE], "all of the domain");
            } else if ranges {
                let operands = operands | AV | NL;
                let block = [operands, (0x200 | 0xff) << 10 | RANGE];
                assert_eq!(commands, [block, [operands, 0x8_0000 << 10], FENCE]);
            } else {
                // 513 pages are more than are named.
                assert_eq!(commands, [[operands, 0], FENCE]);
                invalidate(&domain, &two[1..], Detached::Detached).unwrap();
                assert_eq!(fake.take(), [[operands | AV | NL, 0x8_0000 << 10], FENCE]);
            }
            // Leaves alone are forgotten without their tables.
            invalidate(&domain, &two[1..], Detached::Kept).unwrap();
            assert_eq!(fake.take(), [[operands | AV, 0x8_0000 << 10], FENCE]);
        }
    }
}

#[test]
fn a_batch_that_is_longer_than_the_queue_is_cut() {
    let fake = Fake::new(BASE_FORMAT);
    let config = RiscvIommuConfig { commands_lg2: 2, ..Default::default() };
    let iommu = fake.start(config).unwrap();
    let domain = domain(&iommu, FIRST);
    fake.take();
    for _ in 0..10 {
        invalidate(&domain, &[range(0, 0x20000)], Detached::Kept).unwrap();
        let commands = fake.take();
        assert_eq!((commands.len(), commands[32]), (33, FENCE));
        let pages = (0..).map(|page| [PSCID_1 | AV, page << 10]);
        assert!(commands.into_iter().zip(pages).take(32).all(|(command, page)| command == page));
    }
}

#[test]
fn a_command_that_is_never_completed_is_an_error_in_bounded_time() {
    let fake = Fake::new(BASE_FORMAT);
    let config = RiscvIommuConfig { commands_lg2: 2, ..Default::default() };
    let iommu = fake.start(config).unwrap();
    let domain = domain(&iommu, FIRST);
    fake.set(Fault::Stuck);
    fake.host.polls();
    for says in ["the IOMMU did not complete its commands in time", "the command queue stayed full"]
    {
        let error = invalidate(&domain, &[range(0, 0x1000)], Detached::Kept).unwrap_err();
        assert_eq!((error.what, error.status), (says, 0x1_0001));
        assert_eq!(fake.host.polls(), PATIENCE);
    }
    fake.set(Fault::None);
    // What was placed before is executed with the next command; this one has to fit first.
    let mut state = fake.state.lock();
    state.cqh = state.cqt;
    drop(state);
    invalidate(&domain, &[range(0, 0x1000)], Detached::Kept).unwrap();
}

#[test]
fn an_error_of_the_queue_is_acknowledged_and_the_queue_goes_on() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let domain = domain(&iommu, FIRST);
    let errors = [
        (CMD_ILL, "the IOMMU refused a command"),
        (CMD_TO, "a command of the IOMMU took too long"),
        (CQMF, "the IOMMU could not reach the memory of its command queue"),
    ];
    for (bit, what) in errors {
        for opcode in [1, 2] {
            fake.set(Fault::Refuses(opcode, bit));
            let error = invalidate(&domain, &[range(0, 0x3000)], Detached::Kept).unwrap_err();
            assert_eq!(error, HardwareError { what, status: (0x1_0001 | bit).into() });
            fake.set(Fault::None);
            fake.take();
            invalidate(&domain, &[range(0x5000, 0x1000)], Detached::Kept).unwrap();
            let commands = fake.take();
            let own = [[PSCID_1 | AV, 5 << 10], FENCE];
            assert!(commands.ends_with(&own), "{commands:x?}");
            assert_eq!(fake.state.lock().csr[0], 0x1_0001);
        }
    }
}

#[test]
fn commands_that_were_told_to_have_failed_are_not_executed_any_more() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let domain = domain(&iommu, FIRST);
    fake.set(Fault::Stuck);
    invalidate(&domain, &[range(0, 0x1000)], Detached::Kept).unwrap_err();
    fake.set(Fault::Refuses(1, CMD_ILL));
    invalidate(&domain, &[range(0x1000, 0x1000)], Detached::Kept).unwrap_err();
    assert_eq!(fake.take(), [[2, 0]; 4], "fences that wait for nothing");
}

#[test]
fn a_head_that_makes_no_sense_and_hardware_that_is_gone_are_errors() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let domain = domain(&iommu, FIRST);
    let stuck = |fault| {
        fake.set(fault);
        let error = invalidate(&domain, &[range(0, 0x1000)], Detached::Kept).unwrap_err();
        fake.set(Fault::None);
        error.what
    };
    for head in [256, 0x8000_0000, u32::MAX - 1] {
        assert_eq!(stuck(Fault::Reads(32, head)), "cqh points to no command that was placed");
    }
    assert_eq!(stuck(Fault::Reads(32, 200)), "cqh points to no command that was placed");
    assert_eq!(
        stuck(Fault::Reads(32, u32::MAX)),
        "the IOMMU is gone: its registers read as all ones"
    );
    assert_eq!(stuck(Fault::Gone), "the IOMMU is gone: its registers read as all ones");
    invalidate(&domain, &[range(0, 0x1000)], Detached::Kept).unwrap();
    fake.set(Fault::Stuck);
    fake.state.lock().csr[0] = 0;
    let error = invalidate(&domain, &[range(0, 0x1000)], Detached::Kept).unwrap_err();
    assert_eq!(error.what, "the command queue is off");
}

#[test]
fn each_of_many_threads_waits_for_a_fence_behind_its_batch() {
    let fake = Fake::new(BASE_FORMAT);
    let config = RiscvIommuConfig { commands_lg2: 3, ..Default::default() };
    let iommu = fake.start(config).unwrap();
    let domains: Vec<_> = (0..4).map(|_| domain(&iommu, FIRST)).collect();
    fake.take();
    thread::scope(|scope| {
        for (thread, domain) in (1u64..).zip(&domains) {
            let fake = &fake;
            scope.spawn(move || {
                for page in 0..200 {
                    let page = thread << 32 | page << 12;
                    invalidate(domain, &[range(page, 0x1000)], Detached::Kept).unwrap();
                    let mine = [1 | 1 << 32 | thread << 12 | AV, page >> 2];
                    let log = &fake.state.lock().log;
                    let found = log.iter().position(|&command| command == mine).unwrap();
                    assert!(log[found..].contains(&FENCE));
                }
            });
        }
    });
    let commands = fake.take();
    let fences = commands.iter().filter(|&&command| command == FENCE).count();
    assert_eq!(commands.len() - fences, 800);
    assert!((1..=800).contains(&fences));
}

#[test]
fn hooks_of_a_stage_that_hardware_lacks_are_refused() {
    for (stage, modes, other) in [(FIRST, 0xe << 8, SECOND), (SECOND, 0xe << 16, FIRST)] {
        let iommu = Fake::new(BASE_FORMAT & !modes).driver();
        let refused = iommu.ops(stage).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
        iommu.ops(other).unwrap();
    }
}

#[test]
fn numbers_come_back_when_hardware_has_forgotten_them() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    for stage in [FIRST, SECOND] {
        let all: Vec<_> = (0..0xffff).map(|_| iommu.ops(stage).unwrap()).collect();
        let what = if stage == FIRST { "PSCIDs" } else { "GSCIDs" };
        assert_eq!(iommu.ops(stage).unwrap_err(), Error::NoIds { what, limit: 0xffff });
        drop(all);
        let kept = iommu.ops(stage).unwrap();
        fake.set(Fault::Refuses(1, CMD_ILL));
        drop(iommu.ops(stage).unwrap());
        fake.set(Fault::None);
        let next: Vec<_> = (0..0xfffd).map(|_| iommu.ops(stage).unwrap()).collect();
        assert!(iommu.ops(stage).is_err(), "the one that failed is lost");
        drop((kept, next));
        drop(Arc::clone(&iommu));
    }
}
