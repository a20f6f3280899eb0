//! Map and unmap of a virtual IOMMU: by type 1, which pins each map anew, by iommufd in the same
//! way, and as a copy of memory that is pinned once.

use std::fs;
use std::sync::Arc;
use std::time::Instant;

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::plan::Region;
use dmaspan_linux::vfio::{GuestDomain, HeldGuest, Ioas, Iommufd, VfioContainer};
use dmaspan_linux::{Memory, MemoryKind};

use super::{Result, figure, median, microseconds};
use crate::cases::Context;

const KIB: u64 = 1 << 10;
const LEN: u64 = 64 << 20;
/// Where the guest maps; its memory is at 0.
const AT: u64 = 1 << 40;
/// How many maps of each size.
const TURNS: u64 = 32;

/// Maps a part of a guest's memory at an IOVA, and unmaps it.
trait Mapping {
    fn map(&self, at: IovaRange, guest: u64) -> Result;
    fn unmap(&self, at: IovaRange) -> Result<u64>;
}

impl<S: DmaSpace<Memory = Arc<Memory>, Error: 'static>> Mapping for (S, Arc<Memory>) {
    fn map(&self, at: IovaRange, guest: u64) -> Result {
        let (space, memory) = self;
        let user = memory.sub_range(guest, at.len_less_one() + 1)?;
        Ok(space.map(memory, user, at.start(), Prot::READ_WRITE)?)
    }

    fn unmap(&self, at: IovaRange) -> Result<u64> {
        Ok(self.0.unmap(at)?)
    }
}

impl Mapping for GuestDomain {
    fn map(&self, at: IovaRange, guest: u64) -> Result {
        Ok(GuestDomain::map(self, at, Iova::new(guest), Prot::READ_WRITE)?)
    }

    fn unmap(&self, at: IovaRange) -> Result<u64> {
        Ok(GuestDomain::unmap(self, at)?)
    }
}

/// Measures all three of base pages and of huge ones.
pub(super) fn measure() -> Result {
    let bdf = Context::default().device.parse()?;
    for (pages, kind) in [("base", MemoryKind::Base), ("huge", MemoryKind::Hugetlb2M)] {
        let memory = Arc::new(Memory::new(kind, LEN)?);
        {
            let (space, _device) = VfioContainer::open(bdf)?;
            time(&(space, Arc::clone(&memory)), "type 1", pages)?;
        }
        {
            let (space, _device) = Ioas::open(bdf)?;
            time(&(space, Arc::clone(&memory)), "iommufd", pages)?;
        }
        let held = Arc::new(HeldGuest::new(&Iommufd::open()?)?);
        let domain = GuestDomain::new(&held)?;
        let device = domain.space().attach(bdf)?;
        let begin = Instant::now();
        let region = Region::whole(&memory, Prot::READ_WRITE).at(Iova::new(0));
        let all = held.mapper().map([region])?;
        held.pin_for(&device)?;
        let mib = LEN >> 20;
        figure(&format!("to pin {mib} MiB of {pages} pages once"), took(begin), "µs");
        time(&domain, "pinned once", pages)?;
        all.unmap()?;
    }
    Ok(())
}

/// What the kernel counts as pinned by the process, in KiB: VFIO's type 1 counts it as locked.
fn pinned_kib() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let of = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    let lines =
        status.lines().filter(|line| line.starts_with("VmLck") || line.starts_with("VmPin"));
    Ok(lines.filter_map(of).sum())
}

fn took(begin: Instant) -> f64 {
    microseconds(begin.elapsed())
}

fn time(mapping: &impl Mapping, by: &str, pages: &str) -> Result {
    for len in [4 * KIB, 64 * KIB, 2048 * KIB] {
        let (mut maps, mut unmaps, mut anew) = (Vec::new(), Vec::new(), 0);
        // Once before, for what is done once.
        for turn in 0..=TURNS {
            // No two maps of a turn follow one another in the guest.
            let guest = turn * 7 * len % LEN;
            let at = IovaRange::from_len(Iova::new(AT + turn * 2 * len), len)?;
            let before = pinned_kib()?;
            let begin = Instant::now();
            mapping.map(at, guest)?;
            let map = begin.elapsed();
            anew = pinned_kib()? - before;
            let begin = Instant::now();
            let unmapped = mapping.unmap(at)?;
            if turn > 0 {
                maps.push(map);
                unmaps.push(begin.elapsed());
            }
            if unmapped != len {
                return Err(format!("{unmapped} bytes were unmapped of {len}").into());
            }
        }
        let kib = len / KIB;
        figure(&format!("{by}: pinned by a map of {kib} KiB of {pages} pages"), anew as f64, "KiB");
        for (what, times) in [("map", maps), ("unmap", unmaps)] {
            let name = format!("{by}: {what} of {kib} KiB of {pages} pages");
            figure(&name, microseconds(median(times)), "µs");
        }
    }
    Ok(())
}
