//! A forecast beside the kernel's answers afterwards.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, Prot};
use dmaspan_linux::machine::MachineFiles;
use dmaspan_linux::plan::forecast::{
    Backing, Forecast, LinuxVersion, PaperIommu, PaperLayout, PaperLimits, PaperRegion,
    PlanFinding, PlanSeverity, RegionPages,
};
use dmaspan_linux::plan::{MapError, Mapper, MmioSpace, PlanError, Region};
use dmaspan_linux::vfio::{self, Backend, LockedBy, VfioDevice, VfioSpace};
use dmaspan_linux::{Memory, MemoryKind};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use serde_json::Value;

use super::context::{PEER, with_4_mib_to_lock};
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
    case(
        "forecast/the_limit_of_mappings_of_type1_was_not_said_of_iommufd_and_does_not_bind_it",
        &[Need::Backend, Need::OneOf(&[Backend::Iommufd, Backend::Compat])],
        unlimited,
    ),
    case("forecast/what_lies_outside_of_the_apertures_was_said", BACKEND, outside),
    case(
        "forecast/a_bar_beyond_the_aperture_was_said_and_fits_where_it_was_said",
        &[Need::Backend, Need::Peer],
        bar,
    ),
    case("forecast/what_sysfs_says_of_the_iommu_is_what_the_kernel_maps", BACKEND, sysfs),
    case(
        "forecast/advice_that_a_shell_follows_to_the_letter_ends_in_what_fits",
        &[Need::Backend, Need::OneOf(&[Backend::Vfio])],
        advice,
    ),
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
        device_node: None,
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
    let (forecast, mapper, mapped) = with_4_mib_to_lock(|| -> Result<_> {
        let forecast = Forecast::new(&layout(context, &space, &regions)?)?;
        let mapper = Mapper::new(space)?;
        let mapped = mapper.map(regions.clone());
        Ok((forecast, mapper, mapped))
    })??;
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

/// A space that was opened while four mappings were the most, its device, and five regions of which
/// each is a mapping; `None` where the kernel has no such limit.
fn five_of_four(
    context: &Context,
    memory: &Arc<Memory>,
) -> Result<Option<(VfioSpace, VfioDevice, Vec<Region>)>> {
    let Ok(usual) = fs::read_to_string(ENTRY_LIMIT) else { return Ok(None) };
    fs::write(ENTRY_LIMIT, "4")?;
    let opened = context.open();
    fs::write(ENTRY_LIMIT, usual.trim())?;
    let (space, device) = opened?;
    let piece = |n: u64| Region::part(memory, 2 * n * page(), page(), Prot::READ_WRITE);
    let regions = (0..5).map(piece).collect::<Result<Vec<_>, _>>()?;
    Ok(Some((space, device, regions)))
}

