//! The ACPI table IORT: Arm's DEN 0049.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::bytes::Bytes;
use super::{FirmwareError, IommuKind, IommuMap, IommuUnit, Requesters, ReservedMemory, Route, To};

/// The types of nodes: 3.1.
const NAMED: u8 = 1;
const ROOT: u8 = 2;
const SMMU: u8 = 3;
const SMMU_V3: u8 = 4;
const RESERVED: u8 = 6;
/// The flag of a mapping that is of one device, whose ID has no meaning.
const SINGLE: u32 = 1;

/// A mapping of IDs of a node.
struct Mapping {
    at: usize,
    first: u32,
    last: u32,
    output: u32,
    target: u32,
    single: bool,
}

impl IommuMap {
    /// Reads the table IORT.
    ///
    /// Devices that are mapped to an interrupt controller without an SMMU between have no streams.
    ///
    /// # Errors
    ///
    /// The table is not believed; see [`FirmwareError`].
    pub fn iort(bytes: &[u8]) -> Result<Self, FirmwareError> {
        let nodes = Bytes::acpi("IORT", bytes)?.nodes(1, 16)?;
        let mut map = Self::default();
        // Where the nodes are that IDs may lead to; those of IOMMUs with their places.
        let mut places = Vec::new();
        for node in &nodes {
            let at = node.start();
            let kind = match node.u8(at, "type of a node")? {
                SMMU => IommuKind::SmmuV2,
                SMMU_V3 => IommuKind::SmmuV3,
                _ => {
                    places.push((at, None));
                    continue;
                }
            };
            places.push((at, Some(map.units.len())));
            let base = node.u64(at + 16, "register base")?;
            map.units.push(IommuUnit { kind, base, pci: None });
        }
        for node in &nodes {
            let at = node.start();
            match node.u8(at, "type of a node")? {
                ROOT => {
                    let segment = node.u32(at + 28, "segment")?;
                    let most = u64::from(u16::MAX);
                    let segment = node.check("segment", at + 28, segment.into(), 0..=most)?;
                    map.root(node, u16::try_from(segment).unwrap_or(0), &places)?;
                }
                NAMED => map.named(node, &places)?,
                RESERVED => map.reserve(node, &places)?,
                _ => {}
            }
        }
        Ok(map)
    }

    fn root(
        &mut self,
        node: &Bytes<'_>,
        segment: u16,
        places: &[(usize, Option<usize>)],
    ) -> Result<(), FirmwareError> {
        for mapping in mappings(node)? {
            let unit = target(node, &mapping, places)?;
            let from = if mapping.single {
                Requesters::Segment(segment)
            } else {
                Requesters::ids(segment, mapping.first..=mapping.last)
            };
            let to = if mapping.single { To::Stream } else { To::Base };
            self.routes.push(Route { from, unit, to: to(mapping.output) });
        }
        Ok(())
    }

    fn named(
        &mut self,
        node: &Bytes<'_>,
        places: &[(usize, Option<usize>)],
    ) -> Result<(), FirmwareError> {
        let name = node.name(node.start() + 29)?;
        for mapping in mappings(node)? {
            let unit = target(node, &mapping, places)?;
            let from = Requesters::Named(Arc::clone(&name));
            self.routes.push(Route { from, unit, to: To::Stream(mapping.output) });
        }
        Ok(())
    }

    /// Memory that streams reach from before the start: 3.1.1.6.
    fn reserve(
        &mut self,
        node: &Bytes<'_>,
        places: &[(usize, Option<usize>)],
    ) -> Result<(), FirmwareError> {
        let at = node.start();
        let count = node.u32(at + 20, "number of ranges")? as usize;
        let offset = node.u32(at + 24, "offset of ranges")? as usize;
        let bytes = count.saturating_mul(20);
        let ranges = node.part(at.saturating_add(offset), bytes, "ranges of memory")?;
        let mut streams = Vec::new();
        for mapping in mappings(node)? {
            if let Some(unit) = target(node, &mapping, places)? {
                let last = mapping.output + (mapping.last - mapping.first);
                streams.push((unit, mapping.output..=last));
            }
        }
        let streams = Requesters::Streams(streams.into());
        for range in (ranges.start()..ranges.end()).step_by(20) {
            let first = ranges.u64(range, "start of memory")?;
            let bytes = ranges.u64(range + 8, "length of memory")?;
            let last = ranges.last_byte(range + 8, first, bytes)?;
            let memory = ReservedMemory { first, last, paddr: Some(first) };
            self.reserved.push((streams.clone(), memory));
        }
        Ok(())
    }
}

/// The mappings of a node's IDs: 3.1.
fn mappings(node: &Bytes<'_>) -> Result<Vec<Mapping>, FirmwareError> {
    let at = node.start();
    let count = node.u32(at + 8, "number of mappings")? as usize;
    if count == 0 {
        return Ok(Vec::new());
    }
    let offset = node.u32(at + 12, "offset of mappings")? as usize;
    let array = node.part(at.saturating_add(offset), count.saturating_mul(20), "mappings")?;
    let one = |at: usize| {
        let single = array.u32(at + 16, "flags of a mapping")? & SINGLE != 0;
        let first = array.u32(at, "first ID")?;
        let output = array.u32(at + 8, "first output ID")?;
        // The table says how many IDs there are besides the first.
        let count = u64::from(array.u32(at + 4, "number of IDs")?) + 1;
        let count = if single { 1 } else { count };
        let last = array.last("number of IDs", at + 4, first, count)?;
        array.last("number of output IDs", at + 4, output, count)?;
        let target = array.u32(at + 12, "reference")?;
        Ok(Mapping { at, first, last, output, target, single })
    };
    let all = (array.start()..array.end()).step_by(20).map(one);
    let mut all = all.collect::<Result<Vec<_>, FirmwareError>>()?;
    // Some firmware says how many IDs there are, where the table has one less: the ID behind the
    // last one is then the first of another mapping, whose it is (Linux: `iort_id_map` in
    // drivers/acpi/arm64/iort.c).
    let ranges = all.iter().filter(|mapping| !mapping.single);
    let mut firsts: Vec<_> = ranges.map(|mapping| mapping.first).collect();
    firsts.sort_unstable();
    for mapping in &mut all {
        if mapping.last > mapping.first && firsts.binary_search(&mapping.last).is_ok() {
            mapping.last -= 1;
        }
    }
    Ok(all)
}

/// The place of the IOMMU to which a mapping leads; none where it leads to another node.
fn target(
    node: &Bytes<'_>,
    mapping: &Mapping,
    places: &[(usize, Option<usize>)],
) -> Result<Option<usize>, FirmwareError> {
    let target = mapping.target;
    let found = places.binary_search_by_key(&(target as usize), |&(at, _)| at);
    let found = found.ok().and_then(|index| places.get(index));
    let offset = mapping.at + 12;
    let none = FirmwareError::NoIommu { table: node.table, what: "reference", offset, target };
    found.map(|&(_, unit)| unit).ok_or(none)
}
