//! A process that runs, as a layout.

use dmaspan_linux::Bdf;
use dmaspan_linux::machine::{
    DeviceFiles, MachineFiles, NotTaken, ProcessChoice, ProcessLimits, ProcessMemory, ProcessRange,
};
use dmaspan_linux::plan::forecast::{
    IommuModel, PaperIommu, PaperLayout, PaperLimits, PaperRegion,
};
use dmaspan_linux::vfio::LockedBy;

use super::args::PlanArgs;
use super::{PlanRunError, Source, devices};
use dmaspan_cli::progress::Progress;
use dmaspan_cli::size::ByteSize;

/// What a process has, and what should be known of it.
///
/// # Errors
///
/// [`PlanRunError`] where there is no such process, it may not be looked at, or it has nothing that
/// a device would be given.
pub(super) fn source(pid: u32, args: &PlanArgs) -> Result<Source, PlanRunError> {
    let machine = MachineFiles::at(&args.root);
    let allowed = machine.limits_of(pid)?;
    let choice = match (&args.region[..], &args.name[..]) {
        ([], []) => ProcessChoice::Large,
        ([], names) => ProcessChoice::Names(names.to_vec()),
        (ranges, _) => ProcessChoice::Ranges(ranges.to_vec()),
    };
    let memory = read(&machine, pid, &choice)?;
    if memory.regions.is_empty() {
        return Err(PlanRunError::Nothing(nothing(pid, &choice, &memory)));
    }
    let mut notes = taken(&memory);
    if allowed.in_user_namespace && allowed.memlock.is_some() {
        notes.push(format!(
            "process {pid} is in a user namespace, where CAP_IPC_LOCK does not lift its limit of \
             locked memory"
        ));
    }
    let files = machine.device_files_of(pid).ok();
    let functions = files.as_ref().map_or_else(Vec::new, |files| functions(&machine, files));
    let mut iommu = usual_iommu();
    if args.iommu.is_none() && args.device.is_none() {
        match devices::iommu(&machine, &functions, &mut notes) {
            Some(found) => iommu = found,
            None => notes.push(format!(
                "the IOMMU is assumed to be {}: name it by --device or --iommu",
                kind_of(&iommu)
            )),
        }
    }
    let mut limits = limits(&allowed, files.as_ref(), &memory.regions, &mut notes);
    devices::limits_here(&machine, &mut limits);
    let mut regions = memory.regions;
    regions.extend(devices::bars(&machine, &functions, &mut notes));
    let layout = PaperLayout {
        regions,
        iommu,
        limits,
        kernel: machine.kernel(),
        devices: files.map_or(1, |files| files.devices.max(1)),
        has_viommu: false,
        device_node: functions.iter().find_map(|function| machine.node_of(*function)),
    };
    Ok(Source { title: format!("process {pid}"), layout, notes })
}

/// Reads the memory, with a bar that shows how far it is.
fn read(
    machine: &MachineFiles,
    pid: u32,
    choice: &ProcessChoice,
) -> Result<ProcessMemory, PlanRunError> {
    let progress = Progress::on_stderr();
    let mut seen = 0;
    let mut show = |now: u64, all: u64| {
        if seen == 0 {
            progress.begin(format!("looking up the frames of process {pid}"), all);
        }
        progress.advance(now.saturating_sub(seen));
        seen = now;
    };
    let memory = machine.memory_of(pid, choice, &mut show);
    progress.clear();
    Ok(memory?)
}

/// Why there is nothing to plan, and what to do.
fn nothing(pid: u32, choice: &ProcessChoice, memory: &ProcessMemory) -> String {
    let count = memory.ranges.len();
    if count == 0 {
        return format!(
            "process {pid} has no memory: it has ended and waits for its parent, or it is a thread \
             of the kernel"
        );
    }
    match choice {
        ProcessChoice::Large => format!(
            "process {pid} has no memory that looks like a guest's (hugetlb, a file in memory of \
             2 MiB, private memory of 32 MiB) in its {count} ranges: name it by --region or --name"
        ),
        ProcessChoice::Ranges(_) => format!(
            "process {pid} has no memory in these ranges that it may read and write: \
             /proc/{pid}/maps lists all"
        ),
        ProcessChoice::Names(names) => format!(
            "process {pid} has no memory of a file named `{}` that it may read and write: \
             /proc/{pid}/maps lists all",
            names.join("`, `")
        ),
    }
}

