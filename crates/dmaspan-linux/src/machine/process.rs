//! The memory of a process that a device would be given.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dmaspan::pin::{Kind, SpanSink, Stopped};
use dmaspan::{PhysAddr, Prot, Span, UserAddr, UserRange};

use super::{MachineFiles, ProcessError, field};
use crate::os;
use crate::pagemap::{NoFrames, ProcessFrames};
use crate::pci::Bdf;
use crate::plan::forecast::{Backing, PaperRegion, RegionPages};
use crate::sys;

/// Says which memory of a process is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProcessChoice {
    /// What looks like a guest's memory or buffers of a driver: hugetlb pages, files in memory of 2
    /// MiB and more, and private memory of 32 MiB and more.
    #[default]
    Large,
    /// What lies in these ranges.
    Ranges(Vec<UserRange>),
    /// What is mapped from a file whose name has one of these parts.
    Names(Vec<String>),
}

/// Why memory is not meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NotTaken {
    /// It is smaller than what a guest has.
    Small,
    /// The process may not read and write it, so that the kernel would not pin it.
    Access,
    /// It is registers of a device, or another thing that is no memory.
    Registers,
    /// The process runs what it writes there, as an emulator does; no guest's memory is like that.
    Code,
    /// Neither a range nor a name that was asked for.
    NotAsked,
}

impl NotTaken {
    /// The reason in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Small => "smaller than a guest's memory",
            Self::Access => "not readable and writable",
            Self::Registers => "registers, or no memory",
            Self::Code => "code that the process makes",
            Self::NotAsked => "not asked for",
        }
    }
}

/// A part of a process's addresses, as `/proc/PID/smaps` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessRange {
    /// Its addresses.
    pub user: UserRange,
    /// The file that it is of, or what the kernel calls it; empty for private memory.
    pub name: String,
    /// Why it is not meant; `None` where it is.
    pub left_out: Option<NotTaken>,
}

/// What a process has of VFIO and iommufd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFiles {
    /// Containers of VFIO type 1.
    pub containers: u32,
    /// Files of iommufd.
    pub iommufds: u32,
    /// Devices.
    pub devices: u32,
    /// The numbers of the groups of type 1.
    pub groups: Vec<u32>,
    /// Which PCI functions the devices are, as far as the kernel tells: of iommufd always, of type
    /// 1 since Linux 6.18.
    pub functions: Vec<Bdf>,
}

/// The memory of a process.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// What would be mapped.
    pub regions: Vec<PaperRegion>,
    /// All of its addresses, taken or not.
    pub ranges: Vec<ProcessRange>,
    /// Why frames are not known; `None` where those of all memory in use are.
    pub no_frames: Option<NoFrames>,
    /// How many bytes of the regions the process has not touched yet: where they will be is not
    /// known.
    pub untouched: u64,
}

/// Private memory that is smaller is no guest's.
const PRIVATE_LEAST: u64 = 32 << 20;
/// Files in memory that are smaller are no guest's.
const FILE_LEAST: u64 = 2 << 20;

/// A range with its counters.
struct Smap {
    user: UserRange,
    permissions: String,
    offset: u64,
    inode: u64,
    name: String,
    page: u64,
    resident: u64,
    huge: u64,
    is_hugetlb: bool,
    is_pfnmap: bool,
}

