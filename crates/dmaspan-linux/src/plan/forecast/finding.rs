//! A [`PlanFinding`] is what a forecast has to say, with what mends it.

use std::fmt;

use dmaspan::{Iova, IovaRange};

use super::super::PlanError;
use super::iommu::ReservedIovas;
use super::layout::{Backing, LinuxVersion, PaperPool};
use crate::os::{Parts, Size};
use crate::vfio::LockedBy;

/// Says how bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PlanSeverity {
    /// Nothing is wrong.
    Note,
    /// It works, and costs more than it has to.
    Slow,
    /// Mapping would fail.
    Fails,
}

/// What mends a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mend {
    /// What to do: a sentence, in which commands and options stand in backticks.
    pub action: String,
    /// Those commands of it that a shell of root takes as they are, in their order.
    pub commands: Vec<String>,
    /// Those options of it that QEMU takes behind its others as they are.
    pub options: Vec<String>,
    /// Where to map instead, if that is what to do.
    pub iova: Option<Iova>,
    /// What it gains.
    pub gain: String,
}

impl Mend {
    fn new(action: impl Into<String>, gain: impl Into<String>) -> Self {
        let (commands, options) = (Vec::new(), Vec::new());
        Self { action: action.into(), commands, options, iova: None, gain: gain.into() }
    }

    /// A command, and what is to say of it.
    fn run(command: String, behind: &str, gain: impl Into<String>) -> Self {
        let action = format!("`{command}`{behind}");
        Self { commands: vec![command], ..Self::new(action, gain) }
    }

    /// Another address.
    fn at(iova: Iova, gain: impl Into<String>) -> Self {
        Self { iova: Some(iova), ..Self::new(format!("map it at {iova}"), gain) }
    }

    /// The same with these options of QEMU, which the action has.
    fn with_options<const N: usize>(self, options: [String; N]) -> Self {
        Self { options: options.into(), ..self }
    }
}

/// What is wrong with a layout, or should be known of it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum PlanFinding {
    /// The planner refuses regions.
    Refused {
        /// Why. Its regions are counted in the layout.
        error: PlanError,
        /// What people call the regions.
        names: Vec<String>,
        /// What the first of them is.
        backing: Backing,
        /// What the IOVAs that were asked for are reserved for, if that is the reason.
        reserved: Option<ReservedIovas>,
        /// Where the first of the regions would fit.
        instead: Option<IovaRange>,
    },
    /// So many regions are refused that the rest was not looked at.
    Unfinished {
        /// How many regions were refused.
        refused: usize,
    },
    /// The kernel would refuse memory whose pages are smaller than the smallest leaf.
    BelowGranule {
        /// What people call the regions.
        names: Vec<String>,
        /// The size of their pages, in bytes.
        page: u64,
        /// The size of the smallest leaf, in bytes.
        granule: u64,
    },
    /// More would be locked than may be.
    Memlock {
        /// What it counts against.
        locked_by: LockedBy,
        /// The bytes that would be locked now.
        needed: u64,
        /// The bytes that count already.
        locked: u64,
        /// `RLIMIT_MEMLOCK` in bytes.
        limit: u64,
    },
    /// More memory would be used than the cgroup has left: the kernel ends the process.
    Cgroup {
        /// The bytes that would be used.
        needed: u64,
        /// The bytes that are left.
        left: u64,
    },
    /// The machine has fewer hugetlb pages than there shall be.
    Pool {
        /// What people call the regions.
        names: Vec<String>,
        /// How many pages they need that are not in memory yet.
        needed: u64,
        /// What there is.
        pool: PaperPool,
    },
    /// Memory is on another NUMA node than the devices.
    FarNode {
        /// What people call the regions.
        names: Vec<String>,
        /// Their bytes.
        bytes: u64,
        /// The node that they are on.
        node: u32,
        /// The node of the devices.
        device_node: u32,
    },
    /// Memory has smaller pages than the leaves that would fit.
    SmallPages {
        /// What people call the regions.
        names: Vec<String>,
        /// What they are.
        backing: Backing,
        /// The bytes in small pages.
        bytes: u64,
        /// All bytes of the regions.
        all: u64,
        /// Whether they are one memory, and all memory that there is.
        is_whole: bool,
        /// The size of the pages that would do, in bytes.
        page: u64,
        /// What the pool of such pages has beside those of the layout, where it is known.
        pool: Option<PaperPool>,
        /// How many leaves it takes.
        leaves: u64,
        /// How many it would take in such pages.
        best: u64,
        /// How many times as much mapping them costs, as measured.
        map_ratio: f64,
    },
    /// A region is seen at an address that rules larger leaves out.
    Misaligned {
        /// What people call the regions.
        names: Vec<String>,
        /// What they are.
        backing: Backing,
        /// Where the device would see them.
        iova: IovaRange,
        /// How many leaves it takes there.
        leaves: u64,
        /// How many it would take at the other address.
        best: u64,
        /// The next address that permits the largest leaves.
        instead: Iova,
    },
    /// The kernel looks at each page of large ones by itself.
    ByPage {
        /// Which kernel.
        kernel: LinuxVersion,
        /// How many look-ups a map takes.
        lookups: u64,
        /// How many times less a map would cost since Linux 6.18, as measured.
        map_ratio: f64,
        /// The same of an unmap.
        unmap_ratio: f64,
    },
    /// What an IOMMU for the guest adds, or would add.
    Viommu {
        /// Whether the guest has one.
        is_there: bool,
        /// How many devices have mappings of their own then.
        devices: u32,
        /// The bytes that count as locked more.
        locked: u64,
        /// The bytes of tables more.
        table_bytes: u64,
    },
}

