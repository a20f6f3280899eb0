//! A PC: its memory as PVH names it, and its tables as ACPI has them.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::{Range, RangeInclusive};
use core::ptr::NonNull;
use core::slice;

use acpi::mcfg::Mcfg;
use acpi::sdt::{SdtHeader, Signature};
use acpi::{AcpiHandler, AcpiTable, AcpiTables, PhysicalMapping};
use dmaspan_drivers::Mmio as _;
use dmaspan_drivers::firmware::IommuMap;

use super::{Damage, Machine};
use crate::Result;
use crate::memory::registers;

/// Memory, as PVH names it.
#[repr(C)]
pub(crate) struct MemoryRange {
    start: u64,
    len: u64,
    kind: u32,
    _reserved: u32,
}

/// What the kernel was started with.
#[derive(Clone, Copy)]
pub(crate) struct Firmware {
    rsdp: usize,
    ranges: &'static [MemoryRange],
    options: &'static str,
}

/// Memory is mapped one to one.
#[derive(Clone)]
struct OneToOne;

impl AcpiHandler for OneToOne {
    unsafe fn map_physical_region<T>(&self, at: usize, bytes: usize) -> PhysicalMapping<Self, T> {
        let start = core::ptr::with_exposed_provenance_mut(at);
        let start = NonNull::new(start).expect("no table is at 0");
        // SAFETY: the caller promises that it is there.
        unsafe { PhysicalMapping::new(at, start, bytes, bytes, Self) }
    }

    fn unmap_physical_region<T>(_: &PhysicalMapping<Self, T>) {}
}

/// A table of IOMMUs.
#[repr(transparent)]
struct Table<const AMD: bool>(SdtHeader);

// SAFETY: it begins with a header.
unsafe impl<const AMD: bool> AcpiTable for Table<AMD> {
    const SIGNATURE: Signature = if AMD { Signature::IVRS } else { Signature::DMAR };

    fn header(&self) -> &SdtHeader {
        &self.0
    }
}

fn bytes<const AMD: bool>(tables: &AcpiTables<OneToOne>) -> Option<Vec<u8>> {
    let table = tables.find_table::<Table<AMD>>().ok()?;
    let len = table.0.length as usize;
    // SAFETY: the crate has looked at the sum of as many bytes.
    Some(
        unsafe { slice::from_raw_parts(table.virtual_start().as_ptr().cast::<u8>(), len) }.to_vec(),
    )
}

impl Firmware {
    pub(crate) fn new(rsdp: usize, ranges: &'static [MemoryRange], options: &'static str) -> Self {
        Self { rsdp, ranges, options }
    }

    /// The range of memory that an address is in.
    pub(crate) fn memory(&self, at: u64) -> Option<Range<u64>> {
        const RAM: u32 = 1;
        let all = self.ranges.iter().filter(|range| range.kind == RAM);
        let mut all = all.map(|range| range.start..range.start.saturating_add(range.len));
        all.find(|range| range.contains(&at))
    }

    /// The command line.
    pub(crate) fn options(&self) -> String {
        self.options.into()
    }

    /// What firmware says beyond memory.
    pub(crate) fn machine(&self) -> Result<Machine> {
        // SAFETY: PVH passes the address; firmware leaves its tables where they are.
        let tables = unsafe { AcpiTables::from_rsdp(OneToOne, self.rsdp) };
        let tables = tables.map_err(|error| alloc::format!("ACPI's tables: {error:?}"))?;
        let none = "ACPI names no configuration space of PCI";
        let mcfg = tables.find_table::<Mcfg>().map_err(|_| none)?;
        let ecam = mcfg.entries().first().ok_or(none)?.base_address;
        let is_amd = bytes::<true>(&tables).is_some();
        let table = bytes::<false>(&tables).or_else(|| bytes::<true>(&tables));
        let mut table = table.unwrap_or_default();
        damage(&mut table, Damage::of(self.options));
        let iommus = match is_amd {
            _ if table.is_empty() => Err("ACPI has neither DMAR nor IVRS".into()),
            true => IommuMap::ivrs(&table).map_err(Into::into),
            false => IommuMap::dmar(&table, |_, id| buses(ecam, id)).map_err(Into::into),
        };
        // DMAR has the bits of addresses less one (VT-d 4.1, 8.1). Nobody asks with IVRS.
        let address_bits = table.get(36).map_or(0, |&bits| u32::from(bits) + 1);
        Ok(Machine { ecam, window: 0..0, address_bits, iommus })
    }
}

/// The buses behind a bridge of PCI, as firmware has numbered them.
fn buses(ecam: u64, id: u16) -> Option<RangeInclusive<u8>> {
    let space = registers(ecam + (u64::from(id) << 12), 0x1000);
    let [_, _, header, _] = space.read32(0xc).to_le_bytes();
    let [_, secondary, subordinate, _] = space.read32(0x18).to_le_bytes();
    (header & 0x7f == 1).then_some(secondary..=subordinate)
}

/// Cuts a table, or says that its first structure has no length.
fn damage(table: &mut Vec<u8>, damage: Damage) {
    match damage {
        Damage::None => {}
        Damage::Truncated => table.truncate(table.len() / 2),
        Damage::Nonsense => {
            table[50..52].fill(0);
            // Its sum is right, so that the rest is looked at.
            table[9] = 0;
            let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            table[9] = sum.wrapping_neg();
        }
    }
}
