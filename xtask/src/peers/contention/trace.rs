//! The reader of a trace of `valgrind --tool=lackey --trace-mem=yes`: what each CPU of a process
//! accesses within its operations.
//!
//! The process announces on the same stream where it stores at the beginning and at the end of an
//! operation, and what else is to be known of it:
//!
//! ```text
//! contention mark ADDRESS CPU OPERATION begin|end
//! contention tables START END
//! contention stack CPU START END
//! contention mapping LINE-OF-/proc/self/maps
//! ```

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;
use std::ops::Range;

use super::code::Code;

/// log2 of the bytes of a cache line.
const LINE_LG2: u32 = 6;

/// How a line is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    Load,
    Store,
    /// An atomic read-modify-write.
    Locked,
}

/// Accesses to a line by an instruction of a CPU within a kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Access {
    pub(super) line: u64,
    pub(super) cpu: usize,
    pub(super) operation: usize,
    pub(super) kind: Kind,
    pub(super) instruction: u64,
}

/// What an operation did at a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Touch {
    /// Atomic read-modify-writes.
    pub(super) locked: u64,
    /// Whether it wrote there, by these or otherwise.
    pub(super) stored: bool,
}

/// The lines that an operation touched.
pub(super) type Operation = Vec<(u64, Touch)>;

#[derive(Clone, Copy, Debug)]
struct Mark {
    cpu: usize,
    operation: usize,
    begins: bool,
}

/// What was read of a trace.
#[derive(Debug, Default)]
pub(super) struct Trace {
    marks: HashMap<u64, Mark>,
    tables: Range<u64>,
    stacks: Vec<(usize, Range<u64>)>,
    pub(super) code: Code,
    /// Kinds of operations, in the order in which they were announced.
    pub(super) names: Vec<String>,
    /// Operations of each kind, and the locked instructions in them.
    pub(super) done: BTreeMap<usize, (u64, u64)>,
    pub(super) accesses: HashMap<Access, u64>,
    /// Of each CPU, in their order.
    pub(super) operations: BTreeMap<usize, Vec<Operation>>,
    current: Option<(usize, usize)>,
    touched: HashMap<u64, Touch>,
    instruction: u64,
    is_locked: bool,
    /// Whether the locked instruction's access was counted.
    is_counted: bool,
    is_mixed: bool,
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

impl Trace {
    /// Reads all of a trace.
    ///
    /// # Errors
    ///
    /// Why nothing can be said of it, in one line.
    pub(super) fn read(mut stream: impl BufRead) -> Result<Self, String> {
        let mut trace = Self::default();
        let mut line = Vec::new();
        let mut other = String::new();
        loop {
            line.clear();
            let len = stream.read_until(b'\n', &mut line);
            if len.map_err(|error| format!("the trace broke off: {error}"))? == 0 {
                break;
            }
            let text = str::from_utf8(&line).unwrap_or_default().trim_end();
            if !trace.take(text) && !text.starts_with("==") {
                other = text.to_owned();
            }
        }
        match () {
            () if trace.done.is_empty() => {
                Err(format!("no operation was marked; the last thing said was `{other}`"))
            }
            () if trace.is_mixed => Err("CPUs did not take turns".to_owned()),
            () => Ok(trace),
        }
    }

    /// Whether a page table's memory has the line.
    pub(super) fn is_table(&self, line: u64) -> bool {
        self.tables.contains(&(line << LINE_LG2))
    }

    /// Takes a line; whether it is one of a trace.
    fn take(&mut self, line: &str) -> bool {
        match line.as_bytes() {
            [b'I', b' ', b' ', ..] => {
                if self.current.is_some() {
                    self.execute(&line[3..]);
                }
                true
            }
            [b' ', kind @ (b'L' | b'S' | b'M'), b' ', ..] => {
                // Outside of operations only marks count, and these are stored.
                if self.current.is_some() || *kind == b'S' {
                    self.access(*kind, &line[3..]);
                }
                true
            }
            _ => match line.strip_prefix("contention ") {
                Some(announced) => self.announced(announced).is_some(),
                None => false,
            },
        }
    }

    fn announced(&mut self, text: &str) -> Option<()> {
        if let Some(mapping) = text.strip_prefix("mapping ") {
            self.code.add(mapping);
            return Some(());
        }
        let words: Vec<&str> = text.split_whitespace().collect();
        match words.as_slice() {
            ["mark", address, cpu, name, edge] => {
                let known = self.names.iter().position(|known| known == name);
                let operation = known.unwrap_or(self.names.len());
                if known.is_none() {
                    self.names.push((*name).to_owned());
                }
                let mark = Mark { cpu: cpu.parse().ok()?, operation, begins: *edge == "begin" };
                self.marks.insert(hex(address)?, mark);
            }
            ["tables", start, end] => self.tables = hex(start)?..hex(end)?,
            ["stack", cpu, start, end] => {
                self.stacks.push((cpu.parse().ok()?, hex(start)?..hex(end)?));
            }
            _ => return None,
        }
        Some(())
    }

    fn execute(&mut self, text: &str) {
        let Some((address, len)) = text.split_once(',') else { return };
        let (Some(address), Ok(len)) = (hex(address), len.parse()) else { return };
        self.instruction = address;
        self.is_locked = self.code.is_locked(address, len);
        self.is_counted = false;
        if let Some((_, operation)) = self.current.filter(|_| self.is_locked) {
            self.done.entry(operation).or_default().1 += 1;
        }
    }

