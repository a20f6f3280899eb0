//! The counts of a trace: accesses to lines that another CPU writes, for a map and its unmap.

use std::collections::{BTreeMap, BTreeSet};

use super::trace::{Access, Kind, Touch, Trace};

/// Accesses of one kind of operation, or of several, for each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sums {
    /// Atomic read-modify-writes, wherever they go.
    pub(super) locked: f64,
    /// Of these and of stores, those to lines that another CPU writes, but for those of tables.
    pub(super) writes: f64,
    /// Those of tables.
    pub(super) table_writes: f64,
    /// Loads from lines that another CPU writes, but for those of tables.
    pub(super) loads: f64,
    /// Those of tables.
    pub(super) table_loads: f64,
}

/// A line that goes from CPU to CPU: one writes it, and another one writes or reads it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shared {
    pub(super) address: u64,
    pub(super) is_table: bool,
    /// CPUs that access it, and whether these are all that took turns.
    pub(super) cpus: usize,
    pub(super) by_all: bool,
    /// How often it goes to one of these CPUs for writing, in a pair of that CPU: as often as the
    /// operation has locked instructions there, and once where it only stores.
    pub(super) moves: f64,
    /// How often it goes to one that only reads it, and how often one only reads it.
    pub(super) read_moves: f64,
    pub(super) reading: f64,
}

/// All that is counted of a case, on one side.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// By kind of operation, in the order of the program.
    pub(super) operations: Vec<(String, Sums)>,
    pub(super) shared: Vec<Shared>,
    /// CPUs that took turns.
    pub(super) cpus: usize,
    /// Accesses to lines that another CPU writes, by where the code is: writes, then loads, most
    /// first.
    pub(super) places: Vec<Place>,
}

/// Code that accesses lines that another CPU writes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Place {
    /// The function, and the line in its file.
    pub(super) name: String,
    pub(super) is_table: bool,
    pub(super) is_load: bool,
    /// How often in a pair.
    pub(super) each: f64,
    /// The lines that it accesses.
    pub(super) lines: BTreeSet<u64>,
}

impl Counts {
    pub(super) fn of(trace: &Trace) -> Self {
        let lines = lines(trace);
        let is_contended = |access: &Access| {
            let line = lines.get(&access.line);
            line.is_some_and(|line| line.writers.iter().any(|&cpu| cpu != access.cpu))
        };
        let mut sums = vec![Sums::default(); trace.names.len()];
        let mut found: BTreeMap<(u64, bool, bool), (f64, BTreeSet<u64>)> = BTreeMap::new();
        let count_of = |operation| trace.done.get(&operation).map_or(1, |done| done.0.max(1));
        for (access, &times) in trace.accesses.iter().filter(|(access, _)| is_contended(access)) {
            let each = float(times) / float(count_of(access.operation));
            let is_table = trace.is_table(access.line);
            let sums = &mut sums[access.operation];
            *match (access.kind, is_table) {
                (Kind::Load, false) => &mut sums.loads,
                (Kind::Load, true) => &mut sums.table_loads,
                (_, false) => &mut sums.writes,
                (_, true) => &mut sums.table_writes,
            } += each;
            let is_load = access.kind == Kind::Load;
            let (sum, lines) = found.entry((access.instruction, is_table, is_load)).or_default();
            *sum += each;
            lines.insert(access.line << 6);
        }
        for (&operation, &(count, locked)) in &trace.done {
            sums[operation].locked = float(locked) / float(count.max(1));
        }
        Self {
            operations: trace.names.iter().cloned().zip(sums).collect(),
            shared: shared(trace, &lines),
            cpus: trace.operations.len(),
            places: places(trace, found),
        }
    }

