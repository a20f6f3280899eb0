//! Bugs that are planted, to learn whether the judge finds them.
//!
//! A driver that forgets a command, or names the wrong domain, is one whose commands are changed
//! between it and the hardware. Tables with wrong entries are ones that are spoiled after each
//! mapping. Here the walker and the interval map do not help: hardware must find each alone.

use dmaspan::Iova;
use dmaspan::io_pgtable::{Format, PageTable};
use dmaspan::iommu::{Invalidation, IommuOps as _, Scope, Tables};
use dmaspan::{IovaRange, PhysAddr, Prot, Span, SpanBuf, lg2};
use dmaspan_qemu::{DmaRefused, Ram};
use dmaspan_sim::walker::{TableStep, Translated, Walker as _};

use crate::judge::engine::{Judge, Judges};
use crate::judge::rig::{Rig, Strict as _};

/// A command that a driver gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// It tells hardware of nothing that was unmapped.
    NoInvalidation,
    /// It names the neighbour of the domain.
    WrongDomain,
    /// It does not say that what belongs to a stream changed.
    NoConfiguration,
    /// It tells hardware of less than was unmapped.
    TooNarrow,
}

/// As many operations each bug has to show.
const OPERATIONS: u64 = 1500;

/// Whether hardware, and nobody else, finds the bug in a command.
pub(crate) fn finds<R: Rig>(bug: Bug) {
    let Some(rig) = R::start() else { return };
    rig.tap().set_edit(Some(Box::new(move |command| R::plant(bug, command))));
    let mut judge = Judge::new(rig, 7);
    judge.judges = Judges::HardwareAlone;
    println!("{bug:?}: {}", found_by_dma(&mut judge));
}

/// Whether hardware, and nobody else, finds that two devices go by each other's numbers.
pub(crate) fn finds_swapped_streams<R: Rig>() {
    let Some(rig) = R::start() else { return };
    let mut judge = Judge::new(rig, 7);
    judge.judges = Judges::HardwareAlone;
    judge.writers.swap(0, 1);
    println!("{}", found_by_dma(&mut judge));
}

/// What a device's access showed: no operation failed, and the machine runs.
fn found_by_dma<R: Rig>(judge: &mut Judge<R>) -> String {
    let found = judge.run(OPERATIONS);
    judge.rig.tap().set_edit(None);
    let disagreement = found.expect_err("hardware does as if there were no bug");
    let summary = disagreement.summary();
    assert!(judge.in_access, "{summary}");
    assert!(!judge.rig.pci().machine().is_gone(), "{summary}");
    summary.to_owned()
}

/// What is done to the entry of a leaf.
pub(crate) type Spoil = fn(&Ram, &TableStep);

/// Whether hardware, and nobody else, finds entries that are wrong.
pub(crate) fn finds_spoiled<R: Rig>(spoil: Spoil) {
    let Some(rig) = R::start() else { return };
    let mut judge = Judge::new(rig, 7);
    judge.judges = Judges::HardwareAlone;
    judge.spoil = Some(spoil);
    println!("{}", found_by_dma(&mut judge));
}

/// Clears the bits in an entry.
pub(crate) fn clear(ram: &Ram, step: &TableStep, bits: u64) {
    for word in ram.words_at(step.entry_paddr, 8) {
        word.fetch_and(!bits.to_le(), std::sync::atomic::Ordering::Relaxed);
    }
}

/// Moves an entry to where it would be if tables were indexed by one bit less.
pub(crate) fn misplace(ram: &Ram, step: &TableStep) {
    let offset = step.entry_paddr.get() - step.link.table.get();
    let wrong = step.link.table.wrapping_add(lg2::align_down(offset / 2, 3));
    let [from, to] = [step.entry_paddr, wrong].map(|paddr| ram.words_at(paddr, 8));
    if let ([from], [to]) = (from, to) {
        let entry = from.swap(0, std::sync::atomic::Ordering::Relaxed);
        to.store(entry, std::sync::atomic::Ordering::Relaxed);
    }
}

/// How many tables there were when hardware was told of an invalidation, beside how many there are
/// behind it.
fn tables_when_told<R: Rig>(
    rig: &R,
    tables: &dmaspan::io_pgtable::Arena,
    unmap: impl FnOnce(),
) -> usize {
    let fewest = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(usize::MAX));
    let (seen, arena) = (std::sync::Arc::clone(&fewest), tables.clone());
    rig.tap().set_edit(Some(Box::new(move |_| {
        seen.fetch_min(arena.tables(), std::sync::atomic::Ordering::Relaxed);
    })));
    unmap();
    rig.tap().set_edit(None);
    fewest.load(std::sync::atomic::Ordering::Relaxed)
}

