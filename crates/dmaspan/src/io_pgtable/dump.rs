//! [`Dump`] draws a tree: its tables, links and leaves, for people and for programs.

use core::fmt;
use core::ops::ControlFlow;

use super::cursor::{Cursor, Reached};
use super::format::{Entry, Format, Groups};
use super::manual::ManualEntry;
use super::memory::TableMemory;
use super::scan::Piece;
use super::walk::PIECES;
use super::word::Word;
use super::{PageTable, block_of, to_index};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;

/// How many items a dump reads at once.
const BATCH: usize = 32;

/// A picture of a tree, made by [`Display`](fmt::Display), also while others map and unmap in it.
///
/// It begins with what the tables are. Then there is a line for each table, and indented below it
/// one for each link and each run of leaves that follow each other in the table and in memory.
/// Levels, entries and fields have the names and numbers of the format's [`Manual`]; a field of one
/// bit is shown where it is set, a larger one with its bits. The word is the entry as it is in
/// memory, of a run the first one's; what hardware marked may be different in the others. Entries
/// that are empty are left out.
///
/// It is complete for what is mapped all the time, and shows nothing that the tables did not have
/// at some moment of the dump.
///
/// [`Manual`]: super::Manual
///
/// ```
/// use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
/// use dmaspan::{Iova, PhysAddr, Prot, Span};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let format = X86_64::new(X86_64Config::new(48, 46))?;
///     let mut table = PageTable::new(format, Arena::default())?;
///     let span = Span::new(PhysAddr::new(0x8000_0000), 0x40_3000)?;
///     table.whole().map_spans(Iova::new(0x4000_0000), &[span], Prot::READ_WRITE | Prot::CACHE)?;
///     let picture = table.dump().to_string();
///     let lines: Vec<_> = picture.lines().collect();
///     assert_eq!(lines[0], "x86-64 page tables, 0x0..=0x7fffffffffff");
///     assert_eq!(lines[1], "PML4 table at 0x40000000");
///     assert_eq!(
///         lines[3],
///         "    [1] PDPTE 0x0000000040002027 P R/W U/S A: 0x40000000..=0x7fffffff \
///          by page directory at 0x40002000"
///     );
///     assert_eq!(
///         lines[4],
///         "      [0-1] PDE 0x00000000800000e7 P R/W U/S A D PS: 0x40000000..=0x403fffff \
///          to 0x80000000, 2 of 2M, READ WRITE CACHE"
///     );
///     Ok(())
/// }
/// ```
#[must_use = "a dump is made when it is displayed"]
pub struct Dump<'t, F: Format, M: TableMemory<F::Word>> {
    table: &'t PageTable<F, M>,
    range: IovaRange,
}

/// A dump for programs: a line for each table, link and run of leaves, by
/// [`Display`](fmt::Display).
///
/// A line is a word and `key=value` pairs, in this order and with single spaces between them, so
/// that it is cut by fields; no value has a space in it. Numbers that are addresses, sizes or words
/// are hexadecimal with `0x`, counts and levels are decimal. Level 0 is that of the smallest
/// leaves.
///
/// - `tree title=… first=… last=…`, once: what the tables are, with `_` for spaces, and the IOVAs
///   that are shown.
/// - `table level=… at=…`, once: the root.
/// - `link level=… index=… word=… first=… last=… table=…`: the entry `index` of the table of that
///   level shown last; what it translates; and the table of the next lower level that it leads to,
///   whose entries follow.
/// - `leaf level=… index=… entries=… word=… first=… last=… paddr=… size=… prot=…`: leaves of one
///   size that follow each other, in `entries` entries: the first entry's word, what they translate
///   and where the first byte leads; `prot` as `READ|WRITE|…`.
/// - `corrupt level=… index=… word=… first=…`: an entry that no operation of the table wrote, or
///   whose table its memory does not know.
#[must_use = "a dump is made when it is displayed"]
pub struct DumpLines<'t, F: Format, M: TableMemory<F::Word>>(Dump<'t, F, M>);

/// A part of a tree.
#[derive(Clone, Copy)]
enum Item<W> {
    Link { at: Place<W>, table: PhysAddr },
    Leaves { at: Place<W>, paddr: PhysAddr, lg2: u32, prot: Prot },
    Corrupt { at: Place<W> },
}

/// Some entries of a table, of which the first is `word`, and what of the dump's range they
/// translate.
#[derive(Clone, Copy)]
struct Place<W> {
    level: u32,
    range: IovaRange,
    word: W,
}

