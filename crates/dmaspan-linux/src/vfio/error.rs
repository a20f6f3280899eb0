//! The errors of mapping memory for a device, and of opening one.

use std::ops::Range;
use std::path::PathBuf;

use dmaspan::{Errno, IovaRange, RangeError, UserRange};

use super::backend::Backend;
use crate::mem::OutsideMemory;
use crate::os::{self, Parts, Ranges, Size};
use crate::pci::{Bdf, Reason, Step, reason};
use crate::sys;
use crate::sys::kernel_mapping::LockedBy;

/// The reason why a mapping or an unmapping was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No range begins there and is so long.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The range is not all in the memory.
    #[error(transparent)]
    Outside(#[from] OutsideMemory),
    /// The registers are not all mapped into the process.
    #[error(
        "bytes {:#x} to {:#x} of BAR {index} of {bdf} are not all mapped into the process: the \
         range is empty, leaves the BAR, or has a part that the kernel keeps for itself",
        offsets.start, offsets.end
    )]
    OutsideBar {
        /// The device.
        bdf: Bdf,
        /// The BAR.
        index: u32,
        /// The bytes of the BAR asked for.
        offsets: Range<u64>,
    },
    /// The kernel does not give out registers as a dma-buf.
    #[error(
        "the kernel gives no dma-buf of BAR {index} of {bdf} ({}), by which iommufd maps it: that \
         needs Linux 6.19 with CONFIG_VFIO_PCI_DMABUF; use VFIO's type 1, which maps BARs without",
        os::words(*errno)
    )]
    NoDmaBuf {
        /// The device.
        bdf: Bdf,
        /// The BAR.
        index: u32,
        /// What the kernel answered.
        errno: Errno,
    },
    /// Linux would make memory of registers that it copies.
    #[error(
        "Linux before 7.3.4 makes memory of a BAR that is copied to another page table, as the one \
         at {range} would be, and this is {release}: map the BAR itself there (Ioas::map_bar)"
    )]
    BarCopied {
        /// Where the BAR is mapped.
        range: IovaRange,
        /// What the kernel is called.
        release: String,
    },
    /// Something is no multiple of the granule.
    #[error(
        "{what} {value:#x} is not a multiple of the IOMMU's smallest page, {}", Size(*granule)
    )]
    Misaligned {
        /// The IOVA, the user address or the length.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// Neither reading nor writing was asked for.
    #[error("{range} must be mapped for reading, for writing, or for both")]
    NoAccess {
        /// The range asked for.
        range: IovaRange,
    },
    /// The IOMMU cannot translate the range, or keeps a part of it for itself.
    #[error(
        "{} in no aperture of the IOMMU, which maps {}: choose IOVAs in these",
        Parts(*range, outside), Ranges(apertures)
    )]
    OutsideApertures {
        /// The range asked for.
        range: IovaRange,
        /// The parts of it that no aperture has, in order.
        outside: Vec<IovaRange>,
        /// Where mappings may lie.
        apertures: Vec<IovaRange>,
    },
    /// Something is mapped there.
    #[error("{range} overlaps with the mapping of {mapped}: unmap that first")]
    Overlap {
        /// The range asked for.
        range: IovaRange,
        /// What is mapped.
        mapped: IovaRange,
    },
    /// The range begins or ends inside a mapping.
    #[error("{range} covers only a part of the mapping of {mapped}: unmap all of that")]
    Bisects {
        /// The range asked for.
        range: IovaRange,
        /// The mapping.
        mapped: IovaRange,
    },
    /// Another thread maps or unmaps there.
    #[error("another thread is mapping or unmapping {range}: wait until it has finished")]
    Busy {
        /// Where.
        range: IovaRange,
    },
    /// All mappings that the kernel allows exist.
    #[error(
        "the kernel allows no more mappings than the {mappings} that exist: map larger \
         neighbouring ranges at once (hugetlb pages or merging), or raise the limit by \
         vfio_iommu_type1's parameter dma_entry_limit"
    )]
    NoMappingsLeft {
        /// How many there are.
        mappings: u64,
    },
    /// More memory would be pinned than may be locked.
    #[error(
        "{} more of locked memory are needed and the limit is {}, of which {}{} are used: raise it \
         to at least {} by `ulimit -l {}`, LimitMEMLOCK= of systemd or limits.conf, or give the \
         process CAP_IPC_LOCK{}",
        Size(*needed), Size(*limit), Size(*locked), counted(*locked_by),
        Size(enough(*needed, *locked, *limit)), enough(*needed, *locked, *limit).div_ceil(1024),
        os::outside()
    )]
    MemlockLimit {
        /// The bytes that would be pinned.
        needed: u64,
        /// The bytes that this process has locked, as far as they count.
        locked: u64,
        /// `RLIMIT_MEMLOCK`, in bytes.
        limit: u64,
        /// What the limit is of.
        locked_by: LockedBy,
    },
    /// The kernel has no memory for pins or page tables.
    #[error("the kernel has not enough memory to map {range}: end other programs or map less")]
    NoMemory {
        /// The range asked for.
        range: IovaRange,
    },
    /// The memory cannot be pinned.
    #[error(
        "the kernel cannot pin {user}: it is not mapped, not writable, or a device's registers"
    )]
    NotPinnable {
        /// The memory.
        user: UserRange,
    },
    /// The kernel unmapped less than was mapped. The memory is kept for ever.
    #[error(
        "the kernel unmapped only {unmapped:#x} of the {mapped:#x} bytes of {range}: the memory \
         behind it stays allocated, because a device may still use it"
    )]
    Short {
        /// The range asked for.
        range: IovaRange,
        /// What was mapped there, in bytes.
        mapped: u64,
        /// What the kernel says that it unmapped.
        unmapped: u64,
    },
    /// An earlier unmapping was [`Short`](Self::Short) there: it is unknown what is mapped.
    #[error(
        "an earlier unmap of {range} failed in part: its IOVAs are lost until the space is dropped"
    )]
    Lost {
        /// The mapping that was.
        range: IovaRange,
    },
    /// What was to be copied is not all mapped.
    #[error("{range} cannot be copied, because it is not one whole mapping")]
    NotMapped {
        /// The range asked for.
        range: IovaRange,
    },
    /// A device needs the range for itself, or it was promised to be mappable.
    #[error(
        "{range} holds IOVAs that are reserved for an attached device, or that were promised to \
         stay mappable (allow_iovas)"
    )]
    Reserved {
        /// The range asked for.
        range: IovaRange,
    },
    /// The kernel, or the IOMMU, cannot do that.
    #[error("{what}: {advice}")]
    Unsupported {
        /// What is missing.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// No bitmap describes such a range.
    #[error(
        "{range} in pages of {page_size:#x} bytes has no dirty bitmap: pages are a power of two \
         and no smaller than {}, the range begins and ends between them, and has no more than \
         2^31", Size(*granule)
    )]
    Bitmap {
        /// The range asked for.
        range: IovaRange,
        /// The page size asked for, in bytes.
        page_size: u64,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// The kernel refused for another reason.
    #[error("{request} of {range} failed: {}{}", os::words(*errno), refused(*errno))]
    System {
        /// The request.
        request: &'static str,
        /// The range asked for.
        range: IovaRange,
        /// What the kernel answered.
        errno: Errno,
    },
    /// A setting was not changed, or not read.
    #[error("{request} failed: {}{}", os::words(*errno), option_refused(*errno))]
    Setting {
        /// The request.
        request: &'static str,
        /// What the kernel answered.
        errno: Errno,
    },
    /// The kernel did not say what can be mapped.
    #[error("the kernel did not say what can be mapped: {}", os::words(*errno))]
    NoLimits {
        /// What it answered.
        errno: Errno,
    },
}