impl PlanFinding {
    /// How bad it is.
    pub const fn severity(&self) -> PlanSeverity {
        match self {
            Self::Refused { .. }
            | Self::Unfinished { .. }
            | Self::BelowGranule { .. }
            | Self::Memlock { .. }
            | Self::Cgroup { .. }
            | Self::Pool { .. } => PlanSeverity::Fails,
            Self::SmallPages { .. }
            | Self::Misaligned { .. }
            | Self::FarNode { .. }
            | Self::ByPage { .. } => PlanSeverity::Slow,
            Self::Viommu { .. } => PlanSeverity::Note,
        }
    }

    /// A short name that never changes, for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Refused { error, .. } => match error {
                PlanError::OutsideApertures { .. } => "outside-apertures",
                PlanError::Unaligned { .. } => "unaligned",
                PlanError::Overlap { .. } | PlanError::InUse { .. } => "overlap",
                PlanError::TooManyMaps { .. } => "too-many-mappings",
                PlanError::NoRoom { .. } => "no-room",
                PlanError::NothingFits { .. } => "nothing-fits",
                _ => "refused",
            },
            Self::Unfinished { .. } => "unfinished",
            Self::BelowGranule { .. } => "below-granule",
            Self::Memlock { .. } => "memlock",
            Self::Cgroup { .. } => "cgroup",
            Self::Pool { .. } => "pool",
            Self::FarNode { .. } => "far-node",
            Self::SmallPages { .. } => "small-pages",
            Self::Misaligned { .. } => "misaligned",
            Self::ByPage { .. } => "by-page",
            Self::Viommu { .. } => "viommu",
        }
    }

    /// What mends it, the most effective first.
    pub fn mends(&self) -> Vec<Mend> {
        match self {
            Self::Refused { error, backing, reserved, instead, .. } => {
                refused(error, *backing, reserved.as_ref(), *instead)
            }
            Self::Unfinished { .. } => Vec::new(),
            Self::BelowGranule { granule, .. } => vec![Mend::new(
                format!("take memory with pages of {} or more", Size(*granule)),
                "each leaf has contiguous memory",
            )],
            Self::Memlock { locked_by, needed, locked, .. } => {
                memlock(*locked_by, needed.saturating_add(*locked))
            }
            Self::Cgroup { needed, .. } => vec![Mend::new(
                format!(
                    "raise the limit of the cgroup: `systemctl set-property UNIT \
                     MemoryMax={needed}`, or write it to `memory.max` of the cgroup"
                ),
                "the kernel does not end the process",
            )],
            Self::Pool { needed, pool, .. } => vec![Mend::run(
                raise_pool(*pool, *needed),
                "",
                "the pool has as many pages as are needed",
            )],
            Self::FarNode { device_node, .. } => vec![Mend::new(
                format!(
                    "have it on the node of the devices: `host-nodes={device_node},policy=bind` \
                     behind `-object memory-backend-…`, or start the process by `numactl \
                     --membind={device_node}`"
                ),
                "no access of a device crosses to another node; how much that gains was not \
                 measured",
            )],
            Self::SmallPages {
                backing,
                all,
                is_whole,
                page,
                pool,
                leaves,
                best,
                map_ratio,
                ..
            } => {
                let gain =
                    format!("{}, and a map costs {map_ratio:.1} times less", fewer(*best, *leaves));
                small_pages(*backing, (*all, *is_whole), (*page, *pool), gain)
            }
            Self::Misaligned { leaves, best, instead, .. } => {
                vec![Mend::at(*instead, fewer(*best, *leaves))]
            }
            Self::ByPage { map_ratio, unmap_ratio, .. } => vec![Mend::new(
                "run Linux 6.18 or newer",
                format!("a map costs {map_ratio:.1} times less, an unmap {unmap_ratio:.1} times"),
            )],
            Self::Viommu { .. } => Vec::new(),
        }
    }
}

