//! Findings in a dump: broken tables, and mappings that reach memory that they should not reach.

use std::collections::BTreeSet;

use dmaspan::Prot;
use serde::Serialize;

use super::domain::{Domain, MappedSpan, TablePage};
use super::memory::FileMemory;

/// How many examples a finding has.
const MOST_EXAMPLES: usize = 8;
/// How many of the mappings of one frame are looked at for an example.
const LOOKED_AT: usize = 64;
/// Writes to these addresses are interrupts on x86, and never translated (VT-d, 3.14; AMD IOMMU,
/// 2.1.4.2).
const INTERRUPTS: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

/// Says how bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// A sound system has none of it.
    Wrong,
    /// It may be meant.
    Look,
    /// It explains something.
    Note,
}

/// One kind of thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) name: &'static str,
    pub(crate) severity: Severity,
    /// How many ranges or entries.
    pub(crate) count: u64,
    /// The memory that it is about; absent where it is about entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// What it means.
    pub(crate) text: String,
    /// The first few.
    pub(crate) examples: Vec<String>,
}

/// The spans of each domain, in the order of the domains.
pub(crate) type Spans = Vec<Vec<MappedSpan>>;

/// Everything that is found, the worst first.
pub(crate) fn all(domains: &[Domain], spans: &Spans, memory: Option<&FileMemory>) -> Vec<Finding> {
    let mut findings = faults(domains);
    findings.extend(tables(domains, spans));
    findings.extend(overlaps(domains, spans));
    findings.extend(interrupts(domains, spans));
    findings.extend(memory.and_then(|memory| outside(domains, spans, memory)));
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// What readers said of the tables.
fn faults(domains: &[Domain]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for domain in domains {
        for (&name, faults) in &domain.faults {
            let examples = faults.first.iter().map(|text| format!("{}: {text}", domain.name()));
            match findings.iter_mut().find(|finding| finding.name == name) {
                Some(finding) => {
                    finding.count += faults.count;
                    let room = MOST_EXAMPLES.saturating_sub(finding.examples.len());
                    finding.examples.extend(examples.take(room));
                }
                None => findings.push(Finding {
                    name,
                    severity: Severity::Wrong,
                    count: faults.count,
                    bytes: None,
                    text: meaning(name).to_owned(),
                    examples: examples.take(MOST_EXAMPLES).collect(),
                }),
            }
        }
    }
    findings
}

const fn meaning(fault: &str) -> &'static str {
    match fault.as_bytes() {
        b"invalid" => {
            "entries are none of the format: the format, the root or the number of levels is \
             another, or the table is broken"
        }
        b"outside_aperture" => {
            "entries translate addresses outside of the aperture: there are more bits than --iommu \
             says, or they are of the other half"
        }
        b"missing" => "links lead to tables that the dump does not have",
        b"loop" => "links lead back up the tree; they were not followed",
        b"shared_table" => {
            "several links lead to one table; what it maps is listed at the first of them alone"
        }
        b"table_at_two_levels" => "a table is linked at two levels",
        b"torn_group" => "entries of one large leaf differ; each is listed as a leaf of its own",
        b"another_format" => "a table is of another format than --iommu says",
        b"no_table" => "a device has a table that cannot be read",
        b"incomplete" => "the rest of the dump was not read",
        _ => "entries that no sound tree has",
    }
}

/// Mappings of the tables themselves.
fn tables(domains: &[Domain], spans: &Spans) -> Option<Finding> {
    let mut pages: Vec<&TablePage> = domains.iter().flat_map(|domain| &domain.tables).collect();
    pages.sort_unstable();
    pages.dedup_by_key(|page| page.paddr);
    let largest = pages.iter().map(|page| page.bytes).max()?;
    let (mut count, mut bytes, mut examples, mut writable) = (0, 0, Vec::new(), false);
    for (domain, spans) in domains.iter().zip(spans) {
        for span in spans {
            // A table that begins this much before the span may reach into it.
            let first = span.paddr.saturating_sub(largest - 1);
            let from = pages.partition_point(|page| page.paddr < first);
            let inside = pages.iter().skip(from).take_while(|page| page.paddr <= span.paddr_last());
            for page in inside.filter(|page| page.paddr.saturating_add(page.bytes) > span.paddr) {
                count += 1;
                bytes += page.bytes;
                writable |= span.prot.contains(Prot::WRITE);
                if examples.len() < MOST_EXAMPLES {
                    examples.push(format!(
                        "{} maps the level {} table at {:#x} at IOVA {:#x} ({})",
                        domain.name(),
                        page.level,
                        page.paddr,
                        span.iova.saturating_add(page.paddr.saturating_sub(span.paddr)),
                        permissions(span.prot),
                    ));
                }
            }
        }
    }
    let text = if writable {
        "a device can write page tables: it can give itself any memory"
    } else {
        "a device can read page tables"
    };
    let severity = Severity::Wrong;
    let finding = Finding {
        name: "tables_mapped",
        severity,
        count,
        bytes: Some(bytes),
        text: text.to_owned(),
        examples,
    };
    (count != 0).then_some(finding)
}

