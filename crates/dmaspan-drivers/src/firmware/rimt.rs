//! The ACPI table RIMT: RISC-V IO Mapping Table, version 1.0.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::bytes::Bytes;
use super::{FirmwareError, IommuKind, IommuMap, IommuUnit, Requesters, Route, To};

/// The types of nodes.
const IOMMU: u8 = 0;
const ROOT: u8 = 1;
const PLATFORM: u8 = 2;
/// The flag of an IOMMU that is a PCI function.
const ON_PCI: u32 = 1;

impl IommuMap {
    /// Reads the table RIMT.
    ///
    /// # Errors
    ///
    /// The table is not believed; see [`FirmwareError`].
    pub fn rimt(bytes: &[u8]) -> Result<Self, FirmwareError> {
        let nodes = Bytes::acpi("RIMT", bytes)?.nodes(2, 8)?;
        let mut map = Self::default();
        let mut places = Vec::new();
        for node in &nodes {
            let at = node.start();
            if node.u8(at, "type of a node")? != IOMMU {
                continue;
            }
            places.push(at);
            let base = node.u64(at + 16, "register base")?;
            let on_pci = node.u32(at + 24, "flags")? & ON_PCI != 0;
            let place = (node.u16(at + 32, "segment")?, node.u16(at + 34, "requester ID")?);
            let (kind, pci) = (IommuKind::Riscv, on_pci.then_some(place));
            map.units.push(IommuUnit { kind, base, pci });
        }
        for node in &nodes {
            let at = node.start();
            match node.u8(at, "type of a node")? {
                ROOT => {
                    let segment = node.u16(at + 14, "segment")?;
                    map.rimt_root(node, &places, segment)?;
                }
                PLATFORM => map.rimt_platform(node, &places)?,
                _ => {}
            }
        }
        Ok(map)
    }

    fn rimt_root(
        &mut self,
        node: &Bytes<'_>,
        places: &[usize],
        segment: u16,
    ) -> Result<(), FirmwareError> {
        for_mappings(node, node.start() + 16, places, |[first, last, output], unit| {
            let from = Requesters::ids(segment, first..=last);
            self.routes.push(Route { from, unit: Some(unit), to: To::Base(output) });
        })
    }

    fn rimt_platform(&mut self, node: &Bytes<'_>, places: &[usize]) -> Result<(), FirmwareError> {
        let name = node.name(node.start() + 12)?;
        for_mappings(node, node.start() + 8, places, |[.., output], unit| {
            let from = Requesters::Named(Arc::clone(&name));
            self.routes.push(Route { from, unit: Some(unit), to: To::Stream(output) });
        })
    }
}

/// Calls with the first ID, the last one and the first output ID of each mapping; `header` is where
/// the node says where they are.
fn for_mappings(
    node: &Bytes<'_>,
    header: usize,
    places: &[usize],
    mut found: impl FnMut([u32; 3], usize),
) -> Result<(), FirmwareError> {
    let offset = usize::from(node.u16(header, "offset of mappings")?);
    let count = usize::from(node.u16(header + 2, "number of mappings")?);
    if count == 0 {
        return Ok(());
    }
    let array = node.part(node.start() + offset, count * 20, "mappings")?;
    for at in (array.start()..array.end()).step_by(20) {
        let first = array.u32(at, "first ID")?;
        let count = array.u32(at + 4, "number of IDs")?;
        let output = array.u32(at + 8, "first output ID")?;
        let last = array.last("number of IDs", at + 4, first, count.into())?;
        array.last("number of output IDs", at + 4, output, count.into())?;
        let target = array.u32(at + 12, "reference")?;
        let (table, what, offset) = (array.table, "reference", at + 12);
        let none = FirmwareError::NoIommu { table, what, offset, target };
        let unit = places.binary_search(&(target as usize)).map_err(|_| none)?;
        found([first, last, output], unit);
    }
    Ok(())
}