    /// How many lines go from CPU to CPU for a pair: those of tables last.
    pub(super) fn moves(&self) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for line in &self.shared {
            // Summed over CPUs, of which some may not have the line.
            let share = small(line.cpus) / small(self.cpus.max(1));
            sums[usize::from(line.is_table)] += (line.moves + line.read_moves) * share;
        }
        sums
    }

    /// A map and its unmap.
    pub(super) fn pair(&self) -> Sums {
        let add = |sum: Sums, (_, one): &(String, Sums)| Sums {
            locked: sum.locked + one.locked,
            writes: sum.writes + one.writes,
            table_writes: sum.table_writes + one.table_writes,
            loads: sum.loads + one.loads,
            table_loads: sum.table_loads + one.table_loads,
        };
        self.operations.iter().fold(Sums::default(), add)
    }
}

/// Counts are below 2^53.
#[expect(clippy::cast_precision_loss, reason = "counts are small")]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

/// What became of a line.
#[derive(Debug, Default)]
struct Line {
    writers: BTreeSet<usize>,
    readers: BTreeSet<usize>,
    /// The CPUs whose caches have it as it is.
    holders: BTreeSet<usize>,
    moves: u64,
    read_moves: u64,
    reading: u64,
}

impl Line {
    fn touched(&mut self, cpu: usize, touch: Touch) {
        if touch.stored {
            let is_elsewhere = self.holders.iter().any(|&holder| holder != cpu);
            self.moves += if is_elsewhere { touch.locked.max(1) } else { 0 };
            self.holders = BTreeSet::from([cpu]);
            self.writers.insert(cpu);
        } else {
            self.reading += 1;
            let was_written = self.writers.iter().any(|&writer| writer != cpu);
            let is_new = self.holders.insert(cpu);
            self.read_moves += u64::from(is_new && was_written);
            self.readers.insert(cpu);
        }
    }
}

/// All lines, after each CPU in turn has done an operation, and then its next one: as they follow
/// each other where all run at once, and not as in the process, whose turns are longer.
fn lines(trace: &Trace) -> BTreeMap<u64, Line> {
    let mut lines: BTreeMap<u64, Line> = BTreeMap::new();
    let longest = trace.operations.values().map(Vec::len).max().unwrap_or(0);
    for nth in 0..longest {
        for (&cpu, operations) in &trace.operations {
            for &(line, touch) in operations.get(nth).into_iter().flatten() {
                lines.entry(line).or_default().touched(cpu, touch);
            }
        }
    }
    lines
}

fn shared(trace: &Trace, lines: &BTreeMap<u64, Line>) -> Vec<Shared> {
    let all = trace.operations.len();
    // Each CPU does the same number of pairs.
    let pairs = trace.done.values().map(|done| done.0).max().unwrap_or(1);
    let of_line = |(&address, line): (&u64, &Line)| {
        let cpus = line.writers.union(&line.readers).count();
        let pairs = float(pairs) * small(cpus) / small(all);
        (cpus > 1 && !line.writers.is_empty()).then(|| Shared {
            address: address << 6,
            is_table: trace.is_table(address),
            cpus,
            by_all: cpus == all,
            moves: float(line.moves) / pairs,
            read_moves: float(line.read_moves) / pairs,
            reading: float(line.reading) / pairs,
        })
    };
    lines.iter().filter_map(of_line).collect()
}

