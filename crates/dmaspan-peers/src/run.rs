//! This runs a configuration on both sides: the same operations, and a comparison now and then.

use dmaspan::io_pgtable::{
    ArenaList, DirtyBitmap, Entry, Error, Format, Geometry, PageTable, Retired, Word,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf, lg2};
use dmaspan_sim::rng::Rng;

use crate::compare::{Counts, Found, Sides};
use crate::differences::{Difference, Expected};
use crate::formats::{Asked, Bits, Setup, Subject, chance, place};
use crate::linux::{Done, Linux, Marks};
use crate::memory::{Memory, View};
use crate::model::{Mapping, Model};

/// What a format's configurations came to.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) configurations: u64,
    /// Configurations that both sides refuse.
    pub(crate) impossible: u64,
    pub(crate) operations: u64,
    pub(crate) counts: Counts,
    /// Wrong bits that were planted, all of which were found, in what the CPU sees and in what
    /// hardware does.
    pub(crate) planted: [u64; 2],
}

/// A configuration that both sides have.
pub(crate) struct Run<'l, S: Subject> {
    pub(crate) setup: Setup,
    pub(crate) linux: &'l mut Linux,
    pub(crate) table: PageTable<S::Format, Memory>,
    pub(crate) model: Model,
    pub(crate) rng: Rng,
    /// The operations so far, as a failure names them.
    pub(crate) trail: Vec<String>,
    /// How many of them there were at the last comparison that found nothing.
    pub(crate) compared: usize,
    pub(crate) counts: Counts,
}

/// A leaf of this side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf {
    pub(crate) start: u64,
    pub(crate) lg2: u32,
    /// Where the entry is that was looked at.
    pub(crate) at: u64,
}

impl Leaf {
    /// The last address that it translates.
    pub(crate) fn last(&self) -> u64 {
        self.start | lg2::mask(self.lg2)
    }
}

/// Frees what was taken out of a table.
#[expect(unsafe_code, reason = "there is no hardware")]
fn free<F: Format>(table: &PageTable<F, Memory>, retired: Retired<ArenaList>) {
    // SAFETY: no hardware walks these tables.
    unsafe { table.free(retired) }
}

impl<'l, S: Subject> Run<'l, S> {
    /// Opens a random configuration on both sides, or says which could not.
    ///
    /// `None` where none of both can, or only Linux, as the list says.
    pub(crate) fn open(
        linux: &'l mut Linux,
        setup: Setup,
        mut rng: Rng,
        totals: &mut Totals,
    ) -> Result<Option<Self>, String> {
        let Some(theirs) = linux.open(&setup.linux)? else {
            totals.impossible += 1;
            return match S::format(&setup, None, &[0; 8]) {
                Ok(_) => Err("Linux has no such table and this side has".to_owned()),
                Err(_) => Ok(None),
            };
        };
        let root = linux.root()?;
        let all = match S::format(&setup, None, &root) {
            Ok(format) => format.geometry().page_sizes,
            Err(error) => {
                linux.close()?;
                if !S::refuses(&setup, &root) {
                    return Err(format!("only Linux has such a table: {error}"));
                }
                totals.impossible += 1;
                totals.counts.met.count(Difference::Refused);
                return Ok(None);
            }
        };
        if S::refuses(&setup, &root) {
            return Err("this side has a table that it was to refuse".to_owned());
        }
        let [theirs, ours] = [theirs, all].map(|sizes| sizes & setup.linux.page_sizes);
        let differ = theirs ^ ours;
        if differ & lg2::mask(S::first_listed_size(&setup)) != 0 {
            return Err(format!("the page sizes are {theirs:#x} in Linux and {ours:#x} here"));
        }
        if differ != 0 {
            totals.counts.met.count(Difference::PageSizes);
        }
        linux.sizes(theirs & ours)?;
        let format = S::format(&setup, Some(theirs & ours), &root);
        let format = format.map_err(|error| format!("of these page sizes: {error}"))?;
        let bits = lg2::floor(format.geometry().root.max_paddr.get()) + 1;
        let memory = Memory::new(place(&mut rng, bits), setup.linux.walks);
        let table = PageTable::new(format, memory).map_err(|error| error.to_string())?;
        let (model, trail, counts) = (Model::default(), Vec::new(), Counts::default());
        Ok(Some(Self { setup, linux, table, model, rng, trail, compared: 0, counts }))
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        self.table.geometry()
    }

