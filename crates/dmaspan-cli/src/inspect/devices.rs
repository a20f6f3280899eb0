//! The devices of a page table, read from an IOMMU's own table, which the IOMMU's registers name.
//!
//! Sources: Intel VT-d, D51397, 9.1 "Root Entry" to 9.6 "Scalable-Mode PASID Table Entry" and
//! 11.4.5 "Root Table Address Register"; AMD IOMMU, 48882, 2.2.2.1 "Device Table Entry Format" and
//! 3.4.1 "Device Table Base Address Register"; Arm SMMUv3, IHI 0070, 5.1 to 5.4 and the registers
//! SMMU_STRTAB_BASE and SMMU_STRTAB_BASE_CFG; RISC-V IOMMU, "Device-Directory-Table" and the
//! registers `ddtp` and `capabilities`.

use std::collections::BTreeMap;

use dmaspan::io_pgtable::{ForeignMemory, Half};
use dmaspan::{PhysAddr, lg2};

use super::tables::{Family, TableKind};

/// How many of the devices that something is said of are named.
const MOST_NAMES: usize = 4;
/// How many entries are read: more than the tables of the largest machine have.
const MOST_ENTRIES: usize = 1 << 22;

/// A device with a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Translated {
    pub(crate) device: String,
    pub(crate) kind: TableKind,
    pub(crate) root: u64,
}

/// What an IOMMU's table says.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    pub(crate) translated: Vec<Translated>,
    /// Devices that are not translated, by what is said of them.
    others: BTreeMap<&'static str, Vec<String>>,
    /// Tables that could not be read.
    missing: Vec<String>,
}

impl Devices {
    /// What is to be said of devices that have no table, and of what could not be read.
    pub(crate) fn notes(&self) -> Vec<String> {
        let others = self.others.iter().map(|(what, devices)| {
            let named: Vec<&str> = devices.iter().take(MOST_NAMES).map(String::as_str).collect();
            let named = named.join(", ");
            match devices.len().saturating_sub(MOST_NAMES) {
                0 => format!("{what}: {named}"),
                more => format!("{what}: {named} and {more} more"),
            }
        });
        others.chain(self.missing.iter().take(MOST_NAMES).cloned()).collect()
    }
}

/// Reads the table that these registers lead to.
///
/// # Errors
///
/// What is wrong with the registers, or why nothing can be read, in one line.
pub(crate) fn read(
    family: Family,
    registers: &[u64],
    memory: &dyn ForeignMemory,
) -> Result<Devices, String> {
    let mut reader = Reader { memory, left: MOST_ENTRIES, found: Devices::default() };
    match (family, registers) {
        (Family::Vtd, &[rtaddr]) => reader.vtd(rtaddr),
        (Family::Amd, &[base]) => reader.amd(base),
        (Family::Smmu, &[base, config]) => reader.smmu(base, config),
        (Family::Riscv, &[ddtp, capabilities]) => reader.riscv(ddtp, capabilities)?,
        (Family::Vtd, _) => return Err(takes("vtd", "the register RTADDR")),
        (Family::Amd, _) => return Err(takes("amd", "the device table's base register")),
        (Family::Smmu, _) => return Err(takes("smmuv3", "STRTAB_BASE,STRTAB_BASE_CFG")),
        (Family::Riscv, _) => return Err(takes("riscv", "ddtp,capabilities")),
        _ => return Err("--device-table is for vtd, amd, smmuv3 and riscv".to_owned()),
    }
    if reader.left == 0 {
        return Err(format!("the device table has more than {MOST_ENTRIES} entries"));
    }
    if reader.found.translated.is_empty() && reader.found.notes().is_empty() {
        return Err("the device table has no device".to_owned());
    }
    Ok(reader.found)
}

fn takes(family: &str, what: &str) -> String {
    format!("--device-table for {family} takes the value of {what}")
}

/// Bits 51:12, an address of a page.
const PAGE: u64 = lg2::mask(52) & !lg2::mask(12);
/// Bits 51:6, an address of 64 bytes.
const LINE: u64 = lg2::mask(52) & !lg2::mask(6);

struct Reader<'m> {
    memory: &'m dyn ForeignMemory,
    /// How many entries may still be read.
    left: usize,
    found: Devices,
}

