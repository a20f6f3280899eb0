//! The cases of one format.

use dmaspan::io_pgtable::Format;
use dmaspan::{PhysAddr, Span, lg2};

use crate::models::unwalked::entry_sizes;
use dmaspan_cli::units;

/// Where the memory that is mapped begins: a multiple of every page, and not where the IOVAs begin,
/// so that a translation is never right by accident.
pub(crate) const MEMORY: PhysAddr = PhysAddr::new(1 << 30);

/// The grid is of 1, 2, 4 … 512 of the smallest pages.
const GRID_LG2: u32 = 9;

/// Pairs of blocks in the scattered list.
const SCATTERED_PAIRS: u64 = 8;

/// How much is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Pages that a thread maps and unmaps in one pass, over many ranges where those are short.
    pub(crate) pages_in_pass: u64,
    /// The length of the long range.
    pub(crate) bulk_bytes: u64,
}

/// The sizes that a format maps by, and how many IOVAs it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// log2 of the smallest page.
    granule_lg2: u32,
    /// log2 of what one table of the smallest pages maps.
    table_lg2: u32,
    /// The pages, bit n for 2^n bytes.
    page_sizes: u64,
    /// Those of them that are one entry each.
    entry_sizes: u64,
    /// The length of the aperture, saturated.
    aperture_bytes: u64,
    /// log2 of the entries of a table.
    entries_lg2: u32,
    /// log2 of the bytes of the root, and of every other table.
    root_lg2: u32,
    each_lg2: u32,
}

/// One line of the table: a range, and how it is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// How scripts call it; no two cases of a format have the same name.
    pub(crate) name: String,
    /// How people read it.
    pub(crate) label: String,
    /// The length of the range.
    pub(crate) bytes: u64,
    /// How many such ranges a thread maps in a pass.
    pub(crate) ranges: u64,
    /// What is mapped there.
    pub(crate) work: Work,
}

/// What is mapped in a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Contiguous memory, by pages of one size.
    Pages {
        /// The size of a page.
        page_size: u64,
        /// How many there are.
        pages: u64,
    },
    /// A scatter list, by the fewest leaves.
    Scattered {
        /// The memory.
        spans: Vec<Span>,
        /// Where the leaves begin in the range, and how large they are.
        leaves: Vec<(u64, u64)>,
    },
}

impl Shape {
    /// That of a format.
    pub(crate) fn of<F: Format>(format: &F) -> Self {
        let geometry = format.geometry();
        Self {
            granule_lg2: F::GRANULE_LG2,
            table_lg2: F::shift(1),
            page_sizes: geometry.page_sizes,
            entry_sizes: entry_sizes(format),
            aperture_bytes: geometry.aperture.checked_len().unwrap_or(u64::MAX),
            entries_lg2: F::LG2_ENTRIES,
            root_lg2: geometry.root.lg2_size.max(geometry.root.lg2_align),
            each_lg2: geometry.table.lg2_size,
        }
    }

