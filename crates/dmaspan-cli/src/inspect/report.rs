//! The report of `inspect`: its values, as all forms of output show them.

use std::collections::BTreeMap;

use dmaspan::{Prot, lg2};
use serde::Serialize;

use super::diff::{self, Change, Changed};
use super::domain::{Domain, Leaves, MappedSpan};
use super::findings::{self, Finding, Spans, permissions};
use super::memory::FileMemory;
use super::tables::sizes;

/// What came of reading. Its public part is what `--format json` prints.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) source: Source,
    pub(crate) domains: Vec<DomainReport>,
    /// What is said of devices without a table.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    pub(crate) findings: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) lookups: Vec<Lookup>,
    /// Absent where nothing is compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) diff: Option<Vec<DomainDiff>>,
}

/// What was read.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Source {
    pub(crate) files: Vec<String>,
    /// `raw`, `elf`, `debugfs` or `lines`.
    pub(crate) kind: &'static str,
    /// The first and last address of what a dump of memory has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) memory: Vec<[u64; 2]>,
    /// What the domains are compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compared_with: Option<String>,
}

/// One domain.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DomainReport {
    pub(crate) name: String,
    pub(crate) devices: Vec<String>,
    pub(crate) root: Option<u64>,
    /// What the manual calls the tables.
    pub(crate) tables: String,
    /// The first and the last IOVA; null where the source does not say it.
    pub(crate) aperture: Option<[u64; 2]>,
    pub(crate) page_sizes: Vec<u64>,
    pub(crate) mapped_bytes: u64,
    /// How many tables there are.
    pub(crate) table_count: usize,
    pub(crate) table_bytes: u64,
    pub(crate) spans: SpanFigures,
    /// By size in bytes.
    pub(crate) leaves: BTreeMap<u64, u64>,
    /// The fewest leaves at these IOVAs.
    pub(crate) best_leaves: BTreeMap<u64, u64>,
    /// The fewest leaves at IOVAs that are aligned as the memory is.
    pub(crate) best_leaves_elsewhere: BTreeMap<u64, u64>,
    /// By ascending size, without the smallest.
    pub(crate) missed: Vec<Missed>,
    pub(crate) notes: Vec<String>,
    pub(crate) mappings: Vec<Mapping>,
    /// What a map is drawn of, by ascending IOVA.
    #[serde(skip)]
    pub(crate) runs: Vec<Run>,
}

/// Leaves of one size that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) iova: u64,
    pub(crate) bytes: u64,
    pub(crate) leaf_size: u64,
    /// Whether they lead to what is no memory, as far as that is known.
    pub(crate) is_register: bool,
}

/// How fragmented a domain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct SpanFigures {
    pub(crate) count: usize,
    pub(crate) smallest_bytes: u64,
    pub(crate) median_bytes: u64,
    pub(crate) largest_bytes: u64,
}

/// Why bytes are not in leaves of this size or a larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Missed {
    pub(crate) size: u64,
    /// Bytes that are in such leaves.
    pub(crate) in_leaves_bytes: u64,
    /// Both addresses are aligned, and yet the leaves are smaller.
    pub(crate) by_leaves_bytes: u64,
    /// The memory is aligned, and the IOVA differs from it.
    pub(crate) by_iova_bytes: u64,
    /// The memory is not contiguous where it is aligned.
    pub(crate) by_memory_bytes: u64,
}

/// A span of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Mapping {
    pub(crate) iova: u64,
    pub(crate) paddr: u64,
    pub(crate) bytes: u64,
    /// The smallest and the largest.
    pub(crate) leaf_sizes: [u64; 2],
    pub(crate) prot: String,
    /// Whether the dump has all of it; absent where the source has nothing but tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) in_dump: Option<bool>,
}

/// An address that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Lookup {
    /// `iova` or `phys`.
    pub(crate) space: &'static str,
    pub(crate) address: u64,
    pub(crate) found: Vec<Found>,
}

/// Where an address is mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Found {
    pub(crate) domain: String,
    pub(crate) iova: u64,
    pub(crate) paddr: u64,
    pub(crate) leaf_size: u64,
    pub(crate) prot: String,
}

/// What is different in a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DomainDiff {
    pub(crate) domain: String,
    /// By what happened.
    pub(crate) bytes: BTreeMap<&'static str, u64>,
    pub(crate) changes: Vec<ChangeReport>,
}