/// Where a dump goes on: at the entry for an address, in the table at a level.
#[derive(Clone, Copy)]
struct Next {
    iova: u64,
    level: u32,
}

/// Items that were read and not shown.
struct Batch<W> {
    items: [Option<Item<W>>; BATCH],
    len: usize,
}

impl<W: Word> Batch<W> {
    const fn new() -> Self {
        Self { items: [None; BATCH], len: 0 }
    }

    fn is_full(&self) -> bool {
        self.len == BATCH
    }

    /// Adds an item; the batch is not full.
    fn push(&mut self, item: Item<W>) {
        if let Some(place) = self.items.get_mut(self.len) {
            *place = Some(item);
            self.len += 1;
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// A picture of the tree, also while others map and unmap in it. It is read while it is
    /// displayed, section by section as a [`walk`](Self::walk).
    pub fn dump(&self) -> Dump<'_, F, M> {
        Dump { table: self, range: self.geometry.aperture }
    }

    /// Reads the items from `next` to `last` that fit into a batch, as a reader, and returns where
    /// to go on.
    fn read_items(&self, next: Next, last: u64, batch: &mut Batch<F::Word>) -> Option<Next> {
        let _reader = self.reader();
        let mut cursor = Cursor::new(self, next.iova);
        let mut next = next;
        for _ in 0..PIECES {
            if batch.is_full() {
                break;
            }
            if let Reached::Stopped { level, .. } = cursor.reach(next.iova, next.level) {
                // The table has gone since.
                next.level = level;
            }
            next = self.read_table(&mut cursor, next, last, batch)?;
        }
        Some(next)
    }

    /// Reads the table that the cursor reached, up to a link and into it.
    fn read_table(
        &self,
        cursor: &mut Cursor<'_, F, M>,
        next: Next,
        last: u64,
        batch: &mut Batch<F::Word>,
    ) -> Option<Next> {
        let Next { iova, level } = next;
        if cursor.table_at(level, iova).1.is_empty() {
            return self.pass_over(cursor, next, last, batch);
        }
        let scanned = self.scan_table(cursor, level, iova, last, &mut |piece| {
            if batch.is_full() {
                return ControlFlow::Break(piece.start());
            }
            match piece {
                Piece::Hole(_) => {}
                Piece::Leaves { range, paddr, lg2, level, word } => {
                    let prot = self.format.prot(level, word);
                    batch.push(Item::Leaves { at: Place { level, range, word }, paddr, lg2, prot });
                }
                Piece::Invalid { iova, level } => {
                    let word = cursor.entries_from(level, iova.get()).first();
                    let word = word.map_or(F::Word::EMPTY, F::Word::load);
                    let range = IovaRange::point(iova);
                    batch.push(Item::Corrupt { at: Place { level, range, word } });
                }
            }
            ControlFlow::Continue(())
        });
        let at = match scanned {
            ControlFlow::Break(at) => return Some(Next { iova: at.get(), level }),
            ControlFlow::Continue(at) => at?,
        };
        if block_of(at, F::shift(level + 1)) != block_of(iova, F::shift(level + 1)) {
            return Some(self.climb(at, level));
        }
        // At a link, unless it was taken out meanwhile: then its entry is read once more.
        let word =
            cursor.entries_from(level, at).first().map_or(F::Word::EMPTY, F::Word::load_link);
        let Entry::Table(table) = self.format.decode(level, word) else {
            return Some(Next { iova: at, level });
        };
        if batch.is_full() || level == 0 {
            return Some(Next { iova: at, level });
        }
        let block = block_of(at, F::shift(level));
        let range = IovaRange::new(Iova::new(at), block.last().min(Iova::new(last)))?;
        batch.push(Item::Link { at: Place { level, range, word }, table });
        Some(Next { iova: at, level: level - 1 })
    }

    /// Goes behind a table that the memory does not know, which is a corrupt entry's, or has gone.
    fn pass_over(
        &self,
        cursor: &mut Cursor<'_, F, M>,
        next: Next,
        last: u64,
        batch: &mut Batch<F::Word>,
    ) -> Option<Next> {
        let Next { iova, level } = next;
        cursor.restart();
        let reached = cursor.reach(iova, level) == Reached::Table;
        if reached && !cursor.table_at(level, iova).1.is_empty() {
            return Some(next);
        }
        if reached {
            let (range, word) = (IovaRange::point(Iova::new(iova)), F::Word::EMPTY);
            batch.push(Item::Corrupt { at: Place { level, range, word } });
        }
        let behind = block_of(iova, F::shift(level + 1)).last().get().checked_add(1)?;
        (behind <= last).then(|| self.climb(behind, level))
    }

    /// The next entry behind a table at `level`, which is in the lowest table that does not begin
    /// with it.
    fn climb(&self, iova: u64, level: u32) -> Next {
        let top = self.top().1;
        let begins = |level| lg2::is_aligned(iova, F::shift(level + 1));
        let level = (level..top).find(|&level| !begins(level)).unwrap_or(top);
        Next { iova, level }
    }

    /// Both as one, where `next` continues the leaves of `item` in the table and in memory.
    fn join_items(&self, item: Item<F::Word>, next: Item<F::Word>) -> Option<Item<F::Word>> {
        let (
            Item::Leaves { at, paddr, lg2, prot },
            Item::Leaves { at: more, paddr: next_paddr, lg2: next_lg2, .. },
        ) = (item, next)
        else {
            return None;
        };
        let shift = F::shift(at.level + 1);
        let start = at.range.start().get();
        let bytes = more.range.start().get().wrapping_sub(start);
        let follows = at.range.last().checked_add(1) == Some(more.range.start())
            && paddr.checked_add(bytes) == Some(next_paddr);
        let same_table = at.level == more.level
            && block_of(start, shift) == block_of(more.range.start().get(), shift);
        if !follows || !same_table || lg2 != next_lg2 {
            return None;
        }
        // The word is that of the entry for the first address, or of the whole leaf.
        let repeated = F::GROUPS == Groups::Repeated && lg2 != F::shift(at.level);
        let word_lg2 = if repeated { lg2 } else { F::shift(at.level) };
        let offset = more.range.start().get() - lg2::align_down(start, word_lg2);
        let clean = |word| self.format.clean(word);
        if self.format.advance(clean(at.word), offset) != clean(more.word) {
            return None;
        }
        let range = IovaRange::new(at.range.start(), more.range.last())?;
        Some(Item::Leaves { at: Place { range, ..at }, paddr, lg2, prot })
    }
}

impl<'t, F: Format, M: TableMemory<F::Word>> Dump<'t, F, M> {
    /// The same of what has an address in `range`, with the tables on the way there.
    pub fn of(self, range: IovaRange) -> Self {
        // What has no address in both shows the root, with nothing in it.
        let outside = IovaRange::point(range.start());
        Self { range: self.range.intersection(range).unwrap_or(outside), ..self }
    }