/// A range of memory that is mapped more than once, while it grows.
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    last: u64,
    /// Two of its mappings: numbers of spans.
    pair: (usize, usize),
}

/// Ranges of one kind.
#[derive(Default)]
struct Ranges {
    count: u64,
    bytes: u64,
    open: Option<Range>,
    examples: Vec<Range>,
}

impl Ranges {
    fn add(&mut self, start: u64, last: u64, pair: (usize, usize)) {
        self.bytes = self.bytes.saturating_add((last - start).saturating_add(1));
        if let Some(open) = &mut self.open
            && open.last.checked_add(1) == Some(start)
            && open.pair == pair
        {
            open.last = last;
            return;
        }
        self.close();
        self.open = Some(Range { start, last, pair });
    }

    fn close(&mut self) {
        if let Some(range) = self.open.take() {
            self.count += 1;
            if self.examples.len() < MOST_EXAMPLES {
                self.examples.push(range);
            }
        }
    }

    fn finding(
        mut self,
        name: &'static str,
        text: &str,
        domains: &[Domain],
        all: &[Of<'_>],
    ) -> Option<Finding> {
        self.close();
        let mapping = |number: usize, at: u64| {
            let &(domain, span) = all.get(number)?;
            let iova = span.iova.saturating_add(at.saturating_sub(span.paddr));
            let name = domains.get(domain)?.name();
            Some(format!("{name} at IOVA {iova:#x} ({})", permissions(span.prot)))
        };
        let examples = self.examples.iter().filter_map(|&Range { start, last, pair }| {
            let (one, other) = (mapping(pair.0, start)?, mapping(pair.1, start)?);
            Some(format!("{start:#x}..={last:#x}: {one} and {other}"))
        });
        let (count, bytes, severity) = (self.count, Some(self.bytes), Severity::Look);
        let (text, examples) = (text.to_owned(), examples.collect());
        (count != 0).then_some(Finding { name, severity, count, bytes, text, examples })
    }
}

/// A span and the number of its domain.
type Of<'s> = (usize, &'s MappedSpan);

/// The spans that have a frame, while frames are gone through by address.
struct Sweep<'s> {
    all: Vec<Of<'s>>,
    /// Numbers of those that have the frame.
    active: BTreeSet<usize>,
    /// How many of them each domain has, and how many domains have any.
    by_domain: Vec<usize>,
    present: usize,
    writers: usize,
}

impl Sweep<'_> {
    fn writes(&self, number: usize) -> bool {
        self.all.get(number).is_some_and(|(_, span)| span.prot.contains(Prot::WRITE))
    }

    fn domain(&self, number: usize) -> Option<usize> {
        self.all.get(number).map(|(domain, _)| *domain)
    }

    fn begin(&mut self, number: usize) {
        self.active.insert(number);
        self.writers += usize::from(self.writes(number));
        if let Some(count) = self.domain(number).and_then(|at| self.by_domain.get_mut(at)) {
            self.present += usize::from(*count == 0);
            *count += 1;
        }
    }

    fn end(&mut self, number: usize) {
        self.active.remove(&number);
        self.writers -= usize::from(self.writes(number));
        if let Some(count) = self.domain(number).and_then(|at| self.by_domain.get_mut(at)) {
            *count -= 1;
            self.present -= usize::from(*count == 0);
        }
    }

    /// The first of the mappings, and another one that stands so to it.
    fn pair(&self, stands: impl Fn(usize, usize) -> bool) -> (usize, usize) {
        let first = self.active.first().copied().unwrap_or(0);
        let mut others = self.active.iter().copied().skip(1).take(LOOKED_AT);
        (first, others.find(|&other| stands(first, other)).unwrap_or(first))
    }
}