fn mappings(context: &Context) -> Result {
    let memory = base(MIB)?;
    let Some((space, _device, regions)) = five_of_four(context, &memory)? else {
        return Ok(Outcome::Skipped(format!("the kernel has no {ENTRY_LIMIT}")));
    };
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

/// As many mappings as type 1 would refuse.
fn unlimited(context: &Context) -> Result {
    let memory = base(MIB)?;
    let Some((space, _device, regions)) = five_of_four(context, &memory)? else {
        return Ok(Outcome::Skipped(format!("the kernel has no {ENTRY_LIMIT}")));
    };
    let forecast = Forecast::new(&layout(context, &space, &regions)?)?;
    check!(forecast.verdict() < PlanSeverity::Fails);
    let mapped = Mapper::new(space)?.map(regions)?;
    same(mapped.plan().maps().len(), forecast.maps.len(), "maps")?;
    same(forecast.maps.len(), 5, "maps")?;
    mapped.unmap()?;
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
    let apertures = space.limits().apertures;
    let [first, .., last] = apertures[..] else {
        return Ok(Outcome::Skipped("there is one aperture alone".to_owned()));
    };
    let beyond = last.last().checked_add(1).unwrap_or(Iova::new(1 << 63));
    // The addresses of interrupts follow on the first aperture, on x86 as on Arm.
    let interrupts = Iova::new(first.last().get() - (MIB - 1));
    let mapper = Mapper::new(space)?;
    for (what, at) in [("beyond the aperture", beyond), ("interrupts", interrupts)] {
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

/// Registers at the first address that the IOMMU does not translate: of one with 39 bits, 2^39.
fn bar(context: &Context) -> Result {
    let (space, _device) = context.open()?;
    let peer = space.attach(PEER.parse()?)?;
    let bar = peer.bar(2)?;
    let last = space.limits().apertures.last().copied().ok_or("there is no aperture")?;
    let beyond = last.last().checked_add(1).unwrap_or(Iova::new(1 << 63));
    let command_line = fs::read_to_string("/proc/cmdline")?;
    let told = command_line.split_whitespace().find_map(|word| word.strip_prefix(BITS));
    if let Some(bits) = told {
        same(beyond, Iova::new(1 << bits.parse::<u32>()?), "the first address beyond")?;
    }
    let paper = |at| -> Result<Forecast> {
        let registers = PaperRegion {
            name: "BAR 2".to_owned(),
            user: VfioSpace::bar_range(&bar, 0..bar.len())?,
            memory: 0,
            iova: Some(at),
            prot: Prot::READ_WRITE,
            backing: Backing::Registers,
            pages: RegionPages::Of(bar.len()),
            spans: None,
            resident: 0,
            node: None,
        };
        let mut layout = layout(context, &space, &[])?;
        layout.regions = vec![registers];
        Ok(Forecast::new(&layout)?)
    };
    let forecast = paper(beyond)?;
    let refused = planned_error(&forecast)?;
    let mends = forecast.findings.iter().flat_map(PlanFinding::mends);
    let instead = mends.filter_map(|mend| mend.iova).next().ok_or("no other address was said")?;
    let again = paper(instead)?;
    check!(again.verdict() < PlanSeverity::Fails);
    same(again.locked, 0, "locked bytes")?;
    let before = counted(context)?;
    let mapper = Mapper::new(space)?;
    let map = |at| mapper.map_bar(&bar, 0..bar.len(), Some(at), Prot::READ_WRITE);
    match map(beyond) {
        Err(MapError::Plan(error)) => same(error, refused, "what the mapper said")?,
        other => return Err(format!("{beyond} gave {other:?}").into()),
    }
    let mapped = match map(instead) {
        // iommufd's compatibility mode, and older kernels' iommufd, map no registers.
        Err(MapError::Refused {
            source: vfio::Error::NotPinnable { .. } | vfio::Error::NoDmaBuf { .. },
            ..
        }) => {
            return Ok(Outcome::Skipped("refused, as was said; this kernel maps none".to_owned()));
        }
        result => result?,
    };
    same(mapped.iova(), instead, "where it is")?;
    same(counted(context)?, before, "locked bytes")?;
    println!("{beyond} was refused and {instead} was not, as was said");
    Ok(Outcome::Passed)
}

/// The word of the kernel's command line that says how many bits the IOMMU translates.
const BITS: &str = "dmaspan.bits=";

/// What is read without touching the IOMMU, and what the kernel says when it is asked.
fn sysfs(context: &Context) -> Result {
    let found = match MachineFiles::new().iommu_of(context.device.parse()?) {
        Ok(found) => found,
        Err(error) => return Ok(Outcome::Skipped(error.to_string())),
    };
    let (space, _device) = context.open()?;
    let (told, said) = (space.limits(), found.iommu.limits(None));
    println!("{:?} with {} bits", found.iommu.kind, found.iommu.address_bits);
    if let Some(assumed) = found.assumed {
        return Ok(Outcome::Skipped(assumed));
    }
    same(said.apertures, told.apertures, "apertures")?;
    // iommufd tells the smallest size alone.
    let sizes = match context.backend {
        Backend::Iommufd => said.page_sizes & said.page_sizes.wrapping_neg(),
        _ => said.page_sizes,
    };
    same(sizes, told.page_sizes, "page sizes")?;
    Ok(Outcome::Passed)
}

const SHELL: &str = "/bin/sh";
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// What a shell does that begins with what was said.
fn shell(script: &str, command: &str) -> Result<Output> {
    let script = format!("{script}\nexec {command}");
    let mut shell = Command::new(SHELL);
    Ok(shell.args(["-c", &script]).env("PATH", "/bin").stdin(Stdio::null()).output()?)
}

/// Does what the first mend of the worst finding says, until a command line of QEMU fits: commands
/// go into the script as they are, and options behind the others. Returns the script, and how often
/// something was done.
fn follow(script: &str, line: &str, device: &str) -> Result<(String, usize)> {
    let (mut script, mut line) = (script.to_owned(), line.to_owned());
    for done in 0..ROUNDS {
        fs::write("/tmp/qemu-line", &line)?;
        let plan = format!("dmaspan plan --qemu-cmdline /tmp/qemu-line --device {device}");
        let output = shell(&script, &format!("{plan} --format json"))?;
        let why = String::from_utf8_lossy(&output.stderr);
        let report: Value =
            serde_json::from_slice(&output.stdout).map_err(|error| format!("{error}: {why}"))?;
        let fails = report["verdict"] == "fails";
        same(output.status.code(), Some(i32::from(fails)), "the exit code")?;
        if report["verdict"] == "fits" {
            return Ok((script, done));
        }
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let findings = list(&report["findings"]);
        let worst = findings.first().ok_or("it does not fit, and nothing is said")?;
        println!("{}: {}", worst["severity"], worst["text"]);
        let mends = list(&worst["mends"]);
        let mend = mends.first().ok_or("nothing mends it")?;
        let words = |name: &str| -> Vec<String> {
            list(&mend[name]).iter().filter_map(|it| it.as_str().map(str::to_owned)).collect()
        };
        let (commands, options) = (words("commands"), words("options"));
        if commands.is_empty() && options.is_empty() {
            return Err(format!("`{}` cannot be done as it stands", mend["action"]).into());
        }
        for command in commands {
            println!("$ {command}");
            script = format!("{script}\n{command}");
        }
        for option in options {
            println!("+ {option}");
            line = format!("{line} {option}");
        }
    }
    Err(format!("it does not fit after {ROUNDS} rounds").into())
}

const ROUNDS: usize = 8;

fn advice(context: &Context) -> Result {
    if cfg!(not(target_arch = "x86_64")) {
        return Ok(Outcome::Skipped("its command line of QEMU is a PC's".to_owned()));
    }
    if !Path::new(SHELL).exists() {
        return Ok(Outcome::Skipped(format!("the guest has no {SHELL}")));
    }
    if MachineFiles::new().kernel().is_none_or(|kernel| kernel < LinuxVersion::BY_FOLIO) {
        return Ok(Outcome::Skipped("its advice is another kernel".to_owned()));
    }
    // The plan is made for the device, whose IOMMU it has to know.
    if let Err(error) = MachineFiles::new().iommu_of(context.device.parse()?) {
        return Ok(Outcome::Skipped(error.to_string()));
    }
    // Programs that are started from here on have the limits of everybody.
    remove_capability_from_bounding_set(CapabilitySet::IPC_LOCK)?;
    let device = context.device.as_str();
    let (pool, limit) = (fs::read_to_string(POOL)?, fs::read_to_string(ENTRY_LIMIT)?);
    let result = advice_of(device);
    fs::write(POOL, pool.trim())?;
    fs::write(ENTRY_LIMIT, limit.trim())?;
    result
}

fn advice_of(device: &str) -> Result {
    // Too little may be locked, there is no hugetlb page, and the memory has base pages.
    fs::write(POOL, "0")?;
    let little = "ulimit -S -l 64";
    let line = "qemu-system-x86_64 -M q35 -m 64M -device vfio-pci,host=0000:00:05.0 \
                -object memory-backend-memfd,id=ram,size=64M -machine memory-backend=ram";
    let map = format!("dmaspan map 64M --runs 1 --memory hugetlb --backend vfio:{device}");
    check!(!shell(little, &map)?.status.success(); "it was mapped before anything was done");
    let (script, done) = follow(little, line, device)?;
    check!(done >= 2; "less was to be done than there was wrong");
    let output = shell(&script, &map)?;
    let said = String::from_utf8_lossy(&output.stdout);
    check!(output.status.success(); "it is not mapped after all was done");
    check!(said.contains("64 MiB were mapped"); "the program does not say that it mapped");
    // A pool that is too small for memory that is asked for.
    fs::write(POOL, "0")?;
    let line = "qemu-system-x86_64 -M q35 -m 64M -device vfio-pci,host=0000:00:05.0 \
                -object memory-backend-memfd,id=ram,size=64M,hugetlb=on \
                -machine memory-backend=ram";
    let (_, done) = follow("ulimit -l unlimited", line, device)?;
    same((done, fs::read_to_string(POOL)?.trim()), (1, "32"), "pages of the pool")?;
    // A mapping more than there may be.
    fs::write(ENTRY_LIMIT, "1")?;
    let line = "qemu-system-x86_64 -M q35 -m 8G";
    let (_, done) = follow("ulimit -l unlimited", line, device)?;
    same((done, fs::read_to_string(ENTRY_LIMIT)?.trim()), (1, "2"), "mappings")?;
    Ok(Outcome::Passed)
}