    /// The same for programs.
    pub fn lines(self) -> DumpLines<'t, F, M> {
        DumpLines(self)
    }

    /// The root, and its level.
    fn root(&self) -> (PhysAddr, u32) {
        self.table.root_and_level()
    }

    /// Shows all items below the root, by pieces that are read as a reader and shown when they have
    /// been read.
    fn each(&self, top: u32, mut show: impl FnMut(Item<F::Word>) -> fmt::Result) -> fmt::Result {
        let table = self.table;
        let translated = block_of(0, F::shift(top + 1));
        let below = if top == table.geometry.top_level {
            Some(self.range)
        } else {
            translated.intersection(self.range)
        };
        let Some(range) = below.and_then(|range| range.intersection(table.geometry.aperture))
        else {
            return Ok(());
        };
        let last = range.last().get();
        let mut next = Some(Next { iova: range.start().get(), level: top });
        let mut open = None::<Item<F::Word>>;
        while let Some(from) = next {
            let mut batch = Batch::new();
            next = table.read_items(from, last, &mut batch);
            for item in batch.items.into_iter().flatten() {
                open = match open {
                    None => Some(item),
                    Some(before) => match table.join_items(before, item) {
                        Some(joined) => Some(joined),
                        None => {
                            show(before)?;
                            Some(item)
                        }
                    },
                };
            }
        }
        open.map_or(Ok(()), show)
    }
}

