//! A command line of QEMU, as a layout.

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

/// The words of a command line, as a shell splits them, or as `/proc/PID/cmdline` has them.
fn split(text: &str) -> Result<Vec<String>, QemuError> {
    if text.contains('\0') {
        return Ok(text.split('\0').filter(|word| !word.is_empty()).map(str::to_owned).collect());
    }
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (Some('"') | None, '\\') => match characters.next() {
                // A line that goes on.
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            (Some(_), _) => word.get_or_insert_default().push(character),
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, _) if character.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(character),
        }
    }
    match quote {
        Some(open) => Err(QemuError::Quote(open)),
        None => {
            words.extend(word);
            Ok(words)
        }
    }
}

/// An option with its value, whose parts are `name=value` or a name alone.
struct QemuOption<'w> {
    name: &'w str,
    value: &'w str,
}

impl<'w> QemuOption<'w> {
    fn wrong(&self, what: impl Into<String>) -> QemuError {
        let option = format!("-{} {}", self.name, self.value);
        QemuError::Option { option: option.trim_end().to_owned(), what: what.into() }
    }

    /// What stands before the first comma.
    fn head(&self) -> &'w str {
        self.value.split(',').next().unwrap_or_default()
    }

    fn get(&self, name: &str) -> Option<&'w str> {
        let mut parts = self.value.split(',').filter_map(|part| part.split_once('='));
        // The last one counts.
        parts.rfind(|(key, _)| *key == name).map(|(_, value)| value)
    }

    fn is_on(&self, name: &str) -> bool {
        matches!(self.get(name), Some("on" | "yes" | "true"))
    }

    /// A size, whose unit is `unit` where it has none.
    fn size(&self, text: &str, unit: u64) -> Result<u64, QemuError> {
        let size = match text.parse::<u64>() {
            Ok(number) => number.checked_mul(unit),
            Err(_) => text.parse::<ByteSize>().ok().map(ByteSize::bytes),
        };
        size.ok_or_else(|| self.wrong(format!("`{text}` is no size like 4096, 512M or 4G")))
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

/// The machines whose memory is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QemuMachine {
    Q35,
    Pc,
    /// Of Arm or RISC-V: all memory from here on.
    Virt(u64),
}

