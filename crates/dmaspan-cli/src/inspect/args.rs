//! The options of `dmaspan inspect`, and its help.

use std::path::PathBuf;

use crate::output::ReportFormat;

use super::memory::Kind;
use super::tables::TableKind;

pub(crate) const INSPECT_ABOUT: &str = "\
Say what an IO page table maps, from a dump of it.

FILE is one of
  - a part of a machine's memory as it is (QEMU: pmemsave), with --base
  - a core file of a machine (QEMU: dump-guest-memory; kdump's ELF)
  - Intel's domain_translation_struct in debugfs; newer kernels have a file of
    that name for each device
  - the lines of a dump by a program that has the table (DumpLines)

A dump of memory needs --iommu, the format, and either --root, the address of a
table, or --device-table, by which the program finds the tables of all devices.
The program says of each table what it maps, by which leaves, which larger
leaves are missed and why, and what is suspicious: broken tables, devices that
reach page tables, frames that several devices reach. It trusts nothing in the
dump, reads each table once a level, and changes nothing.";

pub(crate) const INSPECT_EXAMPLES: &str = "\
Formats for --iommu:
  vtd        Intel, second stage of 48 bits; stage=1, bits=39, 48 or 57
  amd        AMD, host translations of 3 levels; levels=N, encryption=BIT
  amd-v2     AMD, guest translations; bits=48 or 57, encryption=BIT
  smmuv3     Arm, stage 1 of 48 bits; stage=2, bits=N, granule=4k, 16k or 64k
  smmu32     Arm, AArch32's long descriptors; stage=2, bits=N
  v7s        Arm, short descriptors; mediatek for MediaTek's
  riscv      RISC-V, Sv39; bits=48 or 57, stage=2
half=upper is for first stages of 64-bit addresses.

Examples:
  dmaspan inspect /sys/kernel/debug/iommu/intel/domain_translation_struct
  dmaspan inspect guest.mem --root 0x102a5d000 --iommu vtd
  dmaspan inspect guest.mem --iommu amd --device-table 0x17a001
  dmaspan inspect part.mem --base 0x40000000 --root 0x41000000 --iommu smmuv3
  dmaspan inspect vmcore --root 0x1000 --iommu amd,levels=4 --iova 0xfffff000
  dmaspan inspect now.mem --root 0x1000 --iommu riscv --diff before.mem
  dmaspan inspect table.txt --format html --output table.html

Exit codes: 0 read; 1 the dump cannot be read; 2 wrong usage.";

/// What to read, and how to report it.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    /// The dump; several only of debugfs
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,

    /// Form of FILE: raw, elf, debugfs or lines [default: what it looks like]
    #[arg(long, value_name = "KIND", hide_possible_values = true)]
    pub(crate) kind: Option<Kind>,

    /// The address of a raw dump's first byte [default: 0]
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) base: Option<u64>,

    /// The address of a table's root, or NAME=ADDR with a name for the report;
    /// more than once for several tables
    #[arg(long, value_name = "ADDR", value_parser = root)]
    pub(crate) root: Vec<Root>,

    /// The IOMMU's own table, by the values of its registers: finds the roots of
    /// all devices, for --iommu vtd (RTADDR), amd (device table base), smmuv3
    /// (STRTAB_BASE,STRTAB_BASE_CFG) and riscv (ddtp,capabilities)
    #[arg(long, value_name = "REGISTER,...", value_delimiter = ',', value_parser = address)]
    #[arg(conflicts_with = "root")]
    pub(crate) device_table: Vec<u64>,

    /// The format of the tables, as below
    #[arg(long, value_name = "FORMAT")]
    pub(crate) iommu: Option<TableKind>,

    /// Look this IOVA up; may be given more than once
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) iova: Vec<u64>,

    /// Find the IOVAs of this physical address; may be given more than once
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) phys: Vec<u64>,

    /// An earlier dump of the same kind: what was mapped and unmapped since?
    #[arg(long, value_name = "FILE")]
    pub(crate) diff: Option<PathBuf>,

    /// Write a core file with the tables alone: small, and without the
    /// memory that they map
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: Option<PathBuf>,

    /// Format of the output: table, json, html or prometheus
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: ReportFormat,

    /// Write the report to this file, whole or not at all
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// Where a table is, and what the report calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) name: Option<String>,
    pub(crate) address: u64,
}

fn root(text: &str) -> Result<Root, String> {
    let (name, at) = text.rsplit_once('=').map_or((None, text), |(name, at)| (Some(name), at));
    Ok(Root { name: name.map(str::to_owned), address: address(at)? })
}

fn address(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+')),
        None => text.parse().ok(),
    };
    number.ok_or_else(|| format!("{text} is no address: a number, or 0x and hexadecimal digits"))
}
