//! A device without an IOMMU, for which iommufd pins (Linux 7.3).

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::pin::Pinner as _;
use dmaspan::{Errno, PhysAddr, Prot, Span};
use dmaspan_linux::vfio::{NoIommuPinError, NoIommuPinner};
use dmaspan_linux::{FrameSource, Lookup, Memory, MemoryKind};
use dmaspan_nvme::vfio::{Untranslated, VfioBuffer};
use dmaspan_nvme::{Controller, QueueConfig};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::context::FREE_HUGEPAGES;
use super::nvme::tagged;
use super::pins::pinned_kib;
use super::{Case, Context, MIB, Need, Outcome, Result, case, page, same};

const NEEDS: &[Need] = &[Need::Untranslated];
const HUGEPAGES: &[Need] = &[Need::Untranslated, Need::Hugepages(4)];

pub(super) const CASES: &[Case] = &[
    // Where memory is, as pagemap has it for root, one request a span.
    case("noiommu/spans_are_those_of_pagemap_of_base_pages", NEEDS, |at| {
        spans(at, MemoryKind::Base)
    }),
    case("noiommu/spans_are_those_of_pagemap_of_thp", NEEDS, |at| spans(at, MemoryKind::Thp)),
    case("noiommu/spans_are_those_of_pagemap_of_memfd", NEEDS, |at| spans(at, MemoryKind::Memfd)),
    case("noiommu/spans_are_those_of_pagemap_of_hugetlb", HUGEPAGES, |at| {
        spans(at, MemoryKind::Hugetlb2M)
    }),
    // The kernel's own count, up and down.
    case("noiommu/pins_are_counted_and_end", NEEDS, counted),
    // A process that may not ask where memory is.
    case("noiommu/without_the_capability_nothing_stays_pinned", NEEDS, without_capability),
    // DMA in both directions.
    case("noiommu/dma_both_ways_with_base", NEEDS, |at| both_ways(at, MemoryKind::Base)),
    case("noiommu/dma_both_ways_with_thp", NEEDS, |at| both_ways(at, MemoryKind::Thp)),
    case("noiommu/dma_both_ways_with_hugetlb", HUGEPAGES, |at| {
        both_ways(at, MemoryKind::Hugetlb2M)
    }),
    // A process that ends while a device may reach its memory.
    case("noiommu/a_killed_process_leaves_no_pin", HUGEPAGES, killed),
    // What users run.
    case("noiommu/the_programs_run_on_it", NEEDS, programs),
];

fn open(context: &Context) -> Result<NoIommuPinner> {
    Ok(NoIommuPinner::new(context.device.parse()?)?)
}

fn spans(context: &Context, kind: MemoryKind) -> Result {
    let (pinner, frames) = (open(context)?, FrameSource::<PhysAddr>::new()?);
    let memory = Arc::new(Memory::new(kind, 8 * MIB)?);
    let parts =
        [(0, 8 * MIB), (page(), 3 * page()), (MIB - page(), MIB), (0x123, 0x4567), (page() - 1, 2)];
    for (offset, len) in parts {
        let user = memory.sub_range(offset, len)?;
        let before = (pinner.requests(), pinner.stats().lookups);
        let mut told: Vec<Span> = Vec::new();
        let pin = pinner.pin(&memory, user, Prot::READ_WRITE, &mut told)?;
        let asked = pinner.stats().lookups - before.1;
        let mut shown: Vec<Span> = Vec::new();
        frames.frames(&memory, user, Lookup::EveryPage, &mut shown)?;
        pinner.give_back(pin);
        check!(told, shown);
        same(told.iter().map(|span| span.len()).sum(), len, "bytes in spans")?;
        same(asked, u64::try_from(told.len())?, "requests that said where it is")?;
        let requests = pinner.requests();
        let done = (requests.maps - before.0.maps, requests.unmaps - before.0.unmaps);
        same(done, (1, 1), "requests that pinned and unpinned")?;
    }
    let outside = memory.user_range();
    let other = Arc::new(Memory::new(MemoryKind::Base, page())?);
    let refused = pinner.pin(&other, outside, Prot::READ, &mut Vec::new());
    check!(refused.is_err_and(|failed| failed.pin.is_none()));
    Ok(Outcome::Passed)
}

fn counted(context: &Context) -> Result {
    let pinner = open(context)?;
    let before = pinned_kib()?;
    let memories = [MemoryKind::Base, MemoryKind::Thp, MemoryKind::Memfd];
    let memories: Vec<_> = memories
        .iter()
        .map(|&kind| Memory::new(kind, 4 * MIB).map(Arc::new))
        .collect::<Result<_, _>>()?;
    let mut buffers = Vec::new();
    for (memory, n) in memories.iter().zip(1..) {
        buffers.push(pinner.pin_whole(memory, Prot::READ_WRITE)?);
        same(pinned_kib()?, before + n * 4096, "KiB pinned")?;
    }
    // The device goes on being open for pins, whoever else has dropped it.
    drop(pinner);
    same(pinned_kib()?, before + 3 * 4096, "KiB pinned without the pinner")?;
    drop(buffers);
    same(pinned_kib()?, before, "KiB pinned at last")?;
    drop(open(context)?);
    Ok(Outcome::Passed)
}

