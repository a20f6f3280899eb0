//! Memory in a file: a raw dump, or the core file of a machine.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::ForeignMemory;
use elf::ElfStream;
use elf::abi::{ET_CORE, PT_LOAD};
use elf::endian::AnyEndian;

use super::debugfs;

/// A part of physical memory, and where the file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Its first address.
    pub(crate) start: u64,
    /// Its last one.
    pub(crate) last: u64,
    /// Where in the file it begins.
    offset: u64,
    /// How many of its bytes the file has; the others are zero.
    stored: u64,
}

impl Segment {
    fn len(&self) -> u64 {
        (self.last - self.start).saturating_add(1)
    }

    /// The rest behind `count` bytes.
    fn skip(&self, count: u64) -> Option<Self> {
        (count < self.len()).then(|| Self {
            start: self.start + count,
            last: self.last,
            offset: self.offset.saturating_add(count),
            stored: self.stored.saturating_sub(count),
        })
    }
}

/// Memory in a file, by ascending and disjoint segments.
#[derive(Debug)]
pub(crate) struct FileMemory {
    file: File,
    segments: Vec<Segment>,
}

impl FileMemory {
    /// A raw dump of the memory from `base` on.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, in one line without its name.
    pub(crate) fn raw(file: File, base: u64) -> Result<Self, String> {
        let bytes = length(&file)?;
        let Some(last) = bytes.checked_sub(1) else { return Err("it is empty".to_owned()) };
        let Some(last) = base.checked_add(last) else {
            return Err(format!(
                "its {bytes:#x} bytes from {base:#x} on end above the last address that there is; \
                 --base says where the dump begins"
            ));
        };
        let segment = Segment { start: base, last, offset: 0, stored: bytes };
        Ok(Self { file, segments: vec![segment] })
    }

    /// The core file of a machine: QEMU's `dump-guest-memory`, kdump's.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, in one line without its name.
    pub(crate) fn elf(file: File) -> Result<Self, String> {
        let bytes = length(&file)?;
        let copy = file.try_clone().map_err(|error| error.to_string())?;
        let stream = ElfStream::<AnyEndian, _>::open_stream(copy);
        let stream = stream.map_err(|error| format!("it is no whole ELF file: {error}"))?;
        if stream.ehdr.e_type != ET_CORE {
            return Err("it is an ELF file, but no core file: memory is in core files".to_owned());
        }
        let loaded = stream.segments().iter().filter(|header| header.p_type == PT_LOAD);
        let mut segments = Vec::new();
        for header in loaded.filter(|header| header.p_memsz != 0 && header.p_filesz != 0) {
            let (start, stored) = (header.p_paddr, header.p_filesz);
            let len = header.p_memsz.max(stored);
            let Some(last) = start.checked_add(len - 1) else {
                return Err(format!("its segment of {len:#x} bytes at {start:#x} wraps"));
            };
            let end = header.p_offset.checked_add(stored);
            if end.is_none_or(|end| end > bytes) {
                return Err(format!(
                    "it is cut off: it has {bytes:#x} bytes, and its segment \
                     {start:#x}..={last:#x} needs {stored:#x} bytes at {:#x}",
                    header.p_offset
                ));
            }
            segments.push(Segment { start, last, offset: header.p_offset, stored });
        }
        if segments.is_empty() {
            return Err("it is a core file without memory (no PT_LOAD segment)".to_owned());
        }
        Ok(Self { file, segments: disjoint(segments)? })
    }

    /// What memory there is.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// How many of the bytes from `first` to `last` it has.
    pub(crate) fn overlap(&self, first: u64, last: u64) -> u64 {
        let from = self.segments.partition_point(|segment| segment.last < first);
        let inside = self.segments.iter().skip(from).take_while(|segment| segment.start <= last);
        let bytes = inside.map(|segment| segment.last.min(last) - segment.start.max(first) + 1);
        bytes.sum()
    }

    fn segment(&self, address: u64) -> Option<&Segment> {
        let behind = self.segments.partition_point(|segment| segment.start <= address);
        let segment = self.segments.get(behind.checked_sub(1)?)?;
        (address <= segment.last).then_some(segment)
    }
}

impl ForeignMemory for FileMemory {
    fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
        let (mut at, mut rest) = (paddr.get(), bytes);
        while !rest.is_empty() {
            let Some(segment) = self.segment(at) else { return false };
            let skipped = at - segment.start;
            let left = usize::try_from(segment.len() - skipped).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at_mut(left.min(rest.len()));
            let stored = usize::try_from(segment.stored.saturating_sub(skipped));
            let (stored, zero) = now.split_at_mut(stored.unwrap_or(usize::MAX).min(now.len()));
            zero.fill(0);
            if self.file.read_exact_at(stored, segment.offset + skipped).is_err() {
                return false;
            }
            let count = (stored.len() + zero.len()) as u64;
            match at.checked_add(count) {
                Some(next) => at = next,
                None => return later.is_empty(),
            }
            rest = later;
        }
        true
    }
}

