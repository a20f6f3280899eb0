//! The command line of `dmaspan`.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use dmaspan_cli::hold;
use dmaspan_cli::options::{memory_kind, run_count};
use dmaspan_cli::size::ByteSize;
use dmaspan_linux::vfio::Backend;
use dmaspan_linux::{Bdf, MemoryKind};

use crate::devices::args::{DEVICES_ABOUT, DEVICES_EXAMPLES, DevicesArgs};
use crate::doctor::{DOCTOR_ABOUT, DOCTOR_EXAMPLES, DoctorArgs};
use crate::inspect::args::{INSPECT_ABOUT, INSPECT_EXAMPLES, InspectArgs};
use crate::output::ReportFormat;
use crate::plan::args::{PLAN_ABOUT, PLAN_EXAMPLES, PlanArgs};

/// Maps memory for devices one contiguous span at a time, measures and verifies.
#[derive(Debug, Parser)]
#[command(name = "dmaspan", version, arg_required_else_help = true, term_width = 80)]
pub(crate) struct Args {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Map real memory for a device, check it, and measure how fast that is.
    #[command(long_about = MAP_ABOUT, after_help = MAP_EXAMPLES)]
    Map(MapArgs),
    /// Say what mapping will cost and whether it will fail, without mapping.
    #[command(long_about = PLAN_ABOUT, after_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Say what of this machine makes mapping fail or slow.
    #[command(long_about = DOCTOR_ABOUT, after_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// List PCI devices, and say what a program needs to use each.
    #[command(long_about = DEVICES_ABOUT, after_help = DEVICES_EXAMPLES)]
    Devices(DevicesArgs),
    /// Say what an IO page table maps, from a dump of it.
    #[command(long_about = INSPECT_ABOUT, after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArgs),
    /// Hold hugetlb pages until standard input ends; `map` starts this command.
    #[command(name = hold::COMMAND, hide = true)]
    HoldHugetlb {
        /// The kind of memory that they are for.
        kind: MemoryKind,
        /// Its length in bytes.
        bytes: u64,
    },
}

const MAP_ABOUT: &str = "\
Map real memory for a device, check it, and measure how fast that is.

For each kind of memory in turn, the program allocates SIZE bytes in its
process, pins them, finds the physically contiguous spans, and maps them through
a software IOMMU. A simulated device behind it writes and reads every byte, and
tries every page again after the unmap. Then the program times mapping and
unmapping.

The program needs neither an IOMMU nor a device. The kernel shows physical
addresses only to root (CAP_SYS_ADMIN); without them the program takes virtual
ones, and spans are as contiguous as virtual memory is.

With --backend vfio:BDF the kernel pins the memory and maps it for the PCI
device BDF, which must be bound to vfio-pci. The program times one request that
maps all of the memory and one that unmaps it, beside one request for each page.
It checks what the kernel counts as pinned before, during and after the mapping.
It tries no DMA, as that needs a driver for the device, so verified_bytes is 0.
The JSON has also device, iommu (apertures, page_sizes, mappings_limit) and
ioctls, and lacks what only the kernel knows: pin, leaves, table_bytes, pin_ns,
lookup_ns, table_ns. Its per_page has pages, page_bytes, ioctls, map_ns and
unmap_ns, and its speedup compares bytes in a second.

With --backend noiommu:BDF iommufd pins the memory for a device without an IOMMU
and says by physical addresses where it is, one span a request (Linux 7.3). As
root the program compares them with what pagemap says.

With --bar N the kernel maps the registers of BAR N of the device for the device
itself, as it maps them for another device that is to reach them (peer-to-peer):
by their address in this process with vfio, as a dma-buf with iommufd. Each run
maps them into the process anew. The row has bytes and alignment, and no
per_page.";

const MAP_EXAMPLES: &str = "\
Examples:
  dmaspan map                                1 GiB of each usual kind of memory
  dmaspan map 4G --memory thp,hugetlb        4 GiB of each of two kinds
  dmaspan map 512M --granule 64k             page tables with pages of 64 KiB
  dmaspan map 64M --format json              a report for scripts
  dmaspan map --backend vfio:0000:00:05.0    mapped by the kernel for a device
  dmaspan map --backend vfio:00:05.0 --bar 0 the registers of its BAR 0

Exit codes: 0 done; 1 the check or the mapping failed; 2 wrong usage.";

/// What to map, and how to report it.
#[derive(Debug, clap::Args)]
pub(crate) struct MapArgs {
    /// Size of the memory of each kind: a number of bytes, or
    /// like 512M, 4G or 1.5GiB (K, M, G and T are powers of 1024)
    ///
    /// [default: 1G, or less where the machine has less]
    #[arg(verbatim_doc_comment)]
    pub(crate) size: Option<ByteSize>,