impl Error {
    /// The errno that Linux's VFIO answers with.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Range(error) => error.errno(),
            Self::Outside(error) => error.errno(),
            Self::OutsideBar { .. }
            | Self::Misaligned { .. }
            | Self::NoAccess { .. }
            | Self::OutsideApertures { .. }
            | Self::Bitmap { .. }
            | Self::Bisects { .. } => Errno::EINVAL,
            Self::Overlap { .. } => Errno::EEXIST,
            Self::NotMapped { .. } => Errno::ENOENT,
            Self::Reserved { .. } => Errno::EADDRINUSE,
            Self::Unsupported { .. } | Self::BarCopied { .. } => Errno::EOPNOTSUPP,
            Self::Busy { .. } => Errno::EBUSY,
            Self::NoMappingsLeft { .. } => Errno::ENOSPC,
            Self::MemlockLimit { .. } | Self::NoMemory { .. } => Errno::ENOMEM,
            Self::NotPinnable { .. } => Errno::EFAULT,
            Self::Short { .. } | Self::Lost { .. } => Errno::EIO,
            Self::NoDmaBuf { errno, .. }
            | Self::System { errno, .. }
            | Self::Setting { errno, .. }
            | Self::NoLimits { errno } => *errno,
        }
    }

    /// What the kernel means by refusing to map.
    pub(crate) fn of_map(
        request: &'static str,
        locked_by: LockedBy,
        range: IovaRange,
        user: Option<UserRange>,
        mappings: u64,
        errno: Errno,
    ) -> Self {
        match (errno, user) {
            (Errno::ENOSPC, _) => Self::NoMappingsLeft { mappings },
            (Errno::ENOMEM, _) => Self::no_memory(range, locked_by),
            (Errno::EFAULT, Some(user)) => Self::NotPinnable { user },
            (Errno::EADDRINUSE, _) => Self::Reserved { range },
            _ => Self::System { request, range, errno },
        }
    }

    /// The same, of another request, which not every kernel has.
    pub(super) fn of_request(
        self,
        request: &'static str,
        what: &'static str,
        advice: &'static str,
    ) -> Self {
        match self {
            Self::System { errno: Errno::ENOTTY | Errno::EOPNOTSUPP, .. } => {
                Self::Unsupported { what, advice }
            }
            Self::System { range, errno, .. } => Self::System { request, range, errno },
            Self::Setting { errno: Errno::ENOTTY | Errno::EOPNOTSUPP, .. } => {
                Self::Unsupported { what, advice }
            }
            other => other,
        }
    }

    /// Whether it is the limit of locked memory or the memory itself. The kernel does not say what
    /// other processes of a user have pinned, so that against the limit of a user speaks nothing.
    fn no_memory(range: IovaRange, locked_by: LockedBy) -> Self {
        let needed = range.checked_len().unwrap_or(u64::MAX);
        let locked = match locked_by {
            LockedBy::Process => os::locked_bytes(),
            LockedBy::User => os::pinned_bytes(),
        };
        match sys::memlock_limit() {
            Some(limit)
                if !os::may_lock_without_limit()
                    && (locked_by == LockedBy::User || locked.saturating_add(needed) > limit) =>
            {
                Self::MemlockLimit { needed, locked, limit, locked_by }
            }
            _ => Self::NoMemory { range },
        }
    }
}