    /// The cases for so many threads: the grid, ranges of 2 MiB and 4 MiB, a scatter list and, for
    /// one thread, the long range by each page that is one entry. Left out is what a thread has not
    /// enough IOVAs for.
    pub(crate) fn cases(&self, threads: u64, extent: Extent) -> Vec<Case> {
        let share = lg2::align_down(self.aperture_bytes / threads.max(1), self.table_lg2);
        let pages = |label: String, name: String, bytes: u64, page_lg2: u32| {
            let work = Work::Pages { page_size: lg2::size(page_lg2), pages: bytes >> page_lg2 };
            Case { name, label, bytes, ranges: 1, work }
        };
        let grid = (0..=GRID_LG2).map(|lg2| {
            let bytes = lg2::size(self.granule_lg2 + lg2);
            let (name, size) = (format!("g={}", lg2::size(lg2)), units::page_size(bytes));
            pages(format!("{name} ({size})"), name, bytes, self.granule_lg2)
        });
        let blocks = [21, 22].map(|lg2| {
            let bytes = lg2::size(lg2.max(self.granule_lg2));
            let page_lg2 = lg2::floor(self.page_sizes & lg2::mask(lg2 + 1));
            let (name, page) = (units::page_size(bytes), units::page_size(lg2::size(page_lg2)));
            let count = bytes >> page_lg2;
            pages(format!("{name} ({count} × {page})"), name, bytes, page_lg2)
        });
        // Half of a small aperture, since the memory does not begin at 0.
        let bytes = extent.bulk_bytes.min(lg2::size(lg2::floor(self.aperture_bytes)) / 2);
        let sizes =
            if threads == 1 { self.entry_sizes & lg2::mask(lg2::floor(bytes) + 1) } else { 0 };
        let bulk = (0..64).filter(|&lg2| sizes & lg2::size(lg2) != 0).map(|page_lg2| {
            let page = units::page_size(lg2::size(page_lg2));
            let name = format!("{} as {page}", units::page_size(bytes));
            pages(name.clone(), name, bytes, page_lg2)
        });
        let all = grid.chain(blocks).chain(bulk).chain([self.scattered_case()]);
        all.filter_map(|case| case.within(share, extent.pages_in_pass)).collect()
    }

    /// How many IOVAs a thread gets for a case: whole tables, so that no two threads share one.
    pub(crate) fn region_bytes(&self, case: &Case) -> u64 {
        let bytes = case.bytes.saturating_mul(case.ranges);
        lg2::align_up(bytes, self.table_lg2).unwrap_or(bytes)
    }

    /// Room for the tables of so many regions of a case: of each level that 64 bits can have, as
    /// many as cover a region, which begins and ends in the middle of one at worst, and the root.
    pub(crate) fn table_bytes(&self, case: &Case, threads: u64) -> u64 {
        let region = self.region_bytes(case);
        let covered = (self.table_lg2..64).step_by(self.entries_lg2.max(1) as usize);
        let tables: u64 = covered.map(|lg2| (region >> lg2) + 2).sum();
        // An arena has no smaller pieces.
        let each = lg2::size(self.each_lg2.max(10));
        let regions = tables.saturating_mul(each).saturating_mul(threads);
        regions.saturating_add(2 * lg2::size(self.root_lg2.max(10)))
    }

    /// Pairs of a block that is one span, congruent to its IOVA, and a block in spans of 1, 3, 4,
    /// 8, 16 … pages that lie apart.
    fn scattered_case(&self) -> Case {
        let block = lg2::size(self.table_lg2);
        let page = lg2::size(self.granule_lg2);
        let mut pieces = vec![page, 3 * page];
        pieces.extend((self.granule_lg2 + 2..self.table_lg2).map(lg2::size));
        let (mut spans, mut leaves) = (Vec::new(), Vec::new());
        let mut offset = 0;
        let mut push = |paddr: PhysAddr, bytes: u64| {
            let Ok(span) = Span::new(paddr, bytes) else { return };
            spans.push(span);
            self.push_leaves(&mut leaves, offset, span);
            offset += bytes;
        };
        for pair in 0..SCATTERED_PAIRS {
            let mut memory = MEMORY.wrapping_add(4 * pair * block);
            push(memory, block);
            memory = memory.wrapping_add(2 * block);
            for &piece in &pieces {
                push(memory, piece);
                memory = memory.wrapping_add(2 * piece);
            }
        }
        let bytes = offset;
        let work = Work::Scattered { spans, leaves };
        let [name, label] = ["scatter"; 2].map(str::to_owned);
        Case { name, label, bytes, ranges: 1, work }
    }

    /// The fewest leaves of a span: the largest page each time that both addresses and the rest
    /// allow.
    fn push_leaves(&self, leaves: &mut Vec<(u64, u64)>, mut offset: u64, span: Span) {
        let mut rest = Some(span);
        while let Some(span) = rest {
            let alignment = lg2::alignment(offset | span.paddr().get());
            let most = alignment.min(lg2::floor(span.len()));
            let page = lg2::size(lg2::floor(self.page_sizes & lg2::mask(most + 1)));
            leaves.push((offset, page));
            offset += page;
            rest = span.skip(page);
        }
    }
}

