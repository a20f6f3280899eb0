//! Planning saves requests, and costs nothing.
//!
//! Where instructions are counted, a time is their number, and times are compared.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot, UserRange};
use dmaspan_linux::plan::{MapError, Mapper, PartError, PlanError, Region};
use dmaspan_linux::vfio::{self, Requests, VfioDevice, VfioSpace};
use dmaspan_linux::{Memory, MemoryKind};

use super::context::{FREE_HUGEPAGES, PEER};
use super::plain::Plain;
use super::{Case, Context, Need, Outcome, Result, case, page, same};

const HUGE: u64 = 2 << 20;
const KIB64: u64 = 64 << 10;
const GIB: u64 = 1 << 30;
/// Hugepages that the cases without times make do with.
const FEW: u64 = 32;
/// Those of 1 GiB.
const ALL: u64 = GIB / HUGE;
const RUNS: usize = 3;

const PAGES: &[Need] = &[Need::Backend, Need::Hugepages(FEW)];
const PAIR: &[Need] = &[Need::Backend, Need::Peer];
const COUNTED: &[Need] = &[Need::Backend, Need::Counted, Need::Hugepages(FEW)];

pub(super) const CASES: &[Case] = &[
    // Pieces of one region, in order and shuffled.
    case("plan/small_pieces_of_one_region_are_one_request", PAGES, one_region),
    // Pieces that alternate: with holes, with other memory, with other permissions.
    case("plan/alternating_pieces_are_the_fewest_requests", PAGES, alternating),
    // A request for each page against one for all.
    case("plan/mapping_costs_a_hundredth_of_a_request_for_each_page", COUNTED, page_at_a_time),
    // The planner against a loop of the same requests.
    case(
        "plan/planning_and_owning_cost_little_beside_the_bare_requests",
        &[Need::Backend, Need::Counted, Need::Hugepages(ALL)],
        costs_nothing,
    ),
    // Allocating pages against mapping them.
    case("plan/populating_costs_more_than_mapping", COUNTED, populating),
    // What others have mapped, and what is excluded.
    case("plan/iovas_of_others_and_excluded_ones_are_passed_over", &[Need::Backend], others),
    // A unit goes and comes again beside its neighbours.
    case("plan/a_unit_is_unmapped_while_the_others_stay_mapped", &[Need::Backend], units),
    // Registers beside memory.
    case("plan/a_bar_is_mapped_beside_regions_and_unmapped_on_drop", PAIR, bars),
];

fn one_region(context: &Context) -> Result {
    let (mapper, _device) = open(context)?;
    let memory = hugepages(ALL)?;
    let count = memory.len() / page();
    // An odd factor permutes the numbers below a power of two, and neighbours are far apart.
    for factor in [1, 0x9e37_79b1] {
        let offset = |n: u64| n.wrapping_mul(factor) % count * page();
        let pieces = (0..count).map(|n| part(&memory, offset(n), page()));
        let before = mapper.space().requests();
        let mapped = mapper.map(pieces.collect::<Result<Vec<_>>>()?)?;
        asked(&mapper, before, Requests { maps: 1, unmaps: 0 })?;
        same(mapper.space().mappings(), 1, "mappings")?;
        same(mapped.bytes(), memory.len(), "bytes")?;
        let first = mapped.translate(memory.user_range().start()).ok_or("nothing is mapped")?;
        for (region, n) in (0..count).enumerate() {
            same(mapped.iova(region), first.checked_add(offset(n)), "an IOVA")?;
        }
        mapped.unmap()?;
        asked(&mapper, before, Requests { maps: 1, unmaps: 1 })?;
        same(mapper.space().mappings(), 0, "mappings behind")?;
    }
    let bytes = page();
    println!("{count} pieces of {bytes} bytes, in order and shuffled: 1 map, 1 unmap");
    Ok(Outcome::Passed)
}