/// The limit that would be enough. Where others must have used it up, what they have is the limit
/// at most.
const fn enough(needed: u64, locked: u64, limit: u64) -> u64 {
    let sum = locked.saturating_add(needed);
    if sum > limit { sum } else { limit.saturating_add(needed) }
}

/// Whose locked memory counts.
const fn counted(locked_by: LockedBy) -> &'static str {
    match locked_by {
        LockedBy::Process => "",
        LockedBy::User => " by this process, and others of the user count too,",
    }
}

/// What a user can change where a mapping was refused.
const fn refused(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM => "; map memory that is not writable for reading alone",
        Errno::EINVAL => {
            "; check that the memory is whole pages, and that its file is long enough and in memory"
        }
        Errno::EEXIST => "; something is mapped there already",
        Errno::ENODEV => "; the device has taken this memory back",
        os::EBADF => "; the file is not memory",
        _ => "",
    }
}

/// What a user can change where a setting was refused.
const fn option_refused(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM => "; this takes CAP_SYS_RESOURCE",
        Errno::EBUSY => "; set it first, before any address space exists",
        Errno::EADDRINUSE => "; an existing mapping or a device does not permit it",
        _ => "",
    }
}

/// The reason why a device cannot be used, or not this way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system is not set up for it.
    #[error("{bdf} cannot be used by {backend}: {}", Reasons(*bdf, reasons))]
    Unusable {
        /// The device.
        bdf: Bdf,
        /// The interface that was asked for.
        backend: Backend,
        /// Why not, in the order in which to change it; at least one.
        reasons: Vec<Reason>,
    },
    /// Another device of the group has a driver of its own.
    #[error(
        "the IOMMU group {group} of {bdf} is not viable: another driver has a device of this \
         group, and all devices of a group belong to one user"
    )]
    NotViable {
        /// The device.
        bdf: Bdf,
        /// Its group.
        group: u32,
    },
    /// A file of the kernel cannot be opened.
    #[error("{} cannot be opened: {}{}", path.display(), os::words(*errno), advice(*errno))]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel answered.
        errno: Errno,
    },
    /// The kernel has not this interface.
    #[error("{what}: {advice}")]
    Unsupported {
        /// What is missing.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// The kernel does not permit it, and neither it nor the system says why.
    #[error(
        "the kernel does not permit this process to use {bdf} ({request}): another process, or \
         another space of this one, has a device of its group {group}, or the IOMMU's driver keeps \
         the device for the firmware{}; `fuser -v /dev/vfio/{group} /dev/vfio/devices/*` names \
         processes, as root, and `dmesg` the rest",
        if *hides_interrupts {
            ", or this machine does not keep the interrupts of devices apart"
        } else {
            ""
        }
    )]
    NotPermitted {
        /// The device.
        bdf: Bdf,
        /// Its group.
        group: u32,
        /// The request.
        request: &'static str,
        /// Whether the machine does not say if it keeps interrupts of devices apart. Where it says
        /// that it does not, [`Unusable`](Self::Unusable) has [`Reason::UnsafeInterrupts`].
        hides_interrupts: bool,
    },
    /// What is mapped already does not fit the device.
    #[error(
        "{bdf} cannot reach all that is mapped already ({}): unmap what lies outside of the \
         device's apertures, or attach the device before mapping; devices of one group share one \
         space",
        os::words(*errno)
    )]
    DoesNotFit {
        /// The device.
        bdf: Bdf,
        /// What the kernel answered.
        errno: Errno,
    },
    /// Linux would make memory of registers that are mapped, in another page table.
    #[error(
        "Linux before 7.3.4 makes memory of a BAR in a page table that comes after it was mapped, \
         as the one at {range} was, and this is {release}: unmap {range}, attach {bdf}, and map \
         the BAR anew"
    )]
    BarMapped {
        /// The device that a page table is for.
        bdf: Bdf,
        /// Where the BAR is mapped.
        range: IovaRange,
        /// What the kernel is called.
        release: String,
    },
    /// Somebody else has it open.
    #[error(
        "{bdf} is in use: another process has the device or one of its group open, or this process \
         has, through another space"
    )]
    InUse {
        /// The device.
        bdf: Bdf,
    },
    /// iommufd does not take it. The kernel does not say which of the two it is.
    #[error(
        "iommufd does not take {bdf}: a process has it open already, or the device bypasses the \
         CPU's caches, which only VFIO's type 1 permits"
    )]
    NotTaken {
        /// The device.
        bdf: Bdf,
    },
    /// The device was opened by another interface, or by another `/dev/iommu`.
    #[error(
        "this iommufd did not open {bdf}: attach the device to one of its address spaces first"
    )]
    Foreign {
        /// The device.
        bdf: Bdf,
    },
    /// The kernel refused for another reason.
    #[error("{request} of {bdf} failed: {}; `dmesg` may say why", os::words(*errno))]
    System {
        /// The request.
        request: &'static str,
        /// The device.
        bdf: Bdf,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl OpenError {
    /// The errno: what the kernel answered, or would.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Unusable { reasons, .. } => reasons.first().map_or(Errno::ENODEV, errno_of),
            Self::NotViable { .. } | Self::InUse { .. } => Errno::EBUSY,
            Self::NotTaken { .. } | Self::Foreign { .. } => Errno::EINVAL,
            Self::Unsupported { .. } => Errno::ENOTTY,
            Self::BarMapped { .. } => Errno::EOPNOTSUPP,
            Self::NotPermitted { .. } => Errno::EPERM,
            Self::File { errno, .. }
            | Self::DoesNotFit { errno, .. }
            | Self::System { errno, .. } => *errno,
        }
    }
}

