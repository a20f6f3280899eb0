//! The plan of a run of `map`: its options, checked against what the machine has.

use dmaspan_linux::vfio::Backend;
use dmaspan_linux::{Bdf, MemoryKind};

use crate::args::{BackendArg, Granule, MapArgs};
use dmaspan_cli::machine::Machine;
use dmaspan_cli::size::ByteSize;

/// How much memory of each kind is mapped where nobody says.
const DEFAULT_BYTES: u64 = 1 << 30;

/// What `dmaspan map` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlannedRun {
    /// Maps memory.
    Memory(MapPlan),
    /// Maps registers.
    Bar(BarPlan),
}

/// Which registers are mapped, for the device that they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BarPlan {
    pub(crate) backend: Backend,
    pub(crate) bdf: Bdf,
    /// Which BAR.
    pub(crate) index: u32,
    /// How many times everything is timed.
    pub(crate) runs: u32,
}

/// How memory is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MapPlan {
    /// Bytes of each kind of memory.
    pub(crate) bytes: u64,
    /// What maps.
    pub(crate) backend: BackendArg,
    /// The pages of its tables, where it is the software IOMMU.
    pub(crate) granule: Granule,
    /// How many times everything is timed.
    pub(crate) runs: u32,
    /// The kinds of memory, each once.
    pub(crate) kinds: Vec<MemoryKind>,
    /// What is not as a user would expect.
    pub(crate) notes: Vec<String>,
}

/// The command line asks for what the machine does not have, or for nonsense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UsageError {
    /// A size of 0.
    #[error("a size of 0 maps nothing: ask for {} or more", ByteSize::new(*least))]
    Zero {
        /// The least that can be mapped, in bytes.
        least: u64,
    },
    /// Not a whole number of pages.
    #[error(
        "{} is not a multiple of {}, the page size of {what}: ask for a multiple of it{}",
        exact(*size), ByteSize::new(*multiple), or_base(*size, what)
    )]
    NotAMultiple {
        /// The bytes asked for.
        size: u64,
        /// What they must be a multiple of.
        multiple: u64,
        /// What has pages of that size.
        what: String,
    },
    /// A granule for an IOMMU that has its own.
    #[error("the IOMMU of {bdf} has page sizes of its own: leave --granule out with --backend")]
    GranuleOfReal {
        /// The device.
        bdf: Bdf,
    },
    /// Registers of no device.
    #[error(
        "--bar maps the registers of a device: name the device with --backend, as in \
         --backend vfio:0000:00:05.0"
    )]
    BarOfNone,
    /// More than the machine has.
    #[error(
        "{} of {kind} memory take {} with tables and lists, but only {} are available\
         {limited_by}: ask for less",
        ByteSize::new(*bytes), ByteSize::new(*needed), ByteSize::new(*available)
    )]
    TooMuch {
        /// The kind asked for.
        kind: MemoryKind,
        /// The bytes asked for.
        bytes: u64,
        /// The bytes that a run takes.
        needed: u64,
        /// The bytes that there are.
        available: u64,
        /// Why there are no more, where it is not the machine.
        limited_by: &'static str,
    },
    /// Less may be pinned than the least that can be mapped.
    #[error(
        "this process may pin only {} (RLIMIT_MEMLOCK) and leaves half of that to others, but a \
         page of {what} has {}: raise the limit with `ulimit -l {}`{}, or run as root{outside}",
        ByteSize::new(*lockable), ByteSize::new(*least), least.saturating_mul(2).div_ceil(1024),
        or_base(lockable / 2, what)
    )]
    TooLittleLockable {
        /// The limit, in bytes.
        lockable: u64,
        /// The least that can be mapped, in bytes.
        least: u64,
        /// What has pages of that size.
        what: String,
        /// Where root may pin more.
        outside: &'static str,
    },
}

/// A size that is not rounded.
fn exact(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) {
        ByteSize::new(bytes).to_string()
    } else {
        ByteSize::exact(bytes)
    }
}

/// What else can be done where the kind of memory asks for much.
fn or_base(bytes: u64, what: &str) -> &'static str {
    let page = MemoryKind::Base.page_size();
    let fits = bytes.is_multiple_of(page) && bytes >= page;
    if fits && what.ends_with("memory") { ", or use `--memory base`" } else { "" }
}