fn fewer(best: u64, leaves: u64) -> String {
    let noun = if best == 1 { "leaf" } else { "leaves" };
    format!("{best} {noun} instead of {leaves}")
}

fn refused(
    error: &PlanError,
    backing: Backing,
    reserved: Option<&ReservedIovas>,
    instead: Option<IovaRange>,
) -> Vec<Mend> {
    let elsewhere =
        instead.map(|instead| Mend::at(instead.start(), format!("it fits at {instead}")));
    let mut mends: Vec<Mend> = Vec::new();
    match error {
        PlanError::OutsideApertures { below, .. } if backing == Backing::Registers => {
            mends.extend(elsewhere);
            let bits = below.filter(|_| reserved.is_none()).map(|below| bits_of(below.last()));
            if let Some(bits) = bits {
                let option = format!("-cpu host,host-phys-bits-limit={bits}");
                let action = format!("give the guest fewer address bits: `{option}`");
                let mend = Mend::new(action, "its firmware puts BARs within them");
                mends.push(mend.with_options([option]));
            }
        }
        PlanError::OutsideApertures { below, .. } => {
            if let Some(below) = below.filter(|_| reserved.is_some()) {
                mends.push(end_below(below.last()));
            }
            mends.extend(elsewhere);
        }
        PlanError::TooManyMaps { needed, .. } => {
            let limit = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
            mends.push(Mend::run(
                format!("echo {needed} > {limit}"),
                ", before the container is opened",
                "so many mappings may be made",
            ));
            mends.push(Mend::new(
                "use iommufd: `-object iommufd,id=iommufd0` and `iommufd=iommufd0` for each \
                 device",
                "nothing limits its mappings",
            ));
            mends.push(Mend::new(
                "map memory that is one range, or larger pieces",
                "neighbours of one memory are one mapping",
            ));
        }
        PlanError::Unaligned { granule, .. } => mends.push(Mend::new(
            format!("align the address and the size to {}", Size(*granule)),
            "the IOMMU has no smaller page",
        )),
        PlanError::NoRoom { .. } => {
            mends.push(Mend::new("map less, or use an IOMMU with more address bits", "it fits"));
        }
        _ => mends.extend(elsewhere),
    }
    mends
}

/// The last address below what is reserved. QEMU can put an end there below 4 GiB.
fn end_below(last: Iova) -> Mend {
    let action = format!("end the region at {last} or below and map the rest elsewhere");
    let gain = "it does not reach what is reserved";
    if last.get() >> 32 != 0 {
        return Mend::new(action, gain);
    }
    let option = "-machine q35,max-ram-below-4g=2G".to_owned();
    let action = format!("{action}, as QEMU's q35 does at 4 GiB (`{option}`)");
    Mend::new(action, gain).with_options([option])
}

/// How many bits an address has.
fn bits_of(iova: Iova) -> u32 {
    u64::BITS - iova.get().leading_zeros()
}