impl QemuMachine {
    /// Where parts of the memory are: the address, the offset in it and the length of each
    /// (hw/i386/pc_q35.c, pc_piix.c; hw/arm/virt.c, hw/riscv/virt.c).
    fn parts(self, total: u64, below_most: u64) -> Vec<(u64, u64, u64)> {
        let low = match self {
            Self::Virt(start) => return vec![(start, 0, total)],
            Self::Q35 if total >= 0xb000_0000 => 0x8000_0000,
            Self::Q35 => 0xb000_0000,
            Self::Pc if total >= 0xe000_0000 => 0xc000_0000,
            Self::Pc => 0xe000_0000,
        };
        let low = total.min(low).min(below_most);
        let high = total - low;
        let parts = [(0, 0, low), (4 * GIB, low, high)];
        parts.into_iter().filter(|(_, _, len)| *len > 0).collect()
    }
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
    let words = split(text)?;
    let mut line = CommandLine::new();
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
            // The program, or a disk.
            if word.contains("qemu") && line.program.is_empty() {
                line.program = word.to_owned();
            } else {
                line.ignored.push(word.to_owned());
            }
            continue;
        };
        let has_value = !ALONE.contains(&name);
        let value = if has_value { words.next_if(|next| !next.starts_with('-')) } else { None };
        line.take(&QemuOption { name, value: value.unwrap_or_default() })?;
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
        match option.name {
            "m" => {
                let text = option.get("size").unwrap_or(option.head());
                self.total = Some(option.size(text, 1 << 20)?);
                if option.get("maxmem").is_some() {
                    self.notes.push("memory that is plugged in later (maxmem) is left out".into());
                }
            }
            "machine" | "M" => self.take_machine(option)?,
            "object" => self.take_object(option)?,
            "numa" => self.take_numa(option)?,
            "mem-path" => self.path = Some(option.value.to_owned()),
            "device" => self.take_device(option),
            _ => self.ignore(option),
        }
        Ok(())
    }

    fn take_machine(&mut self, option: &QemuOption<'_>) -> Result<(), QemuError> {
        let name = option.get("type").unwrap_or(option.head());
        if !name.contains('=') {
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
        self.has_viommu |= option.get("iommu").is_some_and(|kind| kind != "none");
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
                Some(kind) => kind,
                None => {
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
            "file" => self.file(option.get("mem-path").unwrap_or_default()),
            _ => return Err(option.wrong("such memory is not known: ram, file, memfd or shm")),
        };
        if !page.is_power_of_two() || size == 0 || !size.is_multiple_of(page.max(4 << 10)) {
            return Err(option
                .wrong(format!("{size:#x} bytes are not whole pages of {}", ByteSize::new(page))));
        }
        let node = option.get("host-nodes").and_then(|node| node.parse().ok());
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

    fn take_device(&mut self, option: &QemuOption<'_>) {
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
            _ => self.ignore(option),
        }
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
            regions.extend(cut(&memories, at, offset, len));
        }
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

/// The parts of memories, one behind the other, that are at an address.
fn cut(memories: &[QemuMemory], at: u64, offset: u64, len: u64) -> Vec<PaperRegion> {
    let mut regions = Vec::new();
    let mut start = 0_u64;
    for (number, memory) in (0_u64..).zip(memories) {
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
mod tests {
    use dmaspan_linux::plan::forecast::Forecast;

    use super::*;

    fn regions(text: &str) -> Vec<(u64, u64, Backing)> {
        let layout = parse(text).unwrap().source.layout;
        let place =
            |region: &PaperRegion| (region.iova.unwrap().get(), region.len(), region.backing);
        layout.regions.iter().map(place).collect()
    }

    #[test]
    fn memory_is_where_each_machine_has_it() {
        let thp = Backing::Thp;
        let qemu = "qemu-system-x86_64";
        let split = |low, high| vec![(0, low, thp), (4 * GIB, high, thp)];
        assert_eq!(regions(&format!("{qemu} -M q35 -m 8G")), split(2 * GIB, 6 * GIB));
        assert_eq!(regions(&format!("{qemu} -m 8192")), split(3 * GIB, 5 * GIB));
        assert_eq!(
            regions(&format!("{qemu} -machine pc-q35-8.2 -m 2816")),
            split(2 * GIB, 3 << 28)
        );
        assert_eq!(regions(&format!("{qemu} -M q35 -m 2815")), [(0, 2815 << 20, thp)]);
        let less = format!("{qemu} -M q35,max-ram-below-4g=1G -m 8G");
        assert_eq!(regions(&less), split(GIB, 7 * GIB));
        assert_eq!(regions("qemu-system-aarch64 -M virt -m 4G"), [(GIB, 4 * GIB, thp)]);
        assert_eq!(regions("qemu-system-riscv64 -M virt -m 4G"), [(2 * GIB, 4 * GIB, thp)]);
        assert_eq!(regions(qemu), [(0, 128 << 20, thp)]);
    }

    #[test]
    fn memory_objects_of_nodes_are_cut_where_the_machine_cuts() {
        let text = "qemu-system-x86_64 -machine type=q35 -m 6G \
            -object memory-backend-memfd,id=b,size=3G,hugetlb=on,hugetlbsize=1G \
            -object 'memory-backend-file,id=a,size=3G,mem-path=/dev/hugepages' \
            -numa node,nodeid=1,memdev=b -numa node,nodeid=0,memdev=a";
        let huge = Backing::Hugetlb;
        let expected = [(0, 2 * GIB, huge), (4 * GIB, GIB, huge), (5 * GIB, 3 * GIB, huge)];
        assert_eq!(regions(text), expected);
        let CommandLineSource { source, .. } = parse(text).unwrap();
        assert_eq!(source.layout.regions[2].pages, RegionPages::Of(GIB));
        assert_eq!(Forecast::new(&source.layout).unwrap().maps.len(), 3);
    }

    #[test]
    fn devices_iommus_and_interfaces_are_counted_and_all_else_is_listed_as_ignored() {
        let text = "/bin/qemu-system-x86_64 -nodefaults -enable-kvm -cpu host \\\n -M q35 -m 4G \
            -device intel-iommu,aw-bits=48 -object iommufd,id=i \
            -device vfio-pci,host=01:00.0,iommufd=i -device \"vfio-pci,host=02:00.0\" \
            -device virtio-net-pci -drive file=a.img disk.img";
        let CommandLineSource { source, functions, .. } = parse(text).unwrap();
        let Source { layout, notes, .. } = source;
        let functions: Vec<String> = functions.iter().map(Bdf::to_string).collect();
        assert_eq!(functions, ["0000:01:00.0", "0000:02:00.0"]);
        assert_eq!((layout.devices, layout.has_viommu), (2, true));
        assert_eq!(layout.limits.locked_by, LockedBy::User);
        let ignored = notes.last().unwrap();
        for option in
            ["-nodefaults", "-enable-kvm", "-cpu host", "-device virtio-net-pci", "disk.img"]
        {
            assert!(ignored.contains(&format!("`{option}`")), "{ignored}");
        }
        let nul = text.replace("\\\n", " ").replace('"', "");
        let nul = nul.split_whitespace().collect::<Vec<_>>().join("\0");
        assert_eq!(parse(&nul).unwrap().source.layout.devices, 2);
    }

    #[test]
    fn a_wrong_command_line_names_the_option() {
        for (text, part) in [
            ("qemu -m lots", "-m lots: `lots` is no size"),
            ("qemu -m 99999999999999999999", "is no size"),
            ("qemu -m 16384P", "is no size"),
            ("qemu -m 0", "no machine has 0x0 bytes"),
            ("qemu -m 18446744073709551615", "is no size"),
            ("qemu -M sun4m -m 4G", "a machine `sun4m` is, is not known"),
            ("qemu -m 4G -object memory-backend-ram,id=a", "it has no size"),
            ("qemu -m 4G -object memory-backend-ram,size=4G", "it has no id"),
            ("qemu -m 4G -object memory-backend-epc,id=a,size=4G", "is not known"),
            ("qemu -M q35,memory-backend=x -m 4G", "no `-object memory-backend-…,id=x`"),
            (
                "qemu -M q35,memory-backend=x -m 4G -object memory-backend-ram,id=x,size=2G",
                "4 GiB are asked for and the memory objects have 2 GiB",
            ),
            (
                "qemu -m 3M -object memory-backend-memfd,id=a,size=3M,hugetlb=on",
                "not whole pages of 2 MiB",
            ),
            ("qemu -numa node,nodeid=x,memdev=a", "`x` is no number of a node"),
            ("qemu -name 'open", "within a quote (')"),
        ] {
            let error = parse(text).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains('\n'));
        }
        // Nothing at all is a machine of the usual size.
        assert_eq!(parse("").unwrap().source.layout.regions.len(), 1);
    }
}
