//! The options of `dmaspan plan`, and its help.

use std::path::PathBuf;

use dmaspan::{UserAddr, UserRange};
use dmaspan_linux::Bdf;
use dmaspan_linux::plan::forecast::{IommuModel, LinuxVersion, PaperIommu};
use dmaspan_linux::vfio::LockedBy;

use super::layout_file;
use crate::output::ReportFormat;
use dmaspan_cli::size::ByteSize;

pub(crate) const PLAN_ABOUT: &str = "\
Say what mapping memory for a device will cost and whether it will fail.

The program maps nothing and changes nothing. It plans a layout as a program
that uses dmaspan would, and prints for each map its backing, spans, leaves and
what would be best; then tables, mappings and locked bytes beside their limits;
then what fails or costs more than it has to, each with what mends it, the most
effective first.

A layout is a file of TOML: [[region]] (name, at, size, backing, page, memory,
offset, node, access), [[bar]] (name, at, size, host), [iommu] (kind, bits,
granule, page_sizes, apertures, reserved), [limits] (memlock, locked, mappings,
mapped, cgroup), [[pool]] (page, pages, free) of hugetlb pages, and kernel,
interface, devices, device_node, viommu. docs/layouts has examples.

Of a command line of QEMU it takes -m, -machine (q35, pc, virt), -object
memory-backend-*, -numa, IOMMUs and vfio-pci, and lists all that it ignores. Of
devices that this machine has it plans the BARs, too. The limit of locked memory
is that of this shell, which would start QEMU.

Of a process it takes what looks like a guest's memory (hugetlb pages, files in
memory of 2 MiB and more, private memory of 32 MiB and more), with its frames
where root runs this, and says what it left out. It reads the limits of that
process, finds its devices with their BARs and NUMA nodes by its open files, and
infers from VmLck and VmPin what is mapped already. The process is not stopped:
memory may move meanwhile.

With --format html the report is a page to show and to print. The metrics of
--format prometheus begin with dmaspan_plan_. The JSON has verdict (fits, slow,
fails), regions, maps, mappings, locked, table_bytes, lookups and findings, each
with name, severity, text and mends, which have action and gain, and commands,
options of QEMU and an address (at) as they are to be used.";

pub(crate) const PLAN_EXAMPLES: &str = "\
Examples:
  dmaspan plan --layout docs/layouts/q35-16g.toml
  dmaspan plan --layout vm.toml --iommu vtd,bits=39
  dmaspan plan --layout vm.toml --device 0000:00:05.0
  dmaspan plan --layout vm.toml --format json
  dmaspan plan --pid 4711 --device 0000:00:05.0
  dmaspan plan --pid 4711 --name pc.ram
  dmaspan plan --qemu-cmdline - < /proc/4711/cmdline

Exit codes: 0 it fits; 1 it would fail; 2 wrong usage or a bad layout.";

/// What to plan, for what, and how to print it.
#[derive(Debug, clap::Args)]
#[command(
    group(clap::ArgGroup::new("source").required(true)),
    override_usage = "dmaspan plan [OPTIONS] <--layout FILE|--qemu-cmdline FILE|--pid PID>"
)]
pub(crate) struct PlanArgs {
    /// A layout in a file of TOML
    #[arg(long, value_name = "FILE", group = "source")]
    pub(crate) layout: Option<PathBuf>,

    /// A command line of QEMU in a file, - for standard input
    #[arg(long, value_name = "FILE", group = "source")]
    pub(crate) qemu_cmdline: Option<PathBuf>,

    /// A running process: QEMU, cloud-hypervisor, DPDK
    #[arg(long, value_name = "PID", group = "source")]
    pub(crate) pid: Option<u32>,

    /// Only these addresses of the process, like
    /// 0x7f0000000000-0x7f0080000000; may be given often
    #[arg(long, value_name = "START-END", value_parser = user_range)]
    #[arg(conflicts_with_all = ["layout", "qemu_cmdline", "name"])]
    pub(crate) region: Vec<UserRange>,

    /// Only memory of the process from files whose name has
    /// this part; may be given often
    #[arg(long, value_name = "PART")]
    #[arg(conflicts_with_all = ["layout", "qemu_cmdline"])]
    pub(crate) name: Vec<String>,

    /// The IOMMU instead of the layout's: vtd, amd, smmuv3
    /// or riscv, with bits=N and granule=SIZE behind commas
    #[arg(long, value_name = "KIND", value_parser = iommu)]
    #[arg(conflicts_with = "device")]
    pub(crate) iommu: Option<PaperIommu>,

    /// The IOMMU of this device of the machine
    #[arg(long, value_name = "BDF")]
    pub(crate) device: Option<Bdf>,

    /// The kernel's interface: type1 or iommufd
    #[arg(long, value_name = "NAME", value_parser = layout_file::interface)]
    pub(crate) interface: Option<LockedBy>,

    /// Limit of locked memory (RLIMIT_MEMLOCK), like 8M
    #[arg(long, value_name = "SIZE")]
    pub(crate) memlock: Option<ByteSize>,

    /// The kernel's version, like 6.18
    #[arg(long, value_name = "VERSION")]
    pub(crate) kernel: Option<LinuxVersion>,

    /// Write to this file, which is whole at any time
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Format of the output: table, json, html or prometheus
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: ReportFormat,

    /// A folder with the sys, proc and dev of another machine
    #[arg(long, hide = true, default_value = "/")]
    pub(crate) root: PathBuf,
}

/// Addresses as `/proc/PID/maps` has them, the end not included.
fn user_range(text: &str) -> Result<UserRange, String> {
    let hex = |digits: &str| u64::from_str_radix(digits.trim().trim_start_matches("0x"), 16).ok();
    let range = text.split_once('-').and_then(|(start, end)| {
        let (start, end) = (hex(start)?, hex(end)?);
        UserRange::from_len(UserAddr::new(start), end.checked_sub(start)?).ok()
    });
    range.ok_or_else(|| {
        format!("`{text}` is no range: START-END in hexadecimal, as /proc/PID/maps has them")
    })
}

/// A named IOMMU, as in `vtd,bits=39`.
fn iommu(text: &str) -> Result<PaperIommu, String> {
    let mut words = text.split(',').map(str::trim);
    let kind: IommuModel =
        words.next().unwrap_or_default().parse().map_err(|error| format!("{error}"))?;
    let mut iommu = PaperIommu::new(kind);
    for word in words {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let changed = match name {
            "bits" => {
                let bits = value.parse().map_err(|_| format!("bits={value} is no number"))?;
                iommu.with_bits(bits)
            }
            "granule" => iommu.with_granule(layout_file::bytes(value)?),
            _ => return Err(format!("`{word}` is no option of an IOMMU: bits=N or granule=SIZE")),
        };
        iommu = changed.map_err(|error| error.to_string())?;
    }
    Ok(iommu)
}
