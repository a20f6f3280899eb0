//! What `dmaspan devices` takes.

use std::path::PathBuf;

use dmaspan_linux::Bdf;

use dmaspan_cli::options::OutputFormat;

pub(crate) const DEVICES_ABOUT: &str = "\
List PCI devices: whether programs can use each, and the commands for it.

A program reaches a device through VFIO's type1 container or through iommufd.
Both need an IOMMU, the driver vfio-pci for the device and for all others of
its group that do DMA, and permission to open the nodes in /dev. For each
device the list says what is missing. For the devices named, or where there
are few, it says why, and which commands change it and take it back.

Nothing is opened or changed: the commands are for you to run, as root.

With --format json there is one object: iommu, hints and devices. Each device
has bdf, vendor, device, class, class_name, driver, driver_override, kind,
present, bridge, numa_node, bars, group, group_node, cdev_node, uses, type1,
iommufd and give_back. type1 and iommufd have usable, reasons (name and text)
and commands; a command that begins with # is something to do by hand.";

pub(crate) const DEVICES_EXAMPLES: &str = "\
Examples:
  dmaspan devices                            devices that are no bridges
  dmaspan devices --all                      bridges, too
  dmaspan devices 0000:00:05.0               one: why, and the commands
  dmaspan devices --format json              for scripts

Exit codes: 0 listed; 1 there is no PCI or no such device; 2 wrong usage.";

/// Which devices, and how to print them.
#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Addresses, like 0000:00:05.0 or 00:05.0 [default: all]
    #[arg(value_name = "BDF")]
    pub(crate) bdfs: Vec<Bdf>,

    /// Bridges, too
    #[arg(long, conflicts_with = "bdfs")]
    pub(crate) all: bool,

    /// How to print: table or json
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: OutputFormat,

    /// The folder that another machine's sys, proc and dev are in
    #[arg(long, hide = true, default_value = "/")]
    pub(crate) root: PathBuf,
}