/// The bytes of a file; an error where it is none.
fn length(file: &File) -> Result<u64, String> {
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("it is no regular file".to_owned());
    }
    Ok(metadata.len())
}

/// The segments by address. A core file may have a part twice, by two virtual addresses.
///
/// # Errors
///
/// That bytes of the file are the memory of two addresses: then a small file would be any amount of
/// memory.
fn disjoint(mut segments: Vec<Segment>) -> Result<Vec<Segment>, String> {
    segments.sort_by_key(|segment| segment.start);
    let mut apart: Vec<Segment> = Vec::new();
    for segment in segments {
        let covered = apart.last().filter(|before| before.last >= segment.start);
        let covered = covered.map_or(0, |before| (before.last - segment.start).saturating_add(1));
        apart.extend(segment.skip(covered));
    }
    let mut stored: Vec<_> = apart.iter().filter(|segment| segment.stored != 0).collect();
    stored.sort_by_key(|segment| segment.offset);
    for pair in stored.windows(2) {
        if let [one, next] = pair
            && next.offset - one.offset < one.stored.min(one.len())
        {
            return Err(format!(
                "its segments at {:#x} and {:#x} are the same bytes of the file",
                one.start, next.start
            ));
        }
    }
    Ok(apart)
}

/// What a file is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Memory as it is, from --base on (QEMU: pmemsave)
    Raw,
    /// A core file of a machine (QEMU: dump-guest-memory; kdump)
    Elf,
    /// Intel's domain_translation_struct in debugfs
    Debugfs,
    /// The lines of dmaspan's own dump of a table
    Lines,
}

/// How much of a file says what it is.
const FIRST: usize = 4096;

/// Files of memory that are packed, by their first bytes, and what unpacks them.
const PACKED: [(&[u8], &str); 8] = [
    (
        b"KDUMP   ",
        "a compressed kdump file; `makedumpfile -E -d 0 FILE CORE` on a whole vmcore, or \
      kdump's own setting for ELF, gives one that can be read",
    ),
    (b"DISKDUMP", "a compressed diskdump file; kdump's setting for ELF gives one that can be read"),
    (
        b"makedumpfile",
        "a flattened kdump file; `makedumpfile -R CORE < FILE` turns it into a core file",
    ),
    (
        b"QEVM",
        "a state of a virtual machine (migration, savevm); `dump-guest-memory` makes one that \
      can be read",
    ),
    (b"\x1f\x8b", "packed by gzip; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd; unpack it first"),
    (b"\xfd7zXZ", "packed by xz; unpack it first"),
    (b"BZh", "packed by bzip2; unpack it first"),
];

/// Whether a regular file has no bytes. The files of debugfs say that they have none.
///
/// # Errors
///
/// Why it cannot be read.
pub(crate) fn is_empty(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.is_file() && io::Read::read(&mut File::open(path)?, &mut [0])? == 0)
}

/// Finds out what a file is.
///
/// # Errors
///
/// Why it is nothing that can be read, in one line with the file's name.
pub(crate) fn recognise(path: &Path) -> Result<Kind, String> {
    let name = path.display();
    let cannot = |error: io::Error| format!("{name} cannot be read: {error}");
    // Before it is opened: a pipe without a writer would wait for one.
    let metadata = fs::metadata(path).map_err(cannot)?;
    if metadata.is_dir() {
        return Err(format!("{name} is a folder; give a file in it"));
    }
    if !metadata.is_file() {
        return Err(format!("{name} is no regular file: copy what it has into one"));
    }
    let file = File::open(path).map_err(cannot)?;
    let mut first = vec![0; FIRST];
    let count = io::Read::read(&mut &file, &mut first).map_err(cannot)?;
    first.truncate(count);
    if first.is_empty() {
        return Err(format!("{name} is empty"));
    }
    if let Some((_, what)) = PACKED.iter().find(|(magic, _)| first.starts_with(magic)) {
        return Err(format!("{name} is {what}"));
    }
    if first.starts_with(b"\x7fELF") {
        return Ok(Kind::Elf);
    }
    let text = first.trim_ascii_start();
    if text.starts_with(b"tree title=") {
        return Ok(Kind::Lines);
    }
    let of_debugfs = [&b"Device "[..], b"IOVA_PFN", debugfs::OFF.as_bytes()];
    if of_debugfs.iter().any(|begin| text.starts_with(begin)) {
        return Ok(Kind::Debugfs);
    }
    for (begin, what) in [
        (&b"IOMMU "[..], "dmar_translation_struct (contexts, without page tables)"),
        (b"IOMMU: ", "iommu_regset (registers)"),
        (b"Remapped Interrupt", "ir_translation_struct (interrupts)"),
        (b"Invalidation queue", "invalidation_queue"),
    ] {
        if text.starts_with(begin) {
            return Err(format!(
                "{name} is Intel's {what}; the mappings are in domain_translation_struct"
            ));
        }
    }
    let is_text = first.iter().all(|&byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
    if is_text {
        return Err(format!(
            "{name} is a text, but neither Intel's domain_translation_struct nor a dump by lines; \
             --kind says what it is"
        ));
    }
    Ok(Kind::Raw)
}
