//! What firmware says of the machine.

use alloc::string::String;
use core::ops::Range;

use dmaspan_drivers::firmware::IommuMap;
use dtoolkit::fdt::Fdt;
use dtoolkit::standard::NodeStandard as _;
use dtoolkit::{Node as _, Property as _};

use crate::Result;

/// What the kernel wants to know of a machine, whose memory it has found already.
pub(crate) struct Machine {
    /// Where the configuration space of PCI is.
    pub(crate) ecam: u64,
    /// Addresses for BARs.
    pub(crate) window: Range<u64>,
    /// Which IOMMU serves which device.
    pub(crate) iommus: Result<IommuMap>,
}

/// What is done to a description before it is read, as the command line asks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Damage {
    None,
    Truncated,
    Nonsense,
}

impl Damage {
    fn of(options: &str) -> Self {
        match options.split(' ').find_map(|one| one.strip_prefix("firmware=")) {
            Some("truncated") => Self::Truncated,
            Some("nonsense") => Self::Nonsense,
            _ => Self::None,
        }
    }
}

/// The first range of memory.
pub(crate) fn memory(tree: Fdt<'_>) -> Option<Range<u64>> {
    let memory = tree.memory().ok()?.reg().ok()??.next()?;
    let (start, len) = (memory.address::<u64>().ok()?, memory.size::<u64>().ok()?);
    Some(start..start.checked_add(len)?)
}

/// The command line.
pub(crate) fn options(tree: Fdt<'_>) -> String {
    let chosen = tree.chosen();
    chosen.and_then(|chosen| chosen.bootargs().ok().flatten().map(String::from)).unwrap_or_default()
}

impl Machine {
    /// Reads a device tree.
    pub(crate) fn of_tree(tree: Fdt<'_>, options: &str) -> Result<Self> {
        let damage = Damage::of(options);
        let mut bytes = tree.data().to_vec();
        if damage == Damage::Truncated {
            bytes.truncate(bytes.len() / 2);
        }
        if damage == Damage::Nonsense {
            spoil(tree, &mut bytes);
        }
        let tree = Fdt::new(&bytes)?;
        let none = "the device tree has no PCI host with a configuration space";
        let host = tree.root().find_compatible("pci-host-ecam-generic").next().ok_or(none)?;
        let ecam = host.reg()?.and_then(|mut all| all.next()).ok_or(none)?.address()?;
        let memory = |range: &dtoolkit::standard::Range<'_>| {
            // The highest word says the space: 32 bits of memory (IEEE 1275's binding to PCI).
            let child = range.child_bus_address::<u128>().ok()?;
            (child >> 64 & 0x0300_0000 == 0x0200_0000).then_some(())?;
            let (start, len) =
                (range.parent_bus_address::<u64>().ok()?, range.length::<u64>().ok()?);
            Some(start..start.checked_add(len)?)
        };
        let window = host.ranges()?.and_then(|mut all| all.find_map(|range| memory(&range)));
        let window = window.ok_or("the PCI host has no addresses for BARs")?;
        let iommus = IommuMap::device_tree(&bytes).map_err(Into::into);
        Ok(Self { ecam, window, iommus })
    }
}

/// Has the first reference to an IOMMU lead nowhere.
fn spoil(tree: Fdt<'_>, bytes: &mut [u8]) {
    let host = tree.root().find_compatible("pci-host-ecam-generic").next();
    let Some(map) = host.and_then(|host| host.property("iommu-map")) else { return };
    let reference = map.value().as_ptr().addr() - bytes_start(tree) + 4;
    if let Some(reference) = bytes.get_mut(reference..reference + 4) {
        reference.fill(0x7f);
    }
}

fn bytes_start(tree: Fdt<'_>) -> usize {
    tree.data().as_ptr().addr()
}