fn alternating(context: &Context) -> Result {
    let (mapper, _device) = open(context)?;
    let left = mapper.space().limits().mappings_left;
    let memory = hugepages(if left.is_some() { ALL / 2 } else { FEW })?;
    let other = Arc::new(Memory::new(MemoryKind::Base, FEW * HUGE)?);
    let count = FEW * HUGE / page();
    let two = (0..2 * count).map(|n| match n % 2 {
        0 => part(&memory, n / 2 * page(), page()),
        _ => part(&other, n / 2 * page(), page()),
    });
    maps(&mapper, two.collect::<Result<_>>()?, 2, "two memories in turn")?;

    let prots = [Prot::READ, Prot::READ_WRITE];
    let prot = |n: u64| if (n / 4).is_multiple_of(2) { prots[0] } else { prots[1] };
    let pieces =
        (0..count).map(|n| Ok(Region { prot: prot(n), ..part(&memory, n * page(), page())? }));
    maps(&mapper, pieces.collect::<Result<_>>()?, count / 4, "fours with other permissions")?;

    let most = memory.len() / (2 * page());
    let every_second = |count: u64| {
        (0..count).map(|n| part(&memory, 2 * n * page(), page())).collect::<Result<Vec<_>>>()
    };
    if let Some(left) = left.filter(|&left| left < most) {
        let before = mapper.space().requests();
        match mapper.plan(every_second(left + 1)?) {
            Err(PlanError::TooManyMaps { needed, left: said }) => {
                same((needed, said), (left + 1, left), "needed and left")?;
            }
            other => return Err(format!("one more than the limit gave {other:?}").into()),
        }
        asked(&mapper, before, Requests { maps: 0, unmaps: 0 })?;
    }
    let count = left.unwrap_or(count).min(most);
    maps(&mapper, every_second(count)?, count, "every second piece")?;
    Ok(Outcome::Passed)
}

/// Maps and unmaps pieces, by so many requests to map and one to unmap, as the planner's own IOVAs
/// have no holes.
fn maps(mapper: &Mapper<VfioSpace>, pieces: Vec<Region>, fewest: u64, what: &str) -> Result<()> {
    let before = mapper.space().requests();
    let count = pieces.len();
    let mapped = mapper.map(pieces)?;
    asked(mapper, before, Requests { maps: fewest, unmaps: 0 })?;
    same(mapper.space().mappings(), fewest, what)?;
    mapped.unmap()?;
    let unmaps = mapper.space().requests().unmaps - before.unmaps;
    same(mapper.space().mappings(), 0, "mappings behind")?;
    println!("{count} pieces, {what}: {fewest} maps, {unmaps} unmaps");
    Ok(())
}

/// When it unmaps, the kernel looks up and unpins page after page however it was asked: that is all
/// that unmapping costs then, and the requests beside it are some ten times as much.
fn page_at_a_time(context: &Context) -> Result {
    let memory = hugepages(FEW)?;
    let len = memory.len();
    let (planned, placed) = planned(context, || Ok(vec![part(&memory, 0, len)?]))?;
    let at = placed.first().ok_or("nothing was mapped")?.1;
    let parts: Result<Vec<_>> = (0..len / page())
        .map(|n| Ok((memory.sub_range(n * page(), page())?, at.wrapping_add(n * page()))))
        .collect();
    let pages = plain(context, &memory, &parts?)?;
    let what = format!("{} MiB of hugepages", len >> 20);
    let ratios = compare(&what, ("page at a time", pages), ("planned", planned));
    if ratios.map < 100.0 || ratios.unmap < 10.0 {
        return Err(
            "page at a time costs less than 100 times as much to map, or 10 to unmap".into()
        );
    }
    Ok(Outcome::Passed)
}

/// How often as much as the bare requests a planner may cost, and how many instructions for each
/// region where that is more: to find it IOVAs and to keep its memory while it is mapped. Those of
/// regions that say where they want to be are found one by one.
const MOST: f64 = 1.05;
const MOST_EACH: u64 = 3_500;
const MOST_EACH_AT: u64 = 15_000;

type Shape<'s> = (&'s str, u64, &'s dyn Fn(u64) -> Result<Region>, u64);