/// A range that is different.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ChangeReport {
    pub(crate) change: &'static str,
    pub(crate) iova: u64,
    pub(crate) bytes: u64,
    pub(crate) before: Option<Target>,
    pub(crate) after: Option<Target>,
}

/// Where a range leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Target {
    pub(crate) paddr: u64,
    pub(crate) prot: String,
}

/// What is asked besides.
#[derive(Clone, Debug, Default)]
pub(crate) struct Questions<'q> {
    pub(crate) iovas: &'q [u64],
    pub(crate) phys: &'q [u64],
    pub(crate) before: Option<&'q [Domain]>,
}

impl Report {
    pub(crate) fn new(
        source: Source,
        domains: &[Domain],
        memory: Option<&FileMemory>,
        questions: &Questions<'_>,
    ) -> Self {
        let spans: Spans = domains.iter().map(Domain::spans).collect();
        // A dump that has nothing of what is mapped is one of tables: what it lacks means nothing.
        let memory = memory.filter(|memory| {
            let mut all = spans.iter().flatten();
            all.any(|span| memory.overlap(span.paddr, span.paddr_last()) != 0)
        });
        let reports = domains.iter().zip(&spans);
        let iovas = questions.iovas.iter().map(|&iova| look_up(domains, "iova", iova));
        let phys = questions.phys.iter().map(|&paddr| look_up(domains, "phys", paddr));
        Self {
            source,
            notes: Vec::new(),
            findings: findings::all(domains, &spans, memory),
            lookups: iovas.chain(phys).collect(),
            diff: questions.before.map(|before| compare(before, domains)),
            domains: reports
                .map(|(domain, spans)| DomainReport::new(domain, spans, memory))
                .collect(),
        }
    }
}

impl DomainReport {
    fn new(domain: &Domain, spans: &[MappedSpan], memory: Option<&FileMemory>) -> Self {
        let possible = domain.possible(spans);
        let leaves = domain.census();
        let mapping = |span: &MappedSpan| Mapping {
            iova: span.iova,
            paddr: span.paddr,
            bytes: span.bytes,
            leaf_sizes: [lg2::size(span.lg2.0), lg2::size(span.lg2.1)],
            prot: permissions(span.prot),
            in_dump: memory
                .map(|memory| memory.overlap(span.paddr, span.paddr_last()) >= span.bytes),
        };
        Self {
            name: domain.name(),
            devices: domain.devices.clone(),
            root: domain.root,
            tables: domain.title.clone(),
            aperture: domain.aperture.map(|range| [range.start().get(), range.last().get()]),
            page_sizes: sizes(domain.page_sizes),
            mapped_bytes: domain.bytes(),
            table_count: domain.tables.chunk_by(|one, next| one.paddr == next.paddr).count(),
            table_bytes: domain.table_bytes(),
            spans: SpanFigures::of(spans),
            missed: missed(domain, &leaves, &possible.here, &possible.elsewhere),
            leaves,
            best_leaves: possible.here,
            best_leaves_elsewhere: possible.elsewhere,
            notes: domain.notes.clone(),
            mappings: spans.iter().map(mapping).collect(),
            runs: domain.leaves.iter().map(|leaves| Run::of(leaves, memory)).collect(),
        }
    }
}

impl Run {
    fn of(leaves: &Leaves, memory: Option<&FileMemory>) -> Self {
        let last = leaves.paddr.saturating_add(leaves.bytes - 1);
        let is_outside = memory.is_some_and(|memory| memory.overlap(leaves.paddr, last) == 0);
        Self {
            iova: leaves.iova,
            bytes: leaves.bytes,
            leaf_size: lg2::size(leaves.lg2),
            is_register: is_outside || leaves.prot.contains(Prot::MMIO),
        }
    }
}

impl SpanFigures {
    fn of(spans: &[MappedSpan]) -> Self {
        let mut bytes: Vec<u64> = spans.iter().map(|span| span.bytes).collect();
        bytes.sort_unstable();
        let at = |index: usize| bytes.get(index).copied().unwrap_or(0);
        Self {
            count: bytes.len(),
            smallest_bytes: at(0),
            median_bytes: at(bytes.len().saturating_sub(1) / 2),
            largest_bytes: at(bytes.len().saturating_sub(1)),
        }
    }
}

