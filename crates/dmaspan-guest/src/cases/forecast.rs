//! A forecast beside the kernel's answers afterwards.

use std::fs;
use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, Prot};
use dmaspan_linux::machine::MachineFiles;
use dmaspan_linux::plan::forecast::{
    Backing, Forecast, PaperIommu, PaperLayout, PaperLimits, PaperRegion, PlanFinding,
    PlanSeverity, RegionPages,
};
use dmaspan_linux::plan::{MapError, Mapper, PlanError, Region};
use dmaspan_linux::vfio::{self, Backend, LockedBy, VfioSpace};
use dmaspan_linux::{Memory, MemoryKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::{BACKEND, Case, Context, MIB, Need, Outcome, Result, case, page, same};

const ENTRY_LIMIT: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";

pub(super) const CASES: &[Case] = &[
    case("forecast/what_fits_takes_the_maps_and_the_locked_bytes_that_were_said", BACKEND, fits),
    case("forecast/too_little_memory_that_may_be_locked_was_said", BACKEND, memlock),
    case(
        "forecast/more_mappings_than_a_lowered_limit_were_said",
        &[Need::Backend, Need::OneOf(&[Backend::Vfio])],
        mappings,
    ),
    case("forecast/what_lies_outside_of_the_apertures_was_said", BACKEND, outside),
];

/// What the kernel has of this process: VmLck or VmPin, by whom it counts.
fn counted(context: &Context) -> Result<u64> {
    let limits = MachineFiles::new().limits_of(std::process::id())?;
    Ok(match locked_by(context) {
        LockedBy::Process => limits.locked,
        LockedBy::User => limits.pinned,
    })
}

fn locked_by(context: &Context) -> LockedBy {
    match context.backend {
        Backend::Vfio => LockedBy::Process,
        _ => LockedBy::User,
    }
}

/// The regions on paper, for the space's IOMMU and this process's limits.
fn layout(context: &Context, space: &VfioSpace, regions: &[Region]) -> Result<PaperLayout> {
    let limits = space.limits();
    let last = limits.apertures.last().map_or(0, |aperture| aperture.last().get());
    let process = MachineFiles::new().limits_of(std::process::id())?;
    let paper = |region: &Region| PaperRegion {
        name: "region".to_owned(),
        user: region.user,
        memory: region.memory.user_range().start().get(),
        iova: region.iova,
        prot: region.prot,
        backing: Backing::Base,
        pages: RegionPages::Of(page()),
        spans: None,
        resident: region.user.len_less_one() + 1,
        node: None,
    };
    Ok(PaperLayout {
        regions: regions.iter().map(paper).collect(),
        iommu: PaperIommu {
            kind: None,
            address_bits: u64::BITS - last.leading_zeros(),
            page_sizes: limits.page_sizes,
            apertures: limits.apertures,
            reserved: Vec::new(),
        },
        limits: PaperLimits {
            memlock: process.memlock,
            locked: counted(context)?,
            mappings: limits.mappings_left,
            ..PaperLimits::unlimited(locked_by(context))
        },
        kernel: MachineFiles::new().kernel(),
        devices: 1,
        has_viommu: false,
    })
}

fn base(len: u64) -> Result<Arc<Memory>> {
    Ok(Arc::new(Memory::new(MemoryKind::Base, len)?))
}

fn fits(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let (one, other) = (base(8 * MIB)?, base(2 * MIB)?);
    let part = |offset| Region::part(&one, offset, MIB, Prot::READ_WRITE);
    let regions = vec![
        part(0)?,
        part(MIB)?,
        part(4 * MIB)?.at(Iova::new(1 << 32)),
        Region::whole(&other, Prot::READ),
    ];
    let forecast = Forecast::new(&layout(context, &space, &regions)?)?;
    check!(forecast.verdict() < PlanSeverity::Fails);
    let mapper = Mapper::new(space)?;
    let (before, locked) = (mapper.space().requests().maps, counted(context)?);
    let mapped = mapper.map(regions)?;
    let said = u64::try_from(forecast.maps.len())?;
    same(mapper.space().requests().maps - before, said, "requests")?;
    same(mapper.space().mappings(), said, "mappings")?;
    let made: Vec<_> = mapped.plan().maps().iter().map(|map| map.iova()).collect();
    let planned: Vec<_> = forecast.maps.iter().map(|map| map.iova).collect();
    same(made, planned, "IOVAs")?;
    // The kernel counts no pins of iommufd for who may lock without limit.
    if locked_by(context) == LockedBy::Process {
        same(counted(context)? - locked, forecast.locked, "locked bytes")?;
    }
    mapped.unmap()?;
    println!("{said} maps of {} bytes, as was said", forecast.locked);
    Ok(Outcome::Passed)
}

fn memlock(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let memory = base(8 * MIB)?;
    let regions = vec![Region::whole(&memory, Prot::READ_WRITE)];
    let (limits, rights) = (getrlimit(Resource::Memlock), capabilities(None)?);
    let limit = Rlimit { current: Some(4 * MIB), maximum: limits.maximum };
    setrlimit(Resource::Memlock, limit)?;
    let mut fewer = rights;
    fewer.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, fewer)?;
    let forecast = layout(context, &space, &regions).map(|layout| Forecast::new(&layout));
    let mapper = Mapper::new(space)?;
    let mapped = mapper.map(regions.clone());
    set_capabilities(None, rights)?;
    setrlimit(Resource::Memlock, limits)?;
    let forecast = forecast??;
    let said = forecast.findings.iter().find_map(|finding| match finding {
        PlanFinding::Memlock { needed, limit, .. } => Some((*needed, *limit)),
        _ => None,
    });
    let (needed, limit) = said.ok_or("the forecast has nothing of locked memory")?;
    match mapped {
        Err(MapError::Refused {
            source: vfio::Error::MemlockLimit { needed: asked, limit: of, .. },
            ..
        }) => {
            same((asked, of), (needed, limit), "needed and limit")?;
        }
        other => return Err(format!("8 MiB of 4 MiB gave {other:?}").into()),
    }
    // What is said to mend it does.
    let mapped = mapper.map(regions)?;
    mapped.unmap()?;
    println!("{needed} bytes of {limit} were refused, as was said");
    Ok(Outcome::Passed)
}

