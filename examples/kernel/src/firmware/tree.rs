//! A device tree: memory, PCI and IOMMUs.

use alloc::string::String;
use core::ops::Range;
use core::ptr::with_exposed_provenance;

use dmaspan_drivers::firmware::IommuMap;
use dtoolkit::error::FdtParseError;
use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::standard::NodeStandard as _;
use dtoolkit::{Node as _, Property as _};

use super::{Damage, Machine};
use crate::Result;

/// A device tree.
#[derive(Clone, Copy)]
pub(crate) struct Firmware(Fdt<'static>);

impl Firmware {
    /// The tree that the machine put at an address.
    pub(crate) fn at(tree: usize) -> core::result::Result<Self, FdtParseError> {
        // SAFETY: nobody writes there. What it says is checked.
        unsafe { Fdt::from_raw(with_exposed_provenance(tree)) }.map(Self)
    }

    /// The range of memory that an address is in, up to the tree where that is behind the address.
    pub(crate) fn memory(&self, at: u64) -> Option<Range<u64>> {
        let memory = self.0.memory().ok()?.reg().ok()??.next()?;
        let (start, len) = (memory.address::<u64>().ok()?, memory.size::<u64>().ok()?);
        let mut range = start..start.checked_add(len)?;
        let tree = self.0.data().as_ptr().addr() as u64;
        if range.contains(&tree) && tree > at {
            range.end = tree;
        }
        Some(range).filter(|range| range.contains(&at))
    }

    /// The command line.
    pub(crate) fn options(&self) -> String {
        let line = self.0.chosen().and_then(|all| all.bootargs().ok().flatten().map(String::from));
        line.unwrap_or_default()
    }

    /// What firmware says beyond memory.
    pub(crate) fn machine(&self) -> Result<Machine> {
        let damage = Damage::of(&self.options());
        let tree = self.0;
        let mut bytes = tree.data().to_vec();
        if damage == Damage::Truncated {
            bytes.truncate(bytes.len() / 2);
        }
        if damage == Damage::Nonsense {
            spoil(tree, &mut bytes);
        }
        let tree = Fdt::new(&bytes)?;
        let none = "the device tree has no PCI host with a configuration space";
        let host = host(tree.root()).ok_or(none)?;
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
        Ok(Machine { ecam, window, address_bits: u64::BITS, iommus })
    }
}

/// The host of PCI whose configuration space is memory, on any bus of the machine.
fn host(node: FdtNode<'_>) -> Option<FdtNode<'_>> {
    if node.is_compatible("pci-host-ecam-generic") {
        return Some(node);
    }
    node.children().find_map(host)
}

/// Has the first reference to an IOMMU lead nowhere.
fn spoil(tree: Fdt<'_>, bytes: &mut [u8]) {
    let Some(map) = host(tree.root()).and_then(|host| host.property("iommu-map")) else { return };
    let reference = map.value().as_ptr().addr() - bytes_start(tree) + 4;
    if let Some(reference) = bytes.get_mut(reference..reference + 4) {
        reference.fill(0x7f);
    }
}

fn bytes_start(tree: Fdt<'_>) -> usize {
    tree.data().as_ptr().addr()
}