fn memlock(locked_by: LockedBy, all: u64) -> Vec<Mend> {
    let kib = all.div_ceil(1024);
    let raise = "the kernel locks all of it";
    let mut mends = vec![
        Mend::run(format!("ulimit -l {kib}"), " in the shell that starts the process", raise),
        Mend::new(format!("`prlimit --pid PID --memlock={all}:{all}`, while it runs"), raise),
        Mend::new(format!("`LimitMEMLOCK={all}` in its systemd unit"), raise),
    ];
    mends.push(match locked_by {
        LockedBy::Process => Mend::new(
            "give it CAP_IPC_LOCK: `AmbientCapabilities=CAP_IPC_LOCK` in its unit",
            "no limit applies",
        ),
        LockedBy::User => Mend::new(
            "run it as a user of its own",
            "what other processes of the user pin does not count",
        ),
    });
    mends
}

/// Sets so many pages aside beside those that are used, where the pool has fewer.
fn raise_pool(pool: PaperPool, needed: u64) -> String {
    let pages = pool.pages.saturating_sub(pool.free).saturating_add(needed).max(pool.pages);
    let kib = pool.page >> 10;
    format!("echo {pages} > /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages")
}

/// A size as QEMU takes it.
fn qemu_size(bytes: u64) -> String {
    let units = [(40, 'T'), (30, 'G'), (20, 'M')];
    match units.into_iter().find(|(lg2, _)| bytes.trailing_zeros() >= *lg2) {
        Some((lg2, unit)) => format!("{}{unit}", bytes >> lg2),
        None => format!("{}K", bytes >> 10),
    }
}

fn small_pages(
    backing: Backing,
    (all, is_whole): (u64, bool),
    (page, pool): (u64, Option<PaperPool>),
    gain: String,
) -> Vec<Mend> {
    let pages = all.div_ceil(page.max(1));
    let echo = raise_pool(pool.unwrap_or(PaperPool { page, pages: 0, free: 0 }), pages);
    let (size, page) = (qemu_size(pages.saturating_mul(page)), page >> 20);
    let hugetlb = if is_whole {
        let object = format!(
            "-object memory-backend-memfd,id=huge,size={size},hugetlb=on,hugetlbsize={page}M"
        );
        let machine = "-machine memory-backend=huge".to_owned();
        let action = format!("use hugetlb pages: `{object}` and `{machine}` after `{echo}`");
        let mend = Mend { commands: vec![echo], ..Mend::new(action, gain) };
        mend.with_options([object, machine])
    } else {
        let action = format!(
            "use hugetlb pages: `hugetlb=on,hugetlbsize={page}M` behind `-object \
             memory-backend-memfd,…` of each after `{echo}`"
        );
        Mend { commands: vec![echo], ..Mend::new(action, gain) }
    };
    let (setting, when) = match backing {
        Backing::Memfd | Backing::File => {
            let setting = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
            (setting, ", for memory that the process advises")
        }
        _ => (
            "echo always > /sys/kernel/mm/transparent_hugepage/enabled",
            ", before the process starts",
        ),
    };
    let same = "as far as the kernel finds huge pages, the same";
    vec![hugetlb, Mend::run(setting.to_owned(), when, same)]
}

/// Names of regions: of many the first ones, and how many more there are.
struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (named, more) = self.0.split_at(self.0.len().min(4));
        f.write_str(&named.join(", "))?;
        if more.is_empty() { Ok(()) } else { write!(f, " and {} more", more.len()) }
    }
}