/// Frames that are mapped more than once: for two domains, twice for one, with different rights.
fn overlaps(domains: &[Domain], spans: &Spans) -> Vec<Finding> {
    let with_domain = spans.iter().enumerate();
    let all = with_domain.flat_map(|(at, spans)| spans.iter().map(move |span| (at, span)));
    let mut sweep = Sweep {
        all: all.collect(),
        active: BTreeSet::new(),
        by_domain: vec![0; domains.len()],
        present: 0,
        writers: 0,
    };
    // Where spans begin and where the addresses behind them are, in order; ends come first.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * sweep.all.len());
    for (number, (_, span)) in sweep.all.iter().enumerate() {
        events.push((span.paddr, true, number));
        events.extend(span.paddr_last().checked_add(1).map(|behind| (behind, false, number)));
    }
    events.sort_unstable();
    let [mut shared, mut aliased, mut mixed] = [(); 3].map(|()| Ranges::default());
    let mut events = events.into_iter().peekable();
    while let Some((at, begins, number)) = events.next() {
        if begins {
            sweep.begin(number);
        } else {
            sweep.end(number);
        }
        let next = events.peek().map(|(next, ..)| *next);
        let count = sweep.active.len();
        if count < 2 || next == Some(at) {
            continue;
        }
        let last = next.map_or(u64::MAX, |next| next - 1);
        if sweep.present > 1 {
            let of_others = |one, other| sweep.domain(one) != sweep.domain(other);
            shared.add(at, last, sweep.pair(of_others));
        }
        if count > sweep.present {
            let of_one = |one, other| sweep.domain(one) == sweep.domain(other);
            aliased.add(at, last, sweep.pair(of_one));
        }
        if sweep.writers != 0 && sweep.writers != count {
            let differ = |one, other| sweep.writes(one) != sweep.writes(other);
            mixed.add(at, last, sweep.pair(differ));
        }
    }
    [
        ("shared_frames", "frames that devices of different domains reach", shared),
        ("aliased_frames", "frames that one domain maps at several IOVAs", aliased),
        ("mixed_permissions", "frames that one mapping may write and another may only read", mixed),
    ]
    .into_iter()
    .filter_map(|(name, text, ranges)| ranges.finding(name, text, domains, &sweep.all))
    .collect()
}

/// Mappings of what is never translated.
fn interrupts(domains: &[Domain], spans: &Spans) -> Option<Finding> {
    let (mut count, mut bytes, mut examples) = (0, 0, Vec::new());
    for (domain, spans) in domains.iter().zip(spans) {
        // x86's tables have these titles.
        if !["VT-d", "AMD", "x86-64"].iter().any(|title| domain.title.starts_with(title)) {
            continue;
        }
        for span in spans {
            let (first, last) = (span.iova.max(INTERRUPTS.0), span.iova_last().min(INTERRUPTS.1));
            if first > last {
                continue;
            }
            count += 1;
            bytes += last - first + 1;
            if examples.len() < MOST_EXAMPLES {
                examples.push(format!("{} maps IOVA {first:#x}..={last:#x}", domain.name()));
            }
        }
    }
    let text = "IOVAs of x86's interrupts: hardware takes accesses there for interrupts and does \
                not translate them";
    let (name, severity) = ("interrupt_window", Severity::Look);
    let bytes = Some(bytes);
    (count != 0).then(|| Finding { name, severity, count, bytes, text: text.to_owned(), examples })
}

