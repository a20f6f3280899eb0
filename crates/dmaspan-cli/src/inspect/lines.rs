//! The lines of `dmaspan::io_pgtable::DumpLines`, a dump of a table by a program that has it.

use std::collections::BTreeMap;

use dmaspan::{Iova, IovaRange, Prot, lg2};

use super::domain::{Domain, Leaves, TablePage};

/// The domains in a text: each line `tree` begins one.
///
/// # Errors
///
/// The line that is wrong, and what is wrong with it.
pub(crate) fn domains(text: &str) -> Result<Vec<Domain>, String> {
    let mut domains: Vec<Domain> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let at = |what: String| format!("line {number}: {what}");
        let mut words = line.split_whitespace();
        let Some(kind) = words.next() else { continue };
        let pairs: Option<BTreeMap<&str, &str>> = words.map(|word| word.split_once('=')).collect();
        let pairs = pairs.ok_or_else(|| at("a word is no key=value".to_owned()))?;
        let line = Pairs(pairs);
        if kind == "tree" {
            domains.push(tree(&line).map_err(at)?);
            continue;
        }
        let Some(domain) = domains.last_mut() else {
            return Err(at("it comes before a line that begins with tree".to_owned()));
        };
        add(domain, kind, &line).map_err(at)?;
    }
    if domains.is_empty() {
        return Err("it has no line that begins with tree".to_owned());
    }
    domains.iter_mut().for_each(Domain::finish);
    Ok(domains)
}

/// The values of a line.
struct Pairs<'l>(BTreeMap<&'l str, &'l str>);

impl Pairs<'_> {
    fn text(&self, key: &str) -> Result<&str, String> {
        self.0.get(key).copied().ok_or_else(|| format!("it has no {key}=…"))
    }

    fn number(&self, key: &str) -> Result<u64, String> {
        let text = self.text(key)?;
        let number = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        number.ok_or_else(|| format!("{key}={text} is no number"))
    }

    fn level(&self) -> Result<u32, String> {
        let level = self.number("level")?;
        u32::try_from(level)
            .ok()
            .filter(|level| *level < 8)
            .ok_or(format!("there is no level {level}"))
    }

    fn range(&self) -> Result<IovaRange, String> {
        let (first, last) = (self.number("first")?, self.number("last")?);
        let range = IovaRange::new(Iova::new(first), Iova::new(last));
        range.ok_or_else(|| format!("first={first:#x} is above last={last:#x}"))
    }
}

fn tree(line: &Pairs<'_>) -> Result<Domain, String> {
    let mut domain = Domain::new(None, &line.text("title")?.replace('_', " "));
    domain.aperture = Some(line.range()?);
    Ok(domain)
}

fn add(domain: &mut Domain, kind: &str, line: &Pairs<'_>) -> Result<(), String> {
    // The lines do not say how large tables are.
    let page = |paddr, level| TablePage { paddr, bytes: 4096, level };
    match kind {
        "table" => {
            let paddr = line.number("at")?;
            domain.root = Some(paddr);
            domain.tables.push(page(paddr, line.level()?));
        }
        "link" => {
            let level = line.level()?.checked_sub(1).ok_or("a link at level 0")?;
            domain.tables.push(page(line.number("table")?, level));
        }
        "leaf" => {
            let (range, size) = (line.range()?, line.number("size")?);
            if !size.is_power_of_two() {
                return Err(format!("size={size:#x} is no power of two"));
            }
            let Some(bytes) = range.checked_len() else {
                return Err("a leaf of all addresses".to_owned());
            };
            let last = domain.leaves.last().map(|leaves| leaves.iova + (leaves.bytes - 1));
            let (iova, paddr) = (range.start().get(), line.number("paddr")?);
            if last.is_some_and(|last| last >= iova) {
                return Err(format!("IOVA {iova:#x} comes behind a higher one"));
            }
            if paddr.checked_add(bytes - 1).is_none() {
                return Err(format!("the memory at {paddr:#x} wraps"));
            }
            let prot = prot(line.text("prot")?)?;
            domain.push(Leaves { iova, paddr, bytes, lg2: lg2::alignment(size), prot });
        }
        "corrupt" => {
            let (level, word, first) = (line.level()?, line.number("word")?, line.number("first")?);
            domain.fault("invalid", 1, || {
                format!("level {level}, entry {word:#x} for {first:#x} is none of the format")
            });
        }
        other => return Err(format!("{other:?} is none of tree, table, link, leaf and corrupt")),
    }
    Ok(())
}

