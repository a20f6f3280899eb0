//! The translation of one tree: its leaves, tables and faults, in the form that all readers of
//! dumps make.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use dmaspan::io_pgtable::{ForeignFault, ForeignMemory, ForeignPiece, LeafCensus};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, lg2};

use super::tables::Tables;

/// How many runs of leaves are kept of all domains together: what 64 GiB in scattered pages of 4K
/// have.
pub(crate) const MOST_RUNS: usize = 1 << 24;

/// How many faults of a kind are kept; the others are counted.
const MOST_FAULTS: usize = 8;

/// Leaves of one size that follow each other in IOVAs and in memory, with one permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaves {
    pub(crate) iova: u64,
    pub(crate) paddr: u64,
    /// At least 1; a run never fills the whole space.
    pub(crate) bytes: u64,
    /// log2 of a leaf's bytes.
    pub(crate) lg2: u32,
    pub(crate) prot: Prot,
}

/// What is contiguous in IOVAs and in memory with one permission, whatever its leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedSpan {
    pub(crate) iova: u64,
    pub(crate) paddr: u64,
    pub(crate) bytes: u64,
    pub(crate) prot: Prot,
    /// The smallest and the largest leaf, log2 of bytes.
    pub(crate) lg2: (u32, u32),
}

impl MappedSpan {
    pub(crate) fn iova_last(&self) -> u64 {
        self.iova.saturating_add(self.bytes - 1)
    }

    pub(crate) fn paddr_last(&self) -> u64 {
        self.paddr.saturating_add(self.bytes - 1)
    }
}

/// A table page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TablePage {
    pub(crate) paddr: u64,
    pub(crate) bytes: u64,
    pub(crate) level: u32,
}

/// Faults of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// How many entries.
    pub(crate) count: u64,
    /// The first few, in words.
    pub(crate) first: Vec<String>,
}

/// A tree, and who uses it.
#[derive(Clone, Debug)]
pub(crate) struct Domain {
    /// The devices that are known to use it.
    pub(crate) devices: Vec<String>,
    /// Its root, where it is known.
    pub(crate) root: Option<u64>,
    /// What the manual calls the tables.
    pub(crate) title: String,
    /// Leaf sizes, bit n for 2^n bytes.
    pub(crate) page_sizes: u64,
    pub(crate) aperture: Option<IovaRange>,
    /// By ascending IOVA.
    pub(crate) leaves: Vec<Leaves>,
    /// By ascending address, each once a level.
    pub(crate) tables: Vec<TablePage>,
    /// By name.
    pub(crate) faults: BTreeMap<&'static str, Faults>,
    /// What a reader of the report should know.
    pub(crate) notes: Vec<String>,
}

impl Domain {
    pub(crate) fn new(root: Option<u64>, title: &str) -> Self {
        Self {
            devices: Vec::new(),
            root,
            title: title.to_owned(),
            page_sizes: 0,
            aperture: None,
            leaves: Vec::new(),
            tables: Vec::new(),
            faults: BTreeMap::new(),
            notes: Vec::new(),
        }
    }