/// A domain frees tables after hardware was told to forget them, and who frees them before is seen.
pub(crate) fn frees_tables_late<R: Rig>() {
    let Some(rig) = R::start() else { return };
    let tables = rig.pci().machine().ram().arena(8 << 20).expect("there is room");
    // A whole table of the smallest leaves: no larger one fits the memory.
    let (granule, block) = (lg2::size(R::Format::GRANULE_LG2), R::Format::shift(1));
    let range = IovaRange::from_len(Iova::new(0), lg2::size(block)).expect("it is in reach");
    let paddr = PhysAddr::new((1 << 30) + granule);
    let span = Span::new(paddr, lg2::size(block)).expect("it is not empty");

    let domain = rig.domain(&tables);
    let empty = tables.tables();
    #[expect(unsafe_code, reason = "no device has the domain")]
    // SAFETY: no device has the domain.
    unsafe { domain.map_spans(range.start(), &[span], Prot::READ) }.expect("it is free");
    let full = tables.tables();
    assert!(full > empty);
    let told = tables_when_told(&rig, &tables, || {
        let mut room = SpanBuf::room::<1>();
        #[expect(unsafe_code, reason = "one thread uses the domain")]
        // SAFETY: one thread uses the domain.
        let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) };
        unsynced.expect("it is mapped").sync().map(drop).expect("hardware answers");
    });
    assert_eq!(told, full, "tables were freed before hardware was told");
    assert!(tables.tables() < full, "the tables stay");
    drop(domain);

    // The same by hand, in the wrong order.
    let ops = rig.ops();
    let mut table = PageTable::new(rig.format(), tables.clone()).expect("there is room");
    table.whole().map_spans(range.start(), &[span], Prot::READ).expect("it is free");
    let full = tables.tables();
    let told = tables_when_told(&rig, &tables, || {
        let mut room = SpanBuf::room::<1>();
        let unmapped = table.whole().unmap(range, &mut SpanBuf::new(&mut room));
        let retired = unmapped.expect("it is mapped").retired;
        #[expect(unsafe_code, reason = "no device has the tables")]
        // SAFETY: no device has the tables.
        unsafe {
            table.free(retired);
        }
        let scope = Scope::Ranges(std::slice::from_ref(&range));
        let what = Invalidation { scope, leaf_sizes: granule, tables: Tables::Detached };
        ops.invalidate(&what).expect("hardware answers");
    });
    assert!(told < full, "freeing before the sync goes unseen");
}

/// A group whose entries disagree: hardware may use any of them, and QEMU's does not look; the
/// walker finds it.
pub(crate) fn finds_unequal_groups<R: Rig>(group_lg2: u32, spoil: Spoil) {
    let Some(rig) = R::start() else { return };
    let mut judge = Judge::new(rig, 7);
    let (iova, bytes) = (judge.windows[0].start(), lg2::size(group_lg2));
    let span = Span::new(judge.memory.paddr(), bytes).expect("it is not empty");
    judge.attach(0, Some(0)).expect("hardware answers");
    let domain = std::sync::Arc::clone(&judge.sides[0].domain);
    #[expect(unsafe_code, reason = "a device is let at the judge's memory")]
    // SAFETY: 1. One thread uses the domain. 2. The memory is reached by atomics alone.
    unsafe { domain.map_spans(iova, &[span], Prot::READ_WRITE) }.expect("it is free");
    let walker = judge.rig.walker(&domain);
    let found = |iova| -> Result<Translated, String> { walker.strict(&judge.tables, iova) };
    let leaf = found(iova).expect("the group is whole");
    assert_eq!(leaf.group_lg2, group_lg2, "no group was made");
    let ram = judge.rig.pci().machine().ram().clone();
    spoil(&ram, &leaf.step);
    let next = Iova::new(leaf.leaf.last().get() + 1);
    assert!(walker.walk(&judge.tables, next, dmaspan_sim::walker::Access::Write).is_ok());
    let why = found(next).expect_err("the walker passes over it");
    // QEMU goes by each entry.
    let offset = next.get() - iova.get();
    let paddr = span.paddr().wrapping_add(offset);
    let said: Result<(), DmaRefused> = judge.writers[0].write(next.get(), paddr, 4);
    println!("{}: the walker finds {why}; the model says {said:?}", R::NAME);
}