fn prot(text: &str) -> Result<Prot, String> {
    let mut prot = Prot::empty();
    for name in text.split('|').filter(|name| !name.is_empty()) {
        prot |= Prot::from_name(name).ok_or_else(|| format!("prot={name} is no permission"))?;
    }
    Ok(prot)
}

#[cfg(test)]
mod tests {
    use dmaspan::io_pgtable::{Arena, PageTable, VtdSs, VtdSsConfig};
    use dmaspan::{PhysAddr, Span};

    use super::super::page;
    use super::super::report::{Questions, Report, Source};
    use super::*;

    #[test]
    fn what_a_table_dumps_is_read_as_it_was_mapped() {
        let format = VtdSs::new(VtdSsConfig::new(48, 46)).unwrap();
        let mut table = PageTable::new(format, Arena::default()).unwrap();
        let span = Span::new(PhysAddr::new(0x8000_0000), 0x40_3000).unwrap();
        let prot = Prot::READ_WRITE | Prot::CACHE;
        table.whole().map_spans(Iova::new(0x4000_0000), &[span], prot).unwrap();
        let text = table.dump().lines().to_string();
        let domains = domains(&text).unwrap();
        assert_eq!(domains.len(), 1);
        let spans = domains[0].spans();
        assert_eq!((spans.len(), spans[0].iova, spans[0].paddr), (1, 0x4000_0000, 0x8000_0000));
        assert_eq!((spans[0].bytes, spans[0].prot, spans[0].lg2), (0x40_3000, prot, (12, 21)));
        assert_eq!(domains[0].root, Some(table.root().get()));
        assert_eq!(domains[0].table_bytes(), 4 * 4096);
        assert_eq!(domains[0].title, "VT-d second-stage page tables");
    }

    #[test]
    fn leaves_of_the_whole_space_are_told_without_wrapping() {
        let half = |first: &str, last: &str| {
            format!("leaf first={first} last={last} paddr={first} size=0x1000 prot=READ\n")
        };
        let text = "tree title=x first=0x0 last=0xffffffffffffffff\n".to_owned()
            + &half("0x0", "0x7fffffffffffffff")
            + &half("0x8000000000000000", "0xffffffffffffffff");
        let domains = domains(&text).unwrap();
        let source =
            Source { files: Vec::new(), kind: "lines", memory: Vec::new(), compared_with: None };
        let before = Questions { before: Some(&[]), ..Questions::default() };
        let report = Report::new(source, &domains, None, &before);
        assert_eq!((report.domains[0].spans.count, report.domains[0].mapped_bytes), (2, u64::MAX));
        assert!(page::render(&report).contains("0xffffffffffffffff"));
    }

    #[test]
    fn any_changed_byte_is_an_error_or_another_dump() {
        let text = "tree title=x first=0x0 last=0xffffffff\ntable level=2 at=0x1000\n\
                    link level=2 index=0 word=0x2003 first=0x0 last=0x3fffffff table=0x2000\n\
                    leaf level=1 index=0 entries=2 word=0x83 first=0x0 last=0x3fffff paddr=0x0 \
                    size=0x200000 prot=READ|WRITE\n";
        for at in 0..text.len() {
            for byte in [b' ', b'0', b'f', b'=', b'\n'] {
                let mut bytes = text.as_bytes().to_vec();
                bytes[at] = byte;
                let _ = domains(&String::from_utf8(bytes).unwrap());
            }
            let _ = domains(&text[..at]);
        }
    }

    #[test]
    fn what_is_wrong_is_named_by_its_line() {
        let tree = "tree title=x first=0x0 last=0xffff\n";
        for (text, part) in [
            ("leaf level=0\n", "line 1: it comes before"),
            ("", "no line that begins with tree"),
            ("tree title=x first=1\n", "line 1: it has no last"),
            (&format!("{tree}leaf level=0 first=0x0"), "line 2: it has no last"),
            (&format!("{tree}link level=0 table=0x1000"), "line 2: a link at level 0"),
            (&format!("{tree}branch level=0"), "\"branch\" is none of"),
            (&format!("{tree}leaf level"), "no key=value"),
            (
                &format!("{tree}leaf first=0x0 last=0xfff paddr=0x0 size=0x1001 prot=READ"),
                "no power of two",
            ),
            (
                &format!("{tree}leaf first=0x0 last=0xfff paddr=0x0 size=0x1000 prot=FLY"),
                "prot=FLY is no permission",
            ),
            (
                &format!(
                    "{tree}leaf first=0x0 last=0xfff paddr=0xfffffffffffff001 size=0x1000 prot=READ"
                ),
                "wraps",
            ),
        ] {
            let error = domains(text).unwrap_err();
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
