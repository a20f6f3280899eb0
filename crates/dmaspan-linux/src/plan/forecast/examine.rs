//! This looks for what is wrong with a layout, and for what costs more than it has to.

use std::collections::BTreeMap;

use dmaspan::Iova;

use super::super::PlanError;
use super::super::leaves::LeafSizes;
use super::super::places::{Places, Wanted};
use super::finding::PlanFinding;
use super::layout::{Backing, LinuxVersion, PaperLayout, PaperPool, PaperRegion, RegionPages};
use super::tally::{Stretch, Tally};
use super::{Arranged, Forecast, ForecastMap, Refusal, sum};
use crate::sys;

/// All findings, the worst first.
pub(super) fn findings(
    layout: &PaperLayout,
    forecast: &Forecast,
    places: &Places,
    arranged: &Arranged,
) -> Vec<PlanFinding> {
    let mut found: Vec<PlanFinding> =
        arranged.refused.iter().map(|refusal| refused(layout, places, refusal)).collect();
    if arranged.is_cut {
        found.push(PlanFinding::Unfinished { refused: arranged.refused.len() });
    }
    found.extend(below_granule(layout));
    found.extend(memlock(layout, forecast.locked));
    found.extend(cgroup(layout));
    found.extend(pools(layout));
    for map in &forecast.maps {
        found.extend(misaligned(layout, map));
    }
    found.extend(small_pages(layout, forecast));
    found.extend(far(layout));
    found.extend(by_page(layout, forecast));
    found.extend(viommu(layout, forecast));
    found.sort_by_key(|finding| std::cmp::Reverse(finding.severity()));
    found
}

/// What people call regions.
fn names(layout: &PaperLayout, regions: &[usize]) -> Vec<String> {
    let region = |region: &usize| layout.regions.get(*region);
    regions.iter().filter_map(region).map(|region| region.name.clone()).collect()
}

fn refused(layout: &PaperLayout, places: &Places, refusal: &Refusal) -> PlanFinding {
    let Refusal { error, regions } = refusal;
    let first = regions.first().and_then(|&region| Some((region, layout.regions.get(region)?)));
    let reserved = match error {
        PlanError::OutsideApertures { outside, .. } => {
            outside.iter().find_map(|range| layout.iommu.reserved_in(*range)).cloned()
        }
        _ => None,
    };
    let instead =
        first.filter(|_| !matches!(error, PlanError::Unaligned { .. } | PlanError::NoRoom { .. }));
    let instead = instead.and_then(|(number, region)| {
        // A BAR is at a multiple of its size.
        let len = region.len();
        let is_aligned = len.is_power_of_two() && region.user.start().get().is_multiple_of(len);
        let align = if is_aligned && region.backing == Backing::Registers { len } else { 1 };
        let wanted = Wanted { user: region.user, iova: None, align, region: number };
        let place = places.take(wanted, &|_| None).ok()?;
        let range = place.range;
        places.free(place);
        Some(range)
    });
    PlanFinding::Refused {
        error: error.clone(),
        names: names(layout, regions),
        backing: first.map_or(Backing::Base, |(_, region)| region.backing),
        reserved,
        instead,
    }
}

fn smallest_page(region: &PaperRegion) -> u64 {
    match region.pages {
        RegionPages::Of(size) => size,
        RegionPages::Partly { size, huge } if huge >= region.len() => size,
        RegionPages::Partly { .. } => sys::page_size(),
    }
}

/// The kernel maps nothing whose pages are smaller than the smallest leaf.
fn below_granule(layout: &PaperLayout) -> Option<PlanFinding> {
    let granule = layout.iommu.granule();
    let is_below = |region: &&PaperRegion| {
        region.backing != Backing::Registers && smallest_page(region) < granule
    };
    let below: Vec<&PaperRegion> = layout.regions.iter().filter(is_below).collect();
    let page = below.iter().map(|region| smallest_page(region)).min()?;
    let names = below.iter().map(|region| region.name.clone()).collect();
    Some(PlanFinding::BelowGranule { names, page, granule })
}

fn memlock(layout: &PaperLayout, needed: u64) -> Option<PlanFinding> {
    let limits = &layout.limits;
    let (locked_by, locked) = (limits.locked_by, limits.locked);
    let limit = limits.memlock.filter(|limit| needed.saturating_add(locked) > *limit)?;
    (needed > 0).then_some(PlanFinding::Memlock { locked_by, needed, locked, limit })
}

