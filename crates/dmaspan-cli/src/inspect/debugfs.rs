//! Intel's `domain_translation_struct`, as Linux prints it in debugfs.
//!
//! Source: Linux, drivers/iommu/intel/debugfs.c, 5.6 to 7.3. Older kernels have one file with all
//! devices, newer ones a file for each device and each PASID of it. A device is a line
//! `Device BDF @ROOT`, in scalable mode `Device BDF with pasid P @ROOT`, and a line of headings
//! follows. Then each leaf has a line: the IOVA's page number, a bar, and the entries from PML5E to
//! PTE with 16 digits each, 0 where there is none. Newer kernels leave out PDE and PTE where there
//! is none. They print nothing for a device that is not translated, and one line where its IOMMU
//! is off.

use std::collections::BTreeSet;

use dmaspan::io_pgtable::{Entry, Leaf};
use dmaspan::lg2;

use super::domain::{Domain, Leaves, TablePage};
use super::tables::{Family, TableKind, Tables};

/// The entries of a line, from PML5E to PTE.
const ENTRIES: usize = 5;
/// As many of them are always there.
const FIRST_ENTRIES: usize = 3;
/// The digits of an entry.
const DIGITS: usize = 16;
/// What newer kernels print of an IOMMU that is off.
pub(super) const OFF: &str = "DMA Remapping is not enabled on";
/// The bits that as many levels translate.
const INPUT_BITS: u32 = 57;
/// Bit 2: in the first stage U/S, which Linux sets in all leaves; in the second X, which it never
/// sets.
const USER: u64 = 1 << 2;

/// A line with a leaf.
struct Line {
    number: usize,
    iova: u64,
    /// By level, level 0 first.
    entries: [u64; ENTRIES],
}

/// A device as the text has it.
struct Device {
    name: String,
    root: u64,
    lines: Vec<Line>,
}

/// The domains in a text; devices with one root share one. There may be none: newer kernels print
/// nothing for a device that is not translated.
///
/// # Errors
///
/// The line that is wrong, and what is wrong with it.
pub(crate) fn domains(text: &str, kind: Option<TableKind>) -> Result<Vec<Domain>, String> {
    let devices = devices(text)?;
    let mut domains: Vec<Domain> = Vec::new();
    for device in devices {
        if let Some(same) = domains.iter_mut().find(|domain| domain.root == Some(device.root)) {
            same.devices.push(device.name);
            continue;
        }
        domains.push(domain(device, kind)?);
    }
    Ok(domains)
}

fn devices(text: &str) -> Result<Vec<Device>, String> {
    let mut devices: Vec<Device> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [] | ["IOVA_PFN", ..] => {}
            _ if line.starts_with(OFF) => {}
            ["Device", name, at] => devices.push(device(number, name, None, at)?),
            ["Device", name, "with", "pasid", pasid, at] => {
                devices.push(device(number, name, Some(pasid), at)?);
            }
            [pfn, "|", entries @ ..] => {
                let Some(device) = devices.last_mut() else {
                    return Err(format!("line {number}: an entry without a device before it"));
                };
                device.lines.push(entry(number, pfn, entries)?);
            }
            _ => {
                return Err(format!(
                    "line {number}: neither a device, nor headings, nor an entry of \
                     domain_translation_struct: {:?}",
                    line.chars().take(40).collect::<String>()
                ));
            }
        }
    }
    Ok(devices)
}

fn device(number: usize, name: &str, pasid: Option<&str>, at: &str) -> Result<Device, String> {
    let root = at.strip_prefix('@').and_then(hexadecimal);
    let root = root.ok_or_else(|| format!("line {number}: {at:?} is no @0x… with a root"))?;
    let name = match pasid {
        // The one that requests without PASID have.
        None | Some("0") => name.to_owned(),
        Some(pasid) => format!("{name} pasid {pasid}"),
    };
    Ok(Device { name, root, lines: Vec::new() })
}

fn entry(number: usize, pfn: &str, words: &[&str]) -> Result<Line, String> {
    let number_of = |word: &str| {
        hexadecimal(word).ok_or_else(|| format!("line {number}: {word:?} is no number like 0x1f"))
    };
    let iova = number_of(pfn)?.checked_mul(4096);
    let iova = iova.ok_or_else(|| format!("line {number}: no IOVA has the page number {pfn}"))?;
    if !(FIRST_ENTRIES..=ENTRIES).contains(&words.len()) {
        let found = words.len();
        return Err(format!(
            "line {number}: {found} entries in place of {FIRST_ENTRIES} to {ENTRIES}: is it cut \
             off?"
        ));
    }
    let mut entries = [0; ENTRIES];
    for (entry, word) in entries.iter_mut().rev().zip(words) {
        *entry = number_of(word)?;
        let digits = word.len() - "0x".len();
        if digits != DIGITS {
            return Err(format!(
                "line {number}: {word:?} has {digits} digits in place of {DIGITS}: is it cut off?"
            ));
        }
    }
    Ok(Line { number, iova, entries })
}

