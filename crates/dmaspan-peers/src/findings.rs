//! Findings in Linux's page tables, shown by its own code: those of the book.
//!
//! Each is a few calls to the tables and what they answered. A Linux that answers otherwise is
//! said to, and is no failure.

use std::path::Path;

use dmaspan::Coherency;

use crate::formats::{amd_v1, lpae};
use crate::linux::{Config, Kind, Linux, Marks};
use crate::memory::View;

/// `IOMMU_READ | IOMMU_WRITE`.
const READ_WRITE: u32 = 0b11;
const PAGE: u64 = 4096;
/// What a table's first address is for hardware.
const TABLES: u64 = 1 << 32;

/// What was done and what came of it, and whether it is as the book has it.
struct Shown {
    lines: Vec<String>,
    is_there: bool,
}

type Finding = (&'static str, fn(&mut Linux) -> Result<Shown, String>);

const FINDINGS: [Finding; 3] = [
    ("generic_pt, AMD v1: of a dirty leaf of several entries the last page is not reported", dirty),
    ("io-pgtable-arm: iova_to_phys() of the last address, with TTBR1, is left on the stack", last),
    ("io-pgtable-arm: memory that goes over 2^48 is mapped to low memory", wraps),
];

/// Shows all findings.
///
/// # Errors
///
/// What went wrong between this program and Linux's.
pub(crate) fn show(server: &Path) -> Result<(), String> {
    let mut linux = Linux::start(server)?;
    for (name, show) in FINDINGS {
        let Shown { lines, is_there } = show(&mut linux)?;
        println!("{name}");
        for line in lines {
            println!("  {line}");
        }
        println!("  => {}\n", if is_there { "as found" } else { "not in this Linux" });
    }
    Ok(())
}

fn config(kind: Kind, features: u64) -> Config {
    Config {
        kind,
        features,
        page_sizes: PAGE,
        input_bits: 48,
        output_bits: 48,
        walks: Coherency::Coherent,
        top_level: 2,
        tables: TABLES,
        encrypted: 0,
    }
}

fn open(linux: &mut Linux, config: &Config) -> Result<(), String> {
    linux.open(config)?.map(|_| ()).ok_or(format!("Linux opens no {:?}", config.kind))
}

/// A device writes a page of a leaf of 64 KiB, which is sixteen entries.
fn dirty(linux: &mut Linux) -> Result<Shown, String> {
    const START: u64 = 0x10_0000;
    const LEN: u64 = 0x1_0000;
    const WRITTEN: u64 = START + 3 * PAGE;
    /// The bit of an entry that hardware sets when it writes (AMD 48882, 2.2.3: D).
    const DIRTY: u64 = 1 << 6;

    open(linux, &config(Kind::AmdV1, amd_v1::FEATURES))?;
    linux.map(START, 0, LEN, READ_WRITE)?;
    let mut table = linux.root()?[0];
    let mut at = |linux: &mut Linux, level: u32| {
        let index = usize::try_from(WRITTEN >> (12 + 9 * level) & 511).unwrap_or(0);
        let words = linux.read(View::Cpu, 4096, &[table])?;
        let (word, place) = (words[0][index], table + 8 * index as u64);
        table = word & 0x000f_ffff_ffff_f000;
        Ok::<_, String>((word, place))
    };
    for level in [2, 1] {
        at(linux, level)?;
    }
    let (entry, place) = at(linux, 0)?;
    linux.poke(place, entry | DIRTY)?;

    let mut lines = vec![
        format!("map {START:#x}..={:#x}, one leaf of 16 entries of 4 KiB", START + LEN - 1),
        format!("a device writes the page at {WRITTEN:#x}: hardware marks its entry"),
    ];
    let mut pages = Vec::new();
    for _ in 0..2 {
        let ranges = linux.dirty(START, LEN, Marks::Cleared)?;
        let found: u64 = ranges.iter().map(|&(_, bytes)| bytes / PAGE).sum();
        lines.push(format!("read and clear what is dirty: {found} of 16 pages"));
        pages.push(found);
    }
    linux.close()?;
    Ok(Shown { lines, is_there: pages == [15, 0] })
}

/// Nothing is mapped, and the stack has one word or another.
fn last(linux: &mut Linux) -> Result<Shown, String> {
    open(linux, &config(Kind::LpaeS1, lpae::NO_WARN | lpae::TTBR1))?;
    let mut lines = vec!["nothing is mapped".to_owned()];
    let mut answers = Vec::new();
    for stack in [0x1111_1111_1111_1111, 0x2222_2222_2222_2222] {
        let answer = linux.translate(u64::MAX, stack)?;
        lines.push(format!("the stack has {stack:#x}: iova_to_phys(u64::MAX) is {answer:#x}"));
        answers.push(answer);
    }
    linux.close()?;
    Ok(Shown { lines, is_there: answers[0] != answers[1] })
}

/// Two pages of memory, of which the second is beyond the addresses that the table can hold.
fn wraps(linux: &mut Linux) -> Result<Shown, String> {
    const LAST: u64 = (1 << 48) - PAGE;

    open(linux, &config(Kind::LpaeS1, lpae::NO_WARN))?;
    let mapped = linux.map_pages(0, LAST, (PAGE, 2), READ_WRITE)?;
    let mut lines = vec![format!(
        "map_pages of two pages at {LAST:#x}, the last page of 48 bits: {}",
        if mapped.accepted { format!("{:#x} bytes", mapped.value) } else { "refused".to_owned() }
    )];
    // An offset, since 0 alone means that nothing is mapped.
    let second = linux.translate(PAGE + 8, 0)?;
    lines.push(format!("the second page leads to {:#x}", second.wrapping_sub(8)));
    let unmapped = linux.unmap_pages(0, (PAGE, 2))?;
    lines.push(format!("unmapped: {:#x} bytes", unmapped.value));
    linux.close()?;
    Ok(Shown { lines, is_there: mapped.accepted && second < LAST })
}
