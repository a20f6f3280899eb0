//! The cost of mapping much memory at once by VFIO type1: all pages of a large folio are counted,
//! pinned and given back together from Linux 6.18 on.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::VfioSpace;
use dmaspan_linux::{Memory, MemoryKind};

use super::{Result, figure};
use crate::cases::Context;

const AT: u64 = 1 << 36;
const GIB: u64 = 1 << 30;
/// As much as the series maps.
const MOST: u64 = 16 * GIB;
const HUGEPAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Maps and unmaps as much memory as there is, of each kind of the series.
pub(super) fn measure() -> Result {
    let (space, _device) = Context::default().open()?;
    let len = size(&fs::read_to_string("/proc/meminfo")?).ok_or("there is too little memory")?;
    let gib = len / GIB;
    for (kind, name) in [
        (MemoryKind::Thp, "MADV_HUGEPAGE"),
        (MemoryKind::Base, "MAP_POPULATE"),
        (MemoryKind::Hugetlb2M, "HUGETLBFS, 2M"),
    ] {
        let pages = if kind == MemoryKind::Hugetlb2M { len / kind.page_size() } else { 0 };
        fs::write(HUGEPAGES, pages.to_string())?;
        let [map, unmap] = both(&space, kind, len)?;
        figure(&format!("map of {gib} GiB, {name}"), map.as_secs_f64() * 1e3, "ms");
        figure(&format!("unmap of {gib} GiB, {name}"), unmap.as_secs_f64() * 1e3, "ms");
    }
    Ok(())
}

fn both(space: &VfioSpace, kind: MemoryKind, len: u64) -> Result<[Duration; 2]> {
    let memory = Arc::new(Memory::new(kind, len)?);
    memory.populate()?;
    let range = IovaRange::from_len(Iova::new(AT), len)?;
    let begin = Instant::now();
    space.map(&memory, memory.user_range(), range.start(), Prot::READ_WRITE)?;
    let map = begin.elapsed();
    let begin = Instant::now();
    let unmapped = space.unmap(range)?;
    let unmap = begin.elapsed();
    if unmapped != len {
        return Err(format!("{unmapped} bytes of {len} were mapped").into());
    }
    Ok([map, unmap])
}

/// The largest power of two of GiB that leaves an eighth of what is available, by `/proc/meminfo`.
fn size(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    let most = MOST.min(kib * 1024 / 8 * 7);
    (most >= GIB).then(|| 1 << most.ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_a_power_of_two_that_leaves_some_memory() {
        let of = |gib: u64| size(&format!("MemTotal: 1 kB\nMemAvailable: {} kB\n", gib << 20));
        assert_eq!(of(1), None);
        assert_eq!(of(9), Some(4 * GIB));
        assert_eq!(of(10), Some(8 * GIB));
        assert_eq!(of(100), Some(MOST));
        assert_eq!(size(""), None);
    }
}