impl PlannedRun {
    /// What `args` ask for on `machine`.
    ///
    /// # Errors
    ///
    /// [`UsageError`] where that cannot be done.
    pub(crate) fn new(args: &MapArgs, machine: &Machine) -> Result<Self, UsageError> {
        match (args.bar, args.backend) {
            (None, _) => MapPlan::new(args, machine).map(Self::Memory),
            (Some(_), BackendArg::Soft) => Err(UsageError::BarOfNone),
            (Some(index), BackendArg::Real(backend, bdf)) => {
                Ok(Self::Bar(BarPlan { backend, bdf, index, runs: args.runs }))
            }
        }
    }
}

impl MapPlan {
    /// What `args` ask for on `machine`, without a BAR.
    ///
    /// # Errors
    ///
    /// [`UsageError`] where that cannot be done.
    pub(crate) fn new(args: &MapArgs, machine: &Machine) -> Result<Self, UsageError> {
        let mut notes = Vec::new();
        let mut kinds = match args.memory.is_empty() {
            true => usual_kinds(args.size, &mut notes),
            false => Vec::new(),
        };
        for kind in &args.memory {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
        let pages = kinds.iter().map(|kind| (kind.page_size(), format!("{kind} memory")));
        let granule = match (args.backend, args.granule) {
            (BackendArg::Real(_, bdf), Some(_)) => return Err(UsageError::GranuleOfReal { bdf }),
            // What the IOMMU of a device has is known when the device is open.
            (_, granule) => granule.unwrap_or(Granule::K4),
        };
        let smallest = (granule.bytes(), "the page tables".to_owned());
        // All of them are powers of two, so a multiple of the largest is one of all.
        let largest = pages.chain([smallest.clone()]).max_by_key(|(size, _)| *size);
        let (multiple, what) = largest.unwrap_or(smallest);
        let bytes = match args.size {
            Some(size) => size.bytes(),
            None => default_bytes(multiple, &what, machine, &mut notes)?,
        };
        if bytes == 0 {
            return Err(UsageError::Zero { least: multiple });
        }
        if !bytes.is_multiple_of(multiple) {
            return Err(UsageError::NotAMultiple { size: bytes, multiple, what });
        }
        for &kind in &kinds {
            let (needed, available) = (needed_bytes(bytes), machine.available_for(kind));
            if needed > available {
                let limited_by = machine.limited_by();
                return Err(UsageError::TooMuch { kind, bytes, needed, available, limited_by });
            }
        }
        Ok(Self { bytes, backend: args.backend, granule, runs: args.runs, kinds, notes })
    }
}

/// The kinds of memory where none is named, without those that have only larger pages than `size`
/// is made of: Arm's transparent huge pages have up to 512 MiB.
fn usual_kinds(size: Option<ByteSize>, notes: &mut Vec<String>) -> Vec<MemoryKind> {
    let mut kinds = vec![MemoryKind::Thp, MemoryKind::Base, MemoryKind::Hugetlb2M];
    let Some(size) = size.filter(|size| size.bytes() > 0) else { return kinds };
    kinds.retain(|kind| {
        let page = kind.page_size();
        // Those of 2 MiB are asked of the user everywhere.
        let fits = page <= SMALL_HUGE_PAGE || size.bytes().is_multiple_of(page);
        if !fits {
            let (size, page) = (exact(size.bytes()), ByteSize::new(page));
            notes.push(format!(
                "{kind} memory is left out: {size} is no multiple of its pages of {page}"
            ));
        }
        fits
    });
    kinds
}

const SMALL_HUGE_PAGE: u64 = 2 << 20;

/// What a run takes for `bytes` of memory. Base pages that lie apart need most: for each two
/// leaves, an entry in two lists, one in the frame map and one in the IOTLB, about 100 bytes for
/// 4096.
fn needed_bytes(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 32).saturating_add(32 << 20)
}