    /// Compares both sides.
    pub(crate) fn check(&mut self, view: View) -> Result<Found, String> {
        let Self { setup, linux, table, model, .. } = self;
        let found = Sides::<S> { setup, linux, table, model, view }.compare()?;
        self.counts.add(&found.counts);
        self.compared = self.trail.len();
        Ok(found)
    }

    /// Ends the configuration: nothing is mapped, and no table is lost.
    pub(crate) fn close(self) -> Result<(), String> {
        let memory = self.table.memory().clone();
        drop(self.table);
        let (theirs, ours) = (self.linux.close()?, memory.tables());
        if (theirs, ours) != (0, 0) {
            return Err(format!("Linux lost {theirs} pages of tables and this side {ours} tables"));
        }
        Ok(())
    }

    /// Whether both sides did the same; what they did is an error where they did not.
    fn same(&self, theirs: &Done, ours: &Result<(), Error>) -> Result<bool, String> {
        match (theirs.accepted, ours) {
            (true, Err(error)) => Err(format!("only this side refused it: {error}")),
            (false, Ok(())) => Err("only Linux refused it".to_owned()),
            (true, Ok(())) if theirs.warned => Err("Linux did it and warned".to_owned()),
            (accepted, _) => Ok(accepted),
        }
    }

    /// Maps spans, one behind the other.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        spans: Vec<(u64, u64)>,
        prot: Prot,
    ) -> Result<bool, String> {
        let mut theirs = Done { accepted: true, warned: false, value: 0 };
        let mut at = iova;
        for &(paddr, bytes) in &spans {
            theirs = self.linux.map(at, paddr, bytes, prot.bits())?;
            if !theirs.accepted {
                if at != iova {
                    self.linux.unmap(iova, at.wrapping_sub(iova))?;
                }
                break;
            }
            at = at.wrapping_add(bytes);
        }
        let ours = self.map_ours(iova, &spans, prot);
        let to = spans.iter().map(|(paddr, bytes)| format!(" {paddr:#x}+{bytes:#x}"));
        self.trail.push(format!("map {iova:#x} to{} {prot:?}", to.collect::<String>()));
        let accepted = self.same(&theirs, &ours)?;
        if accepted {
            let mut at = iova;
            for (paddr, bytes) in spans {
                self.mapped(at, paddr, bytes, prot);
                at = at.wrapping_add(bytes);
            }
        }
        Ok(accepted)
    }

    fn mapped(&mut self, start: u64, paddr: u64, bytes: u64, prot: Prot) {
        let asked = Asked { prot, fresh: true };
        self.model.insert(Mapping { start, last: start + (bytes - 1), paddr, asked });
    }

    fn map_ours(&mut self, iova: u64, spans: &[(u64, u64)], prot: Prot) -> Result<(), Error> {
        let spans: Result<Vec<Span>, _> =
            spans.iter().map(|&(paddr, bytes)| Span::new(PhysAddr::new(paddr), bytes)).collect();
        let spans = spans?;
        let mapped = self.table.whole().map_spans(Iova::new(iova), &spans, prot);
        let Err(failed) = mapped else { return Ok(()) };
        free(&self.table, failed.retired);
        let Error::EmptyTable { .. } = failed.error else { return Err(failed.error) };
        let bytes = spans.iter().map(|span| span.len()).sum();
        self.reclaim(IovaRange::from_len(Iova::new(iova), bytes)?)?;
        let mapped = self.table.whole().map_spans(Iova::new(iova), &spans, prot);
        mapped.map_err(|failed| {
            free(&self.table, failed.retired);
            failed.error
        })
    }

    fn reclaim(&mut self, range: IovaRange) -> Result<(), Error> {
        let retired = self.table.whole().reclaim(range)?;
        free(&self.table, retired);
        Ok(())
    }

    /// Maps pages of one size.
    pub(crate) fn map_pages(
        &mut self,
        iova: u64,
        paddr: u64,
        pages: (u64, u64),
        prot: Prot,
    ) -> Result<bool, String> {
        let (size, count) = pages;
        let bytes = size * count;
        let named = format!("map {iova:#x} to {paddr:#x}, {count} pages of {size:#x}, {prot:?}");
        self.trail.push(named);
        let theirs = self.linux.map_pages(iova, paddr, pages, prot.bits())?;
        let at = |done: u64| (Iova::new(iova + done), PhysAddr::new(paddr + done));
        let mut done = 0;
        let mut ours = Ok(());
        // Empty tables in the way are reclaimed once.
        for _ in 0..2 {
            let left = count - done / size;
            let (iova, paddr) = at(done);
            let (mapped, result) = self.table.whole().map_pages(iova, paddr, size, left, prot);
            done += mapped;
            ours = result;
            let Err(Error::EmptyTable { .. }) = ours else { break };
            let range = IovaRange::from_len(at(done).0, bytes - done);
            let range = range.map_err(|error| error.to_string())?;
            self.reclaim(range).map_err(|error| error.to_string())?;
        }
        if theirs.value != done {
            return Err(format!("Linux mapped {:#x} bytes and this side {done:#x}", theirs.value));
        }
        if done > 0 {
            self.mapped(iova, paddr, done, prot);
        }
        self.same(&theirs, &ours)
    }

    /// Unmaps a range of whole leaves without holes.
    pub(crate) fn unmap(&mut self, iova: u64, last: u64) -> Result<(), String> {
        let bytes = last - iova + 1;
        self.trail.push(format!("unmap {iova:#x}+{bytes:#x}"));
        let theirs = self.linux.unmap(iova, bytes)?;
        let range = IovaRange::new(Iova::new(iova), Iova::new(last)).ok_or("an empty range")?;
        let ours = if chance(&mut self.rng, 50) {
            self.unmap_spans(range)
        } else {
            let size = lg2::size(<S::Format as Format>::GRANULE_LG2);
            self.unmap_ours(iova, (size, bytes / size))
        };
        self.model.cut(iova, last);
        self.unmapped(&theirs, bytes, ours)
    }

    /// The same for leaves of one size.
    pub(crate) fn unmap_pages(&mut self, iova: u64, pages: (u64, u64)) -> Result<(), String> {
        let (size, count) = pages;
        self.trail.push(format!("unmap {iova:#x}, {count} pages of {size:#x}"));
        let theirs = self.linux.unmap_pages(iova, pages)?;
        let ours = self.unmap_ours(iova, pages);
        let bytes = size * count;
        self.model.cut(iova, iova + (bytes - 1));
        self.unmapped(&theirs, bytes, ours)
    }

    fn unmapped(&self, theirs: &Done, bytes: u64, ours: Result<u64, Error>) -> Result<(), String> {
        let done = ours.map_err(|error| format!("this side refused it: {error}"))?;
        if theirs.value != bytes || done != bytes {
            let theirs = theirs.value;
            return Err(format!("Linux unmapped {theirs:#x} bytes and this side {done:#x}"));
        }
        if theirs.warned { Err("Linux did it and warned".to_owned()) } else { Ok(()) }
    }

    fn unmap_ours(&mut self, iova: u64, (size, count): (u64, u64)) -> Result<u64, Error> {
        let unmapped = self.table.whole().unmap_pages(Iova::new(iova), size, count);
        free(&self.table, unmapped.retired);
        unmapped.result.map(|()| unmapped.bytes)
    }

    fn unmap_spans(&mut self, range: IovaRange) -> Result<u64, Error> {
        let mut room = SpanBuf::room::<16>();
        let mut buf = SpanBuf::new(&mut room);
        let mut bytes = 0;
        let mut unmapped = self.table.whole().unmap(range, &mut buf)?;
        loop {
            free(&self.table, unmapped.retired);
            bytes += buf.spans().iter().map(|span| span.len()).sum::<u64>();
            buf.clear();
            let Some(rest) = unmapped.rest else { return Ok(bytes) };
            unmapped = self.table.whole().resume(rest, &mut buf);
        }
    }

    /// Where this side's, or Linux's, entry of a level for an address is.
    fn entry_at(&self, table: u64, level: u32, iova: u64) -> u64 {
        let geometry = self.geometry();
        let size = <S::Format as Format>::Word::LG2_BYTES;
        let entries = if level == geometry.top_level {
            geometry.root.lg2_size - size
        } else {
            <S::Format as Format>::LG2_ENTRIES
        };
        let index = iova >> <S::Format as Format>::shift(level) & lg2::mask(entries);
        table + (index << size)
    }

    /// The leaf of this side at an address.
    pub(crate) fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        let (root, top) = self.table.root_and_level();
        let mut table = root.get();
        for level in (0..=top).rev() {
            let at = self.entry_at(table, level, iova);
            let word = self.table.memory().read(View::Cpu, 8, at & !7)?[0];
            let word = Bits::of(if at & 4 == 0 { word } else { word >> 32 });
            match self.table.format().decode(level, word) {
                Entry::Table(below) => table = below.get(),
                Entry::Leaf(leaf) => {
                    let start = lg2::align_down(iova, leaf.lg2);
                    return Some(Leaf { start, lg2: leaf.lg2, at });
                }
                _ => return None,
            }
        }
        None
    }

    /// Where Linux's leaf entry at an address is, of 8 bytes, and what it is.
    fn their_leaf(&mut self, iova: u64) -> Result<(u64, u64), String> {
        let (_, top) = self.table.root_and_level();
        let words = self.linux.root()?;
        let mut table = S::root(&self.setup, &words).paddr;
        for level in (0..=top).rev() {
            let at = self.entry_at(table, level, iova);
            let word = self.linux.read(View::Cpu, 8, &[at])?.remove(0)[0];
            match self.table.format().decode(level, Bits::of(word)) {
                Entry::Table(below) => table = below.get(),
                Entry::Leaf(_) => return Ok((at, word)),
                _ => break,
            }
        }
        Err(format!("Linux has no leaf at {iova:#x}"))
    }

    /// Hardware writes at an address that both sides map as writable.
    pub(crate) fn mark(&mut self, iova: u64) -> Result<(), String> {
        self.trail.push(format!("hardware writes at {iova:#x}"));
        let (at, word) = self.their_leaf(iova)?;
        let ours = self.leaf_at(iova).ok_or("this side has no leaf")?.at;
        let format = self.table.format().clone();
        let dirtied = |word| format.dirtied(Bits::of(word)).bits();
        self.linux.poke(at, dirtied(word))?;
        self.table.memory().change(ours, dirtied)
    }

    /// How many bytes Linux was to report for a leaf at `iova`, of which it reported `bytes`.
    fn dirty_bytes(&mut self, iova: u64, bytes: u64) -> u64 {
        let Some(leaf) = self.leaf_at(iova) else { return bytes };
        let level = <S::Format as Format>::level_of(leaf.lg2);
        let (size, entry) = (lg2::size(leaf.lg2), lg2::size(<S::Format as Format>::shift(level)));
        let lacks = S::DIRTY_LACKS_LAST && size > entry;
        let mut expected = Expected::of(bytes, &mut self.counts.met);
        let whole = |bytes| if bytes == size - entry { size } else { bytes };
        if lacks {
            expected.apply(Difference::DirtyLength, whole);
        }
        expected.word
    }

    /// Reads on both sides what hardware wrote in a mapping, and compares it.
    pub(crate) fn read_dirty(&mut self, mapping: Mapping, marks: Marks) -> Result<(), String> {
        let (start, bytes) = (mapping.start, mapping.reach() + 1);
        let clear = if marks == Marks::Cleared { " and clear" } else { "" };
        self.trail.push(format!("read{clear} what was written in {start:#x}+{bytes:#x}"));
        let theirs = self.linux.dirty(start, bytes, marks)?;
        let range = IovaRange::from_len(Iova::new(start), bytes);
        let range = range.map_err(|error| error.to_string())?;
        let granule = lg2::size(<S::Format as Format>::GRANULE_LG2);
        let granule = granule.max(bytes.next_power_of_two() >> 16);
        let words = usize::try_from(bytes.div_ceil(granule << 6)).unwrap_or(0);
        let mut expected = vec![0u64; words];
        for (iova, bytes) in theirs {
            let bytes = self.dirty_bytes(iova, bytes);
            let first = (iova - start) / granule;
            for bit in first..=(iova - start + bytes - 1) / granule {
                expected[usize::try_from(bit >> 6).unwrap_or(0)] |= 1 << (bit & 63);
            }
        }
        let mut found = vec![0; words];
        let bitmap = DirtyBitmap::new(&mut found, range, granule);
        let mut bitmap = bitmap.map_err(|error| error.to_string())?;
        let whole = self.table.whole();
        let read = if marks == Marks::Cleared {
            whole.read_and_clear_dirty(range, &mut bitmap).map(Some)
        } else {
            whole.read_dirty(range, &mut bitmap).map(|()| None)
        };
        if let Some(retired) = read.map_err(|error| error.to_string())? {
            free(&self.table, retired);
        }
        // What starts dirty in Linux is all that differs before the first time.
        if !mapping.asked.fresh && expected != found {
            return Err("what hardware wrote is not the same".to_owned());
        }
        if marks == Marks::Cleared {
            self.model.asked_for_dirty(start);
        }
        Ok(())
    }
}