fn costs_nothing(context: &Context) -> Result {
    let memory = hugepages(ALL)?;
    let huge = |n: u64| part(&memory, 2 * n * HUGE, HUGE);
    let small = |n: u64| part(&memory, 2 * n * KIB64, KIB64);
    let small_at = |n: u64| Ok(small(n)?.at(Iova::new((4 << 30) + 2 * n * KIB64)));
    let shapes: [Shape<'_>; 4] = [
        ("one region of 1 GiB", 1, &|_| part(&memory, 0, GIB), 0),
        ("256 regions of 2 MiB", 256, &huge, 0),
        ("1000 regions of 64 KiB", 1000, &small, MOST_EACH),
        ("1000 regions of 64 KiB at certain IOVAs", 1000, &small_at, MOST_EACH_AT),
    ];
    let mut dear = Vec::new();
    for (what, count, region, most_each) in shapes {
        let (planned, placed) = planned(context, || (0..count).map(region).collect())?;
        let plain = plain(context, &memory, &placed)?;
        compare(what, ("planned", planned), ("plain", plain));
        let more = planned.both().saturating_sub(plain.both());
        println!("{what}: {} instructions more for each", more.as_nanos() / u128::from(count));
        let most = plain.both().mul_f64(MOST) - plain.both();
        if more > most.max(Duration::from_nanos(count * most_each)) {
            dear.push(what);
        }
    }
    if dear.is_empty() {
        return Ok(Outcome::Passed);
    }
    Err(format!("planning costs too much: {}", dear.join("; ")).into())
}

fn populating(context: &Context) -> Result {
    let mut cheap = Vec::new();
    for kind in [MemoryKind::Base, MemoryKind::Thp, MemoryKind::Hugetlb2M] {
        let begin = Instant::now();
        let memory = Arc::new(Memory::new(kind, FEW * HUGE)?);
        let populate = begin.elapsed();
        let (times, _) = planned(context, || Ok(vec![part(&memory, 0, memory.len())?]))?;
        let ratio = populate.as_secs_f64() / times.map.as_secs_f64();
        let (mib, populate) = (memory.len() >> 20, populate.as_nanos());
        println!("{mib} MiB, {kind}: populate {populate} ns, {times}: populate {ratio:.1} of map");
        if ratio < 1.0 {
            cheap.push(kind.name());
        }
    }
    if cheap.is_empty() {
        return Ok(Outcome::Passed);
    }
    Err(format!("mapping costs more than populating: {}", cheap.join(", ")).into())
}

fn others(context: &Context) -> Result {
    let (mapper, _device) = open(context)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 16 * page())?);
    let region = || Region::whole(&memory, Prot::READ_WRITE);
    let taken = mapper.plan([region()])?.iova_of(0).ok_or("nothing was planned")?;
    let theirs = Arc::new(Memory::new(MemoryKind::Base, 4 * page())?);
    mapper.space().map(&theirs, theirs.user_range(), taken, Prot::READ)?;
    let mapped = mapper.map([region()])?;
    check!(mapped.iova(0).is_some_and(|iova| iova.get() >= taken.get() + 4 * page()));
    let own = mapped.plan().maps().first().ok_or("no map")?.iova();
    check!(matches!(mapper.exclude(own), Err(PlanError::Held { .. })));
    let theirs_at = IovaRange::from_len(taken, 4 * page())?;
    let refused = mapper.plan([region().at(taken)]);
    check!(matches!(refused, Err(PlanError::InUse { taken, .. }) if taken == [theirs_at]
        || taken == [theirs_at.join(own).unwrap_or(own)]));
    mapper.exclude(theirs_at)?;
    check!(mapper.space().unmap(theirs_at)?, 4 * page());
    check!(matches!(mapper.plan([region().at(taken)]), Err(PlanError::InUse { .. })));
    mapped.unmap()?;
    let shared = mapper.alloc(3 * page(), 8 * page())?;
    check!((shared.len(), shared.iova().get() % (8 * page())), (3 * page(), 0));
    check!(shared.range().intersection(theirs_at), None);
    shared.unmap()?;
    check!((mapper.space().mappings(), mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0, 0));
    Ok(Outcome::Passed)
}