fn mappings(context: &Context) -> Result {
    let Ok(usual) = fs::read_to_string(ENTRY_LIMIT) else {
        return Ok(Outcome::Skipped(format!("the kernel has no {ENTRY_LIMIT}")));
    };
    fs::write(ENTRY_LIMIT, "4")?;
    let opened = context.open();
    fs::write(ENTRY_LIMIT, usual.trim())?;
    let (space, _device) = opened?;
    let memory = base(MIB)?;
    let piece = |n: u64| Region::part(&memory, 2 * n * page(), page(), Prot::READ_WRITE);
    let regions = (0..5).map(piece).collect::<Result<Vec<_>, _>>()?;
    let forecast = Forecast::new(&layout(context, &space, &regions)?)?;
    let mapper = Mapper::new(space)?;
    let refused = planned_error(&forecast)?;
    same(refused.clone(), PlanError::TooManyMaps { needed: 5, left: 4 }, "what was said")?;
    match mapper.map(regions.clone()) {
        Err(MapError::Plan(error)) => same(error, refused, "what the mapper said")?,
        other => return Err(format!("5 of 4 mappings gave {other:?}").into()),
    }
    let mapped = mapper.map(regions.into_iter().take(4))?;
    // The kernel itself refuses one more.
    let more = memory.sub_range(10 * page(), page())?;
    let one_more = mapper.space().map(&memory, more, Iova::new(1 << 33), Prot::READ);
    check!(one_more.is_err(); "the kernel made one mapping more than its limit");
    mapped.unmap()?;
    println!("5 mappings of 4 were refused, as was said");
    Ok(Outcome::Passed)
}

/// Why the planner refuses a region.
fn planned_error(forecast: &Forecast) -> Result<PlanError> {
    let errors = forecast.findings.iter().filter_map(|finding| match finding {
        PlanFinding::Refused { error, .. } => Some(error.clone()),
        _ => None,
    });
    Ok(errors.into_iter().next().ok_or("the forecast refuses nothing")?)
}

/// Beyond the last aperture, and in the addresses of interrupts.
fn outside(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let memory = base(4 * MIB)?;
    let last = space.limits().apertures.last().copied().ok_or("there is no aperture")?;
    let beyond = last.last().checked_add(1).unwrap_or(Iova::new(1 << 63));
    let mapper = Mapper::new(space)?;
    for (what, at) in [("beyond the aperture", beyond), ("interrupts", Iova::new(0xfed0_0000))] {
        let regions = vec![Region::whole(&memory, Prot::READ_WRITE).at(at)];
        let forecast = Forecast::new(&layout(context, mapper.space(), &regions)?)?;
        let refused = planned_error(&forecast)?;
        let before = mapper.space().requests();
        match mapper.map(regions) {
            Err(MapError::Plan(error)) => same(error, refused, what)?,
            other => return Err(format!("{what} gave {other:?}").into()),
        }
        same(mapper.space().requests(), before, "requests")?;
        println!("{what}: refused, as was said");
    }
    Ok(Outcome::Passed)
}
