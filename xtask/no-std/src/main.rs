//! Proves that the core and the drivers need nothing but `core` and `alloc`.
//!
//! This program has its own panic handler, allocator and entry point. A dependency that brought the
//! standard library in would bring a second panic handler, and the build would fail; one that
//! needed the C library would not link. Where it can run, it maps a few pages and looks them up,
//! the second time through the DMA API, bounces a buffer, registers one, drives an SMMUv3 and an
//! NVMe controller whose registers are memory, and the exit code says what happened.

#![no_std]
#![no_main]

extern crate alloc;

mod bounce;
mod dma;
mod hardware;
mod nvme;
mod regbuf;
mod runtime;
mod smmu;
mod tables;

use core::sync::atomic::{AtomicU32, Ordering};

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::{Account, Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use tables::Tables;

/// The step that is under way: the exit code where it fails.
static STEP: AtomicU32 = AtomicU32::new(1);

fn step(number: u32) {
    STEP.store(number, Ordering::Relaxed);
}

/// Maps and unmaps 4 MiB and a page. `None` where anything is not as it should be.
fn exercise() -> Option<()> {
    step(2);
    let account = Account::new(8 << 20);
    let charge = account.charge((4 << 20) + 4096).ok()?;
    account.charge(4 << 20).is_err().then_some(())?;

    step(3);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).ok()?;
    let mut table = PageTable::new(format, Tables).ok()?;
    let whole = table.whole();

    step(4);
    let large = Span::new(PhysAddr::new(0x8000_0000), 4 << 20).ok()?;
    let small = Span::new(PhysAddr::new(0x5000), 4096).ok()?;
    whole.map_spans(Iova::new(0), &[large, small], Prot::READ_WRITE).ok()?;
    let found = whole.iova_to_phys(Iova::new(0x40_0123))?;
    (found == PhysAddr::new(0x5123)).then_some(())?;

    step(5);
    let mut room = SpanBuf::room::<4>();
    let mut removed = SpanBuf::new(&mut room);
    let range = IovaRange::from_len(Iova::new(0), (4 << 20) + 4096).ok()?;
    let unmapped = whole.unmap(range, &mut removed).ok()?;
    (removed.spans() == [large, small] && unmapped.rest.is_none()).then_some(())?;
    whole.iova_to_phys(Iova::new(0)).is_none().then_some(())?;

    step(6);
    // No hardware walks these tables, so what was retired is dropped, which leaks it.
    drop(unmapped);
    drop(table);
    drop(charge);
    (account.used() == 0).then_some(())
}

/// Everything, as an exit code.
fn run() -> u32 {
    let done = exercise().and_then(|()| {
        step(7);
        dma::exercise()?;
        step(8);
        bounce::exercise()?;
        step(9);
        regbuf::exercise()?;
        step(10);
        smmu::exercise()?;
        step(11);
        nvme::exercise()
    });
    if done.is_some() { 0 } else { STEP.load(Ordering::Relaxed) }
}
