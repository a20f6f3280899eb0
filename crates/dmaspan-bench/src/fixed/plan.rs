//! The cases of the benchmark: the reads, and the memory that each of them fills.

use dmaspan_linux::MemoryKind;

use super::args::FixedArgs;
use super::source::Source;
use super::work::Op;
use crate::failed::Failed;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::size::ByteSize;

const USUAL_DEPTH: u32 = 64;
/// What every disk's direct reads are multiples of, at least.
const SECTOR: u64 = 512;
/// The longest slice of a pool.
const MOST_BLOCK: u64 = 1 << 30;

/// What `dmaspan-bench fixed` does.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) source: Source,
    /// Bytes of a read.
    pub(crate) block: u64,
    /// The same as bytes of memory.
    pub(crate) block_len: usize,
    pub(crate) depth: u32,
    /// Reads of a run.
    pub(crate) count: u64,
    pub(crate) memory: MemoryKind,
    /// Bytes of memory for a read: whole pages.
    pub(crate) buffer: u64,
    pub(crate) runs: u32,
    /// Reads, or reads and writes.
    pub(crate) ops: &'static [Op],
    /// What is not as a user would expect.
    pub(crate) notes: Vec<String>,
}

impl Plan {
    /// What `args` ask for on `machine`.
    ///
    /// # Errors
    ///
    /// What cannot be done, and what can.
    pub(crate) fn new(args: &FixedArgs, machine: &Machine) -> Result<Self, Failed> {
        let ops: &[Op] = if args.write { &[Op::Read, Op::Write] } else { &[Op::Read] };
        let source = Source::open(&args.path, ops)?;
        let unit = source.limits().map_or(SECTOR, |limits| limits.logical_block_size.max(SECTOR));
        let block = args.block.bytes();
        let block_len = match usize::try_from(block) {
            Ok(len) if block > 0 && block <= MOST_BLOCK && block.is_multiple_of(unit) => len,
            _ => {
                let [block, unit] = [block, unit].map(ByteSize::new);
                return Err(Failed::new(format_args!(
                    "--block {block}: direct reads are multiples of {unit}, up to 1 GiB, like 8M"
                )));
            }
        };
        if source.len < block {
            let [len, block] = [source.len, block].map(ByteSize::new);
            return Err(Failed::new(format_args!(
                "{}: it has {len}, and a block {block}: name a longer file, or ask for less by \
                 --block",
                source.path.display()
            )));
        }
        let page = args.memory.page_size();
        let buffer = block.next_multiple_of(page);
        let available = machine.available_for(args.memory);
        let fits = (available / buffer).max(1);
        let asked = args.depth.map(|depth| u32::try_from(depth).unwrap_or(u32::MAX));
        let depth = asked.unwrap_or(USUAL_DEPTH);
        let mut notes = Vec::new();
        let depth = match asked {
            Some(_) if u64::from(depth) > fits => {
                let [buffer, available] = [buffer, available].map(ByteSize::new);
                return Err(Failed::new(format_args!(
                    "{depth} buffers of {buffer} are more than the {available} that are available: \
                     ask for less, like --depth {fits}"
                )));
            }
            // Half: others want memory too.
            None if u64::from(depth) > fits / 2 => {
                let less = u32::try_from((fits / 2).max(1)).unwrap_or(depth);
                notes.push(format!(
                    "{less} at a time, not 64, as {} of memory are available",
                    ByteSize::new(available)
                ));
                less
            }
            _ => depth,
        };
        let (count, memory, runs) = (args.count, args.memory, args.runs);
        Ok(Self { source, block, block_len, depth, count, memory, buffer, runs, ops, notes })
    }

    /// Bytes of all buffers.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.buffer * u64::from(self.depth)
    }

    /// How many places there are to read at.
    pub(crate) fn places(&self) -> u64 {
        self.source.len / self.block
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A plan for tests of other parts, of a file that is never read.
    pub(in crate::fixed) fn example(block: u64, count: u64) -> Plan {
        Plan {
            source: Source::unread(),
            block,
            block_len: usize::try_from(block).unwrap(),
            depth: 1,
            count,
            memory: MemoryKind::Base,
            buffer: block,
            runs: 1,
            ops: &[Op::Read],
            notes: Vec::new(),
        }
    }

    /// A plan to read this program, or its message.
    fn plan(block: u64, depth: Option<u64>, available: u64) -> Result<Plan, Failed> {
        let args = FixedArgs {
            path: std::env::current_exe().unwrap(),
            block: ByteSize::new(block),
            depth,
            count: 1,
            memory: MemoryKind::Memfd,
            runs: 1,
            write: false,
        };
        Plan::new(&args, &Machine::with_available(available))
    }

    fn is_refused(block: u64, depth: Option<u64>, available: u64, words: &str) -> String {
        let error = plan(block, depth, available).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        error
    }

    /// Where the test's own file system has no direct I/O nothing can be planned.
    fn is_direct() -> bool {
        let refused = plan(MIB, None, u64::MAX).err().map(|error| error.to_string());
        let direct = !refused.is_some_and(|words| words.contains("has no direct I/O"));
        if !direct {
            eprintln!("SKIP: no direct I/O where the tests are");
        }
        direct
    }

    #[test]
    fn a_small_machine_reads_fewer_at_a_time_and_is_told_so() {
        if !is_direct() {
            return;
        }
        let plan = plan(MIB, None, 8 * MIB).unwrap();
        assert!(plan.buffer == MIB && plan.depth == 4, "{plan:?}");
        assert_eq!(plan.notes.len(), 1);
    }

    #[test]
    fn what_cannot_be_is_refused_and_says_what_can() {
        if !is_direct() {
            return;
        }
        for block in [0, 100, 513, 2 << 30] {
            is_refused(block, None, u64::MAX, ": direct reads are multiples of ");
        }
        is_refused(1 << 30, None, u64::MAX, "name a longer file");
        let error = is_refused(MIB, Some(1 << 11), 1 << 30, "ask for less, like --depth ");
        let fits = error.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap();
        assert!(fits >= 512, "{error}");
    }
}