fn cgroup(layout: &PaperLayout) -> Option<PlanFinding> {
    // Hugetlb pages have a controller of their own.
    let is_counted =
        |region: &&PaperRegion| !matches!(region.backing, Backing::Registers | Backing::Hugetlb);
    let absent = |region: &PaperRegion| region.len().saturating_sub(region.resident);
    let needed = layout.regions.iter().filter(is_counted).map(absent);
    let needed = needed.fold(0, u64::saturating_add);
    let left = layout.limits.cgroup_left.filter(|left| needed > *left)?;
    Some(PlanFinding::Cgroup { needed, left })
}

/// Pools that have fewer pages than there are in the regions without those in memory already. Which
/// of them a process that runs has reserved is not known, so that all of a pool counts.
fn pools(layout: &PaperLayout) -> Vec<PlanFinding> {
    let mut found = Vec::new();
    for pool in &layout.limits.pools {
        let needed = needed_of(layout, pool.page);
        if needed > pool.pages {
            let names = of_pool(layout, pool.page).map(|region| region.name.clone()).collect();
            found.push(PlanFinding::Pool { names, needed, pool: *pool });
        }
    }
    found
}

/// The regions of hugetlb pages of a size.
fn of_pool(layout: &PaperLayout, page: u64) -> impl Iterator<Item = &PaperRegion> {
    layout.regions.iter().filter(move |region| {
        region.backing == Backing::Hugetlb && region.pages == RegionPages::Of(page)
    })
}

/// How many of such pages they have that are not in memory yet.
fn needed_of(layout: &PaperLayout, page: u64) -> u64 {
    let absent = |region: &PaperRegion| region.len().saturating_sub(region.resident);
    let bytes = of_pool(layout, page).map(absent).fold(0, u64::saturating_add);
    bytes.div_ceil(page.max(1))
}

/// What a pool has when the regions of hugetlb pages have theirs.
fn pool_left(layout: &PaperLayout, page: u64) -> Option<PaperPool> {
    let pool = layout.limits.pools.iter().find(|pool| pool.page == page)?;
    let used = pool.pages.saturating_sub(pool.free).saturating_add(needed_of(layout, page));
    let pages = pool.pages.max(used);
    Some(PaperPool { page, pages, free: pages - used })
}

/// Regions on other nodes than the devices, by node.
fn far(layout: &PaperLayout) -> Vec<PlanFinding> {
    let Some(device_node) = layout.device_node else { return Vec::new() };
    let mut nodes: BTreeMap<u32, (Vec<String>, u64)> = BTreeMap::new();
    for region in layout.regions.iter().filter(|region| region.backing != Backing::Registers) {
        let Some(node) = region.node.filter(|node| *node != device_node) else { continue };
        let (names, bytes) = nodes.entry(node).or_default();
        names.push(region.name.clone());
        *bytes = bytes.saturating_add(region.len());
    }
    let finding = |(node, (names, bytes))| PlanFinding::FarNode { names, bytes, node, device_node };
    nodes.into_iter().map(finding).collect()
}

/// The bytes of leaves that are smaller than the pages of the memory would permit.
fn misaligned(layout: &PaperLayout, map: &ForecastMap) -> Option<PlanFinding> {
    let first = layout.regions.get(*map.regions.first()?)?;
    first.iova?;
    let (start, iova) = (map.user.start().get(), map.iova.start().get());
    let (at, most) = match (first.spans.as_deref(), first.pages) {
        (Some([span]), _) if map.regions.len() == 1 => (span.start().get(), u64::MAX),
        (Some(_), _) => return None,
        (None, RegionPages::Of(size) | RegionPages::Partly { size, .. }) => (start, size),
    };
    let leaf = map.best.iter().map(|leaf| leaf.size).find(|size| *size <= most)?;
    let apart = at.wrapping_sub(iova) & (leaf - 1);
    if apart == 0 {
        return None;
    }
    let instead = iova.checked_add(apart)?;
    let mut tally = Tally::of_leaves(&layout.iommu);
    tally.add(Stretch { at, iova: instead, len: map.len(), most });
    let (leaves, best) = (map.leaf_count(), sum(&tally.leaves()));
    (best < leaves).then(|| PlanFinding::Misaligned {
        names: names(layout, &map.regions),
        backing: first.backing,
        iova: map.iova,
        leaves,
        best,
        instead: Iova::new(instead),
    })
}