impl MachineFiles {
    /// The memory of a process that a device would be given, with its frames where this process may
    /// see them. `progress` is told how many bytes were looked at, of how many.
    ///
    /// # Errors
    ///
    /// [`ProcessError`] where there is none, or it may not be looked at.
    pub fn memory_of(
        &self,
        pid: u32,
        choice: &ProcessChoice,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<ProcessMemory, ProcessError> {
        let file = "smaps";
        let text = self.read(Path::new("proc").join(pid.to_string()).join(file));
        let text = text.map_err(|error| self.process_error(pid, file, &error))?;
        let nodes = self.nodes_of(pid);
        let mut memory = ProcessMemory {
            regions: Vec::new(),
            ranges: Vec::new(),
            no_frames: None,
            untouched: 0,
        };
        let smaps = smaps(&text);
        let mut before: Option<(u64, &Smap)> = None;
        for smap in &smaps {
            let (left_out, parts) = smap.chosen(choice);
            let (user, name) = (smap.user, smap.name.clone());
            memory.ranges.push(ProcessRange { user, name, left_out });
            for part in parts {
                let number = match before {
                    Some((number, before)) if before.goes_on_with(smap) => number,
                    _ => smap.user.start().get(),
                };
                let node = nodes.get(&smap.user.start().get()).copied();
                memory.regions.push(PaperRegion { node, ..smap.region(part, number) });
                before = Some((number, smap));
            }
        }
        if self.0 == Path::new("/") {
            memory.look_up(pid, progress);
        }
        Ok(memory)
    }

    /// What a process has open of VFIO and iommufd.
    ///
    /// # Errors
    ///
    /// [`ProcessError`] where there is none, or it may not be looked at.
    pub fn device_files_of(&self, pid: u32) -> Result<DeviceFiles, ProcessError> {
        let of_process = Path::new("proc").join(pid.to_string());
        let folder = self.path(of_process.join("fd"));
        let failed = |error: std::io::Error| self.process_error(pid, "fd", &error);
        let mut files = DeviceFiles::default();
        for entry in fs::read_dir(&folder).map_err(failed)?.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy();
            match target.as_ref() {
                "/dev/vfio/vfio" => files.containers += 1,
                "/dev/iommu" => files.iommufds += 1,
                "anon_inode:[vfio-device]" => {
                    files.devices += 1;
                    // Documentation/filesystems/proc.rst, "VFIO Device files".
                    let info = self.text(of_process.join("fdinfo").join(entry.file_name()));
                    let path = info.as_deref().and_then(|info| field(info, "vfio-device-syspath:"));
                    files.functions.extend(path.and_then(function));
                }
                other => {
                    if let Some(name) = other.strip_prefix("/dev/vfio/devices/") {
                        files.devices += 1;
                        files.functions.extend(self.function_of_node(name));
                    } else if let Some(name) = other.strip_prefix("/dev/vfio/") {
                        files.groups.extend(name.parse::<u32>().ok());
                    }
                }
            }
        }
        files.functions.sort_unstable();
        files.functions.dedup();
        Ok(files)
    }

    /// The function of a node in `/dev/vfio/devices`.
    fn function_of_node(&self, name: &str) -> Option<Bdf> {
        let link = Path::new("sys/class/vfio-dev").join(name).join("device");
        function(fs::read_link(self.path(link)).ok()?.to_str()?)
    }

    /// The NUMA node that most of each range of a process is on, by the range's address
    /// (`/proc/PID/numa_maps` of numa(7)); nothing where the kernel does not tell.
    fn nodes_of(&self, pid: u32) -> BTreeMap<u64, u32> {
        let text = self.text(Path::new("proc").join(pid.to_string()).join("numa_maps"));
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            let start = u64::from_str_radix(words.next()?, 16).ok()?;
            let pages = |word: &str| {
                let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
                Some((pages.parse::<u64>().ok()?, node.parse::<u32>().ok()?))
            };
            let (_, node) = words.filter_map(pages).max()?;
            Some((start, node))
        };
        text.unwrap_or_default().lines().filter_map(line).collect()
    }

    /// The devices of a group.
    pub fn devices_of_group(&self, group: u32) -> Vec<Bdf> {
        let names = self.names(format!("sys/kernel/iommu_groups/{group}/devices"));
        names.iter().filter_map(|name| name.parse().ok()).collect()
    }
}

/// The function that a path of sysfs ends with.
fn function(path: &str) -> Option<Bdf> {
    path.rsplit('/').next()?.parse().ok()
}

