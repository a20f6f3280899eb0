//! Linux's page tables, in a process of their own: `xtask/peers/bench/bytes.c`.

use std::fmt;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use dmaspan::Coherency;

use crate::memory::View;

/// What can be asked for, by its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// A table.
    Open = 0,
    /// These page sizes and no others.
    Sizes = 1,
    /// A mapping through the IOMMU core.
    Map = 2,
    /// Pages through io-pgtable's own call.
    MapPages = 3,
    /// An unmap through the IOMMU core.
    Unmap = 4,
    /// The same through io-pgtable's own call.
    UnmapPages = 5,
    /// What hardware is told of the root.
    Root = 6,
    /// The contents of tables.
    Read = 7,
    /// A word written as hardware writes it.
    Poke = 8,
    /// What hardware wrote.
    Dirty = 9,
    /// The table's end.
    Close = 10,
    /// Where an address leads.
    Translate = 11,
}

/// The formats, by their numbers there: those of `enum io_pgtable_fmt`, then generic_pt's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `ARM_32_LPAE_S1`.
    Lpae32S1 = 0,
    /// `ARM_32_LPAE_S2`.
    Lpae32S2 = 1,
    /// `ARM_64_LPAE_S1`.
    LpaeS1 = 2,
    /// `ARM_64_LPAE_S2`.
    LpaeS2 = 3,
    /// `ARM_V7S`.
    V7s = 4,
    /// `amdv1`.
    AmdV1 = 100,
    /// `vtdss`.
    VtdSs = 101,
    /// `x86_64`.
    X86_64 = 102,
    /// `riscv_64`.
    Riscv64 = 103,
}

/// What becomes of hardware's marks that are read, as Linux's flag `IOMMU_DIRTY_NO_CLEAR` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marks {
    Cleared = 0,
    Kept = 1,
}

/// What a table is opened with: `struct config` there.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The format.
    pub(crate) kind: Kind,
    /// Quirks of io-pgtable, features of generic_pt.
    pub(crate) features: u64,
    /// The page sizes asked for.
    pub(crate) page_sizes: u64,
    /// Bits of input addresses.
    pub(crate) input_bits: u32,
    /// Bits of physical addresses.
    pub(crate) output_bits: u32,
    /// Whether hardware's walks see the CPU's caches.
    pub(crate) walks: Coherency,
    /// The level of the first root, for generic_pt.
    pub(crate) top_level: u32,
    /// Where its tables are, for hardware.
    pub(crate) tables: u64,
    /// The address bit of encrypted memory.
    pub(crate) encrypted: u64,
}

/// What it answered.
#[derive(Debug)]
pub(crate) struct Reply {
    /// 0, or `-errno`.
    pub(crate) result: i64,
    /// How often Linux warned meanwhile.
    pub(crate) warned: u64,
    /// What was asked for.
    pub(crate) words: Vec<u64>,
}

/// A reply that says what happened at all.
#[derive(Debug)]
pub(crate) struct Done {
    /// Whether Linux did it.
    pub(crate) accepted: bool,
    /// Whether it warned of something wrong.
    pub(crate) warned: bool,
    /// The first word of the reply.
    pub(crate) value: u64,
}

/// The most tables of one [`Request::Read`], and the most bytes of the reply.
const MOST_TABLES: usize = 1 << 15;
const MOST_BYTES: usize = 16 << 20;

/// The process.
pub(crate) struct Linux {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl fmt::Debug for Linux {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Linux({})", self.child.id())
    }
}