/// What a kernel answers whoever tries all the same.
const fn errno_of(reason: &Reason) -> Errno {
    match reason {
        Reason::GroupNotViable { .. } | Reason::GroupHeld { .. } => Errno::EBUSY,
        Reason::Permission { .. } => os::EACCES,
        Reason::UnsafeInterrupts { .. } | Reason::NoRawIo { .. } => Errno::EPERM,
        Reason::NoIommufd { .. } | Reason::NoCdev | Reason::NodeMissing { .. } => Errno::ENOENT,
        _ => Errno::ENODEV,
    }
}

/// Why a device cannot be used, and what to do.
struct Reasons<'a>(Bdf, &'a [Reason]);

impl std::fmt::Display for Reasons<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(bdf, reasons) = self;
        for (index, reason) in reasons.iter().enumerate() {
            let semicolon = if index == 0 { "" } else { "; " };
            write!(f, "{semicolon}{reason}")?;
        }
        match reason::steps(reasons).as_slice() {
            [Step::Run(command)] => write!(f, ": run `{command}` as root"),
            [Step::ByHand(what)] => write!(f, ": {what}"),
            _ => write!(f, ": `dmaspan devices {bdf}` lists the commands that change that"),
        }
    }
}

/// What to do about a file of the kernel that cannot be opened.
const fn advice(errno: Errno) -> &'static str {
    match errno {
        os::EACCES => "; make this user its owner, or run as root",
        Errno::ENOENT => "; the kernel has no such interface, or its module is not loaded",
        Errno::EBUSY => "; another process uses it",
        _ => "",
    }
}