/// For each size but the smallest that could be had, where the bytes are that are not in such
/// leaves.
fn missed(
    domain: &Domain,
    now: &BTreeMap<u64, u64>,
    here: &BTreeMap<u64, u64>,
    elsewhere: &BTreeMap<u64, u64>,
) -> Vec<Missed> {
    let total = domain.bytes();
    let largest = domain.leaves.iter().map(|leaves| leaves.bytes).max().unwrap_or(0);
    let of_usual = usual_sizes(domain.page_sizes);
    let sizes = of_usual.into_iter().skip(1).filter(|size| *size <= largest.max(total));
    sizes
        .map(|size| {
            let within = |census: &BTreeMap<u64, u64>| {
                let larger = census.range(size..);
                larger.fold(0_u64, |sum, (size, count)| {
                    sum.saturating_add(size.saturating_mul(*count))
                })
            };
            let (now, here) = (within(now), within(here));
            let (here, elsewhere) = (here.max(now), within(elsewhere).max(here));
            Missed {
                size,
                in_leaves_bytes: now,
                by_leaves_bytes: here - now,
                by_iova_bytes: elsewhere - here,
                by_memory_bytes: total.saturating_sub(elsewhere),
            }
        })
        .collect()
}

/// The sizes that are worth a line: of a format that has each power of two, those that CPUs have.
fn usual_sizes(page_sizes: u64) -> Vec<u64> {
    let all = sizes(page_sizes);
    if all.len() <= 8 {
        return all;
    }
    all.into_iter().filter(|size| [12, 16, 21, 30].contains(&lg2::alignment(*size))).collect()
}

fn look_up(domains: &[Domain], space: &'static str, address: u64) -> Lookup {
    let mut found = Vec::new();
    for domain in domains {
        for leaves in &domain.leaves {
            let start = if space == "iova" { leaves.iova } else { leaves.paddr };
            if address < start || address - start >= leaves.bytes {
                continue;
            }
            let offset = address - start;
            found.push(Found {
                domain: domain.name(),
                iova: leaves.iova + offset,
                paddr: leaves.paddr + offset,
                leaf_size: lg2::size(leaves.lg2),
                prot: permissions(leaves.prot),
            });
        }
    }
    Lookup { space, address, found }
}

fn compare(before: &[Domain], after: &[Domain]) -> Vec<DomainDiff> {
    let pairs = diff::pairs(before, after);
    let diffs = pairs.iter().map(|pair| {
        let spans = |domain: Option<&Domain>| domain.map(Domain::spans).unwrap_or_default();
        let changes = diff::changes(&spans(pair.before), &spans(pair.after));
        let mut bytes: BTreeMap<&'static str, u64> =
            Change::ALL.into_iter().map(|change| (change.name(), 0)).collect();
        for changed in &changes {
            let sum = bytes.entry(changed.change.name()).or_insert(0);
            *sum = sum.saturating_add(changed.bytes);
        }
        let domain = pair.after.or(pair.before).map(Domain::name).unwrap_or_default();
        DomainDiff { domain, bytes, changes: changes.iter().map(ChangeReport::new).collect() }
    });
    diffs.collect()
}

impl ChangeReport {
    fn new(changed: &Changed) -> Self {
        let target = |(paddr, prot)| Target { paddr, prot: permissions(prot) };
        Self {
            change: changed.change.name(),
            iova: changed.iova,
            bytes: changed.bytes,
            before: changed.before.map(target),
            after: changed.after.map(target),
        }
    }
}

