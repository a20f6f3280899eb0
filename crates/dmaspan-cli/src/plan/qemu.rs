//! A command line of QEMU, as a layout.

mod machine;
mod option;

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use dmaspan::{Iova, Prot, UserAddr, UserRange};
use dmaspan_linux::Bdf;
use dmaspan_linux::machine::MachineFiles;
use dmaspan_linux::plan::forecast::{
    Backing, IommuModel, PaperIommu, PaperLayout, PaperLimits, PaperRegion, RegionPages,
};
use dmaspan_linux::vfio::LockedBy;

use super::args::PlanArgs;
use super::{Source, devices};
use dmaspan_cli::size::ByteSize;
use machine::QemuMachine;
use option::{QemuOption, program_of, split};

/// A command line that was not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QemuError {
    /// It cannot be read at all.
    #[error("the command line cannot be read from {from}: {source}")]
    Unreadable {
        /// From where.
        from: String,
        /// Why.
        source: io::Error,
    },
    /// It is longer than the kernel lets one be.
    #[error("the command line has more than {}: pass QEMU's alone", ByteSize::new(LONGEST))]
    TooLong,
    /// A quote has no end.
    #[error("the command line ends within a quote ({0}): pass all of it")]
    Quote(char),
    /// There is no memory in it, or something is wrong with an option.
    #[error("{option}: {what}")]
    Option {
        /// The option with its value.
        option: String,
        /// What is wrong.
        what: String,
    },
}

/// Longer than any command line (`ARG_MAX` of Linux is 2 MiB).
const LONGEST: u64 = 4 << 20;
const GIB: u64 = 1 << 30;
const M2: u64 = 2 << 20;

/// What a command line lays out.
///
/// # Errors
///
/// [`QemuError`], with the option that is wrong.
pub(super) fn source(
    path: &Path,
    machine: &MachineFiles,
    args: &PlanArgs,
) -> Result<Source, QemuError> {
    let is_stdin = path == Path::new("-");
    let from = if is_stdin { "standard input".to_owned() } else { path.display().to_string() };
    let unreadable = |source| QemuError::Unreadable { from: from.clone(), source };
    let mut text = String::new();
    let mut read = |reader: &mut dyn Read| {
        reader.take(LONGEST + 1).read_to_string(&mut text).map_err(&unreadable)
    };
    if is_stdin {
        read(&mut io::stdin().lock())?;
    } else {
        read(&mut fs::File::open(path).map_err(&unreadable)?)?;
    }
    if u64::try_from(text.len()).is_ok_and(|len| len > LONGEST) {
        return Err(QemuError::TooLong);
    }
    let CommandLineSource { mut source, functions, named } = parse(&text)?;
    let Source { layout, notes, .. } = &mut source;
    layout.kernel = machine.kernel();
    devices::limits_here(machine, &mut layout.limits);
    layout.device_node = functions.iter().find_map(|function| machine.node_of(*function));
    if args.iommu.is_none()
        && args.device.is_none()
        && let Some(iommu) = devices::iommu(machine, &functions, notes)
    {
        layout.iommu = iommu;
    }
    let is_there = |bdf: &Bdf| machine.has_device(*bdf);
    let (here, absent): (Vec<Bdf>, Vec<Bdf>) = functions.into_iter().partition(is_there);
    layout.regions.extend(devices::bars(machine, &here, notes));
    let absent = absent.iter().map(Bdf::to_string).chain(named);
    notes.extend(absent.map(|device| format!("the BARs of {device} are left out: it is not here")));
    if args.memlock.is_none() {
        own_limit(layout, machine, notes);
    }
    Ok(source)
}

/// The shell that starts QEMU passes its limit on, and this program has that of the shell.
fn own_limit(layout: &mut PaperLayout, machine: &MachineFiles, notes: &mut Vec<String>) {
    let Ok(own) = machine.limits_of(std::process::id()) else { return };
    layout.limits.memlock = own.memlock;
    if let Some(limit) = own.memlock {
        notes.push(format!(
            "QEMU is taken to have the limit of this shell, {}: name another by --memlock",
            ByteSize::new(limit)
        ));
    }
}