impl<F: Format, M: TableMemory<F::Word>> Dump<'_, F, M> {
    /// The index of a place's first entry, and how many entries it is.
    fn entries_of(&self, at: &Place<F::Word>) -> (usize, usize) {
        let shift = F::shift(at.level);
        let first = at.range.start().get() >> shift;
        let count = to_index((at.range.last().get() >> shift) - first).saturating_add(1);
        (self.table.index(at.level, at.range.start().get()), count)
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Display for Dump<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let manual = self.table.format.manual();
        let (root, top) = self.root();
        writeln!(f, "{}, {}", manual.title, self.range)?;
        writeln!(f, "{} at {root}", manual.level(top).table)?;
        self.each(top, |item| {
            let (Item::Link { at, .. } | Item::Leaves { at, .. } | Item::Corrupt { at }) = item;
            let indent = (top.saturating_sub(at.level) as usize + 1) * 2;
            let (first, count) = self.entries_of(&at);
            write!(f, "{:indent$}[{first}", "")?;
            if count > 1 {
                write!(f, "-{}", first + count - 1)?;
            }
            f.write_str("] ")?;
            let words = manual.level(at.level);
            match item {
                Item::Link { table, .. } => {
                    write_entry(f, &words.link, at.word)?;
                    let below = manual.level(at.level.saturating_sub(1)).table;
                    writeln!(f, ": {} by {below} at {table}", at.range)
                }
                Item::Leaves { paddr, lg2, prot, .. } => {
                    let group = lg2 != F::shift(at.level);
                    write_entry(f, if group { &words.group } else { &words.leaf }, at.word)?;
                    let (start, last) = (at.range.start().get(), at.range.last().get());
                    let leaves = (last >> lg2) - (start >> lg2) + 1;
                    write!(f, ": {} to {paddr}, {leaves} of {},", at.range, Size(lg2))?;
                    prot.iter_names().try_for_each(|(name, _)| write!(f, " {name}"))?;
                    writeln!(f)
                }
                Item::Corrupt { .. } => {
                    let digits = 2 + (2 << F::Word::LG2_BYTES);
                    writeln!(f, "corrupt {:#0digits$x}: {}", at.word.bits(), at.range.start())
                }
            }
        })
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Display for DumpLines<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(dump) = self;
        let (root, top) = dump.root();
        f.write_str("tree title=")?;
        let mut words = dump.table.format.manual().title.split(' ');
        f.write_str(words.next().unwrap_or_default())?;
        words.try_for_each(|word| write!(f, "_{word}"))?;
        writeln!(f, " first={} last={}", dump.range.start(), dump.range.last())?;
        writeln!(f, "table level={top} at={root}")?;
        dump.each(top, |item| {
            let (Item::Link { at, .. } | Item::Leaves { at, .. } | Item::Corrupt { at }) = item;
            let (index, entries) = dump.entries_of(&at);
            let Place { level, range, word } = at;
            let (first, last, word) = (range.start(), range.last(), word.bits());
            match item {
                Item::Link { table, .. } => writeln!(
                    f,
                    "link level={level} index={index} word={word:#x} first={first} last={last} \
                     table={table}"
                ),
                Item::Leaves { paddr, lg2, prot, .. } => {
                    write!(
                        f,
                        "leaf level={level} index={index} entries={entries} word={word:#x} \
                         first={first} last={last} paddr={paddr} size={:#x} prot=",
                        lg2::size(lg2)
                    )?;
                    let mut between = "";
                    for (name, _) in prot.iter_names() {
                        write!(f, "{between}{name}")?;
                        between = "|";
                    }
                    writeln!(f)
                }
                Item::Corrupt { .. } => {
                    writeln!(f, "corrupt level={level} index={index} word={word:#x} first={first}")
                }
            }
        })
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Debug for Dump<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Debug for DumpLines<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The entry's name, its word and its fields.
fn write_entry<W: Word>(f: &mut fmt::Formatter<'_>, entry: &ManualEntry, word: W) -> fmt::Result {
    let digits = 2 + (2 << W::LG2_BYTES);
    write!(f, "{} {:#0digits$x}", entry.name, word.bits())?;
    for field in entry.fields {
        let value = field.value_in(word.bits());
        match (field.width, value) {
            (1, 0) => {}
            (1, _) => write!(f, " {}", field.name)?,
            (width, _) => {
                let digits = 2 + width as usize;
                write!(f, " {}={value:#0digits$b}", field.name)?;
            }
        }
    }
    Ok(())
}

/// `2^lg2` bytes, as the manuals write it.
struct Size(u32);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(lg2) = *self;
        let units = ["", "K", "M", "G", "T", "P", "E"];
        let unit = units.get((lg2 / 10) as usize).copied().unwrap_or_default();
        write!(f, "{}{unit}", 1u64 << (lg2 % 10))
    }
}
