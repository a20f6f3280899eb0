//! What a trace comes to: accesses to lines that another CPU writes, for a map and its unmap.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::trace::{Access, Kind, Trace, Visits};

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

/// A line that several CPUs write, or one writes and others read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shared {
    pub(super) address: u64,
    pub(super) is_table: bool,
    /// CPUs that access it, and of these all that took turns, or some.
    pub(super) cpus: usize,
    pub(super) by_all: bool,
    /// How often a pair of one of its CPUs wants it for writing.
    pub(super) moves: f64,
    /// How often a pair of one of its CPUs writes there, or only reads.
    pub(super) writing: f64,
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
    /// Writes for a pair to lines that another CPU writes, by where the code is, most first; those
    /// of tables are marked.
    pub(super) places: Vec<(String, bool, f64)>,
}

impl Counts {
    pub(super) fn of(trace: &Trace) -> Self {
        let writers = writers(trace);
        let is_contended = |access: &Access| {
            let others = writers.get(&access.line);
            others.is_some_and(|cpus| cpus.iter().any(|&cpu| cpu != access.cpu))
        };
        let mut sums = vec![Sums::default(); trace.names.len()];
        let mut written: BTreeMap<(u64, bool), f64> = BTreeMap::new();
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
            if access.kind != Kind::Load {
                *written.entry((access.instruction, is_table)).or_default() += each;
            }
        }
        for (&operation, &(count, locked)) in &trace.done {
            sums[operation].locked = float(locked) / float(count.max(1));
        }
        Self {
            operations: trace.names.iter().cloned().zip(sums).collect(),
            shared: shared(trace, &writers),
            cpus: trace.cpus.len(),
            places: places(trace, &written),
        }
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

/// The CPUs that write a line within their operations.
fn writers(trace: &Trace) -> BTreeMap<u64, BTreeSet<usize>> {
    let mut writers: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
    for (&(line, cpu), visits) in &trace.visits {
        if visits.writing > 0 {
            writers.entry(line).or_default().insert(cpu);
        }
    }
    writers
}

fn shared(trace: &Trace, writers: &BTreeMap<u64, BTreeSet<usize>>) -> Vec<Shared> {
    // Each CPU does the same number of pairs.
    let pairs = trace.done.values().map(|done| done.0).max().unwrap_or(1).max(1);
    let all: HashSet<usize> = trace.cpus.clone();
    let of_line = |(&line, _): (&u64, &BTreeSet<usize>)| {
        let of = |cpu: &usize| Some((*cpu, *trace.visits.get(&(line, *cpu))?));
        let visits: Vec<(usize, Visits)> = all.iter().filter_map(of).collect();
        let (cpus, ways) = (visits.len(), u64::try_from(all.len()).unwrap_or(1));
        let sum = |what: fn(&Visits) -> u64| {
            let total: u64 = visits.iter().map(|(_, visits)| what(visits)).sum();
            let of_each = float(pairs) / float(ways.max(1));
            float(total) / (of_each * float(u64::try_from(cpus).unwrap_or(1).max(1)))
        };
        (cpus > 1).then(|| Shared {
            address: line << 6,
            is_table: trace.is_table(line),
            cpus,
            by_all: cpus == all.len(),
            moves: sum(|visits| visits.moves),
            writing: sum(|visits| visits.writing),
            reading: sum(|visits| visits.reading),
        })
    };
    writers.iter().filter_map(of_line).collect()
}

fn places(trace: &Trace, written: &BTreeMap<(u64, bool), f64>) -> Vec<(String, bool, f64)> {
    let addresses = written.keys().map(|&(address, _)| address).collect();
    let names = trace.code.places(&addresses);
    let mut sums: BTreeMap<(&str, bool), f64> = BTreeMap::new();
    for (&(address, is_table), each) in written {
        let name = names.get(&address).map_or("?", String::as_str);
        *sums.entry((name, is_table)).or_default() += each;
    }
    let mut sums: Vec<_> = sums
        .into_iter()
        .map(|((name, is_table), each)| (name.to_owned(), is_table, each))
        .collect();
    sums.sort_by(|one, other| other.2.total_cmp(&one.2).then_with(|| one.0.cmp(&other.0)));
    sums
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
        // Two operations, of which one or both have it. Who alone writes a line is not disturbed
        // by itself.
        let expected =
            Sums { locked: 1.0, writes: 0.0, table_writes: 1.0, loads: 0.5, table_loads: 1.0 };
        assert_eq!(counts.pair(), expected);
        assert_eq!(counts.cpus, 2);
        let lines: Vec<_> = counts.shared.iter().map(|line| (line.address, line.moves)).collect();
        assert_eq!(lines, [(0x10000, 1.0), (0xb0000, 1.0)]);
        let table = Shared {
            address: 0x10000,
            is_table: true,
            cpus: 2,
            by_all: true,
            moves: 1.0,
            writing: 1.0,
            reading: 0.0,
        };
        assert_eq!(counts.shared[0], table);
        assert_eq!((counts.shared[1].writing, counts.shared[1].reading), (0.5, 0.5));
        assert_eq!(counts.places.len(), 1);
        assert!(counts.places[0].1 && (counts.places[0].2 - 1.0).abs() < 1e-9);
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
