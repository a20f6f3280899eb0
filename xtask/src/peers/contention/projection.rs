//! A projection to many CPUs, how many pairs a second they do, from the lines that they share.
//!
//! - A pair takes a CPU that is alone the time that was measured, and longer by the time in which
//!   a line comes from another CPU, where one has had it since: once for each locked instruction
//!   there, once for an operation that only stores, and for one that only reads the more often the
//!   more CPUs may have written it.
//! - A line goes to one CPU at a time: pairs that want it for writing wait for each other.
//! - A line that all CPUs of the count share is shared by however many there are; one that fewer
//!   share, such as the records of neighbours, by as many as there.
//! - Nobody waits for anything else: the work under a lock that is held, memory and cores that run
//!   two threads are left out, so that this is the most that there can be.

use super::counts::{Counts, Shared, small};

/// How long a line takes from CPU to CPU in a large machine, in nanoseconds: about what it takes
/// between the sockets of one, or its far dies.
pub(super) const LARGE_NS: f64 = 100.0;

/// The CPUs that are projected to.
pub(super) const MANY: [u32; 2] = [64, 256];

/// What is projected, in pairs a second of all CPUs together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Projected {
    pub(super) rate: f64,
    /// The line that they wait for, where they do.
    pub(super) limit: Option<Shared>,
}

/// So many CPUs, whose pairs take `alone_ns`, and lines `line_ns` from one to another.
pub(super) fn projected(counts: &Counts, cpus: u32, alone_ns: f64, line_ns: f64) -> Projected {
    let many = f64::from(cpus);
    let share = |line: &Shared| if line.by_all { many } else { small(line.cpus).min(many) };
    let wait = |line: &Shared| {
        // The more there are, the more often one has written since this one read.
        let others = small(line.cpus).max(2.0) - 1.0;
        let reading = line.reading.min(line.read_moves * (share(line) - 1.0) / others);
        let each = if share(line) > 1.0 { line.moves + reading } else { 0.0 };
        // Of CPUs that do not share the line it costs nothing.
        each * small(line.cpus) / small(counts.cpus.max(1)) * line_ns
    };
    let waits: f64 = counts.shared.iter().map(wait).sum();
    let alone = Projected { rate: many * 1e9 / (alone_ns + waits), limit: None };
    let capped = counts.shared.iter().filter(|line| line.moves > 0.0 && share(line) > 1.0);
    let capped = capped.map(|line| {
        let groups = many / share(line);
        Projected { rate: groups * 1e9 / (line.moves * line_ns), limit: Some(*line) }
    });
    capped.fold(alone, |least, one| if one.rate < least.rate { one } else { least })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(cpus: usize, moves: f64, read_moves: f64, reading: f64) -> Shared {
        let by_all = cpus == 4;
        Shared { address: 0x40, is_table: false, cpus, by_all, moves, read_moves, reading }
    }

    fn counts(shared: &[Shared]) -> Counts {
        Counts { shared: shared.to_vec(), cpus: 4, ..Counts::default() }
    }

    fn rate(shared: &[Shared], cpus: u32) -> f64 {
        projected(&counts(shared), cpus, 100.0, 50.0).rate
    }

    #[test]
    fn what_shares_nothing_scales_with_the_cpus() {
        assert!((rate(&[], 1) - 1e7).abs() < 1.0);
        assert!((rate(&[], 256) - 2.56e9).abs() < 1.0);
    }

    #[test]
    fn one_cpu_waits_for_nobody() {
        assert!((rate(&[line(4, 2.0, 0.0, 0.0)], 1) - 1e7).abs() < 1.0);
    }

    #[test]
    fn a_line_that_all_want_twice_a_pair_is_the_limit_of_many_and_named() {
        // Two CPUs: 100 ns and two lines of 50 ns each.
        let shared = [line(4, 2.0, 0.0, 0.0)];
        assert!((rate(&shared, 2) - 1e7).abs() < 1.0);
        let many = projected(&counts(&shared), 64, 100.0, 50.0);
        assert!((many.rate - 1e7).abs() < 1.0);
        assert_eq!(many.limit, Some(shared[0]));
    }

    #[test]
    fn a_line_of_two_neighbours_costs_time_and_limits_only_these() {
        // All of four CPUs have such a line: there are two.
        let shared = [line(2, 1.0, 0.0, 0.0), line(2, 1.0, 0.0, 0.0)];
        let found = rate(&shared, 64);
        assert!((found - 64.0 / 150e-9).abs() < 1.0, "{found}");
        let limited = [line(2, 4.0, 0.0, 0.0)];
        assert!((rate(&limited, 64) - 32.0 / 200e-9).abs() < 1.0);
    }

    #[test]
    fn reading_costs_as_often_as_others_write() {
        // One pair of a hundred writes what all read, so one of 34 finds that another of four did.
        let shared = [line(4, 0.01, 0.03, 0.99)];
        let of = |cpus: f64, waits: f64| cpus * 1e9 / (100.0 + 50.0 * waits);
        assert!((rate(&shared, 2) - of(2.0, 0.02)).abs() < 1.0);
        assert!((rate(&shared, 64) - of(64.0, 0.01 + 0.63)).abs() < 1.0);
        assert!((rate(&shared, 256) - of(256.0, 0.01 + 0.99)).abs() < 1.0);
    }
}