impl ProcessMemory {
    /// Looks up where the regions are.
    fn look_up(&mut self, pid: u32, progress: &mut dyn FnMut(u64, u64)) {
        let frames = match ProcessFrames::of(pid) {
            Ok(frames) => frames,
            Err(why) => {
                self.no_frames = Some(why);
                return;
            }
        };
        let all = self.regions.iter().map(PaperRegion::len).fold(0, u64::saturating_add);
        let mut before = 0;
        for region in &mut self.regions {
            let hugetlb = match region.pages {
                RegionPages::Of(size) if region.backing == Backing::Hugetlb => Some(size),
                _ => None,
            };
            let spans = Vec::new();
            let mut found = FoundSpans { spans, seen: before, all, progress: &mut *progress };
            let result = frames.spans(region.user, hugetlb, &mut found);
            // What is not in memory yet, or was swapped, has no frames.
            match result {
                Ok(()) => region.spans = Some(found.spans),
                Err(_) => {
                    self.untouched += region.len().saturating_sub(region.resident);
                }
            }
            before += region.len();
        }
    }
}

/// Spans, with progress.
struct FoundSpans<'p> {
    spans: Vec<Span<PhysAddr>>,
    seen: u64,
    all: u64,
    progress: &'p mut dyn FnMut(u64, u64),
}

impl SpanSink<PhysAddr> for FoundSpans<'_> {
    fn push(&mut self, span: Span<PhysAddr>, _kind: Kind) -> Result<(), Stopped> {
        self.seen = self.seen.saturating_add(span.len());
        self.spans.push(span);
        // Seldom enough to cost nothing beside the look-ups.
        if self.spans.len().is_power_of_two() || self.spans.len().is_multiple_of(8192) {
            (self.progress)(self.seen, self.all);
        }
        Ok(())
    }
}

/// The ranges of a file like `/proc/PID/smaps` (proc(5)). Lines that are none are passed over.
fn smaps(text: &str) -> Vec<Smap> {
    let mut found: Vec<Smap> = Vec::new();
    for line in text.lines() {
        if let Some(smap) = header(line) {
            found.push(smap);
            continue;
        }
        let (Some(last), Some((name, value))) = (found.last_mut(), line.split_once(':')) else {
            continue;
        };
        let kib = value.trim().strip_suffix(" kB").and_then(|kib| kib.trim().parse::<u64>().ok());
        let bytes = kib.unwrap_or(0).saturating_mul(1024);
        match name {
            "KernelPageSize" => last.page = bytes,
            "Rss" => last.resident = last.resident.saturating_add(bytes),
            "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => {
                last.huge = last.huge.saturating_add(bytes);
            }
            // Rss has none of them.
            "Shared_Hugetlb" | "Private_Hugetlb" => {
                last.resident = last.resident.saturating_add(bytes);
            }
            "VmFlags" => {
                let has = |flag: &str| value.split_whitespace().any(|word| word == flag);
                last.is_hugetlb = has("ht");
                last.is_pfnmap = has("pf") || has("io");
            }
            _ => {}
        }
    }
    found
}

/// `START-END rw-p OFFSET DEV INODE NAME`.
fn header(line: &str) -> Option<Smap> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    let user = UserRange::from_len(UserAddr::new(start), end.checked_sub(start)?).ok()?;
    let mut words = rest.splitn(5, ' ');
    let permissions = words.next()?.to_owned();
    let offset = hex(words.next()?)?;
    words.next()?;
    let inode = words.next()?.parse().ok()?;
    // A terminal that shows it gets no control characters of it.
    let name = words.next().unwrap_or_default().trim().replace(char::is_control, "?");
    let page = sys::page_size();
    Some(Smap {
        user,
        permissions,
        offset,
        inode,
        name,
        page,
        resident: 0,
        huge: 0,
        is_hugetlb: false,
        is_pfnmap: false,
    })
}

impl Smap {
    fn len(&self) -> u64 {
        self.user.len_less_one().saturating_add(1)
    }

