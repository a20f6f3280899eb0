//! The code of a traced process: which of its instructions are locked, and where they were written.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A file, or a part of it, in the memory of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    /// Of `start` in the file.
    offset: u64,
    path: PathBuf,
}

impl Mapping {
    /// A line of `/proc/PID/maps`, if it is of a file.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let offset = words.nth(1)?;
        let path = words.nth(2).filter(|path| path.starts_with('/'))?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        Some(Self { start: hex(start)?, end: hex(end)?, offset: hex(offset)?, path: path.into() })
    }
}

/// Whether an instruction is an atomic read-modify-write of memory: it has the prefix `lock`, or it
/// is an `xchg` with memory, which is locked without one.
pub(super) fn is_locked(instruction: &[u8]) -> bool {
    let is_prefix = |byte: &u8| {
        matches!(byte, 0xf0 | 0xf2 | 0xf3 | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65 | 0x66 | 0x67)
    };
    let prefixes = instruction.iter().take_while(|byte| is_prefix(byte)).count();
    let (prefixes, rest) = instruction.split_at(prefixes);
    if prefixes.contains(&0xf0) {
        return true;
    }
    let rest = match rest {
        [0x40..=0x4f, rest @ ..] => rest,
        rest => rest,
    };
    matches!(rest, [0x86 | 0x87, modrm, ..] if modrm >> 6 != 3)
}

/// What a traced process executes.
#[derive(Debug, Default)]
pub(super) struct Code {
    mappings: Vec<Mapping>,
    files: HashMap<PathBuf, Vec<u8>>,
    /// By address.
    locked: HashMap<u64, bool>,
}

impl Code {
    /// Adds a line of `/proc/PID/maps`.
    pub(super) fn add(&mut self, line: &str) {
        self.mappings.extend(Mapping::parse(line));
    }

    fn mapping(&self, address: u64) -> Option<&Mapping> {
        self.mappings.iter().find(|mapping| (mapping.start..mapping.end).contains(&address))
    }

    /// Whether the instruction of so many bytes is locked. One of no file is not.
    pub(super) fn is_locked(&mut self, address: u64, len: usize) -> bool {
        if let Some(&known) = self.locked.get(&address) {
            return known;
        }
        let found = self.bytes(address, len).is_some_and(|bytes| is_locked(&bytes));
        self.locked.insert(address, found);
        found
    }

    fn bytes(&mut self, address: u64, len: usize) -> Option<Vec<u8>> {
        let Mapping { start, offset, path, .. } = self.mapping(address)?.clone();
        let file = self.files.entry(path).or_insert_with_key(|path| {
            // One that cannot be read has no locked instructions.
            fs::read(path).unwrap_or_default()
        });
        let at = usize::try_from(address - start + offset).ok()?;
        file.get(at..at + len).map(<[u8]>::to_vec)
    }

    /// Where instructions were written, as `function (file:line)`, by binutils' `addr2line`; by the
    /// address alone where that does not know.
    pub(super) fn places(&self, addresses: &BTreeSet<u64>) -> BTreeMap<u64, String> {
        let mut of_files: BTreeMap<&PathBuf, Vec<(u64, u64)>> = BTreeMap::new();
        for &address in addresses {
            if let Some(mapping) = self.mapping(address) {
                // Of a file of which no part is mapped elsewhere: where its first byte is.
                let first = self.mappings.iter().filter(|other| other.path == mapping.path);
                let base = first.map(|other| other.start - other.offset.min(other.start)).min();
                let base = base.unwrap_or_default();
                of_files.entry(&mapping.path).or_default().push((address, address - base));
            }
        }
        let mut places: BTreeMap<u64, String> =
            addresses.iter().map(|&address| (address, format!("{address:#x}"))).collect();
        for (path, addresses) in of_files {
            let of_file = addresses.iter().map(|(_, at)| format!("{at:#x}"));
            let output = Command::new("addr2line")
                .args(["-a", "-f", "-i", "-C", "-e"])
                .arg(path)
                .args(of_file)
                .stderr(Stdio::null())
                .output();
            let Ok(output) = output else { continue };
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            for ((address, _), place) in addresses.iter().zip(said_of_each(&said)) {
                places.insert(*address, place);
            }
        }
        places
    }
}

