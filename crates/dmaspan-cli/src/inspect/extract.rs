//! A core file with the tables alone: small enough to be sent, without the memory that they map.

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::ForeignMemory;

use super::domain::{Domain, TablePage};
use super::memory::FileMemory;

/// The sizes of ELF's headers of 64 bits: of the file, a segment and a section.
const FILE_HEADER: u64 = 64;
const SEGMENT_HEADER: u64 = 56;
const SECTION_HEADER: u64 = 64;
/// The number of segments that says that the first section header has it (PN_XNUM).
const MANY: u64 = 0xffff;

/// A core file of the tables of `domains`: each table is at its own physical address.
///
/// # Errors
///
/// That the dump cannot be read any more, in one line.
pub(crate) fn core(domains: &[Domain], memory: &FileMemory) -> Result<Vec<u8>, String> {
    let mut pages: Vec<&TablePage> = domains.iter().flat_map(|domain| &domain.tables).collect();
    pages.sort_unstable_by_key(|page| (page.paddr, page.bytes));
    // Neighbours are one segment; a table that is at two levels is there once.
    let mut parts: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        let end = page.paddr.saturating_add(page.bytes);
        match parts.last_mut() {
            Some((_, last)) if page.paddr <= *last => *last = end.max(*last),
            _ => parts.push((page.paddr, end)),
        }
    }
    let count = parts.len() as u64;
    let sections = u64::from(count >= MANY);
    let headers = FILE_HEADER + count * SEGMENT_HEADER + sections * SECTION_HEADER;
    let mut file = Vec::new();
    // The magic number, 64 bits, lower byte first, version 1.
    file.extend(b"\x7fELF\x02\x01\x01");
    file.resize(16, 0);
    let half = |value: u64| u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes();
    let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    file.extend(half(u64::from(elf::abi::ET_CORE)));
    file.extend(half(u64::from(elf::abi::EM_NONE)));
    file.extend(word(1));
    let section_at = (FILE_HEADER + count * SEGMENT_HEADER) * sections;
    for value in [0, FILE_HEADER, section_at] {
        file.extend(value.to_le_bytes());
    }
    file.extend(word(0));
    for value in [FILE_HEADER, SEGMENT_HEADER, count.min(MANY), SECTION_HEADER, sections, 0] {
        file.extend(half(value));
    }
    let mut offset = headers;
    for &(start, end) in &parts {
        let bytes = end - start;
        file.extend(word(u64::from(elf::abi::PT_LOAD)));
        file.extend(word(u64::from(elf::abi::PF_R)));
        for value in [offset, 0, start, bytes, bytes, 0] {
            file.extend(value.to_le_bytes());
        }
        offset += bytes;
    }
    if sections != 0 {
        // sh_info is behind name, type, flags, address, offset, size and link.
        file.resize(file.len() + 44, 0);
        file.extend(word(count));
        file.resize(file.len() + 16, 0);
    }
    for &(start, end) in &parts {
        let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
        let from = file.len();
        file.resize(from + bytes, 0);
        let page = file.get_mut(from..).unwrap_or(&mut []);
        if !memory.read(PhysAddr::new(start), page) {
            return Err(format!("the table at {start:#x} cannot be read again"));
        }
    }
    Ok(file)
}
