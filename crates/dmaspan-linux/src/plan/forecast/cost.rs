//! A [`MapCost`] says how much more a layout costs to map than the best one would.

use super::layout::{Backing, LinuxVersion, PaperRegion, RegionPages};
use crate::sys;

/// What mapping and unmapping cost by the byte, as multiples of what they cost for huge pages since
/// Linux 6.18. The page "Measured on real kernels" of the book has the times that they are ratios
/// of: 256 MiB by VFIO type 1 of 6.17 and 6.18.
#[derive(Clone, Copy, Debug)]
struct Weight {
    map: f64,
    unmap: f64,
}

const HUGE_BY_FOLIO: Weight = Weight { map: 1.0, unmap: 1.0 };
const BASE_BY_FOLIO: Weight = Weight { map: 47.0 / 1.63, unmap: 23.4 / 10.8 };
const HUGE_BY_PAGE: Weight = Weight { map: 6.81 / 1.63, unmap: 22.8 / 10.8 };
const BASE_BY_PAGE: Weight = Weight { map: 49.1 / 1.63, unmap: 26.6 / 10.8 };

/// What the huge pages that the weights are of have at least.
const HUGE: u64 = 2 << 20;

/// What it costs to map memory, beside the best that the same bytes could cost on the same kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MapCost {
    /// How many times the kernel looks up where memory is: once for each page before Linux 6.18,
    /// and once for each folio since.
    pub lookups: u64,
    /// The same if all of it were in pages of 2 MiB.
    pub best_lookups: u64,
    /// How many times as much a map costs as if all of it were in huge pages, as measured.
    pub map_ratio: f64,
    /// The same of an unmap.
    pub unmap_ratio: f64,
    /// How many times less a map would cost since Linux 6.18; 1 where it is as new.
    pub newer_map_ratio: f64,
    /// The same of an unmap.
    pub newer_unmap_ratio: f64,
}

impl MapCost {
    /// Of all memory, without registers. A kernel of which nobody knows is taken for a new one. Its
    /// pages are this machine's or, where an IOMMU on paper has smaller ones, of that size.
    pub(super) fn of<'r>(
        regions: impl Iterator<Item = &'r PaperRegion>,
        kernel: Option<LinuxVersion>,
        granule: u64,
    ) -> Self {
        let is_by_page = kernel.is_some_and(|kernel| kernel < LinuxVersion::BY_FOLIO);
        let (mut huge, mut base, mut folios) = (0_u64, 0_u64, 0_u64);
        for region in regions.filter(|region| region.backing != Backing::Registers) {
            let (huge_bytes, base_bytes, count) = folios_of(region);
            huge = huge.saturating_add(huge_bytes);
            base = base.saturating_add(base_bytes);
            folios = folios.saturating_add(count);
        }
        let all = huge.saturating_add(base).max(1);
        let (of_huge, of_base) = match is_by_page {
            true => (HUGE_BY_PAGE, BASE_BY_PAGE),
            false => (HUGE_BY_FOLIO, BASE_BY_FOLIO),
        };
        let mean = |huge_weight: f64, base_weight: f64| {
            (huge as f64 * huge_weight + base as f64 * base_weight) / all as f64
        };
        let (map, unmap) = (mean(of_huge.map, of_base.map), mean(of_huge.unmap, of_base.unmap));
        let newer = |weight: fn(&Weight) -> f64, now: f64| {
            (now / mean(weight(&HUGE_BY_FOLIO), weight(&BASE_BY_FOLIO))).max(1.0)
        };
        let pages = all / sys::page_size().min(granule).max(1);
        Self {
            lookups: if is_by_page { pages } else { folios },
            best_lookups: if is_by_page { pages } else { all.div_ceil(HUGE) },
            map_ratio: map / of_huge.map,
            unmap_ratio: unmap / of_huge.unmap,
            newer_map_ratio: newer(|weight| weight.map, map),
            newer_unmap_ratio: newer(|weight| weight.unmap, unmap),
        }
    }
}

/// The bytes in huge pages, those in others, and how many pages there are.
fn folios_of(region: &PaperRegion) -> (u64, u64, u64) {
    let len = region.user.len_less_one().saturating_add(1);
    match region.pages {
        RegionPages::Of(size) if size >= HUGE => (len, 0, len.div_ceil(size)),
        RegionPages::Of(size) => (0, len, len.div_ceil(size.max(1))),
        RegionPages::Partly { size, huge } => {
            let huge = huge.min(len);
            let base = len - huge;
            (huge, base, huge.div_ceil(size.max(1)) + base / sys::page_size())
        }
    }
}