/// Memory of `-object memory-backend-…`.
#[derive(Clone, Debug)]
struct QemuMemory {
    id: String,
    size: u64,
    backing: Backing,
    page: u64,
    node: Option<u32>,
}

/// A device whose memory a guest sees behind all other memory.
struct QemuMemoryDevice {
    option: String,
    /// Its memory.
    id: String,
    at: Option<u64>,
    /// How much of the memory is there, where it is not all of it.
    size: Option<u64>,
}

/// What a command line lays out, and which devices it names.
struct CommandLineSource {
    source: Source,
    functions: Vec<Bdf>,
    /// Devices that it names otherwise than by their address.
    named: Vec<String>,
}

/// What was read so far.
struct CommandLine {
    program: String,
    machine: Option<QemuMachine>,
    total: Option<u64>,
    below_most: u64,
    memories: Vec<QemuMemory>,
    /// The ids of the memory of the machine, or of its nodes in their order.
    used: Vec<(u32, String)>,
    path: Option<String>,
    memory_devices: Vec<QemuMemoryDevice>,
    devices: u32,
    functions: Vec<Bdf>,
    named: Vec<String>,
    has_viommu: bool,
    locked_by: LockedBy,
    ignored: Vec<String>,
    notes: Vec<String>,
}

/// Options without a value, which would otherwise swallow the next one (qemu-options.hx).
const ALONE: [&str; 16] = [
    "enable-kvm",
    "nodefaults",
    "nographic",
    "no-reboot",
    "no-shutdown",
    "S",
    "s",
    "daemonize",
    "mem-prealloc",
    "no-user-config",
    "snapshot",
    "full-screen",
    "usb",
    "no-hpet",
    "no-acpi",
    "version",
];

fn parse(text: &str) -> Result<CommandLineSource, QemuError> {
    let mut words = split(text)?;
    let mut line = CommandLine::new();
    if let Some(program) = program_of(&words) {
        line.ignored.extend(words.drain(..program));
        line.program = words.remove(0);
    }
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
            // A disk.
            line.ignored.push(word.to_owned());
            continue;
        };
        let has_value = !ALONE.contains(&name);
        let value = if has_value { words.next_if(|next| !next.starts_with('-')) } else { None };
        line.take(&QemuOption::new(name, value.unwrap_or_default()))?;
    }
    line.source()
}