fn units(context: &Context) -> Result {
    const AT: u64 = 1 << 32;
    let (mapper, _device) = open(context)?;
    let memory = Arc::new(Memory::new(MemoryKind::Memfd, 3 * HUGE)?);
    let pieces = |unit: u64| {
        let pages = unit * (HUGE / page())..(unit + 1) * (HUGE / page());
        let piece = move |n: u64| {
            part(&memory, n * page(), page()).map(|it| it.at(Iova::new(AT + n * page())))
        };
        let unit = u32::try_from(unit).unwrap_or(0);
        pages.map(piece).map(|it| Ok(it?.in_unit(unit))).collect::<Result<Vec<_>>>()
    };
    let all = [pieces.clone()(0)?, pieces.clone()(1)?, pieces.clone()(2)?].concat();
    let before = mapper.space().requests();
    let mut mapped = mapper.map(all)?;
    asked(&mapper, before, Requests { maps: 3, unmaps: 0 })?;
    for part in [
        IovaRange::from_len(Iova::new(AT + HUGE), page())?,
        IovaRange::from_len(Iova::new(AT), HUGE + page())?,
    ] {
        check!(matches!(mapped.unmap_part(part), Err(PartError::Cuts { .. })));
    }
    asked(&mapper, before, Requests { maps: 3, unmaps: 0 })?;
    check!(mapped.unmap_unit(1)?, HUGE);
    asked(&mapper, before, Requests { maps: 3, unmaps: 1 })?;
    check!((mapper.space().mappings(), mapped.bytes()), (2, 2 * HUGE));
    let again = mapper.map(pieces(1)?)?;
    check!((mapper.space().mappings(), again.iova(0)), (3, Some(Iova::new(AT + HUGE))));
    again.unmap()?;
    mapped.unmap()?;
    check!(mapper.space().mappings(), 0);
    Ok(Outcome::Passed)
}

fn bars(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let peer = space.attach(PEER.parse()?)?;
    let bar = peer.bar(2)?;
    let mapper = Mapper::new(space)?;
    let refused = mapper.map_bar(&bar, 0..0, None, Prot::READ_WRITE);
    check!(matches!(refused, Err(MapError::Bar { source: vfio::Error::OutsideBar { .. } })));
    let mapped = match mapper.map_bar(&bar, 0..bar.len(), None, Prot::READ_WRITE) {
        // iommufd's compatibility mode, and older kernels' iommufd, map no registers.
        Err(MapError::Refused {
            source: vfio::Error::NotPinnable { .. } | vfio::Error::NoDmaBuf { .. },
            ..
        }) => return Ok(Outcome::Skipped("this kernel maps no registers".to_owned())),
        result => result?,
    };
    let memory = Arc::new(Memory::new(MemoryKind::Base, 16 * page())?);
    let beside = mapper.map([Region::whole(&memory, Prot::READ_WRITE)])?;
    check!((mapper.space().mappings(), mapper.mapped_bytes()), (2, bar.len() + 16 * page()));
    let taken = mapper.map([Region::whole(&memory, Prot::READ_WRITE).at(mapped.iova())]);
    check!(matches!(taken, Err(MapError::Plan(PlanError::InUse { .. }))));
    let at = mapped.iova();
    drop(mapped);
    check!((mapper.space().mappings(), mapper.leaked_bytes()), (1, 0));
    mapper.map([Region::whole(&memory, Prot::READ_WRITE).at(at)])?.unmap()?;
    drop(beside);
    check!(mapper.space().mappings(), 0);
    Ok(Outcome::Passed)
}

/// What mapping and unmapping took.
#[derive(Clone, Copy, Debug)]
struct Times {
    map: Duration,
    unmap: Duration,
}