impl Reader<'_> {
    /// The words of an entry; `None` where they are not there, or too many were read.
    fn entry<const N: usize>(&mut self, at: u64) -> Option<[u64; N]> {
        self.left = self.left.checked_sub(1)?;
        let mut words = [0; N];
        for (word, offset) in words.iter_mut().zip((0..).step_by(8)) {
            let mut bytes = [0; 8];
            let read = self.memory.read(PhysAddr::new(at.checked_add(offset)?), &mut bytes);
            *word = read.then(|| u64::from_le_bytes(bytes))?;
        }
        Some(words)
    }

    /// The entries of a table, one after the other, each with its index; those that are missing are
    /// left out, and a note says so.
    fn entries<const N: usize>(&mut self, at: u64, count: u64) -> Vec<(u64, [u64; N])> {
        let mut entries = Vec::new();
        for index in 0..count {
            let Some(entry) = self.entry(at.wrapping_add(index * 8 * N as u64)) else {
                let what = format!("the dump has no entry {index} of the device table at {at:#x}");
                self.found.missing.push(what);
                break;
            };
            if entry != [0; N] {
                entries.push((index, entry));
            }
        }
        entries
    }

    fn table(&mut self, device: String, kind: TableKind, root: u64) {
        self.found.translated.push(Translated { device, kind, root });
    }

    fn note(&mut self, device: &str, what: &'static str) {
        self.found.others.entry(what).or_default().push(device.to_owned());
    }

    fn vtd(&mut self, rtaddr: u64) {
        // TTM, bits 11:10: 1 is scalable mode.
        let scalable = rtaddr >> 10 & 0b11 == 1;
        for (bus, [lower, upper]) in self.entries::<2>(rtaddr & PAGE, 256) {
            if !scalable {
                if lower & 1 != 0 {
                    self.vtd_contexts(bus, lower & PAGE);
                }
                continue;
            }
            for (half, entry) in [(0, lower), (128, upper)] {
                if entry & 1 == 0 {
                    continue;
                }
                for (function, context) in self.entries::<4>(entry & PAGE, 128) {
                    if context[0] & 1 != 0 {
                        self.vtd_pasids(&bdf((bus << 8) + half + function), context);
                    }
                }
            }
        }
    }

    /// Legacy contexts: SSPTPTR in 63:12, TT in 3:2, AW in 66:64.
    fn vtd_contexts(&mut self, bus: u64, at: u64) {
        for (function, [low, high]) in self.entries::<2>(at, 256) {
            let device = bdf(bus << 8 | function);
            match (low & 1, low >> 2 & 0b11) {
                (0, _) => {}
                (_, 2) => self.note(&device, "passed through"),
                _ => self.vtd_second(device, low & PAGE, high & 0b111),
            }
        }
    }

    fn vtd_second(&mut self, device: String, root: u64, width: u64) {
        let bits = match width {
            1 => 39,
            2 => 48,
            3 => 57,
            _ => return self.note(&device, "with a table of a width that there is not"),
        };
        let kind = TableKind { bits: Some(bits), ..TableKind::new(Family::Vtd) };
        self.table(device, kind, root);
    }

    /// Scalable-mode contexts: PASIDDIRPTR in 63:12, PDTS in 11:9, RID_PASID in 83:64.
    fn vtd_pasids(&mut self, device: &str, context: [u64; 4]) {
        let without_pasid = context[1] & lg2::mask(20);
        let directory = 1 << (7 + (context[0] >> 9 & 0b111));
        for (high, [entry]) in self.entries::<1>(context[0] & PAGE, directory) {
            if entry & 1 == 0 {
                continue;
            }
            for (low, entry) in self.entries::<8>(entry & PAGE, 64) {
                let pasid = high << 6 | low;
                let device = match pasid {
                    _ if pasid == without_pasid => device.to_owned(),
                    _ => format!("{device} pasid {pasid:x}"),
                };
                // PGTT, bits 8:6.
                match (entry[0] & 1, entry[0] >> 6 & 0b111) {
                    (0, _) => {}
                    (_, 1) => {
                        // FSPM, bits 131:130: 0 is four levels.
                        let bits = if entry[2] >> 2 & 0b11 == 0 { 48 } else { 57 };
                        let (stage, bits) = (Some(1), Some(bits));
                        let kind = TableKind { stage, bits, ..TableKind::new(Family::Vtd) };
                        self.table(device, kind, entry[2] & PAGE);
                    }
                    (_, 2 | 3) => {
                        self.vtd_second(device, entry[0] & PAGE, entry[0] >> 2 & 0b111);
                    }
                    (_, 4) => self.note(&device, "passed through"),
                    _ => self.note(&device, "with an entry of no kind that there is"),
                }
            }
        }
    }

    /// V and TV in bits 1:0, Mode in 11:9, the root in 51:12, GV in 55.
    fn amd(&mut self, base: u64) {
        let count = (base & lg2::mask(9)).wrapping_add(1) * 4096 / 32;
        for (id, [entry, ..]) in self.entries::<4>(base & PAGE, count) {
            let device = bdf(id);
            let levels = field(entry, 9, 3);
            match (entry & 0b11, levels) {
                (0b11, 1..=6) => {
                    let kind = TableKind { levels: Some(levels), ..TableKind::new(Family::Amd) };
                    self.table(device.clone(), kind, entry & PAGE);
                }
                (0b11, 0) => self.note(&device, "passed through"),
                (0b11, _) => self.note(&device, "with a table of a mode that there is not"),
                _ => {}
            }
            if entry >> 55 & 1 != 0 {
                self.note(&device, "with tables for guest translations, which are not read");
            }
        }
    }

    /// STRTAB_BASE_CFG has LOG2SIZE in 5:0, SPLIT in 10:6, FMT in 17:16.
    fn smmu(&mut self, base: u64, config: u64) {
        let (bits, split) = (config & lg2::mask(6), config >> 6 & lg2::mask(5));
        let streams = 1 << bits.min(32);
        if config >> 16 & 0b11 == 0 {
            return self.smmu_streams(0, base & LINE, streams);
        }
        for (index, [entry]) in self.entries::<1>(base & LINE, streams >> split) {
            // Span in 4:0: so many streams, less one and as a power of two.
            if let Some(lg2) = (entry & lg2::mask(5)).checked_sub(1) {
                self.smmu_streams(index << split, entry & LINE, 1 << lg2.min(split));
            }
        }
    }

    fn smmu_streams(&mut self, first: u64, at: u64, count: u64) {
        for (index, entry) in self.entries::<8>(at, count) {
            let device = format!("stream {:#x}", first + index);
            // V in bit 0, Config in 3:1.
            match (entry[0] & 1, entry[0] >> 1 & 0b111) {
                (0, _) => {}
                (_, 0) => self.note(&device, "blocked"),
                (_, 4) => self.note(&device, "passed through"),
                (_, 5) => self.smmu_context(device, entry[0]),
                (_, 6 | 7) => self.smmu_second(device, [entry[2], entry[3]]),
                _ => self.note(&device, "with an entry of no kind that there is"),
            }
        }
    }

    /// The context of the substream 0: S1Fmt in 5:4, S1ContextPtr in 51:6, S1CDMax in 63:59.
    fn smmu_context(&mut self, device: String, stream: u64) {
        let (mut at, levels) = (stream & LINE, stream >> 4 & 0b11);
        if stream >> 59 != 0 {
            self.note(&device, "with substreams, of which the first alone is read");
            if levels != 0 {
                at = self.entry::<1>(at).map_or(u64::MAX, |[entry]| entry & PAGE);
            }
        }
        let Some([control, lower, upper]) = self.entry(at) else {
            return self.note(&device, "with a context that the dump does not have");
        };
        // T0SZ in 5:0, TG0 in 7:6, EPD0 in 14; the same 16 bits higher for the upper half.
        for (half, shift, root) in [(Half::Lower, 0, lower), (Half::Upper, 16, upper)] {
            if field(control, 14 + shift, 1) != 0 {
                continue;
            }
            let bits = Some(64 - field(control, shift, 6));
            // TG0 and TG1 have other values for the same granules.
            let granule_lg2 = Some(match (half, field(control, 6 + shift, 2)) {
                (Half::Lower, 1) | (Half::Upper, 3) => 16,
                (Half::Lower, 2) | (Half::Upper, 1) => 14,
                _ => 12,
            });
            let stage = Some(1);
            let kind = TableKind { stage, bits, granule_lg2, half, ..TableKind::new(Family::Smmu) };
            self.table(device.clone(), kind, root & lg2::mask(52) & !lg2::mask(4));
        }
    }

    /// S2T0SZ in 165:160, S2TG in 175:174, S2TTB in 243:196.
    fn smmu_second(&mut self, device: String, [control, root]: [u64; 2]) {
        let granule = match field(control, 46, 2) {
            1 => 16,
            2 => 14,
            _ => 12,
        };
        let bits = Some(64 - field(control, 32, 6));
        let (stage, granule_lg2) = (Some(2), Some(granule));
        let kind = TableKind { stage, bits, granule_lg2, ..TableKind::new(Family::Smmu) };
        self.table(device, kind, root & lg2::mask(52) & !lg2::mask(4));
    }

    /// `ddtp` has its mode in 3:0 and a PPN in 53:10; MSI_FLAT, bit 22 of `capabilities`, makes
    /// contexts twice as large.
    fn riscv(&mut self, ddtp: u64, capabilities: u64) -> Result<(), String> {
        let levels = match ddtp & 0xf {
            mode @ 2..=4 => mode - 1,
            mode => return Err(format!("ddtp's mode {mode} has no device table")),
        };
        // How many bits of the device's number each level takes, the lowest first.
        let is_extended = capabilities >> 22 & 1 != 0;
        let [first, second, third] = if is_extended { [6, 9, 9] } else { [7, 9, 8] };
        let mut tables = vec![(0, (ddtp >> 10 & lg2::mask(44)) << 12)];
        let all = [(2, third), (1, second), (0, first)];
        for (level, width) in all.into_iter().filter(|(level, _)| *level < levels) {
            let is_last = level == 0;
            let mut below = Vec::new();
            for (id, at) in tables {
                if is_last && is_extended {
                    for (index, context) in self.entries::<8>(at, 1 << width) {
                        self.riscv_context(id << width | index, context[0], context[1], context[3]);
                    }
                } else if is_last {
                    for (index, [tc, iohgatp, _, fsc]) in self.entries::<4>(at, 1 << width) {
                        self.riscv_context(id << width | index, tc, iohgatp, fsc);
                    }
                } else {
                    for (index, [entry]) in self.entries::<1>(at, 1 << width) {
                        if entry & 1 != 0 {
                            let table = (entry >> 10 & lg2::mask(44)) << 12;
                            below.push((id << width | index, table));
                        }
                    }
                }
            }
            tables = below;
        }
        Ok(())
    }

    /// tc has V in bit 0 and PDTV in 5; iohgatp and fsc have a mode in 63:60 and a PPN in 43:0.
    fn riscv_context(&mut self, id: u64, tc: u64, iohgatp: u64, fsc: u64) {
        if tc & 1 == 0 {
            return;
        }
        let device = bdf(id);
        let bits = |atp: u64| match atp >> 60 {
            8 => Some(39),
            9 => Some(48),
            10 => Some(57),
            _ => None,
        };
        let root = |atp: u64| (atp & lg2::mask(44)) << 12;
        if let Some(bits) = bits(iohgatp) {
            let (stage, bits) = (Some(2), Some(bits));
            let kind = TableKind { stage, bits, ..TableKind::new(Family::Riscv) };
            return self.table(device, kind, root(iohgatp));
        }
        if tc >> 5 & 1 != 0 {
            return self.note(&device, "with a table for each process, which are not read");
        }
        match bits(fsc) {
            Some(bits) => {
                let kind = TableKind { bits: Some(bits), ..TableKind::new(Family::Riscv) };
                self.table(device, kind, root(fsc));
            }
            None => self.note(&device, "passed through"),
        }
    }
}