impl Linux {
    /// Starts it.
    pub(crate) fn start(program: &Path) -> Result<Self, String> {
        let child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child =
            child.map_err(|error| format!("`{}` did not start: {error}", program.display()))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the pipes to Linux's page tables are missing".to_owned());
        };
        Ok(Self { child, to, from: BufReader::with_capacity(1 << 20, from) })
    }

    fn ask(&mut self, request: Request, words: &[u64]) -> Result<Reply, String> {
        let ended = |error| format!("Linux's page tables ended in `{request:?}`: {error}");
        let header = [request as u64, words.len() as u64];
        let bytes: Vec<u8> = header.iter().chain(words).flat_map(|w| w.to_le_bytes()).collect();
        self.to.write_all(&bytes).and_then(|()| self.to.flush()).map_err(ended)?;
        let [result, warned, count] = self.read_words(3).map_err(ended)?[..] else {
            return Err("Linux's page tables sent no header".to_owned());
        };
        let words = self.read_words(count).map_err(ended)?;
        Ok(Reply { result: result.cast_signed(), warned, words })
    }

    fn read_words(&mut self, count: u64) -> std::io::Result<Vec<u64>> {
        let mut bytes = vec![0; usize::try_from(count).unwrap_or(usize::MAX >> 4) * 8];
        self.from.read_exact(&mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// One that must work.
    fn must(&mut self, request: Request, words: &[u64]) -> Result<Vec<u64>, String> {
        let reply = self.ask(request, words)?;
        if reply.result == 0 {
            Ok(reply.words)
        } else {
            Err(format!("`{request:?}` {words:x?} failed with {} in Linux", reply.result))
        }
    }

    fn done(&mut self, request: Request, words: &[u64]) -> Result<Done, String> {
        let reply = self.ask(request, words)?;
        let value = reply.words.first().copied().unwrap_or(0);
        Ok(Done { accepted: reply.result == 0, warned: reply.warned > 0, value })
    }

    /// Opens a table, and returns its page sizes where Linux has such tables.
    pub(crate) fn open(&mut self, config: &Config) -> Result<Option<u64>, String> {
        let words = [
            config.kind as u64,
            config.features,
            config.page_sizes,
            u64::from(config.input_bits),
            u64::from(config.output_bits),
            u64::from(config.walks == Coherency::Coherent),
            u64::from(config.top_level),
            config.tables,
            config.encrypted,
        ];
        let opened = self.done(Request::Open, &words)?;
        Ok(opened.accepted.then_some(opened.value))
    }

    /// Lets the IOMMU core use these page sizes only.
    pub(crate) fn sizes(&mut self, page_sizes: u64) -> Result<(), String> {
        self.must(Request::Sizes, &[page_sizes]).map(|_| ())
    }

    /// Maps contiguous memory by whatever leaves.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        paddr: u64,
        bytes: u64,
        prot: u32,
    ) -> Result<Done, String> {
        self.done(Request::Map, &[iova, paddr, bytes, prot.into()])
    }

    /// Maps pages of one size; the value is how many bytes.
    pub(crate) fn map_pages(
        &mut self,
        iova: u64,
        paddr: u64,
        pages: (u64, u64),
        prot: u32,
    ) -> Result<Done, String> {
        self.done(Request::MapPages, &[iova, paddr, pages.0, pages.1, prot.into()])
    }

    /// Takes away what is mapped; the value is how many bytes.
    pub(crate) fn unmap(&mut self, iova: u64, bytes: u64) -> Result<Done, String> {
        self.done(Request::Unmap, &[iova, bytes])
    }

    /// The same, by pages of one size.
    pub(crate) fn unmap_pages(&mut self, iova: u64, pages: (u64, u64)) -> Result<Done, String> {
        self.done(Request::UnmapPages, &[iova, pages.0, pages.1])
    }

    /// What hardware is told of the root now, by format.
    pub(crate) fn root(&mut self) -> Result<Vec<u64>, String> {
        self.must(Request::Root, &[])
    }

    /// The words of tables of the same size.
    pub(crate) fn read(
        &mut self,
        view: View,
        bytes: usize,
        tables: &[u64],
    ) -> Result<Vec<Vec<u64>>, String> {
        let mut read = Vec::with_capacity(tables.len());
        for some in tables.chunks((MOST_BYTES / bytes).clamp(1, MOST_TABLES)) {
            let mut words = vec![view as u64, bytes as u64];
            words.extend_from_slice(some);
            let found = self.must(Request::Read, &words)?;
            read.extend(found.chunks_exact(bytes / 8).map(<[u64]>::to_vec));
        }
        Ok(read)
    }

    /// Writes a word of a table as hardware does.
    pub(crate) fn poke(&mut self, paddr: u64, value: u64) -> Result<(), String> {
        self.must(Request::Poke, &[paddr, 8, value]).map(|_| ())
    }

    /// The ranges, as addresses and bytes, that hardware wrote.
    pub(crate) fn dirty(
        &mut self,
        iova: u64,
        bytes: u64,
        marks: Marks,
    ) -> Result<Vec<(u64, u64)>, String> {
        let words = self.must(Request::Dirty, &[iova, bytes, marks as u64])?;
        let (pairs, _) = words.as_chunks::<2>();
        Ok(pairs.iter().map(|&[iova, bytes]| (iova, bytes)).collect())
    }

    /// Where an address leads, by `iova_to_phys` of io-pgtable; words of the stack below the call
    /// are `stack` before.
    pub(crate) fn translate(&mut self, iova: u64, stack: u64) -> Result<u64, String> {
        Ok(self.must(Request::Translate, &[iova, stack])?.first().copied().unwrap_or(0))
    }

    /// Ends the table, and returns how many pages of tables Linux has left.
    pub(crate) fn close(&mut self) -> Result<u64, String> {
        Ok(self.must(Request::Close, &[])?.first().copied().unwrap_or(0))
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        // Without its pipe it ends at once; where it hangs, nobody waits for it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