    /// Whether `next` is of the same memory, behind this.
    fn goes_on_with(&self, next: &Self) -> bool {
        let is_one_file = (self.inode, self.name.as_str()) == (next.inode, next.name.as_str());
        let follows = self.user.last().checked_add(1) == Some(next.user.start());
        let is_next_part = self.inode == 0 || self.offset + self.len() == next.offset;
        let is_same = std::ptr::eq(self, next);
        let pages = self.page == next.page;
        is_same || is_one_file && follows && is_next_part && pages
    }

    /// Where its memory comes from.
    fn backing(&self) -> Backing {
        let is_in_memory = ["/memfd:", "/dev/shm/", "/dev/zero", "/SYSV"]
            .iter()
            .any(|begin| self.name.starts_with(begin));
        match () {
            () if self.is_pfnmap || self.name.starts_with("anon_inode:") => Backing::Registers,
            () if self.is_hugetlb || self.page > sys::page_size() => Backing::Hugetlb,
            () if is_in_memory => Backing::Memfd,
            () if self.name.starts_with('/') => Backing::File,
            () if self.huge > 0 => Backing::Thp,
            () => Backing::Base,
        }
    }

    /// Why it is not taken, or which parts of it are.
    fn chosen(&self, choice: &ProcessChoice) -> (Option<NotTaken>, Vec<UserRange>) {
        let no = |why| (Some(why), Vec::new());
        let backing = self.backing();
        let is_special = self.name.starts_with('[') && !self.name.starts_with("[anon");
        let is_asked_for = match choice {
            ProcessChoice::Large => None,
            ProcessChoice::Ranges(ranges) => {
                let parts: Vec<UserRange> =
                    ranges.iter().filter_map(|range| range.intersection(self.user)).collect();
                Some(parts)
            }
            ProcessChoice::Names(names) => {
                let is_named = names.iter().any(|name| self.name.contains(name.as_str()));
                Some(if is_named { vec![self.user] } else { Vec::new() })
            }
        };
        if is_asked_for.as_ref().is_some_and(Vec::is_empty) {
            return no(NotTaken::NotAsked);
        }
        if backing == Backing::Registers {
            return no(NotTaken::Registers);
        }
        if !self.permissions.starts_with("rw") {
            return no(NotTaken::Access);
        }
        if let Some(parts) = is_asked_for {
            return (None, parts);
        }
        if self.permissions.starts_with("rwx") {
            return no(NotTaken::Code);
        }
        let is_large = match backing {
            Backing::Hugetlb => true,
            Backing::Memfd => self.len() >= FILE_LEAST,
            Backing::File => false,
            _ => self.len() >= PRIVATE_LEAST && !is_special,
        };
        if is_large { (None, vec![self.user]) } else { no(NotTaken::Small) }
    }

    fn region(&self, user: UserRange, memory: u64) -> PaperRegion {
        let backing = self.backing();
        let len = user.len_less_one().saturating_add(1);
        let share = |bytes: u64| {
            let part = u128::from(bytes) * u128::from(len) / u128::from(self.len());
            u64::try_from(part).unwrap_or(len).min(len)
        };
        let pages = match backing {
            Backing::Hugetlb => RegionPages::Of(self.page),
            _ if self.huge > 0 => {
                RegionPages::Partly { size: os::thp_size(), huge: share(self.huge) }
            }
            _ => RegionPages::Of(self.page),
        };
        let name = match self.name.rsplit('/').next() {
            Some(name) if !name.is_empty() => name.trim_end_matches(" (deleted)").to_owned(),
            _ => format!("{:#x}", user.start().get()),
        };
        PaperRegion {
            name,
            user,
            memory,
            iova: None,
            prot: Prot::READ_WRITE,
            backing,
            pages,
            spans: None,
            resident: share(self.resident),
            node: None,
        }
    }
}

#[cfg(test)]
mod tests;