/// A number of CPUs.
pub(super) fn small(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// What is found of each instruction, for tables and loads or not, by where that was written.
fn places(trace: &Trace, found: BTreeMap<(u64, bool, bool), (f64, BTreeSet<u64>)>) -> Vec<Place> {
    let addresses = found.keys().map(|&(address, ..)| address).collect();
    let names = trace.code.places(&addresses);
    let mut places: Vec<Place> = Vec::new();
    for ((address, is_table, is_load), (each, lines)) in found {
        let name = names.get(&address).map_or("?", String::as_str);
        let same = places.iter_mut().find(|place| {
            (place.name.as_str(), place.is_table, place.is_load) == (name, is_table, is_load)
        });
        if let Some(place) = same {
            place.each += each;
            place.lines.extend(lines);
        } else {
            places.push(Place { name: name.to_owned(), is_table, is_load, each, lines });
        }
    }
    places.sort_by(|one, other| {
        one.is_load.cmp(&other.is_load).then(other.each.total_cmp(&one.each))
    });
    places
}

#[cfg(test)]
mod tests {
    use super::super::trace::tests::read;
    use super::*;

    /// An operation of a CPU with these accesses.
    fn operation(cpu: usize, accesses: &str) -> String {
        let page = ["00009", "0000a"][cpu];
        format!(" S {page}000,1\n{accesses} S {page}040,1\n")
    }

    #[test]
    fn only_lines_that_another_cpu_writes_count_and_tables_by_themselves() {
        let own = "I  00001003,2\n S 000c0000,8\n";
        let of_other = "I  00001003,2\n S 000d0000,8\n L 000b0008,8\n";
        // Both store to a line of a table, and one by a locked instruction to what the other reads.
        let table = "I  00001003,2\n M 00010000,8\n";
        let locked = "I  00001000,3\n M 000b0000,8\nI  00001000,3\n M 000b0000,8\n";
        let trace = [
            operation(0, &[own, table, locked].concat()),
            operation(1, &[of_other, table].concat()),
        ];
        let counts = Counts::of(&read(&trace.concat()).unwrap());
        // One or both of two operations have it. A CPU that alone writes a line does not disturb
        // itself.
        let expected =
            Sums { locked: 1.0, writes: 0.0, table_writes: 1.0, loads: 0.5, table_loads: 1.0 };
        assert_eq!(counts.pair(), expected);
        assert_eq!(counts.cpus, 2);
        // Each line went to the second CPU, once.
        let line = Shared {
            address: 0xb0000,
            is_table: false,
            cpus: 2,
            by_all: true,
            moves: 0.0,
            read_moves: 0.5,
            reading: 0.5,
        };
        let table =
            Shared { address: 0x10000, is_table: true, moves: 0.5, read_moves: 0.0, ..line };
        assert_eq!(counts.shared, [Shared { reading: 0.0, ..table }, line]);
        assert_eq!(counts.moves(), [0.5, 0.5]);
        let places = counts.places.iter().map(|place| (place.is_load, place.is_table, place.each));
        let expected = [(false, true, 1.0), (true, true, 1.0), (true, false, 0.5)];
        assert_eq!(places.collect::<Vec<_>>(), expected);
        assert_eq!(counts.places[0].lines, BTreeSet::from([0x10000]));
    }

    #[test]
    fn a_line_moves_where_another_cpu_had_it_and_not_where_it_stays() {
        // As one CPU does all of its operations first, it is one of a magazine that is passed on;
        // both in turn it is one that both want each time.
        let store = "I  00001003,2\n S 000b0000,8\n";
        let lock = "I  00001000,3\n M 000b0000,8\nI  00001000,3\n M 000b0000,8\n";
        let idle = "I  00001003,2\n L 000c0000,8\n";
        let moves = |first: [&str; 4], second: [&str; 4]| {
            let of = |cpu, all: [&str; 4]| all.map(|one| operation(cpu, one)).concat();
            let trace = of(0, first) + &of(1, second);
            let counts = Counts::of(&read(&trace).unwrap());
            counts.shared.iter().map(|line| line.moves * 8.0).sum::<f64>()
        };
        assert_eq!(moves([store, store, idle, idle], [idle, idle, store, store]), 1.0);
        assert_eq!(moves([store; 4], [store; 4]), 7.0);
        assert_eq!(moves([lock; 4], [lock; 4]), 14.0);
    }

    #[test]
    fn disjoint_operations_share_nothing() {
        let trace = operation(0, "I  00001000,3\n M 000b0000,8\n")
            + &operation(1, "I  00001000,3\n M 000b0040,8\n");
        let counts = Counts::of(&read(&trace).unwrap());
        assert_eq!(counts.pair(), Sums { locked: 1.0, ..Sums::default() });
        assert!(counts.shared.is_empty() && counts.places.is_empty());
    }
}