/// What was taken, and what was left out and why.
fn taken(memory: &ProcessMemory) -> Vec<String> {
    let bytes = |range: &ProcessRange| range.user.len_less_one().saturating_add(1);
    let all = memory.regions.iter().map(PaperRegion::len).fold(0, u64::saturating_add);
    let mut notes = vec![format!(
        "taken as memory for devices: {} ranges, {}",
        memory.regions.len(),
        ByteSize::new(all)
    )];
    let reasons = [
        NotTaken::Small,
        NotTaken::Code,
        NotTaken::Access,
        NotTaken::Registers,
        NotTaken::NotAsked,
    ];
    for why in reasons {
        let ranges: Vec<_> =
            memory.ranges.iter().filter(|range| range.left_out == Some(why)).collect();
        let Some(largest) = ranges.iter().max_by_key(|range| bytes(range)) else { continue };
        let sum = ranges.iter().map(|range| bytes(range)).fold(0, u64::saturating_add);
        let name = if largest.name.is_empty() { "private memory" } else { &largest.name };
        notes.push(format!(
            "left out as {}: {} ranges, {}; the largest is {name} at {:#x}",
            why.words(),
            ranges.len(),
            ByteSize::new(sum),
            largest.user.start().get()
        ));
    }
    match memory.no_frames {
        Some(why) => notes.push(format!("spans are not known, only page sizes: {why}")),
        None => notes.push(
            "spans are those of this moment: the kernel may move what nothing pins".to_owned(),
        ),
    }
    if memory.untouched > 0 {
        notes.push(format!(
            "{} were not touched yet, and where they will be is not known",
            ByteSize::new(memory.untouched)
        ));
    }
    notes
}

/// The devices of a process: those that its files name, or else those of its groups that VFIO has.
fn functions(machine: &MachineFiles, files: &DeviceFiles) -> Vec<Bdf> {
    if !files.functions.is_empty() {
        return files.functions.clone();
    }
    let of_group = |group: &u32| machine.devices_of_group(*group);
    files.groups.iter().flat_map(of_group).filter(|bdf| machine.is_vfio(*bdf)).collect()
}

/// The usual IOMMU of this architecture.
fn usual_iommu() -> PaperIommu {
    PaperIommu::new(match std::env::consts::ARCH {
        "aarch64" => IommuModel::SmmuV3,
        "riscv64" => IommuModel::Riscv,
        _ => IommuModel::Vtd,
    })
}

fn kind_of(iommu: &PaperIommu) -> String {
    iommu.kind.map_or_else(String::new, |kind| kind.to_string())
}

/// What the process may still pin. What it has pinned of the same memory is inferred.
fn limits(
    allowed: &ProcessLimits,
    files: Option<&DeviceFiles>,
    regions: &[PaperRegion],
    notes: &mut Vec<String>,
) -> PaperLimits {
    let uses_iommufd = files.is_some_and(|files| files.iommufds > 0);
    let locked_by = if uses_iommufd { LockedBy::User } else { LockedBy::Process };
    let (name, counted) = match locked_by {
        LockedBy::Process => ("VmLck", allowed.locked),
        LockedBy::User => ("VmPin", allowed.pinned),
    };
    let all = regions.iter().map(PaperRegion::len).fold(0, u64::saturating_add);
    let has_devices = files.is_some_and(|files| files.containers + files.iommufds > 0);
    let mapped = if has_devices { counted.min(all) } else { 0 };
    match files {
        Some(files) if has_devices => notes.push(format!(
            "the process has open: {} containers of VFIO, {} files of iommufd, {} devices",
            files.containers, files.iommufds, files.devices
        )),
        Some(_) => notes.push("the process has neither VFIO nor iommufd open".to_owned()),
        None => notes.push(
            "which devices the process has open is not known: run this as root or as its user"
                .to_owned(),
        ),
    }
    if mapped > 0 {
        notes.push(format!(
            "inferred: {} of this memory are mapped already, since {name} has {}",
            ByteSize::new(mapped),
            ByteSize::new(counted)
        ));
    }
    PaperLimits {
        memlock: allowed.memlock,
        locked: counted - mapped,
        cgroup_left: allowed.cgroup_left,
        ..PaperLimits::unlimited(locked_by)
    }
}