    /// Reads the tree at `root`; `left` is how many runs may still be kept.
    ///
    /// # Errors
    ///
    /// Why there is no tree.
    pub(crate) fn read(
        tables: &dyn Tables,
        root: u64,
        memory: &dyn ForeignMemory,
        left: &mut usize,
    ) -> Result<Self, String> {
        let mut domain = Self::new(Some(root), tables.title());
        domain.page_sizes = tables.page_sizes();
        domain.aperture = Some(tables.aperture());
        let read = tables.read(PhysAddr::new(root), memory, &mut |piece| {
            domain.add(piece);
            if domain.leaves.len() < *left {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        read.map_err(|error| error.to_string())?;
        *left -= domain.leaves.len().min(*left);
        if *left == 0 {
            let what =
                format!("the rest was not read: there are more than {MOST_RUNS} runs of leaves");
            domain.fault("incomplete", 1, || what);
        }
        domain.finish();
        Ok(domain)
    }

    /// Adds what a reader found.
    fn add(&mut self, piece: ForeignPiece) {
        match piece {
            ForeignPiece::Table { level, paddr, bytes } => {
                self.tables.push(TablePage { paddr: paddr.get(), bytes, level });
            }
            ForeignPiece::Leaves { range, paddr, lg2, prot, .. } => {
                let Some(bytes) = range.checked_len() else { return };
                let (iova, paddr) = (range.start().get(), paddr.get());
                self.push(Leaves { iova, paddr, bytes, lg2, prot });
            }
            ForeignPiece::Fault { range, level, table, word, fault } => {
                let at = format!("level {level} table at {table}, entry {word:#x} for {range}");
                match fault {
                    ForeignFault::Invalid { entries } => self.fault("invalid", entries, || {
                        format!("{at}: {entries} entries from it on are none of the format")
                    }),
                    ForeignFault::OutsideAperture { entries } => {
                        self.fault("outside_aperture", entries, || {
                            format!(
                                "level {level} table at {table}: {entries} entries from {word:#x} \
                                 on translate nothing of the aperture {range}"
                            )
                        });
                    }
                    ForeignFault::Missing { paddr } => self.fault("missing", 1, || {
                        format!("{at} leads to a table at {paddr}, which the dump does not have")
                    }),
                    ForeignFault::Loop { paddr } => self.fault("loop", 1, || {
                        format!("{at} leads back to the table at {paddr}, which is above it")
                    }),
                    ForeignFault::Again { paddr } => self.fault("shared_table", 1, || {
                        format!(
                            "{at} leads to the table at {paddr}, which another entry leads to: \
                             what it maps is listed there alone"
                        )
                    }),
                    ForeignFault::OtherLevel { paddr, other } => {
                        self.fault("table_at_two_levels", 1, || {
                            format!(
                                "{at} leads to the table at {paddr}, which is a table of level \
                                 {other} too"
                            )
                        });
                    }
                    ForeignFault::TornGroup { lg2 } => self.fault("torn_group", 1, || {
                        format!(
                            "{at} says that it is part of a leaf of {:#x} bytes, of which other \
                             entries differ",
                            lg2::size(lg2)
                        )
                    }),
                    _ => self.fault("other", 1, || format!("{at}: {fault:?}")),
                }
            }
            _ => {}
        }
    }

    /// Counts faults, and keeps what the first few say.
    pub(crate) fn fault(&mut self, name: &'static str, count: u64, what: impl FnOnce() -> String) {
        let faults = self.faults.entry(name).or_default();
        faults.count += count;
        if faults.first.len() < MOST_FAULTS {
            faults.first.push(what());
        }
    }

    /// Adds leaves behind the others, joined with them where they go on.
    pub(crate) fn push(&mut self, next: Leaves) {
        if let Some(last) = self.leaves.last_mut()
            && (last.lg2, last.prot) == (next.lg2, next.prot)
            && last.iova.checked_add(last.bytes) == Some(next.iova)
            && last.paddr.checked_add(last.bytes) == Some(next.paddr)
            && let Some(bytes) = last.bytes.checked_add(next.bytes)
        {
            last.bytes = bytes;
            return;
        }
        self.leaves.push(next);
    }

    /// Sorts what was read.
    pub(crate) fn finish(&mut self) {
        self.tables.sort_unstable();
        self.tables.dedup();
        let seen = self.leaves.iter().fold(0, |sizes, leaves| sizes | lg2::size(leaves.lg2));
        self.page_sizes |= seen;
    }

    /// What a report calls it.
    pub(crate) fn name(&self) -> String {
        match (self.devices.as_slice(), self.root) {
            ([], Some(root)) => format!("table at {root:#x}"),
            ([], None) => "table".to_owned(),
            ([one], _) => one.clone(),
            ([first, others @ ..], _) => format!("{first} and {} more", others.len()),
        }
    }

    /// What is contiguous, by ascending IOVA.
    pub(crate) fn spans(&self) -> Vec<MappedSpan> {
        let mut spans: Vec<MappedSpan> = Vec::new();
        for &Leaves { iova, paddr, bytes, lg2, prot } in &self.leaves {
            if let Some(last) = spans.last_mut()
                && last.prot == prot
                && last.iova.checked_add(last.bytes) == Some(iova)
                && last.paddr.checked_add(last.bytes) == Some(paddr)
                && let Some(bytes) = last.bytes.checked_add(bytes)
            {
                last.bytes = bytes;
                last.lg2 = (last.lg2.0.min(lg2), last.lg2.1.max(lg2));
            } else {
                spans.push(MappedSpan { iova, paddr, bytes, prot, lg2: (lg2, lg2) });
            }
        }
        spans
    }

    /// The bytes that are mapped; what is mapped twice counts twice.
    pub(crate) fn bytes(&self) -> u64 {
        self.leaves.iter().fold(0, |sum, leaves| leaves.bytes.saturating_add(sum))
    }

    /// The bytes of the tables, each once.
    pub(crate) fn table_bytes(&self) -> u64 {
        let pages = self.tables.chunk_by(|one, next| one.paddr == next.paddr);
        pages.filter_map(|same| same.first()).fold(0, |sum, page| page.bytes + sum)
    }

    /// How many leaves there are, by size in bytes.
    pub(crate) fn census(&self) -> BTreeMap<u64, u64> {
        let mut census = BTreeMap::new();
        for leaves in &self.leaves {
            let size = lg2::size(leaves.lg2);
            *census.entry(size).or_insert(0) += leaves.bytes.div_ceil(size);
        }
        census
    }

    /// How many leaves the same spans could have: at these addresses, and at IOVAs that are aligned
    /// as the memory is.
    pub(crate) fn possible(&self, spans: &[MappedSpan]) -> Possible {
        let mut possible = Possible::default();
        for span in spans {
            let Ok(memory) = Span::new(PhysAddr::new(span.paddr), span.bytes) else { continue };
            let of = |iova| LeafCensus::of_spans(self.page_sizes, Iova::new(iova), &[memory]);
            for (census, to) in
                [(of(span.iova), &mut possible.here), (of(span.paddr), &mut possible.elsewhere)]
            {
                for (lg2, count) in census.sizes() {
                    *to.entry(lg2::size(lg2)).or_insert(0) += count;
                }
            }
        }
        possible
    }
}

/// The fewest leaves of some spans, by size in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Possible {
    /// At the IOVAs that they have.
    pub(crate) here: BTreeMap<u64, u64>,
    /// At IOVAs that are aligned as the memory is.
    pub(crate) elsewhere: BTreeMap<u64, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(iova: u64, paddr: u64, bytes: u64, lg2: u32) -> Leaves {
        Leaves { iova, paddr, bytes, lg2, prot: Prot::READ_WRITE }
    }

    #[test]
    fn leaves_of_different_sizes_make_one_span() {
        let mut domain = Domain::new(Some(0x1000), "tables");
        domain.page_sizes = 1 << 12 | 1 << 21;
        domain.push(leaves(0x1f_f000, 0x3f_f000, 0x1000, 12));
        domain.push(leaves(0x20_0000, 0x40_0000, 2 << 20, 21));
        domain.push(leaves(0x40_0000, 0x60_0000, 2 << 20, 21));
        domain.push(leaves(0x80_0000, 0x90_1000, 2 << 20, 12));
        domain.finish();
        assert_eq!(domain.leaves.len(), 3);
        let spans = domain.spans();
        let ends = |span: &MappedSpan| (span.iova, span.iova_last(), span.lg2);
        assert_eq!(
            spans.iter().map(ends).collect::<Vec<_>>(),
            [(0x1f_f000, 0x5f_ffff, (12, 21)), (0x80_0000, 0x9f_ffff, (12, 12))]
        );
        assert_eq!(domain.census(), BTreeMap::from([(4096, 513), (2 << 20, 2)]));
        let possible = domain.possible(&spans);
        assert_eq!(possible.here, BTreeMap::from([(4096, 513), (2 << 20, 2)]));
        // The second span has no whole 2M of aligned memory.
        assert_eq!(possible.elsewhere, BTreeMap::from([(4096, 513), (2 << 20, 2)]));
    }
}