impl Times {
    /// The medians of the runs.
    fn of(mut run: impl FnMut() -> Result<Self>) -> Result<Self> {
        let runs = (0..RUNS).map(|_| run()).collect::<Result<Vec<_>>>()?;
        let median = |of: fn(&Self) -> Duration| {
            let mut all: Vec<Duration> = runs.iter().map(of).collect();
            all.sort_unstable();
            all.get(RUNS / 2).copied().unwrap_or_default()
        };
        Ok(Self { map: median(|times| times.map), unmap: median(|times| times.unmap) })
    }

    fn both(self) -> Duration {
        self.map + self.unmap
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "map {} ns, unmap {} ns", self.map.as_nanos(), self.unmap.as_nanos())
    }
}

/// How many times as much something took as something else.
#[derive(Clone, Copy, Debug)]
struct Ratios {
    map: f64,
    unmap: f64,
}

/// Says what both took, and how many times as much the first.
fn compare(what: &str, one: (&str, Times), other: (&str, Times)) -> Ratios {
    let ratio = |of: fn(Times) -> Duration| of(one.1).as_secs_f64() / of(other.1).as_secs_f64();
    let (map, unmap) = (ratio(|times| times.map), ratio(|times| times.unmap));
    for (how, times) in [one, other] {
        println!("{what}, {how}: {times}");
    }
    let both = ratio(Times::both);
    println!("{what}, {} / {}: map {map:.3}, unmap {unmap:.3}, both {both:.3}", one.0, other.0);
    Ratios { map, unmap }
}

/// Maps and unmaps regions by a mapper; also what was mapped where.
fn planned(
    context: &Context,
    regions: impl Fn() -> Result<Vec<Region>>,
) -> Result<(Times, Vec<(UserRange, Iova)>)> {
    let (mapper, _device) = open(context)?;
    let mut placed = Vec::new();
    let times = Times::of(|| {
        let regions = regions()?;
        let begin = Instant::now();
        let mapped = mapper.map(regions)?;
        let map = begin.elapsed();
        placed = mapped.plan().maps().iter().map(|map| (map.user(), map.iova().start())).collect();
        let begin = Instant::now();
        mapped.unmap()?;
        Ok(Times { map, unmap: begin.elapsed() })
    })?;
    Ok((times, placed))
}

/// Maps and unmaps parts by requests alone, one to unmap for each to map.
fn plain(context: &Context, memory: &Arc<Memory>, parts: &[(UserRange, Iova)]) -> Result<Times> {
    let unmaps: Vec<_> = parts.iter().map(|(user, at)| (*at, user.len_less_one() + 1)).collect();
    let mut plain = Plain::open(context, memory, parts, &unmaps)?;
    Times::of(|| {
        let begin = Instant::now();
        plain.map()?;
        let map = begin.elapsed();
        let begin = Instant::now();
        plain.unmap()?;
        Ok(Times { map, unmap: begin.elapsed() })
    })
}

fn open(context: &Context) -> Result<(Mapper<VfioSpace>, VfioDevice)> {
    let (space, device) = context.open()?;
    Ok((Mapper::new(space)?, device))
}

/// So many hugepages where they are free, or else few.
fn hugepages(wanted: u64) -> Result<Arc<Memory>> {
    let free: u64 = fs::read_to_string(FREE_HUGEPAGES)?.trim().parse()?;
    let pages = if free >= wanted { wanted } else { FEW };
    Ok(Arc::new(Memory::new(MemoryKind::Hugetlb2M, pages * HUGE)?))
}

fn part(memory: &Arc<Memory>, offset: u64, len: u64) -> Result<Region> {
    Ok(Region::part(memory, offset, len, Prot::READ_WRITE)?)
}

/// Whether so many requests were made since `before`.
fn asked(mapper: &Mapper<VfioSpace>, before: Requests, expected: Requests) -> Result<()> {
    let now = mapper.space().requests();
    let since = Requests { maps: now.maps - before.maps, unmaps: now.unmaps - before.unmaps };
    same(since, expected, "requests")
}