/// Mappings of memory that the dump does not have.
fn outside(domains: &[Domain], spans: &Spans, memory: &FileMemory) -> Option<Finding> {
    let (mut count, mut bytes, mut examples) = (0, 0_u64, Vec::new());
    for (domain, spans) in domains.iter().zip(spans) {
        for span in spans {
            let inside = memory.overlap(span.paddr, span.paddr_last());
            if inside >= span.bytes {
                continue;
            }
            count += 1;
            bytes = bytes.saturating_add(span.bytes - inside);
            if examples.len() < MOST_EXAMPLES {
                examples.push(format!(
                    "{} maps {:#x}..={:#x} at IOVA {:#x}",
                    domain.name(),
                    span.paddr,
                    span.paddr_last(),
                    span.iova
                ));
            }
        }
    }
    let text = "addresses that the dump does not have: registers of devices (BARs), or memory that \
                was not dumped";
    let (name, severity) = ("outside_dump", Severity::Note);
    let bytes = Some(bytes);
    (count != 0).then(|| Finding { name, severity, count, bytes, text: text.to_owned(), examples })
}

/// Permissions as people read them.
pub(crate) fn permissions(prot: Prot) -> String {
    let mut text = match (prot.contains(Prot::READ), prot.contains(Prot::WRITE)) {
        (true, true) => "rw",
        (true, false) => "r",
        (false, true) => "w",
        (false, false) => "-",
    }
    .to_owned();
    for (bit, name) in [(Prot::MMIO, " mmio"), (Prot::PRIV, " priv")] {
        if prot.contains(bit) {
            text.push_str(name);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(iova: u64, paddr: u64, bytes: u64, prot: Prot) -> MappedSpan {
        MappedSpan { iova, paddr, bytes, prot, lg2: (12, 12) }
    }

    fn domain(name: &str, root: u64) -> Domain {
        let mut domain = Domain::new(Some(root), "VT-d second-stage page tables");
        domain.devices.push(name.to_owned());
        domain.tables.push(TablePage { paddr: root, bytes: 4096, level: 3 });
        domain
    }

    fn named(findings: &[Finding], name: &str) -> Finding {
        findings.iter().find(|finding| finding.name == name).unwrap().clone()
    }

    #[test]
    fn mappings_that_reach_what_they_should_not_are_found() {
        let domains = [domain("00:05.0", 0x1000), domain("00:06.0", 0x9000)];
        let (all_of, read) = (Prot::READ_WRITE, Prot::READ);
        let spans = vec![
            vec![
                span(0x10_0000, 0x8_0000, 0x4000, all_of),
                span(0x20_0000, 0x8_1000, 0x1000, read),
                span(0xfedf_f000, 0x40_0000, 0x2000, all_of),
            ],
            vec![span(0, 0x8_3000, 0x2000, all_of), span(0x5000, 0, 0x2000, all_of)],
        ];
        let findings = all(&domains, &spans, None);
        let tables = named(&findings, "tables_mapped");
        assert_eq!((tables.severity, tables.count, tables.bytes), (Severity::Wrong, 1, Some(4096)));
        assert_eq!(
            tables.examples,
            ["00:06.0 maps the level 3 table at 0x1000 at IOVA 0x6000 (rw)"]
        );
        let shared = named(&findings, "shared_frames");
        assert_eq!((shared.count, shared.bytes), (1, Some(0x1000)));
        assert_eq!(
            shared.examples,
            ["0x83000..=0x83fff: 00:05.0 at IOVA 0x103000 (rw) and 00:06.0 at IOVA 0x0 (rw)"]
        );
        let aliased = named(&findings, "aliased_frames");
        assert_eq!((aliased.count, aliased.bytes), (1, Some(0x1000)));
        let mixed = named(&findings, "mixed_permissions");
        assert_eq!(
            mixed.examples,
            ["0x81000..=0x81fff: 00:05.0 at IOVA 0x101000 (rw) and 00:05.0 at IOVA 0x200000 (r)"]
        );
        let window = named(&findings, "interrupt_window");
        assert_eq!(window.examples, ["00:05.0 maps IOVA 0xfee00000..=0xfee00fff"]);
        assert_eq!(findings[0].severity, Severity::Wrong);
    }

    #[test]
    fn what_is_mapped_once_is_no_finding() {
        let domains = [domain("00:05.0", 0x1000)];
        let spans = vec![vec![
            span(0, 0x8_0000, 0x1000, Prot::READ),
            span(0x1000, 0x8_1000, 0x1000, Prot::READ_WRITE),
            span(0x2000, u64::MAX - 0xfff, 0x1000, Prot::READ_WRITE),
        ]];
        assert_eq!(all(&domains, &spans, None), []);
    }
}
