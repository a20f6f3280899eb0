//! The options of `dmaspan devices`, and its help.

use std::path::PathBuf;

use dmaspan_linux::Bdf;

use dmaspan_cli::options::OutputFormat;

pub(crate) const DEVICES_ABOUT: &str = "\
List PCI devices, and say what a program needs to use each.

A program reaches a device through VFIO's type1 container or through iommufd.
Both need an IOMMU, the driver vfio-pci for the device and for all others of
its group that do DMA, and permission to open the nodes in /dev. The list says
for each device what is missing. For the devices that you name, or where there
are few, it also says why, which commands change that, and which undo them.

This program opens and changes nothing: run the commands yourself, as root.
In a container it may not see what the machine has mounted, or which network
interfaces it has. The use of a disk or network card is then unknown, and no
command takes the device away: ask on the host.

With --format json the report is one object: iommu, hints and devices. Each
device has bdf, vendor, device, class, class_name, driver, driver_override,
kind, present, bridge, numa_node, bars, group, group_node, cdev_node, uses,
type1, iommufd, noiommu and give_back. type1, iommufd and noiommu have usable,
reasons (name and text) and commands; a command that begins with # is a step to
take by hand. noiommu is iommufd without an IOMMU: the device reaches all memory,
and the program tells it physical addresses (Linux 7.3).";

pub(crate) const DEVICES_EXAMPLES: &str = "\
Examples:
  dmaspan devices                            all devices but bridges
  dmaspan devices --all                      all devices
  dmaspan devices 0000:00:05.0               one device, with the commands
  dmaspan devices --format json              a report for scripts

Exit codes: 0 listed; 1 there is no PCI or no such device; 2 wrong usage.";

/// Which devices, and how to print them.
#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Addresses of devices, like 0000:00:05.0 or 00:05.0 [default: all]
    #[arg(value_name = "BDF")]
    pub(crate) bdfs: Vec<Bdf>,

    /// List bridges, too
    #[arg(long, conflicts_with = "bdfs")]
    pub(crate) all: bool,

    /// Format of the output: table or json
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: OutputFormat,

    /// A folder with the sys, proc and dev of another machine
    #[arg(long, hide = true, default_value = "/")]
    pub(crate) root: PathBuf,
}