impl CommandLine {
    fn new() -> Self {
        Self {
            program: String::new(),
            machine: None,
            total: None,
            below_most: u64::MAX,
            memories: Vec::new(),
            used: Vec::new(),
            path: None,
            memory_devices: Vec::new(),
            devices: 0,
            functions: Vec::new(),
            named: Vec::new(),
            has_viommu: false,
            locked_by: LockedBy::Process,
            ignored: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn ignore(&mut self, option: &QemuOption<'_>) {
        self.ignored.push(format!("-{} {}", option.name, option.value).trim_end().to_owned());
    }

    /// Takes an option, or notes that it is ignored.
    fn take(&mut self, option: &QemuOption<'_>) -> Result<(), QemuError> {
        if option.is_bad_object() && matches!(option.name, "object" | "device") {
            return Err(option.wrong("it is no object of JSON: pass all of it"));
        }
        match option.name {
            "m" => {
                match option.get("size").unwrap_or(option.head()) {
                    // Of more than the usual size it says only slots.
                    "" => {}
                    text => self.total = Some(option.size(text, 1 << 20)?),
                }
                if option.get("maxmem").is_some() {
                    self.notes.push("memory that is plugged in later (maxmem) is left out".into());
                }
            }
            "machine" | "M" => self.take_machine(option)?,
            "object" => self.take_object(option)?,
            "numa" => self.take_numa(option)?,
            "mem-path" => self.path = Some(option.value.to_owned()),
            "device" => self.take_device(option)?,
            _ => self.ignore(option),
        }
        Ok(())
    }

    fn take_machine(&mut self, option: &QemuOption<'_>) -> Result<(), QemuError> {
        let name = option.get("type").unwrap_or(option.head());
        // Proxmox adds a version of its own.
        let name = name.split_once('+').map_or(name, |(name, _)| name);
        if !name.is_empty() {
            let known = match name {
                _ if name == "q35" || name.starts_with("pc-q35") => Some(QemuMachine::Q35),
                _ if name == "pc" || name.starts_with("pc-i440fx") => Some(QemuMachine::Pc),
                _ if name == "virt" || name.starts_with("virt-") => Some(self.virt()),
                _ => None,
            };
            let known = known.ok_or_else(|| {
                option.wrong(format!(
                    "where the memory of a machine `{name}` is, is not known: q35, pc and virt \
                     are; write a layout for --layout"
                ))
            });
            self.machine = Some(known?);
        }
        if let Some(id) = option.get("memory-backend") {
            self.used = vec![(0, id.to_owned())];
        }
        if let Some(most) = option.get("max-ram-below-4g") {
            self.below_most = option.size(most, 1)?;
        }
        let iommu = option.get("iommu");
        self.has_viommu |= iommu.is_some_and(|kind| !matches!(kind, "none" | "off" | "no"));
        Ok(())
    }

    /// The machine of that name of the program's CPU.
    fn virt(&self) -> QemuMachine {
        let is_riscv = self.program.contains("riscv");
        QemuMachine::Virt(if is_riscv { 2 * GIB } else { GIB })
    }

    fn take_object(&mut self, option: &QemuOption<'_>) -> Result<(), QemuError> {
        let kind = match option.head() {
            "iommufd" => {
                self.locked_by = LockedBy::User;
                return Ok(());
            }
            head => match head.strip_prefix("memory-backend-") {
                Some(kind @ ("ram" | "file" | "memfd" | "shm")) => kind,
                _ => {
                    self.ignore(option);
                    return Ok(());
                }
            },
        };
        let size = option.get("size").ok_or_else(|| option.wrong("it has no size"))?;
        let size = option.size(size, 1)?;
        let id = option.get("id").ok_or_else(|| option.wrong("it has no id"))?.to_owned();
        let hugetlb_page = match option.get("hugetlbsize") {
            Some(text) => option.size(text, 1)?,
            None => M2,
        };
        let (backing, page) = match kind {
            "ram" => (Backing::Thp, M2),
            "memfd" if option.is_on("hugetlb") => (Backing::Hugetlb, hugetlb_page),
            "memfd" | "shm" => (Backing::Memfd, 4 << 10),
            _ => self.file(option.get("mem-path").unwrap_or_default()),
        };
        if !page.is_power_of_two() || size == 0 || !size.is_multiple_of(page.max(4 << 10)) {
            return Err(option
                .wrong(format!("{size:#x} bytes are not whole pages of {}", ByteSize::new(page))));
        }
        let node = option.get("host-nodes").or(option.get("host-nodes.0"));
        let node = node.and_then(|node| node.parse().ok());
        self.memories.push(QemuMemory { id, size, backing, page, node });
        Ok(())
    }

    /// The pages of a file, by the folder that it is in.
    fn file(&mut self, path: &str) -> (Backing, u64) {
        let page = if path.contains("1G") || path.contains("1048576") { GIB } else { M2 };
        if path.contains("huge") {
            self.notes.push(format!(
                "{path} is taken for hugetlb pages of {}: `stat -f -c %S {path}` says it",
                ByteSize::new(page)
            ));
            (Backing::Hugetlb, page)
        } else if path.starts_with("/dev/shm") {
            (Backing::Memfd, 4 << 10)
        } else {
            (Backing::File, 4 << 10)
        }
    }

    fn take_numa(&mut self, option: &QemuOption<'_>) -> Result<(), QemuError> {
        if option.head() != "node" || option.get("mem").is_some() {
            self.ignore(option);
            return Ok(());
        }
        let Some(id) = option.get("memdev") else {
            self.ignore(option);
            return Ok(());
        };
        let next = u32::try_from(self.used.len()).unwrap_or(u32::MAX);
        let node = match option.get("nodeid") {
            Some(text) => text
                .parse()
                .map_err(|_| option.wrong(format!("`{text}` is no number of a node")))?,
            None => next,
        };
        self.used.push((node, id.to_owned()));
        Ok(())
    }

    fn take_device(&mut self, option: &QemuOption<'_>) -> Result<(), QemuError> {
        match option.head() {
            name if name.starts_with("vfio-pci") => {
                self.devices += 1;
                let host = option.get("host").or(option.get("sysfsdev")).unwrap_or("its device");
                let last = host.rsplit('/').next().unwrap_or(host);
                match last.parse() {
                    Ok(bdf) => self.functions.push(bdf),
                    Err(_) => self.named.push(host.to_owned()),
                }
                if option.get("iommufd").is_some() {
                    self.locked_by = LockedBy::User;
                }
            }
            "intel-iommu" | "amd-iommu" | "virtio-iommu-pci" | "virtio-iommu" | "arm-smmuv3"
            | "riscv-iommu-pci" => self.has_viommu = true,
            name @ ("pc-dimm" | "nvdimm" | "virtio-mem-pci" | "virtio-mem" | "virtio-pmem-pci") => {
                let id = option.get("memdev").ok_or_else(|| option.wrong("it has no memdev"))?;
                let (at, size) = match name {
                    "pc-dimm" | "nvdimm" => (option.size_of("addr")?, None),
                    "virtio-pmem-pci" => (option.size_of("memaddr")?, None),
                    _ => {
                        let size = option.size_of("requested-size")?;
                        (option.size_of("memaddr")?, Some(size.unwrap_or(0)))
                    }
                };
                let (option, id) = (format!("-device {}", option.value), id.to_owned());
                self.memory_devices.push(QemuMemoryDevice { option, id, at, size });
            }
            _ => self.ignore(option),
        }
        Ok(())
    }

    /// The regions of memory that devices have, from `start` on: each at the address that it asks
    /// for, or behind the one before it (`memory_device_get_free_addr` of QEMU).
    fn plugged(&mut self, start: u64, number: u64) -> Result<Vec<PaperRegion>, QemuError> {
        let mut next = start;
        let (mut regions, mut notes) = (Vec::new(), Vec::new());
        for (number, device) in (number..).zip(&self.memory_devices) {
            let QemuMemoryDevice { option, id, at, size } = device;
            let wrong = |what| QemuError::Option { option: option.clone(), what };
            let missing = || wrong(format!("there is no `-object memory-backend-…,id={id}`"));
            let memory =
                self.memories.iter().find(|memory| memory.id == *id).ok_or_else(missing)?;
            let align = memory.page.max(M2);
            let too_high = || wrong("its memory ends behind all addresses".to_owned());
            let at = match at {
                Some(at) => *at,
                None => next.checked_next_multiple_of(align).ok_or_else(too_high)?,
            };
            next = next.max(at.checked_add(memory.size).ok_or_else(too_high)?);
            let len = size.unwrap_or(memory.size);
            if len > memory.size {
                let has = ByteSize::new(memory.size);
                return Err(wrong(format!("its memory has no more than {has}")));
            }
            if size.is_some() {
                notes.push(format!(
                    "of {id} {} are planned, which its device requests: QEMU maps each block of \
                     it by itself",
                    ByteSize::new(len)
                ));
            }
            if len > 0 {
                let memory = [QemuMemory { size: len, ..memory.clone() }];
                let region = cut(&memory, number, at, 0, len).into_iter();
                let name = || format!("{id} (device)");
                regions.extend(region.map(|region| PaperRegion { name: name(), ..region }));
            }
        }
        self.notes.extend(notes);
        Ok(regions)
    }

    /// The memory of the machine, in the order of its addresses.
    fn memory(&mut self) -> Result<Vec<QemuMemory>, QemuError> {
        let total = self.total.unwrap_or(128 << 20);
        if self.used.is_empty() {
            let (backing, page) = match self.path.clone() {
                Some(path) => self.file(&path),
                None => (Backing::Thp, M2),
            };
            let id = "ram".to_owned();
            return Ok(vec![QemuMemory { id, size: total, backing, page, node: None }]);
        }
        let wrong = |what: String| QemuError::Option { option: "-m".to_owned(), what };
        self.used.sort_by_key(|(node, _)| *node);
        let mut memories = Vec::new();
        for (_, id) in &self.used {
            let found = self.memories.iter().find(|memory| memory.id == *id).cloned();
            let missing = || wrong(format!("there is no `-object memory-backend-…,id={id}`"));
            memories.push(found.ok_or_else(missing)?);
        }
        let sum = memories.iter().map(|memory| memory.size).fold(0, u64::saturating_add);
        if self.total.is_some_and(|total| total != sum) {
            return Err(wrong(format!(
                "{} are asked for and the memory objects have {}: QEMU refuses that",
                ByteSize::new(total),
                ByteSize::new(sum)
            )));
        }
        Ok(memories)
    }

    fn source(mut self) -> Result<CommandLineSource, QemuError> {
        let memories = self.memory()?;
        let machine = self.machine.unwrap_or_else(|| {
            if self.program.contains("aarch64") || self.program.contains("riscv") {
                self.virt()
            } else {
                QemuMachine::Pc
            }
        });
        let sum = memories.iter().map(|memory| memory.size).fold(0, u64::saturating_add);
        if sum == 0 || sum > 1 << 52 {
            let what = format!("no machine has {sum:#x} bytes of memory");
            return Err(QemuError::Option { option: "-m".to_owned(), what });
        }
        let mut regions = Vec::new();
        for (at, offset, len) in machine.parts(sum, self.below_most) {
            regions.extend(cut(&memories, 0, at, offset, len));
        }
        let behind = regions.iter().filter_map(|region: &PaperRegion| {
            Some(region.iova?.get().saturating_add(region.len()))
        });
        let least = if matches!(machine, QemuMachine::Virt(_)) { 0 } else { 4 * GIB };
        let behind = behind.fold(least, u64::max).next_multiple_of(GIB);
        let number = u64::try_from(memories.len()).unwrap_or(0);
        regions.extend(self.plugged(behind, number)?);
        let kind = match machine {
            QemuMachine::Virt(start) if start == GIB => IommuModel::SmmuV3,
            QemuMachine::Virt(_) => IommuModel::Riscv,
            _ => IommuModel::Vtd,
        };
        let mut notes = self.notes;
        if self.devices == 0 {
            notes.push("there is no `-device vfio-pci`: nothing would be mapped without".into());
        }
        if machine == QemuMachine::Q35 || machine == QemuMachine::Pc {
            notes.push("QEMU maps the first MiB in a few parts of their own".into());
        }
        if !self.ignored.is_empty() {
            notes.push(format!("ignored: `{}`", self.ignored.join("`, `")));
        }
        let layout = PaperLayout {
            regions,
            iommu: PaperIommu::new(kind),
            limits: PaperLimits::unlimited(self.locked_by),
            kernel: None,
            devices: self.devices.max(1),
            has_viommu: self.has_viommu,
            device_node: None,
        };
        let source = Source { title: "QEMU's command line".to_owned(), layout, notes };
        Ok(CommandLineSource { source, functions: self.functions, named: self.named })
    }
}

/// The parts of memories, one behind the other, that are at an address. They are numbered from
/// `first` on.
fn cut(memories: &[QemuMemory], first: u64, at: u64, offset: u64, len: u64) -> Vec<PaperRegion> {
    let mut regions = Vec::new();
    let mut start = 0_u64;
    for (number, memory) in (first..).zip(memories) {
        let end = start.saturating_add(memory.size);
        let (first, behind) = (offset.max(start), offset.saturating_add(len).min(end));
        if first < behind {
            // Memories lie far apart, each at a multiple of the largest page.
            let base = (number + 1) << 53;
            let user = UserAddr::new(base + (first - start));
            let Ok(user) = UserRange::from_len(user, behind - first) else { continue };
            let place = if at < 4 * GIB { "low" } else { "high" };
            regions.push(PaperRegion {
                name: format!("{} ({place})", memory.id),
                user,
                memory: number,
                iova: Some(Iova::new(at + (first - offset))),
                prot: Prot::READ_WRITE,
                backing: memory.backing,
                pages: RegionPages::Of(memory.page),
                spans: None,
                resident: 0,
                node: memory.node,
            });
        }
        start = end;
    }
    regions
}

#[cfg(test)]
mod tests;