fn without_capability(context: &Context) -> Result {
    let (pinner, rights, before) = (open(context)?, capabilities(None)?, pinned_kib()?);
    let memory = Arc::new(Memory::new(MemoryKind::Base, MIB)?);
    let mut fewer = rights;
    fewer.effective.remove(CapabilitySet::SYS_RAWIO);
    set_capabilities(None, fewer)?;
    let refused = pinner.pin(&memory, memory.user_range(), Prot::READ_WRITE, &mut Vec::new());
    let closed = NoIommuPinner::new(context.device.parse()?).map(drop);
    set_capabilities(None, rights)?;
    let failed = refused.err().ok_or("memory was pinned")?;
    let says = failed.to_string();
    check!(failed.pin.is_none());
    let dmaspan::pin::PinError::Failed(error) = &failed.error else { return Err(says.into()) };
    check!(matches!(error, NoIommuPinError::Physical { errno: Errno::EPERM, .. }));
    check!(says.contains("CAP_SYS_RAWIO"));
    same(pinned_kib()?, before, "KiB pinned")?;
    same((pinner.pins(), pinner.requests().unmaps), (0, 1), "pins that are left, and unmaps")?;
    let closed = closed.err().ok_or("a device was opened")?.to_string();
    check!(closed.contains("CAP_SYS_RAWIO"));
    Ok(Outcome::Passed)
}

#[expect(unsafe_code, reason = "a device without an IOMMU reaches all memory")]
fn both_ways(context: &Context, kind: MemoryKind) -> Result {
    let untranslated = Untranslated::open(context.device.parse()?)?;
    // SAFETY: the driver alone writes its registers.
    let mut controller = Controller::new(unsafe { untranslated.access()? }, 1)?;
    let namespace = controller.namespace(1)?;
    let mut queue = controller.create_queue(QueueConfig::new(32))?;
    let memory = Arc::new(Memory::new(kind, 4 * MIB)?);
    let buffer = VfioBuffer::pinned(&untranslated, &memory)?;
    queue.read(&namespace, 0, &buffer, page()..page() + MIB)?;
    memory.check_words(page(), MIB, tagged(0))?;
    memory.check_words(0, page(), |_| 0)?;
    // What is written comes back.
    let lba = 32 * MIB / namespace.block_bytes();
    memory.fill_words(2 * MIB, MIB, |word| !word)?;
    queue.write(&namespace, lba, &buffer, 2 * MIB..3 * MIB)?;
    queue.read(&namespace, lba, &buffer, 0..MIB)?;
    memory.check_words(0, MIB, |word| !word)?;
    controller.shutdown([queue])?;
    Ok(Outcome::Passed)
}

/// What a process that is going to be killed says when all is pinned.
const PINNED: &str = "pinned";

/// How many pages are pinned in the machine.
fn pinned_pages() -> Result<i64> {
    // Read, it adds to the counters what each CPU has noted for itself.
    fs::read_to_string("/proc/sys/vm/stat_refresh")?;
    let text = fs::read_to_string("/proc/vmstat")?;
    let of = |name: &str| {
        let line =
            text.lines().find_map(|line| line.strip_prefix(name)).ok_or("no such counter")?;
        Ok::<i64, Box<dyn std::error::Error>>(line.trim().parse()?)
    };
    Ok(of("nr_foll_pin_acquired ")? - of("nr_foll_pin_released ")?)
}

fn killed(context: &Context) -> Result {
    let free = fs::read_to_string(FREE_HUGEPAGES)?;
    let before = pinned_pages()?;
    for _ in 0..3 {
        let mut victim = context.victim(PINNED)?;
        check!(pinned_pages()? > before; "the other process has pinned nothing");
        victim.kill()?;
        victim.wait()?;
        // The kernel closes its files behind the wait.
        let began = Instant::now();
        while pinned_pages()? != before && began.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(20));
        }
        same(pinned_pages()?, before, "pages pinned in the machine")?;
        drop(open(context)?);
    }
    same(fs::read_to_string(FREE_HUGEPAGES)?, free, "free hugepages")?;
    Ok(Outcome::Passed)
}

/// Pins, says so, and pins and unpins until it is killed.
///
/// # Errors
///
/// Why it could not.
pub(super) fn be_killed(context: &Context) -> Result<()> {
    let pinner = open(context)?;
    let kept = Arc::new(Memory::new(MemoryKind::Hugetlb2M, 4 * MIB)?);
    let _kept = pinner.pin_whole(&kept, Prot::READ_WRITE)?;
    println!("{PINNED}");
    let memory = Arc::new(Memory::new(MemoryKind::Base, 16 * MIB)?);
    loop {
        drop(pinner.pin_whole(&memory, Prot::READ_WRITE)?);
    }
}

fn programs(context: &Context) -> Result {
    let device = &context.device;
    let backend = format!("noiommu:{device}");
    let lines: [(&str, &[&str], &str); 5] = [
        ("dmaspan", &["devices", device], "usable by noiommu"),
        (
            "dmaspan",
            &["map", "64M", "--runs", "1", "--backend", &backend, "--format", "json"],
            "\"VmPin\"",
        ),
        ("dmaspan-nvme", &["identify", device, "--backend", "noiommu"], "namespace 1"),
        (
            "dmaspan-nvme",
            &["read", device, "--backend", "noiommu", "--blocks", "65536", "--out", "/dev/null"],
            "",
        ),
        (
            "dmaspan-nvme",
            &["bench", device, "--backend", "noiommu", "--count", "2000", "--turns", "2"],
            "dmaspan",
        ),
    ];
    for (program, arguments, says) in lines {
        let ran = Command::new(program).args(arguments).output()?;
        let (said, errors) =
            (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        if !ran.status.success() || !said.contains(says) {
            return Err(format!("{program} {arguments:?}: {}: {said} {errors}", ran.status).into());
        }
        said.lines().for_each(|line| println!("{line}"));
    }
    Ok(Outcome::Passed)
}