/// The usual size, or the largest power of two that leaves a quarter of the memory alone, and half
/// of what the process may pin. The least is `multiple`, the pages of `what`.
fn default_bytes(
    multiple: u64,
    what: &str,
    machine: &Machine,
    notes: &mut Vec<String>,
) -> Result<u64, UsageError> {
    let (available, lockable) = (machine.available(), machine.lockable());
    let fits = |budget: u64| budget.checked_ilog2().map_or(0, |lg2| 1u64 << lg2);
    let by_memory = fits(available.saturating_sub(64 << 20) / 4 * 3);
    let by_limit = if lockable == u64::MAX { u64::MAX } else { fits(lockable / 2) };
    if by_limit < multiple {
        let what = what.to_owned();
        let outside = machine.outside();
        return Err(UsageError::TooLittleLockable { lockable, least: multiple, what, outside });
    }
    let bytes = by_memory.max(multiple).min(by_limit).min(DEFAULT_BYTES.max(multiple));
    if bytes >= DEFAULT_BYTES {
        return Ok(bytes);
    }
    let why = if by_limit < by_memory {
        format!(
            "this process may pin only {} (raise the limit with `ulimit -l`, or run as root{})",
            ByteSize::new(lockable),
            machine.outside()
        )
    } else {
        let limited_by = machine.limited_by();
        format!("only {} of memory are available{limited_by}", ByteSize::new(available))
    };
    let (bytes_shown, usual) = (ByteSize::new(bytes), ByteSize::new(DEFAULT_BYTES));
    notes.push(format!("the size is {bytes_shown} of each kind instead of {usual}, because {why}"));
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ReportFormat;

    const GIB: u64 = 1 << 30;

    fn args(size: Option<u64>, memory: &[MemoryKind], granule: Granule) -> MapArgs {
        let size = size.map(ByteSize::new);
        MapArgs {
            size,
            memory: memory.to_vec(),
            backend: BackendArg::Soft,
            bar: None,
            granule: Some(granule),
            runs: 3,
            format: ReportFormat::Table,
            report: None,
        }
    }

    #[test]
    fn usual_kinds_whose_pages_are_larger_than_the_size_are_left_out_with_a_note() {
        let (mut notes, thp) = (Vec::new(), MemoryKind::Thp.page_size());
        let all = [MemoryKind::Thp, MemoryKind::Base, MemoryKind::Hugetlb2M];
        assert_eq!(usual_kinds(None, &mut notes), all);
        assert_eq!(usual_kinds(Some(ByteSize::new(thp)), &mut notes), all);
        assert!(notes.is_empty());
        let kinds = usual_kinds(Some(ByteSize::new(8 << 20)), &mut notes);
        let is_left_out = !(8_u64 << 20).is_multiple_of(thp);
        assert_eq!(
            (!kinds.contains(&MemoryKind::Thp), notes.len()),
            (is_left_out, is_left_out.into())
        );
    }

    fn plan(size: Option<u64>, kinds: &[MemoryKind], gib: u64) -> Result<MapPlan, UsageError> {
        MapPlan::new(&args(size, kinds, Granule::K4), &Machine::with_available(gib * GIB))
    }

    #[test]
    fn a_small_machine_gets_less_and_is_told() {
        let planned = plan(None, &[MemoryKind::Base], 23).unwrap();
        assert_eq!((planned.bytes, planned.notes.len()), (GIB, 0));
        let planned = plan(None, &[MemoryKind::Base], 1).unwrap();
        assert_eq!(planned.bytes, GIB / 2);
        assert!(planned.notes[0].contains("512 MiB") && planned.notes[0].contains("1 GiB"));
    }

    #[test]
    fn a_process_that_may_pin_little_gets_less_and_is_told() {
        let machine = Machine::with_available(GIB * 8).with_lockable(8 << 20);
        let planned =
            MapPlan::new(&args(None, &[MemoryKind::Base], Granule::K4), &machine).unwrap();
        assert_eq!(planned.bytes, 4 << 20);
        assert!(planned.notes[0].contains("may pin only 8 MiB"), "{:?}", planned.notes);
        // A user who asks for more is told by the kernel, which knows what is pinned already.
        let asked = args(Some(GIB), &[MemoryKind::Base], Granule::K4);
        assert_eq!(MapPlan::new(&asked, &machine).unwrap().bytes, GIB);
    }

    #[test]
    fn a_process_that_may_pin_less_than_a_page_is_told_the_limit_that_would_do() {
        let machine = Machine::with_available(GIB * 8).with_lockable(64 << 10);
        let planned =
            MapPlan::new(&args(None, &[MemoryKind::Base], Granule::K4), &machine).unwrap();
        assert_eq!(planned.bytes, 32 << 10);
        let all = args(None, &[MemoryKind::Base, MemoryKind::Hugetlb2M], Granule::K4);
        let error = MapPlan::new(&all, &machine).unwrap_err().to_string();
        for part in ["only 64 KiB", "hugetlb memory has 2 MiB", "`ulimit -l 4096`", "memory base`"]
        {
            assert!(error.contains(part), "{error}");
        }
        let none = Machine::with_available(GIB * 8).with_lockable(4096);
        let error = MapPlan::new(&args(None, &[MemoryKind::Base], Granule::K4), &none).unwrap_err();
        assert!(error.to_string().contains("`ulimit -l 8`"), "{error}");
    }

    #[test]
    fn sizes_are_whole_pages_of_every_kind_and_of_the_granule() {
        let error = plan(Some(3 << 20), &[MemoryKind::Base, MemoryKind::Hugetlb2M], 8).unwrap_err();
        assert!(error.to_string().contains("multiple of 2 MiB, the page size of hugetlb memory"));
        assert!(plan(Some(3 << 20), &[MemoryKind::Base], 8).is_ok());
        let wanted = args(Some(4096 * 17), &[MemoryKind::Base], Granule::K64);
        let error = MapPlan::new(&wanted, &Machine::with_available(GIB)).unwrap_err();
        assert!(
            error.to_string().contains("multiple of 64 KiB, the page size of the page tables"),
            "{error}"
        );
        assert_eq!(plan(Some(0), &[MemoryKind::Base], 8), Err(UsageError::Zero { least: 4096 }));
    }

    #[test]
    fn more_than_there_is_names_both_numbers() {
        let error = plan(Some(8 * GIB), &[MemoryKind::Base], 4).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("8 GiB of base") && text.contains("only 4 GiB"), "{text}");
        assert!(plan(Some(!0xfff), &[MemoryKind::Base], 4).is_err());
    }

    #[test]
    fn a_real_iommu_has_its_own_granule() {
        let machine = Machine::with_available(8 * GIB);
        let real = BackendArg::Real(Backend::Vfio, "00:05.0".parse().unwrap());
        let mut asked = MapArgs { backend: real, ..args(None, &[MemoryKind::Base], Granule::K4) };
        let error = MapPlan::new(&asked, &machine).unwrap_err();
        assert!(error.to_string().contains("leave --granule out"), "{error}");
        asked.granule = None;
        let planned = MapPlan::new(&asked, &machine).unwrap();
        assert!(matches!(planned.backend, BackendArg::Real(Backend::Vfio, _)));
    }

    #[test]
    fn a_bar_is_of_a_device() {
        let machine = Machine::with_available(8 * GIB);
        let bdf = "00:05.0".parse().unwrap();
        let memory = args(None, &[MemoryKind::Base], Granule::K4);
        let mut asked = MapArgs { bar: Some(2), granule: None, ..memory };
        assert_eq!(PlannedRun::new(&asked, &machine), Err(UsageError::BarOfNone));
        asked.backend = BackendArg::Real(Backend::Iommufd, bdf);
        let planned = BarPlan { backend: Backend::Iommufd, bdf, index: 2, runs: 3 };
        assert_eq!(PlannedRun::new(&asked, &machine), Ok(PlannedRun::Bar(planned)));
        asked.bar = None;
        assert!(matches!(PlannedRun::new(&asked, &machine), Ok(PlannedRun::Memory(_))));
    }

    #[test]
    fn a_kind_named_twice_is_one_row() {
        let planned = plan(Some(4096), &[MemoryKind::Base, MemoryKind::Base], 1).unwrap();
        assert_eq!(planned.kinds, [MemoryKind::Base]);
    }
}