    fn access(&mut self, kind: u8, text: &str) {
        let Some((address, len)) = text.split_once(',') else { return };
        let (Some(address), Ok(len)) = (hex(address), len.parse::<u64>()) else { return };
        if kind == b'S'
            && let Some(&mark) = self.marks.get(&address)
        {
            return self.mark(mark);
        }
        let Some((cpu, operation)) = self.current else { return };
        let kinds: &[Kind] = match kind {
            _ if self.is_locked && self.is_counted => return,
            _ if self.is_locked => &[Kind::Locked],
            b'L' => &[Kind::Load],
            b'S' => &[Kind::Store],
            _ => &[Kind::Load, Kind::Store],
        };
        self.is_counted = true;
        let is_foreign = |(of, stack): &(usize, Range<u64>)| *of != cpu && stack.contains(&address);
        self.is_mixed |= self.stacks.iter().any(is_foreign);
        for line in address >> LINE_LG2..=(address + len.max(1) - 1) >> LINE_LG2 {
            let touch = self.touched.entry(line).or_default();
            for &kind in kinds {
                touch.locked += u64::from(kind == Kind::Locked);
                touch.stored |= kind != Kind::Load;
                let instruction = self.instruction;
                let access = Access { line, cpu, operation, kind, instruction };
                *self.accesses.entry(access).or_default() += 1;
            }
        }
    }

    fn mark(&mut self, mark: Mark) {
        let Mark { cpu, operation, begins } = mark;
        self.is_mixed |= self.current != (!begins).then_some((cpu, operation));
        self.current = begins.then_some((cpu, operation));
        self.is_locked = false;
        if !begins {
            self.done.entry(operation).or_default().0 += 1;
            self.operations.entry(cpu).or_default().push(self.touched.drain().collect());
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;
    use std::sync::OnceLock;

    use super::*;

    const ANNOUNCED: &str = "\
==1== Lackey, an example Valgrind tool
contention mark 9000 0 map begin
contention mark 9040 0 map end
contention mark a000 1 map begin
contention mark a040 1 map end
contention tables 10000 20000
contention stack 0 50000 60000
contention stack 1 70000 80000
";

    pub(crate) fn read(lines: &str) -> Result<Trace, String> {
        // An instruction with `lock` at 0x1000, and one without at 0x1003.
        static PATH: OnceLock<PathBuf> = OnceLock::new();
        let path = PATH.get_or_init(|| {
            let path = std::env::temp_dir().join(format!("contention-{}", std::process::id()));
            std::fs::write(&path, [0xf0, 0xff, 0x00, 0xff, 0x00]).unwrap();
            path
        });
        let mapping =
            format!("contention mapping 1000-2000 r-xp 00000000 08:01 7 {}\n", path.display());
        Trace::read(format!("{ANNOUNCED}{mapping}{lines}").as_bytes())
    }

    #[test]
    fn what_is_accessed_within_operations_is_counted_and_nothing_else() {
        let trace = read(
            " S 000b0000,8\n S 00009000,1\nI  00001003,2\n L 000b0000,8\n M 000b0038,16\n \
             S 00009040,1\nI  00001000,3\n M 000b0000,8\n",
        );
        let trace = trace.unwrap();
        assert_eq!(trace.done, BTreeMap::from([(0, (1, 0))]));
        let count = |line, kind| {
            let access = Access { line, cpu: 0, operation: 0, kind, instruction: 0x1003 };
            trace.accesses.get(&access).copied()
        };
        assert_eq!(count(0xb0000 >> 6, Kind::Load), Some(2));
        assert_eq!(count(0xb0000 >> 6, Kind::Store), Some(1));
        // The modification goes over the end of its line.
        assert_eq!(count(0xb0040 >> 6, Kind::Store), Some(1));
        assert_eq!(trace.accesses.len(), 4);
        let mut touched = trace.operations[&0][0].clone();
        touched.sort_by_key(|touch| touch.0);
        let stored = Touch { locked: 0, stored: true };
        assert_eq!(touched, [(0xb0000 >> 6, stored), (0xb0040 >> 6, stored)]);
    }

    #[test]
    fn a_locked_instruction_counts_once_whatever_it_loads_and_stores() {
        let trace = read(
            " S 0000a000,1\nI  00001000,3\n L 000b0000,8\n M 000b0000,8\nI  00001000,3\n \
             M 000b0000,8\nI  00001003,2\n S 000b0000,8\n S 0000a040,1\n",
        );
        let trace = trace.unwrap();
        assert_eq!(trace.done[&0], (1, 2));
        let locked = Access {
            line: 0xb0000 >> 6,
            cpu: 1,
            operation: 0,
            kind: Kind::Locked,
            instruction: 0x1000,
        };
        assert_eq!(trace.accesses[&locked], 2);
        let touch = Touch { locked: 2, stored: true };
        assert_eq!(trace.operations[&1], [vec![(0xb0000 >> 6, touch)]]);
    }

    #[test]
    fn a_trace_in_which_cpus_do_not_take_turns_or_mark_nothing_is_refused() {
        let mixed = " S 00009000,1\n S 0000a000,1\n S 00009040,1\n S 0000a040,1\n";
        assert!(read(mixed).unwrap_err().contains("turns"));
        let foreign = " S 00009000,1\nI  00001003,2\n S 00070010,8\n S 00009040,1\n";
        assert!(read(foreign).unwrap_err().contains("turns"));
        assert!(read("nothing works\n").unwrap_err().contains("nothing works"));
    }

    #[test]
    fn lines_of_tables_are_told_apart() {
        let trace = read(" S 00009000,1\n S 00009040,1\n").unwrap();
        assert!(trace.is_table(0x10000 >> 6) && !trace.is_table(0x20000 >> 6));
    }
}