impl Case {
    /// With the ranges of a pass, as many of them as fit into so many IOVAs; `None` where not one
    /// does.
    fn within(mut self, bytes: u64, pages_in_pass: u64) -> Option<Self> {
        let pages = match &self.work {
            Work::Pages { pages, .. } => *pages,
            Work::Scattered { leaves, .. } => u64::try_from(leaves.len()).unwrap_or(u64::MAX),
        };
        let wanted = pages_in_pass.checked_div(pages).unwrap_or(0).max(1);
        self.ranges = wanted.min(bytes.checked_div(self.bytes)?);
        (self.ranges > 0).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};

    use super::*;

    const EXTENT: Extent = Extent { pages_in_pass: 8192, bulk_bytes: 16 << 30 };

    fn shape<const G: u32>(input_bits: u32) -> Shape {
        Shape::of(&ArmLpaeS1::<G>::new(ArmLpaeS1Config::new(input_bits, 48)).unwrap())
    }

    fn names(cases: &[Case]) -> Vec<&str> {
        cases.iter().map(|case| case.name.as_str()).collect()
    }

    #[test]
    fn the_grid_doubles_its_pages_and_the_bulk_is_of_every_level() {
        let cases = shape::<12>(48).cases(1, EXTENT);
        let grid: Vec<String> = (0..10).map(|lg2| format!("g={}", 1 << lg2)).collect();
        assert_eq!(names(&cases)[..10], grid);
        let others = ["2M", "4M", "16G as 4K", "16G as 2M", "16G as 1G", "scatter"];
        assert_eq!(names(&cases)[10..], others);
        assert_eq!(cases[9].label, "g=512 (2M)");
        assert_eq!(cases[9].work, Work::Pages { page_size: 4096, pages: 512 });
        assert_eq!(cases[11].label, "4M (2 × 2M)");
        assert_eq!(cases[12].work, Work::Pages { page_size: 4096, pages: 4 << 20 });
    }

    #[test]
    fn blocks_are_as_large_as_the_pages_of_the_format_go() {
        let cases = shape::<16>(48).cases(10, EXTENT);
        let others = ["2M", "4M", "scatter"];
        assert_eq!(names(&cases)[10..], others);
        assert_eq!(cases[10].label, "2M (32 × 64K)");
    }

    #[test]
    fn everything_fits_into_a_small_aperture() {
        let shape = shape::<12>(32);
        for threads in [1, 10, 64] {
            for case in shape.cases(threads, EXTENT) {
                assert!(shape.region_bytes(&case) * threads <= 1 << 32, "{threads}: {case:?}");
            }
        }
        assert_eq!(names(&shape.cases(1, EXTENT))[12], "2G as 4K");
        // 256 threads have 16 MiB each: less than the scatter list.
        assert!(!names(&shape.cases(256, EXTENT)).contains(&"scatter"));
    }

    #[test]
    fn the_scattered_list_is_of_spans_that_lie_apart_and_fills_whole_blocks() {
        let case = shape::<12>(48).scattered_case();
        let Work::Scattered { spans, leaves } = &case.work else { panic!("{case:?}") };
        assert_eq!(spans.len(), 80);
        assert!(spans.windows(2).all(|pair| pair[0].join(pair[1]).is_none()));
        assert_eq!(spans.iter().map(|span| span.len()).sum::<u64>(), case.bytes);
        assert_eq!(case.bytes, 16 * (2 << 20));
        assert_eq!(leaves.iter().map(|(_, size)| size).sum::<u64>(), case.bytes);
        assert_eq!(leaves.iter().filter(|(_, size)| *size == 2 << 20).count(), 8);
        assert_eq!(leaves.iter().filter(|(_, size)| *size == 4096).count(), 8 * 512);
    }
}