    /// The kinds of memory to map in turn: thp, base,
    /// hugetlb, hugetlb-1g, memfd, memfd-hugetlb, and where
    /// the kernel has such pages hugetlb-64k, hugetlb-32m,
    /// hugetlb-512m, hugetlb-16g
    /// [default: thp,base,hugetlb]
    ///
    /// thp            transparent huge pages
    /// base           base pages alone
    /// hugetlb        hugetlb pages of 2 MiB, reserved for the run
    /// hugetlb-1g     hugetlb pages of 1 GiB, reserved for the run
    /// memfd          a file in memory
    /// memfd-hugetlb  a file in memory with hugetlb pages of 2 MiB, as above
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "KIND,...",
        value_delimiter = ',',
        value_parser = memory_kind,
    )]
    pub(crate) memory: Vec<MemoryKind>,

    /// The IOMMU to map with: soft, vfio:BDF, iommufd:BDF,
    /// compat:BDF, noiommu:BDF
    /// [default: soft]
    ///
    /// soft     a software IOMMU in this process
    /// vfio     the kernel, asked by VFIO (container and group)
    /// iommufd  the kernel, asked by iommufd
    /// compat   iommufd, asked as if it were VFIO's container
    /// noiommu  none: iommufd pins for a device without one
    #[arg(
        long,
        verbatim_doc_comment,
        value_parser = backend,
        default_value = "soft",
        hide_default_value = true
    )]
    pub(crate) backend: BackendArg,

    /// Map the registers of this BAR of the device instead
    /// of memory
    #[arg(long, verbatim_doc_comment, value_name = "N")]
    #[arg(value_parser = bar_index, conflicts_with_all = ["size", "memory", "granule"])]
    pub(crate) bar: Option<u32>,

    /// The smallest page of the software IOMMU: 4k, 16k or
    /// 64k
    /// [default: 4k]
    #[arg(long, verbatim_doc_comment, value_name = "SIZE", ignore_case = true)]
    #[arg(hide_possible_values = true)]
    pub(crate) granule: Option<Granule>,

    /// Number of timed runs, for medians
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = run_count)]
    pub(crate) runs: u32,

    /// Format of the output: table, json, html or prometheus
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: ReportFormat,

    /// Write a page with the report to this file, too
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}

fn bar_index(text: &str) -> Result<u32, String> {
    let index = text.trim().parse().ok().filter(|index| *index < BARS);
    index.ok_or_else(|| format!("--bar takes a whole number from 0 to {}", BARS - 1))
}

/// How many BARs a function may have (PCI Local Bus 3.0, section 6.1).
const BARS: u32 = 6;

/// What maps memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackendArg {
    /// The software IOMMU.
    Soft,
    /// The kernel, for a device.
    Real(Backend, Bdf),
}

fn backend(text: &str) -> Result<BackendArg, String> {
    let text = text.trim();
    if text == "soft" {
        return Ok(BackendArg::Soft);
    }
    let real = text.split_once(':').and_then(|(name, bdf)| Some((name.parse().ok()?, bdf)));
    let Some((backend, bdf)) = real else {
        return Err("--backend takes soft, or vfio:, iommufd:, compat: or noiommu: before the \
                    address of a PCI device, as in vfio:0000:00:05.0"
            .to_owned());
    };
    Ok(BackendArg::Real(backend, bdf.parse::<Bdf>().map_err(|error| error.to_string())?))
}

/// The smallest page of an Arm stage-1 table, by its log2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Granule {
    /// 4 KiB, with blocks of 2 MiB and 1 GiB
    #[value(name = "4k", alias = "4096")]
    K4 = 12,
    /// 16 KiB, with blocks of 32 MiB
    #[value(name = "16k", alias = "16384")]
    K16 = 14,
    /// 64 KiB, with blocks of 512 MiB
    #[value(name = "64k", alias = "65536")]
    K64 = 16,
}

impl Granule {
    /// Its bytes.
    pub(crate) const fn bytes(self) -> u64 {
        1 << self as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> MapArgs {
        let line = ["dmaspan", "map"].iter().chain(args);
        match Args::try_parse_from(line).unwrap().command {
            Command::Map(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_defaults_are_the_three_usual_kinds() {
        let args = parse(&[]);
        assert_eq!(args.memory, [], "the plan chooses them by the size");
        assert_eq!(args.size, None);
        assert_eq!((args.backend, args.granule), (BackendArg::Soft, None));
        assert_eq!((args.runs, args.format), (5, ReportFormat::Table));
    }

    #[test]
    fn granules_and_kinds_are_read_however_they_are_written() {
        for (text, granule) in [("4K", Granule::K4), ("16384", Granule::K16), ("64k", Granule::K64)]
        {
            assert_eq!(parse(&["--granule", text]).granule, Some(granule));
        }
        let kinds = [MemoryKind::Thp, MemoryKind::Base];
        assert_eq!(parse(&["--memory", "thp, base"]).memory, kinds);
    }

    #[test]
    fn a_backend_is_soft_or_names_its_device() {
        let bdf: Bdf = "0000:00:05.0".parse().unwrap();
        for api in Backend::ALL {
            for address in ["0000:00:05.0", "00:05.0"] {
                let text = format!("{}:{address}", api.name());
                let expected = BackendArg::Real(api, bdf);
                assert_eq!(parse(&["--backend", &text]).backend, expected, "{text}");
            }
        }
        assert_eq!(parse(&["--backend=soft"]).backend, BackendArg::Soft);
        for text in ["vfio", "vfio:", "soft:00:05.0", "vfio:5", "kvm:00:05.0", ""] {
            let error = Args::try_parse_from(["dmaspan", "map", "--backend", text]).unwrap_err();
            assert!(error.to_string().contains("0000:00:05.0"), "{text}: {error}");
        }
    }

    #[test]
    fn everything_can_be_chosen() {
        let args = parse(&[
            "8M",
            "--memory",
            "memfd,base",
            "--granule",
            "64k",
            "--runs=2",
            "--format=json",
        ]);
        assert_eq!(args.size, Some(ByteSize::new(8 << 20)));
        assert_eq!(args.memory, [MemoryKind::Memfd, MemoryKind::Base]);
        assert_eq!(args.granule.map(Granule::bytes), Some(65536));
        assert_eq!((args.runs, args.format), (2, ReportFormat::Json));
    }
}