/// A number of Linux's `0x%llx`.
fn hexadecimal(word: &str) -> Option<u64> {
    let digits = word.strip_prefix("0x")?;
    // `from_str_radix` takes a sign.
    let all = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

/// The domain of a device.
fn domain(device: Device, kind: Option<TableKind>) -> Result<Domain, String> {
    let (tables, inferred) = tables(&device, kind)?;
    let mut domain = Domain::new(Some(device.root), tables.title());
    domain.page_sizes = tables.page_sizes();
    domain.aperture = None;
    domain.devices.push(device.name);
    domain.notes.extend(inferred);
    let mut links = BTreeSet::new();
    let mut leaves = Vec::with_capacity(device.lines.len());
    let mut top = 0;
    for line in &device.lines {
        leaves.push((line.number, leaf(tables.as_ref(), line, &mut links, &mut top)?));
    }
    // In the order of the tree already, unless somebody joined texts.
    leaves.sort_by_key(|(_, leaf)| leaf.iova);
    for pair in leaves.windows(2) {
        if let [(_, one), (number, next)] = pair
            && one.iova + (one.bytes - 1) >= next.iova
        {
            return Err(format!(
                "line {number}: IOVA {:#x} is mapped by another line too",
                next.iova
            ));
        }
    }
    leaves.into_iter().for_each(|(_, leaf)| domain.push(leaf));
    let pages = links.into_iter().map(|(paddr, level)| TablePage { paddr, bytes: 4096, level });
    domain.tables = pages.collect();
    domain.tables.push(TablePage { paddr: device.root, bytes: 4096, level: top });
    domain.finish();
    Ok(domain)
}

/// The tables that a device's entries are of, and a note where that is a guess.
fn tables(
    device: &Device,
    kind: Option<TableKind>,
) -> Result<(Box<dyn Tables>, Option<String>), String> {
    let (bits, kind_is_given) = (Some(INPUT_BITS), kind.is_some());
    if kind.is_some_and(|kind| kind.family != Family::Vtd) {
        return Err(
            "domain_translation_struct is Intel's: --iommu takes vtd, with stage=1 or stage=2, for \
             it"
            .to_owned(),
        );
    }
    let leaf_of = |line: &Line| line.entries.iter().copied().find(|entry| *entry != 0);
    let mut leaves = device.lines.iter().filter_map(leaf_of).peekable();
    let first = leaves.peek().is_some() && leaves.all(|leaf| leaf & USER != 0);
    let likely = if first { 1 } else { 2 };
    let kind = kind.unwrap_or(TableKind { stage: Some(likely), ..TableKind::new(Family::Vtd) });
    let stage = kind.stage.unwrap_or(2);
    let note = match (device.lines.is_empty(), kind_is_given) {
        (true, _) => None,
        (false, false) => Some(format!(
            "the text does not say which stage its tables are of: stage {stage} by bit 2 of the \
             leaves (--iommu vtd,stage=1 or 2 says it)"
        )),
        (false, true) => (stage != likely).then(|| {
            format!("by bit 2 of the leaves the tables are of stage {likely}, not of stage {stage}")
        }),
    };
    Ok((TableKind { bits, ..kind }.tables()?, note))
}

/// The leaf of a line; adds the tables above it to `links`, by address and level, and raises `top`
/// to the level of the highest entry.
fn leaf(
    tables: &dyn Tables,
    line: &Line,
    links: &mut BTreeSet<(u64, u32)>,
    top: &mut u32,
) -> Result<Leaves, String> {
    let Line { number, iova, ref entries } = *line;
    let with_level = || (0..).zip(entries.iter().copied());
    let mut used = with_level().filter(|(_, entry)| *entry != 0);
    let Some((level, word)) = used.next() else {
        return Err(format!("line {number}: all entries are 0"));
    };
    let Entry::Leaf(Leaf { paddr, lg2 }) = tables.decode(level, word) else {
        let title = tables.title();
        return Err(format!(
            "line {number}: {word:#x} is no leaf of level {level} of {title}: is it cut off?"
        ));
    };
    for (level, word) in used {
        let Entry::Table(table) = tables.decode(level, word) else {
            return Err(format!("line {number}: {word:#x} of level {level} leads to no table"));
        };
        links.insert((table.get(), level - 1));
        *top = (*top).max(level);
    }
    *top = (*top).max(level);
    if !lg2::is_aligned(iova, lg2) {
        let size = lg2::size(lg2);
        return Err(format!(
            "line {number}: IOVA {iova:#x} is no multiple of its leaf's {size:#x} bytes"
        ));
    }
    if iova >> INPUT_BITS != 0 {
        return Err(format!("line {number}: IOVA {iova:#x} is above what five levels translate"));
    }
    let prot = tables.prot(level, word);
    let paddr = lg2::align_down(paddr.get(), lg2);
    Ok(Leaves { iova, paddr, bytes: lg2::size(lg2), lg2, prot })
}

#[cfg(test)]
mod tests {
    use dmaspan::Prot;

    use super::*;

    /// As 6.1 prints it: headings with tabs, and zeros for what is not there.
    const OLD: &str = "\
Device 0000:00:05.0 @0x102a5d000
IOVA_PFN\t\tPML5E\t\t\tPML4E\t\t\tPDPE\t\t\tPDE\t\t\tPTE
0x00000000fee00 |\t0x0000000000000000\t0x0000000102a60003\t\
0x0000000102a61003\t0x0000000102a62003\t0x0000000000005003
0x0000000100000 |\t0x0000000000000000\t0x0000000102a60003\t\
0x0000000102a64003\t0x0000000140000883\t0x0000000000000000

Device 0000:00:06.0 @0x102a5d000
IOVA_PFN\t\tPML5E\t\t\tPML4E\t\t\tPDPE\t\t\tPDE\t\t\tPTE

";

    #[test]
    fn devices_of_one_root_are_one_domain() {
        let domains = domains(OLD, None).unwrap();
        assert_eq!(domains.len(), 1);
        let domain = &domains[0];
        assert_eq!(domain.devices, ["0000:00:05.0", "0000:00:06.0"]);
        assert_eq!(
            (domain.root, domain.title.as_str()),
            (Some(0x1_02a5_d000), "VT-d second-stage page tables")
        );
        let page = Leaves {
            iova: 0xfee0_0000,
            paddr: 0x5000,
            bytes: 4096,
            lg2: 12,
            prot: Prot::READ_WRITE,
        };
        let large = Leaves {
            iova: 1 << 32,
            paddr: 0x1_4000_0000,
            bytes: 2 << 20,
            lg2: 21,
            prot: Prot::READ_WRITE | Prot::CACHE,
        };
        assert_eq!(domain.leaves, [page, large]);
        let levels: Vec<_> =
            domain.tables.iter().map(|page| (page.paddr & 0xf_f000, page.level)).collect();
        assert_eq!(
            levels,
            [(0x5_d000, 3), (0x6_0000, 2), (0x6_1000, 1), (0x6_2000, 0), (0x6_4000, 1)]
        );
    }

    #[test]
    fn a_pasid_has_a_domain_of_its_own_and_user_leaves_are_of_the_first_stage() {
        let text = "Device 0000:6a:01.0 with pasid 0 @0x10000\n\
            IOVA_PFN         \tPML5E             \tPML4E             \tPDPE\tPDE\tPTE\n\
            0x0000000000001 |\t0x0000000000000000\t0x0000000000011027\t0x0000000000012027\t\
            0x0000000000013027\t0x8000000000005067\n\
            Device 0000:6a:01.0 with pasid 3 @0x20000\n";
        let domains = domains(text, None).unwrap();
        let names: Vec<_> = domains.iter().map(Domain::name).collect();
        assert_eq!(names, ["0000:6a:01.0", "0000:6a:01.0 pasid 3"]);
        assert_eq!(domains[0].title, "x86-64 page tables");
        assert!(domains[0].notes[0].contains("stage 1 by bit 2"));
        let prot = domains[0].leaves[0].prot;
        assert!(prot.contains(Prot::READ_WRITE | Prot::NOEXEC) && !prot.contains(Prot::PRIV));
        let of = |kind: &str| super::domains(text, Some(kind.parse().unwrap())).unwrap();
        let forced = of("vtd,stage=2");
        assert_eq!(forced[0].title, "VT-d second-stage page tables");
        assert!(forced[0].notes[0].ends_with("of stage 1, not of stage 2"), "{forced:?}");
        assert!(of("vtd,stage=1")[0].notes.is_empty());
    }

    /// A number with all digits.
    fn long(word: &str) -> String {
        hexadecimal(word).map_or_else(|| word.to_owned(), |number| format!("0x{number:016x}"))
    }

    #[test]
    fn newer_kernels_leave_out_the_entries_below_a_leaf() {
        // As 7.3 prints it: headings with spaces, and no entries below a leaf.
        let start = "Device 0000:00:05.0 @0x102a5d000\n\
             IOVA_PFN         \tPML5E             \tPML4E             \tPDPE              \t\
             PDE               \tPTE\n";
        let path = "0x0000000000000000\t0x0000000102a60003";
        let lines = format!(
            "0x0000000040000 |\t{path}\t0x0000000140000083\n\
             0x0000000080000 |\t{path}\t0x0000000102a61003\t0x0000000180000083\n\
             0x0000000080200 |\t{path}\t0x0000000102a61003\t0x0000000102a62003\t\
             0x0000000000005003\n"
        );
        let found = domains(&format!("{start}{lines}"), None).unwrap();
        let leaves: Vec<_> =
            found[0].leaves.iter().map(|it| (it.iova, it.paddr, it.bytes)).collect();
        let expected = [
            (0x4000_0000, 0x1_4000_0000, 1 << 30),
            (0x8000_0000, 0x1_8000_0000, 2 << 20),
            (0x8020_0000, 0x5000, 4096),
        ];
        assert_eq!(leaves, expected);
        // A text that ends anywhere within a line is not taken for a shorter one.
        for at in 0..lines.len() {
            let cut = domains(&format!("{start}{}", &lines[..at]), None);
            let is_whole = at == 0 || lines[at - 1..=at].contains('\n');
            assert_eq!(cut.is_ok(), is_whole, "{at}: {:?}", &lines[..at]);
        }
        // The two devices of another text have no translation, or an IOMMU that is off.
        assert!(domains("", None).unwrap().is_empty());
        assert!(domains("DMA Remapping is not enabled on dmar0\n", None).unwrap().is_empty());
    }

    #[test]
    fn any_changed_byte_is_an_error_or_another_dump() {
        for at in 0..OLD.len() {
            for byte in [b' ', b'0', b'f', b'|', b'\n'] {
                let mut bytes = OLD.as_bytes().to_vec();
                bytes[at] = byte;
                let _ = domains(&String::from_utf8(bytes).unwrap(), None);
            }
            let _ = domains(&OLD[..at], None);
        }
    }

    #[test]
    fn what_is_wrong_is_named_by_its_line() {
        let row = |pfn: &str, entries: &str| {
            let entries: Vec<_> = entries.split(' ').map(long).collect();
            format!(
                "Device 0000:00:05.0 @0x1000\nIOVA_PFN PML5E PML4E PDPE PDE PTE\n\
                 {pfn} | {}\n",
                entries.join("\t")
            )
        };
        for (text, part) in [
            (OLD.replace("\t0x0000000000005003", ""), "line 3: 0x102a62003 is no leaf of level 1"),
            (row("0x1", "0x0 0x0"), "line 3: 2 entries in place of 3 to 5"),
            (row("0x1", "0x0 0x0 0x0 0x0 0x0 0x0"), "line 3: 6 entries in place of 3 to 5"),
            (OLD.replace("5003\n", "5\n"), "has 13 digits in place of 16: is it cut off?"),
            (OLD.replace("@0x102a5d000", "@102a5d000"), "line 1: \"@102a5d000\" is no @0x"),
            (
                OLD.replace("Device 0000:00:05.0 @0x102a5d000\n", ""),
                "line 2: an entry without a device",
            ),
            (format!("{OLD}Dmesg: hello\n"), "line 9: neither a device"),
            (row("0x1", "0x0 0x0 0x0 0x0 0x0"), "line 3: all entries are 0"),
            (row("0x1", "0x0 0x0 0x0 0x2003 zero"), "\"zero\" is no number"),
            (row("0x1", "0x0 0x0 0x0 0x2003 0x+5003"), "\"0x+5003\" is no number"),
            (row("0x1", "0x0 0x0 0x0 0x200083 0x0"), "is no multiple of its leaf's 0x200000"),
            (row("0x1", "0x0 0x0 0x0 0x83 0x3003"), "0x83 of level 1 leads to no table"),
            (row("0x1", "0x0 0x0 0x0 0x2003 0x0"), "is no leaf of level 1"),
            (row("0xffffffffffffffff", "0x0 0x0 0x0 0x2003 0x3003"), "no IOVA has the page number"),
            (row("0x2000000000000", "0x0 0x0 0x0 0x2003 0x3003"), "above what five levels"),
        ] {
            let error = domains(&text, None).unwrap_err();
            assert!(error.contains(part), "{part}: {error}");
        }
        let twice = OLD.replace("0x0000000100000 |", "0x0000000000000 |");
        let twice = twice.replace("0x00000000fee00 |", "0x0000000000003 |");
        let error = domains(&twice, None).unwrap_err();
        assert!(error.contains("line 3: IOVA 0x3000 is mapped by another line too"), "{error}");
    }
}