/// `width` bits of a word from `low` on.
fn field(word: u64, low: u32, width: u32) -> u32 {
    u32::try_from(word >> low & lg2::mask(width)).unwrap_or(u32::MAX)
}

/// The address of a PCI function by its number.
fn bdf(id: u64) -> String {
    format!("{:02x}:{:02x}.{}", id >> 8, id >> 3 & 0x1f, id & 0b111)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Words at addresses; all others are 0.
    struct Words(BTreeMap<u64, u64>);

    impl ForeignMemory for Words {
        fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
            let word = self.0.get(&paddr.get()).copied().unwrap_or(0);
            bytes.copy_from_slice(&word.to_le_bytes());
            paddr.get() < 1 << 32
        }
    }

    fn devices(family: Family, registers: &[u64], words: &[(u64, u64)]) -> Devices {
        read(family, registers, &Words(words.iter().copied().collect())).unwrap()
    }

    fn named(devices: &Devices) -> Vec<(&str, u64, Option<u32>, Option<u32>)> {
        let all = devices.translated.iter();
        all.map(|it| (it.device.as_str(), it.root, it.kind.stage, it.kind.bits)).collect()
    }

    #[test]
    fn contexts_of_vtd_lead_to_tables() {
        // Bus 0: 00:05.0 with 48 bits, 00:06.0 passed through.
        let words = [
            (0x1000, 0x2001),
            (0x2000 + 16 * 0x28, 0x9000 | 1),
            (0x2008 + 16 * 0x28, 0x302),
            (0x2000 + 16 * 0x30, 0b1001),
        ];
        let found = devices(Family::Vtd, &[0x1000], &words);
        assert_eq!(named(&found), [("00:05.0", 0x9000, None, Some(48))]);
        assert_eq!(found.notes(), ["passed through: 00:06.0"]);
        // The same bus in scalable mode: 00:05.0, by PASID 0 and 3.
        let words = [
            (0x1000, 0x2001),
            (0x2000 + 32 * 0x28, 0x3001),
            (0x3000, 0x4001),
            (0x4000, 0x8000 | 2 << 6 | 3 << 2 | 1),
            (0x4000 + 64 * 3, 1 << 6 | 1),
            (0x4010 + 64 * 3, 0xa000),
        ];
        let found = devices(Family::Vtd, &[0x1400], &words);
        assert_eq!(
            named(&found),
            [("00:05.0", 0x8000, None, Some(57)), ("00:05.0 pasid 3", 0xa000, Some(1), Some(48)),]
        );
    }

    #[test]
    fn entries_of_amd_lead_to_tables() {
        let words = [
            (0x1000 + 32 * 0x28, 0x6000_0000_00a6_9603),
            (0x1000 + 32 * 0x30, 0b11),
            (0x1000 + 32 * 0x38, 0b11 | 7 << 9),
        ];
        let found = devices(Family::Amd, &[0x1001], &words);
        assert_eq!(named(&found), [("00:05.0", 0xa6_9000, None, None)]);
        assert_eq!(found.translated[0].kind.levels, Some(3));
        assert_eq!(found.notes().len(), 2);
    }

    #[test]
    fn streams_of_smmuv3_lead_to_tables() {
        // What Linux 6.12 had in a guest: two levels, and a context of 48 bits.
        let words = [
            (0x4801_0000, 0x4ba6_0009),
            (0x4ba6_0000 + 64 * 0x28, 0x4345_b00b),
            (0x4ba6_0000 + 64 * 0x30, 0x9),
            (0x4345_b000, 0x2_e204_c000_3510 | 1 << 30),
            (0x4345_b008, 0x434f_e000),
        ];
        let registers = [0x4000_0000_4801_0000, 1 << 16 | 8 << 6 | 16];
        let found = devices(Family::Smmu, &registers, &words);
        assert_eq!(named(&found), [("stream 0x28", 0x434f_e000, Some(1), Some(48))]);
        assert_eq!(found.notes(), ["passed through: stream 0x30"]);
        let words = [(0x1000, 0b1101), (0x1010, 24 << 32 | 2 << 46), (0x1018, 0x8000)];
        let found = devices(Family::Smmu, &[0x1000, 3], &words);
        assert_eq!(named(&found), [("stream 0x0", 0x8000, Some(2), Some(40))]);
        assert_eq!(found.translated[0].kind.granule_lg2, Some(14));
    }

    #[test]
    fn contexts_of_riscv_lead_to_tables() {
        let first = 9 << 60 | 0x9;
        let words = [
            (0x1000, 0x2 << 10 | 1),
            (0x2000 + 32 * 0x28, 1),
            (0x2018 + 32 * 0x28, first),
            (0x2000 + 32 * 0x30, 1),
            (0x2008 + 32 * 0x30, 8 << 60 | 0xc),
            (0x2000 + 32 * 0x38, 1),
        ];
        let found = devices(Family::Riscv, &[0x1 << 10 | 3, 0], &words);
        assert_eq!(
            named(&found),
            [("00:05.0", 0x9000, None, Some(48)), ("00:06.0", 0xc000, Some(2), Some(39))]
        );
        assert_eq!(found.notes(), ["passed through: 00:07.0"]);
        let words = [(0x1000 + 64 * 0x28, 1), (0x1018 + 64 * 0x28, first)];
        let found = devices(Family::Riscv, &[0x1 << 10 | 2, 1 << 22], &words);
        assert_eq!(named(&found), [("00:05.0", 0x9000, None, Some(48))]);
    }

    #[test]
    fn registers_that_cannot_be_and_tables_that_are_not_there_are_errors() {
        let none = Words(BTreeMap::new());
        for (family, registers, part) in [
            (Family::Vtd, &[0x1000, 1][..], "for vtd takes the value of the register RTADDR"),
            (Family::Smmu, &[0x1000], "STRTAB_BASE,STRTAB_BASE_CFG"),
            (Family::Riscv, &[0x1000], "ddtp,capabilities"),
            (Family::Riscv, &[0x401, 0], "ddtp's mode 1 has no device table"),
            (Family::AmdV2, &[0x1000], "is for vtd, amd, smmuv3 and riscv"),
            (Family::Vtd, &[0x1000], "has no device"),
            (Family::Smmu, &[0x1000, 40], "more than 4194304 entries"),
        ] {
            let error = read(family, registers, &none).unwrap_err();
            assert!(error.contains(part), "{part}: {error}");
        }
        // Beyond the dump it is a note, beside what was found.
        let found = read(Family::Vtd, &[1 << 33], &none).unwrap();
        assert!(found.notes()[0].contains("no entry 0 of the device table at 0x200000000"));
    }
}
