//! The ACPI table DMAR: VT-d 4.1, chapter 8.

use alloc::vec::Vec;
use core::ops::RangeInclusive;

use super::bytes::Bytes;
use super::{FirmwareError, IommuKind, IommuMap, IommuUnit, Requesters, ReservedMemory, Route, To};

/// The types of the structures that are read: 8.2.
const UNIT: u16 = 0;
const RESERVED: u16 = 1;
/// The flag `INCLUDE_PCI_ALL` of a unit.
const ALL: u8 = 1;
/// The types of an entry of a device scope: 8.3.1.
const ENDPOINT: u8 = 1;
const BRIDGE: u8 = 2;

impl IommuMap {
    /// Reads the table DMAR.
    ///
    /// A scope names a function by the bridges before it, and a bridge stands for all behind it.
    /// Firmware has numbered their buses; `buses` reads the numbers of the bridge that a segment
    /// and a requester ID name: its registers Secondary and Subordinate Bus Number. `None` says
    /// that there is no bridge; the scope is left out then, so that its functions are served by
    /// nothing, or by the unit for all others.
    ///
    /// # Errors
    ///
    /// The table is not believed; see [`FirmwareError`].
    pub fn dmar(
        bytes: &[u8],
        buses: impl Fn(u16, u16) -> Option<RangeInclusive<u8>>,
    ) -> Result<Self, FirmwareError> {
        let table = Bytes::acpi("DMAR", bytes)?;
        let mut map = Self::default();
        let mut others = Vec::new();
        let length = |table: &Bytes<'_>, at: usize| {
            Ok(usize::from(table.u16(at + 2, "length of a structure")?))
        };
        for part in table.parts(48, 4, "structure", length) {
            let part = part?;
            let at = part.start();
            match part.u16(at, "type")? {
                UNIT => {
                    let unit = map.units.len();
                    let segment = part.u16(at + 6, "segment")?;
                    let base = part.u64(at + 8, "register base")?;
                    let flags = part.u8(at + 4, "flags")?;
                    map.units.push(IommuUnit { kind: IommuKind::Vtd, base, pci: None });
                    let route = |from| Route { from, unit: Some(unit), to: To::Id };
                    for_scopes(&part, at + 16, segment, &buses, |ids| {
                        map.routes.push(route(Requesters::ids(segment, ids)));
                    })?;
                    if flags & ALL != 0 {
                        others.push(route(Requesters::Segment(segment)));
                    }
                }
                RESERVED => {
                    let segment = part.u16(at + 6, "segment")?;
                    let first = part.u64(at + 8, "reserved base")?;
                    let last = part.u64(at + 16, "reserved limit")?;
                    part.check("reserved limit", at + 16, last, first..=u64::MAX)?;
                    let memory = ReservedMemory { first, last, paddr: Some(first) };
                    for_scopes(&part, at + 24, segment, &buses, |ids| {
                        map.reserved.push((Requesters::ids(segment, ids), memory));
                    })?;
                }
                _ => {}
            }
        }
        // The unit for all others serves whom none of the scopes names.
        map.routes.append(&mut others);
        Ok(map)
    }
}

/// Calls for the requester IDs of each scope from `offset` on.
fn for_scopes(
    part: &Bytes<'_>,
    offset: usize,
    segment: u16,
    buses: impl Fn(u16, u16) -> Option<RangeInclusive<u8>>,
    mut found: impl FnMut(RangeInclusive<u32>),
) -> Result<(), FirmwareError> {
    let length = |part: &Bytes<'_>, at: usize| {
        let length = usize::from(part.u8(at + 1, "length of a scope")?);
        part.check("length of a scope", at + 1, length as u64, 8..=u64::MAX)?;
        Ok(length)
    };
    for scope in part.parts(offset, 8, "scope", length) {
        let scope = scope?;
        let at = scope.start();
        let kind = scope.u8(at, "type of a scope")?;
        if kind != ENDPOINT && kind != BRIDGE {
            continue; // an interrupt controller, a timer or an object of ACPI
        }
        let Some(id) = function(&scope, segment, &buses)? else { continue };
        found(id.into()..=id.into());
        if let Some(behind) = buses(segment, id).filter(|_| kind == BRIDGE) {
            let (first, last) = behind.into_inner();
            if first <= last {
                found(u32::from(first) << 8..=u32::from(last) << 8 | 0xff);
            }
        }
    }
    Ok(())
}

/// The requester ID to which a scope's path leads; `None` where a bridge of it is none.
fn function(
    scope: &Bytes<'_>,
    segment: u16,
    buses: impl Fn(u16, u16) -> Option<RangeInclusive<u8>>,
) -> Result<Option<u16>, FirmwareError> {
    let at = scope.start();
    let mut bus = scope.u8(at + 5, "start bus")?;
    let mut hop = at + 6;
    loop {
        let device = scope.u8(hop, "device of a path")?;
        let function = scope.u8(hop + 1, "function of a path")?;
        scope.check("device of a path", hop, device.into(), 0..=31)?;
        scope.check("function of a path", hop + 1, function.into(), 0..=7)?;
        let id = u16::from(bus) << 8 | u16::from(device) << 3 | u16::from(function);
        hop += 2;
        if hop + 1 >= scope.end() {
            return Ok(Some(id));
        }
        let Some(behind) = buses(segment, id) else { return Ok(None) };
        bus = *behind.start();
    }
}
