//! The ACPI table IVRS: AMD's 48882, chapter 5.2.

use alloc::vec::Vec;

use super::bytes::Bytes;
use super::{FirmwareError, IommuKind, IommuMap, IommuUnit, Requesters, ReservedMemory, Route, To};

/// The types of blocks: an IOMMU (5.2.2), and memory for all, one, or a range of devices (5.2.4).
const UNITS: [u8; 3] = [0x10, 0x11, 0x40];
const MEMORY: [u8; 3] = [0x20, 0x21, 0x22];
/// The flags of a block of memory: mapped one to one, or left out.
const UNITY: u8 = 1;
const EXCLUSION: u8 = 1 << 3;

impl IommuMap {
    /// Reads the table IVRS.
    ///
    /// Where it describes an IOMMU by several blocks, the block of the highest type counts, as the
    /// manual wants (5.2.2.1).
    ///
    /// # Errors
    ///
    /// The table is not believed; see [`FirmwareError`].
    pub fn ivrs(bytes: &[u8]) -> Result<Self, FirmwareError> {
        let table = Bytes::acpi("IVRS", bytes)?;
        let mut map = Self::default();
        let length =
            |table: &Bytes<'_>, at: usize| Ok(usize::from(table.u16(at + 2, "length of a block")?));
        let blocks = table.parts(48, 4, "block", length).collect::<Result<Vec<_>, _>>()?;
        let mut units = Vec::new();
        for &block in &blocks {
            let at = block.start();
            let kind = block.u8(at, "type of a block")?;
            if UNITS.contains(&kind) {
                let id = block.u16(at + 4, "device ID")?;
                let segment = block.u16(at + 16, "segment")?;
                units.push((segment, id, kind, block));
            } else if MEMORY.contains(&kind) {
                map.ivmd(&block, kind)?;
            }
        }
        // Of one IOMMU's blocks the highest comes first, and the others are dropped.
        units.sort_by_key(|&(segment, id, kind, _)| (segment, id, u8::MAX - kind));
        units.dedup_by_key(|&mut (segment, id, ..)| (segment, id));
        for (segment, id, kind, block) in units {
            map.ivhd(&block, segment, id, kind)?;
        }
        Ok(map)
    }

    /// A block of memory. ACPI has given it no segment before revision 3; it is of all.
    fn ivmd(&mut self, block: &Bytes<'_>, kind: u8) -> Result<(), FirmwareError> {
        let at = block.start();
        let flags = block.u8(at + 1, "flags")?;
        let id = block.u16(at + 4, "device ID")?;
        let end = block.u16(at + 6, "last device ID")?;
        let first = block.u64(at + 16, "start of memory")?;
        let bytes = block.u64(at + 24, "length of memory")?;
        let last = block.last_byte(at + 24, first, bytes)?;
        if flags & (UNITY | EXCLUSION) == 0 {
            return Ok(());
        }
        let from = match kind {
            0x20 => Requesters::All,
            0x21 => Requesters::ids(0, id.into()..=id.into()),
            _ => {
                block.check("last device ID", at + 6, end.into(), id.into()..=0xffff)?;
                Requesters::ids(0, id.into()..=end.into())
            }
        };
        self.reserved.push((from, ReservedMemory { first, last, paddr: Some(first) }));
        Ok(())
    }

    /// A block of an IOMMU, with entries for its devices: 5.2.2.
    fn ivhd(
        &mut self,
        block: &Bytes<'_>,
        segment: u16,
        id: u16,
        kind: u8,
    ) -> Result<(), FirmwareError> {
        let at = block.start();
        let base = block.u64(at + 8, "register base")?;
        let unit = self.units.len();
        self.units.push(IommuUnit { kind: IommuKind::AmdVi, base, pci: Some((segment, id)) });
        let entries = if kind == 0x10 { at + 24 } else { at + 40 };
        let mut direct = Vec::new();
        // A range that is open: its first device, and whose name its devices ask by.
        let mut open: Option<(u16, Option<u16>)> = None;
        for entry in block.parts(entries, 4, "entry", entry_length) {
            let entry = entry?;
            let at = entry.start();
            let device = entry.u16(at + 1, "device ID")?;
            let kind = entry.u8(at, "type of an entry")?;
            let alias = |entry: &Bytes<'_>| entry.u16(at + 5, "alias");
            let (ids, alias) = match kind {
                1 => (0..=0xffff, None),
                2 | 0x46 => (device..=device, None),
                0x42 => (device..=device, Some(alias(&entry)?)),
                3 | 0x47 => {
                    open = Some((device, None));
                    continue;
                }
                0x43 => {
                    open = Some((device, Some(alias(&entry)?)));
                    continue;
                }
                4 => {
                    let Some((first, alias)) = open.take() else {
                        entry.check("end of a range without a beginning", at, 4, 0..=3)?;
                        continue;
                    };
                    entry.check("last device ID", at + 1, device.into(), first.into()..=0xffff)?;
                    (first..=device, alias)
                }
                _ => continue, // padding, an interrupt controller, a timer or an object of ACPI
            };
            let (first, last) = ids.into_inner();
            let from = Requesters::ids(segment, first.into()..=last.into());
            let route = |to| Route { from, unit: Some(unit), to };
            match alias {
                Some(alias) => self.routes.push(route(To::Stream(alias.into()))),
                None => direct.push(route(To::Id)),
            }
        }
        // A device with an alias may be in a range of others too: it asks by the alias (Linux:
        // `init_iommu_from_acpi` in drivers/iommu/amd/init.c).
        self.routes.append(&mut direct);
        Ok(())
    }
}

/// The length of an entry follows from its type: 5.2.2.1.
fn entry_length(block: &Bytes<'_>, at: usize) -> Result<usize, FirmwareError> {
    const OBJECT: u8 = 0xf0;
    Ok(match block.u8(at, "type of an entry")? {
        OBJECT => 22 + usize::from(block.u8(at + 21, "length of a unique ID")?),
        kind => 4 << (kind >> 6),
    })
}