/// Regions of a backing, most of which could be in larger pages.
fn small_pages(layout: &PaperLayout, forecast: &Forecast) -> Vec<PlanFinding> {
    let granule = layout.iommu.granule();
    let mut found: Vec<PlanFinding> = Vec::new();
    for map in &forecast.maps {
        let regions: Vec<&PaperRegion> =
            map.regions.iter().filter_map(|region| layout.regions.get(*region)).collect();
        let Some(backing) = regions.first().map(|region| region.backing) else { continue };
        let bytes = regions.iter().map(|region| small_bytes(region)).fold(0, u64::saturating_add);
        // The smallest pages that are a leaf of their own, and that huge pages can have.
        let leaf_sizes = LeafSizes::exactly(layout.iommu.page_sizes).descending();
        let page = leaf_sizes.filter(|size| *size >= LARGE && *size > granule).min();
        let Some(page) = page.filter(|page| *page <= map.len()) else { continue };
        if backing == Backing::Registers || bytes < page || bytes < map.len() / 16 {
            continue;
        }
        let mut tally = Tally::of_leaves(&layout.iommu);
        tally.add(Stretch { at: 0, iova: 0, len: map.len(), most: page });
        let (leaves, best) = (map.leaf_count(), sum(&tally.leaves()));
        let new = names(layout, &map.regions);
        let pool = pool_left(layout, page);
        let all = map.len();
        let alike =
            found.iter_mut().find_map(|finding| match finding {
                PlanFinding::SmallPages {
                    names, backing: of, bytes, all, leaves, best, ..
                } if *of == backing => Some((names, bytes, all, leaves, best)),
                _ => None,
            });
        match alike {
            Some((names, all_bytes, whole, all_leaves, all_best)) => {
                names.extend(new);
                *all_bytes += bytes;
                *whole += all;
                *all_leaves += leaves;
                *all_best += best;
            }
            None => {
                let map_ratio = forecast.cost.map_ratio;
                found.push(PlanFinding::SmallPages {
                    names: new,
                    backing,
                    bytes,
                    all,
                    is_whole: false,
                    page,
                    pool,
                    leaves,
                    best,
                    map_ratio,
                });
            }
        }
    }
    for finding in &mut found {
        if let PlanFinding::SmallPages { all, is_whole, .. } = finding {
            let memory =
                || layout.regions.iter().filter(|region| region.backing != Backing::Registers);
            let bytes = memory().map(PaperRegion::len).fold(0, u64::saturating_add);
            let first = memory().next().map(|region| region.memory);
            *is_whole = *all == bytes && memory().all(|region| Some(region.memory) == first);
        }
    }
    found
}

/// Pages of this size and above are large.
const LARGE: u64 = 2 << 20;

/// The bytes that are in pages which are not large.
fn small_bytes(region: &PaperRegion) -> u64 {
    match region.pages {
        RegionPages::Of(size) if size >= LARGE => 0,
        RegionPages::Of(_) => region.len(),
        RegionPages::Partly { huge, .. } => region.len().saturating_sub(huge),
    }
}

fn by_page(layout: &PaperLayout, forecast: &Forecast) -> Option<PlanFinding> {
    let kernel = layout.kernel.filter(|kernel| *kernel < LinuxVersion::BY_FOLIO)?;
    let cost = forecast.cost;
    let (map_ratio, unmap_ratio) = (cost.newer_map_ratio, cost.newer_unmap_ratio);
    // Base pages gain little.
    (map_ratio > 1.5).then_some(PlanFinding::ByPage {
        kernel,
        lookups: cost.lookups,
        map_ratio,
        unmap_ratio,
    })
}

fn viommu(layout: &PaperLayout, forecast: &Forecast) -> Option<PlanFinding> {
    let (devices, is_there) = (layout.devices, layout.has_viommu);
    if forecast.maps.is_empty() || (devices < 2 && !is_there) {
        return None;
    }
    let more = u64::from(devices.max(1) - 1);
    let spaces = if is_there { u64::from(devices.max(1)) } else { 1 };
    Some(PlanFinding::Viommu {
        is_there,
        devices,
        locked: (forecast.locked / spaces).saturating_mul(more),
        table_bytes: forecast.table_bytes.saturating_mul(more),
    })
}