/// A report with something of everything.
#[cfg(test)]
pub(crate) fn example() -> Report {
    use super::domain::TablePage;

    let leaves =
        |iova, paddr, bytes, lg2| Leaves { iova, paddr, bytes, lg2, prot: Prot::READ_WRITE };
    let mut one = Domain::new(Some(0x1000), "VT-d second-stage page tables");
    one.devices.extend(["0000:00:05.0", "0000:00:06.0"].map(str::to_owned));
    one.page_sizes = 1 << 12 | 1 << 21 | 1 << 30;
    one.tables.push(TablePage { paddr: 0x1000, bytes: 4096, level: 3 });
    one.push(leaves(0, 0x4000_0000, 0xa_0000, 12));
    one.push(leaves(0x10_0000, 0x4010_0000, 0x10_0000, 12));
    one.push(leaves(0x20_0000, 0x4020_0000, 0x3fe0_0000, 21));
    one.push(leaves(0x1_0000_1000, 0x8000_0000, 0x40_0000, 12));
    one.fault("loop", 3, || "level 2 table at 0x3000, entry 0x1003 for 0x0..=0x1fffff".to_owned());
    one.notes.push("the stage is a guess".to_owned());
    one.finish();
    let mut other = Domain::new(Some(0x9000), "VT-d second-stage page tables");
    other.page_sizes = 1 << 12 | 1 << 21 | 1 << 30;
    other.push(leaves(0, 0x8000_0000, 0x1000, 12));
    other.push(leaves(0xfee0_0000, 0x1000, 0x1000, 12));
    other.finish();
    let mut before = one.clone();
    before.leaves.pop();
    let source = Source {
        files: vec!["guest.mem".to_owned()],
        kind: "raw",
        memory: vec![[0, 0x7fff_ffff]],
        compared_with: Some("before.mem".to_owned()),
    };
    let questions = Questions {
        iovas: &[0x20_1234, 0xdead_0000],
        phys: &[0x8000_0010],
        before: Some(&[before]),
    };
    Report::new(source, &[one, other], None, &questions)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_shape_is_the_one_that_scripts_use() {
        let value: Value = serde_json::to_value(example()).unwrap();
        assert_eq!(value["source"]["files"], json!(["guest.mem"]));
        let domain = &value["domains"][0];
        assert_eq!(domain["devices"], json!(["0000:00:05.0", "0000:00:06.0"]));
        assert_eq!(domain["leaves"], json!({"4096": 160 + 256 + 1024, "2097152": 511}));
        assert_eq!(domain["best_leaves"], json!({"4096": 160 + 256 + 1024, "2097152": 511}));
        // The last span's memory is aligned, its IOVA is not.
        assert_eq!(domain["best_leaves_elsewhere"], json!({"4096": 160 + 256, "2097152": 513}));
        assert_eq!(
            domain["missed"][0],
            json!({
                "size": 2 << 20, "in_leaves_bytes": 511_u64 << 21, "by_leaves_bytes": 0,
                "by_iova_bytes": 4 << 20, "by_memory_bytes": 0xa_0000 + 0x10_0000,
            })
        );
        assert_eq!(
            domain["spans"],
            json!({
                "count": 3, "smallest_bytes": 0xa_0000, "median_bytes": 0x40_0000,
                "largest_bytes": 0x3ff0_0000,
            })
        );
        assert_eq!(
            domain["mappings"][1],
            json!({
                "iova": 0x10_0000, "paddr": 0x4010_0000, "bytes": 0x3ff0_0000,
                "leaf_sizes": [4096, 2 << 20], "prot": "rw",
            })
        );
        let iova = &value["lookups"][0];
        assert_eq!(
            iova["found"],
            json!([{
                "domain": "0000:00:05.0 and 1 more", "iova": 0x20_1234, "paddr": 0x4020_1234,
                "leaf_size": 2 << 20, "prot": "rw",
            }])
        );
        assert_eq!(value["lookups"][1]["found"], json!([]));
        assert_eq!(value["lookups"][2]["found"].as_array().unwrap().len(), 2);
        assert_eq!(value["diff"][0]["bytes"]["added"], json!(4 << 20));
        assert_eq!(
            value["diff"][0]["changes"],
            json!([{
                "change": "added", "iova": 0x1_0000_1000_u64, "bytes": 4 << 20,
                "before": null, "after": {"paddr": 0x8000_0000_u64, "prot": "rw"},
            }])
        );
        let names: Vec<_> =
            value["findings"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
        assert_eq!(names, ["loop", "tables_mapped", "shared_frames", "interrupt_window"]);
    }

    #[test]
    fn small_leaves_where_both_sides_are_aligned_are_the_tables_fault() {
        let mut domain = Domain::new(None, "t");
        domain.page_sizes = 1 << 12 | 1 << 21;
        let prot = dmaspan::Prot::READ;
        domain.push(super::super::domain::Leaves {
            iova: 0,
            paddr: 0,
            bytes: 4 << 20,
            lg2: 12,
            prot,
        });
        domain.finish();
        let report = DomainReport::new(&domain, &domain.spans(), None);
        let missed = report.missed[0];
        assert_eq!(
            (
                missed.in_leaves_bytes,
                missed.by_leaves_bytes,
                missed.by_iova_bytes,
                missed.by_memory_bytes
            ),
            (0, 4 << 20, 0, 0)
        );
    }
}