/// What `addr2line -a -f -i` said of each address: of the functions that are inlined there, the
/// innermost one that is not the standard library's or the compiler's.
fn said_of_each(said: &str) -> Vec<String> {
    let mut places = Vec::new();
    for block in said.split("0x").skip(1) {
        // Behind the address, pairs of a function and where it was written.
        let lines: Vec<&str> = block.lines().skip(1).collect();
        let frames: Vec<(&str, &str)> =
            lines.as_chunks::<2>().0.iter().map(|[function, place]| (*function, *place)).collect();
        let is_own =
            |place: &str| !["/rustc/", "/.cargo/", "/usr/"].iter().any(|at| place.contains(at));
        let found = frames.iter().find(|(_, place)| is_own(place)).or(frames.first());
        let &(function, place) = found.unwrap_or(&("??", "??:0"));
        places.push(shortened(function, place));
    }
    places
}

fn shortened(function: &str, place: &str) -> String {
    let place = place.split(" (").next().unwrap_or(place);
    let names: Vec<&str> = place.rsplitn(3, '/').collect();
    let file = match names.as_slice() {
        [name, folder, _] => format!("{folder}/{name}"),
        _ => place.to_owned(),
    };
    // Parameters of types are long, and say nothing here.
    let mut depth = 0_u32;
    let mut short = String::new();
    for character in function.chars() {
        match character {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            _ if depth == 0 => short.push(character),
            _ => {}
        }
    }
    let name = short.rsplit("::").find(|part| !part.is_empty() && !part.starts_with('{'));
    format!("{} ({file})", name.unwrap_or(&short))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_instructions_are_those_with_the_prefix_and_exchanges_with_memory() {
        // As objdump prints them.
        let locked = [
            "f0 48 83 05 df 2e 00 00 01", // lock addq $0x1,0x2edf(%rip)
            "f0 48 0f b1 0d c8 2e 00 00", // lock cmpxchg %rcx,0x2ec8(%rip)
            "f0 41 0f b1 0c 24",          // lock cmpxchg %ecx,(%r12)
            "65 f0 0f c1 03",             // lock xadd %eax,%gs:(%rbx)
            "66 f0 0f b1 0b",             // lock cmpxchg %cx,(%rbx)
            "f0 83 44 24 fc 00",          // lock addl $0x0,-0x4(%rsp)
            "87 03",                      // xchg %eax,(%rbx)
            "48 87 45 10",                // xchg %rax,0x10(%rbp)
            "86 07",                      // xchg %al,(%rdi)
        ];
        let others = [
            "48 c7 05 d4 2e 00 00 05 00 00 00", // movq $0x5,0x2ed4(%rip)
            "48 87 d8",                         // xchg %rbx,%rax
            "66 90",                            // xchg %ax,%ax
            "48 83 00 f0",                      // addq $0xfffffffffffffff0,(%rax)
            "f3 48 ab",                         // rep stos %rax,%es:(%rdi)
            "",
        ];
        let bytes = |text: &str| {
            let byte = |hex| u8::from_str_radix(hex, 16).unwrap();
            text.split_whitespace().map(byte).collect::<Vec<u8>>()
        };
        for text in locked {
            assert!(is_locked(&bytes(text)), "{text}");
        }
        for text in others {
            assert!(!is_locked(&bytes(text)), "{text}");
        }
    }

    #[test]
    fn instructions_are_found_in_the_file_that_is_mapped_there() {
        let path = std::env::temp_dir().join(format!("contention-code-{}", std::process::id()));
        fs::write(&path, [0x90, 0x90, 0xf0, 0xff, 0x00, 0xff, 0x00]).unwrap();
        let mut code = Code::default();
        code.add(&format!("00010000-00011000 r-xp 00000002 08:01 77    {}", path.display()));
        code.add("00020000-00021000 rw-p 00000000 00:00 0 [heap]");
        let found = [(0x10000, 3), (0x10003, 2), (0x20000, 2), (0x9_0000, 3)]
            .map(|(address, len)| code.is_locked(address, len));
        fs::remove_file(&path).unwrap();
        assert_eq!(found, [true, false, false, false]);
    }

    #[test]
    fn a_place_is_the_innermost_function_that_is_not_the_standard_librarys() {
        let said = "0x0000000000001234\n\
            core::sync::atomic::atomic_add<u32>\n\
            /rustc/abc/library/core/src/sync/atomic.rs:3900\n\
            <dmaspan::iommu::iova::Space<P>>::alloc\n\
            /there/crates/dmaspan/src/iommu/iova/mod.rs:77 (discriminator 3)\n\
            0x0000000000002000\n??\n??:0\n";
        assert_eq!(said_of_each(said), ["alloc (iova/mod.rs:77)", "?? (??:0)"]);
    }
}