impl fmt::Display for PlanFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { error, names, reserved, .. } => {
                write_refused(f, error, &Names(names), reserved.as_ref())
            }
            Self::Unfinished { refused } => write!(
                f,
                "{refused} regions are refused, and what remains was not looked at: mend these \
                 first"
            ),
            Self::BelowGranule { names, page, granule } => write!(
                f,
                "{}: its pages of {} are smaller than {}, the smallest leaf of the IOMMU",
                Names(names),
                Size(*page),
                Size(*granule)
            ),
            Self::Memlock { locked_by, needed, locked, limit } => {
                write_memlock(f, *locked_by, [*needed, *limit, *locked])
            }
            Self::Cgroup { needed, left } => write!(
                f,
                "{} of memory would be used and the memory cgroup has {} left: the kernel would \
                 end the process",
                Size(*needed),
                Size(*left)
            ),
            Self::Pool { names, needed, pool } => write!(
                f,
                "{}: {needed} hugetlb pages of {} are needed and the machine may have {}, of which \
                 {} are free",
                Names(names),
                Size(pool.page),
                pool.pages,
                pool.free
            ),
            Self::FarNode { names, bytes, node, device_node } => write!(
                f,
                "{}: {} are on NUMA node {node} and the devices are on node {device_node}",
                Names(names),
                Size(*bytes)
            ),
            Self::SmallPages { names, bytes, leaves, best, .. } => write!(
                f,
                "{}: {} are in pages smaller than the IOMMU's large leaves: {leaves} leaves where \
                 {best} would do",
                Names(names),
                Size(*bytes)
            ),
            Self::Misaligned { names, backing, iova, leaves, best, .. } => write!(
                f,
                "{}: {iova} is aligned otherwise than the {}, which rules larger leaves out: \
                 {leaves} leaves where {best} would do",
                Names(names),
                if *backing == Backing::Registers { "registers" } else { "memory" }
            ),
            Self::ByPage { kernel, lookups, .. } => write!(
                f,
                "Linux {kernel} looks up each page of a huge one by itself: {lookups} look-ups"
            ),
            Self::Viommu { is_there, devices, locked, table_bytes } => {
                let words = match is_there {
                    true => "the guest has an IOMMU of its own which adds",
                    false => "an IOMMU for the guest would add",
                };
                write_viommu(f, words, *devices, [*locked, *table_bytes])
            }
        }
    }
}

fn write_memlock(
    f: &mut fmt::Formatter<'_>,
    locked_by: LockedBy,
    [needed, limit, locked]: [u64; 3],
) -> fmt::Result {
    let whose = match locked_by {
        LockedBy::Process => "the process",
        LockedBy::User => "the user",
    };
    write!(
        f,
        "{} would be locked and RLIMIT_MEMLOCK of {whose} is {}, of which {} are used",
        Size(needed),
        Size(limit),
        Size(locked)
    )
}

fn write_viommu(
    f: &mut fmt::Formatter<'_>,
    words: &str,
    devices: u32,
    [locked, table_bytes]: [u64; 2],
) -> fmt::Result {
    write!(
        f,
        "{words} mappings for each of {devices} devices: {} more locked, {} more of tables, and a \
         request for each range that the guest maps",
        Size(locked),
        Size(table_bytes)
    )
}

fn write_refused(
    f: &mut fmt::Formatter<'_>,
    error: &PlanError,
    names: &Names<'_>,
    reserved: Option<&ReservedIovas>,
) -> fmt::Result {
    match error {
        PlanError::OutsideApertures { range, outside, .. } => {
            write!(f, "{names}: {} ", Parts(*range, outside))?;
            match reserved {
                Some(it) => write!(f, "reserved for {}", it.name),
                None => f.write_str("outside of what the IOMMU translates"),
            }
        }
        PlanError::Overlap { ranges: [first, second], .. } => {
            write!(f, "{names} overlap: {first} and {second}")
        }
        PlanError::TooManyMaps { needed, left } => {
            write!(f, "{needed} mappings are needed and {left} can be made (dma_entry_limit)")
        }
        PlanError::Unaligned { user, iova, granule, .. } => {
            let at = iova.map_or("any IOVA".to_owned(), |iova| iova.to_string());
            let len = user.len_less_one().saturating_add(1);
            write!(
                f,
                "{names}: {len:#x} bytes at {at} do not begin and end at multiples of {}, the \
                 smallest page of the IOMMU",
                Size(*granule)
            )
        }
        PlanError::NoRoom { len, limit, .. } => {
            write!(f, "{names}: {} of IOVAs are not free up to {limit}", Size(*len))
        }
        PlanError::Wraps { source, .. } => write!(f, "{names}: {source}"),
        PlanError::Outside { source, .. } => write!(f, "{names}: {source}"),
        other => write!(f, "{other}"),
    }
}
