//! The console of a guest, read line by line.
//!
//! The lines that count begin with `guest: `; the guest's program documents them. Everything else
//! is the output of commands.

use std::time::Duration;

/// What a line of the guest's init begins with.
pub(super) const MARKER: &str = "guest: ";

/// The line by which a guest has this machine note the time that its CPUs took.
pub(super) const MARK: &str = "guest: mark";

/// A guest's console, read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Report {
    /// The kernel that ran.
    pub(super) release: Option<String>,
    /// The commands that began.
    pub(super) commands: Vec<Ran>,
    /// How many cases passed.
    pub(super) passed: usize,
    /// The names of cases that were skipped, and why.
    pub(super) skipped: Vec<String>,
    /// The names of cases that failed, and why.
    pub(super) failed: Vec<String>,
    /// What was measured.
    pub(super) figures: Vec<Figure>,
    /// What the disk of a server is to have.
    pub(super) sums: Vec<Sum>,
    /// The last file that was flushed to a disk whose server was killed then.
    pub(super) flushed: Option<u64>,
    /// The marks so far, and between which two lies what some figures are about: of each the
    /// second's number, and by how much what lies between is divided.
    marks: usize,
    between: Vec<(usize, usize, f64)>,
    /// What init failed in.
    errors: Vec<String>,
    taint: Option<u64>,
    ended: bool,
}

/// A figure that a guest measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Figure {
    /// Of what it is.
    pub(super) name: String,
    /// The number.
    pub(super) number: f64,
    /// Its unit; `-` of a count.
    pub(super) unit: String,
}

impl Figure {
    /// Reads `NUMBER UNIT NAME`.
    fn parse(text: &str) -> Option<Self> {
        let (number, rest) = text.split_once(' ')?;
        let (unit, name) = rest.split_once(' ')?;
        Some(Self { name: name.to_owned(), number: number.parse().ok()?, unit: unit.to_owned() })
    }
}

/// What bytes of the disk of a guest's server are to hash to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    /// Their SHA-256, in hexadecimal.
    pub(super) hash: String,
    pub(super) len: u64,
    pub(super) offset: u64,
}

impl Sum {
    /// Reads `HASH LENGTH OFFSET`.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let hash = words.next()?.to_owned();
        Some(Self { hash, len: words.next()?.parse().ok()?, offset: words.next()?.parse().ok()? })
    }
}

/// A command that a guest ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ran {
    line: String,
    code: Option<i32>,
    /// What it printed.
    pub(super) output: Vec<String>,
}

/// The bits of the kernel's taint that say that something went wrong in it, and what
/// (Documentation/admin-guide/tainted-kernels.rst).
const TAINTS: [(u32, &str); 5] = [
    (4, "a machine check"),
    (5, "a page in a wrong state"),
    (7, "an oops"),
    (9, "a warning"),
    (14, "a soft lockup"),
];

impl Report {
    /// Reads a console.
    pub(super) fn parse(console: &str) -> Self {
        let mut report = Self::default();
        for line in console.lines() {
            let line = clean(line);
            let marker = line.strip_prefix(MARKER).map(str::to_owned);
            match marker.as_deref().map(|rest| rest.split_once(' ').unwrap_or((rest, ""))) {
                Some((word, rest)) => {
                    report.marker(word, rest);
                    if ["PASS", "SKIP", "FAIL"].contains(&word) {
                        report.output(line);
                    }
                }
                None => report.output(line),
            }
        }
        report
    }

    /// Takes what the command that runs printed.
    fn output(&mut self, line: String) {
        let running = self.commands.last_mut().filter(|ran| ran.code.is_none() && !self.ended);
        if let Some(ran) = running {
            ran.output.push(line);
        }
    }

    fn marker(&mut self, word: &str, rest: &str) {
        match word {
            "kernel" => self.release = rest.split(' ').next().map(str::to_owned),
            "run" => self.commands.push(Ran { line: rest.to_owned(), ..Ran::default() }),
            "rc" => {
                if let Some(ran) = self.commands.last_mut() {
                    ran.code = rest.split(' ').next().and_then(|code| code.parse().ok());
                }
            }
            "figure" => match Figure::parse(rest) {
                Some(figure) => self.figures.push(figure),
                None => self.errors.push(format!("`{rest}` is no figure")),
            },
            "sha256" => match Sum::parse(rest) {
                Some(sum) => self.sums.push(sum),
                None => self.errors.push(format!("`{rest}` is no sum")),
            },
            "flushed" => self.flushed = rest.parse().ok(),
            "mark" => self.marks += 1,
            "host-cpu" => {
                match rest.split_once(' ').and_then(|(by, name)| Some((by.parse().ok()?, name))) {
                    Some((by, name)) => {
                        self.between.push((self.figures.len(), self.marks, by));
                        let (name, unit) = (name.to_owned(), "µs".to_owned());
                        self.figures.push(Figure { name, number: f64::NAN, unit });
                    }
                    None => self.errors.push(format!("`{rest}` is no figure")),
                }
            }
            "PASS" => self.passed += 1,
            "SKIP" => self.skipped.push(rest.to_owned()),
            "FAIL" => self.failed.push(rest.to_owned()),
            "error" => self.errors.push(rest.to_owned()),
            "taint" => self.taint = rest.parse().ok(),
            "end" => self.ended = true,
            _ => {}
        }
    }

    /// Takes what this machine noted at the marks: the figures about the time between two of them
    /// are complete then.
    pub(super) fn host_cpu(&mut self, noted: &[Duration]) {
        for (index, mark, by) in std::mem::take(&mut self.between) {
            let ends = [mark.checked_sub(2), mark.checked_sub(1)];
            let [begin, end] = ends.map(|at| noted.get(at?).copied());
            let time = end.zip(begin).map(|(end, begin)| end.saturating_sub(begin));
            if let (Some(figure), Some(time)) = (self.figures.get_mut(index), time) {
                figure.number = time.as_secs_f64() * 1e6 / by;
            }
        }
    }

    /// What failed in the guest, a line each.
    pub(super) fn failures(&self) -> Vec<String> {
        let mut failures: Vec<String> = Vec::new();
        failures.extend(self.failed.iter().map(|case| format!("FAIL {case}")));
        failures.extend(self.errors.iter().map(|error| format!("its init: {error}")));
        failures
    }

    /// What is wrong, a line each; nothing where the guest did what it was told.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = self.failures();
        for ran in &self.commands {
            match ran.code {
                Some(0) => {}
                Some(code) => problems.push(format!("`{}` ended with {code}", ran.line)),
                None => problems.push(format!("`{}` did not end", ran.line)),
            }
        }
        if !self.ended {
            problems.push("it did not come to its end".to_owned());
        } else if self.errors.is_empty() && self.taint.is_none() {
            problems.push("the kernel did not say whether it is tainted".to_owned());
        }
        let taint = self.taint.unwrap_or(0);
        for (bit, what) in TAINTS {
            if taint >> bit & 1 == 1 {
                problems.push(format!("the kernel had {what}"));
            }
        }
        problems
    }
}

/// A line without the escape sequences that firmware prints.
pub(super) fn clean(line: &str) -> String {
    let mut cleaned = String::new();
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\r' => {}
            '\u{1b}' if characters.next_if_eq(&'[').is_some() => {
                // Parameters up to a letter (ECMA-48, 5.4).
                characters.find(|each| ('@'..='~').contains(each));
            }
            '\u{1b}' => drop(characters.next()),
            other => cleaned.push(other),
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLE: &str = "\u{1b}c\u{1b}[?7l\u{1b}[2JSeaBIOS (version x)\r\n\
        \u{1b}[0mguest: kernel 6.1.0-50-cloud-amd64 up 1.25\r\n\
        guest: run bind 0000:00:05.0\r\n\
        guest: rc 0 bind 0000:00:05.0\r\n\
        guest: run dmaspan-guest cases\r\n\
        guest: PASS a/b\r\n\
        text\r\n\
        guest: SKIP c/d: no hugepages\r\n\
        guest: log <3>[4.000001] DMAR: fault\r\n\
        guest: rc 0 dmaspan-guest cases\r\n\
        guest: taint 4096\r\n\
        guest: end\r\n";

    #[test]
    fn a_guest_that_did_what_it_was_told_has_no_problems() {
        let report = Report::parse(CONSOLE);
        assert_eq!(report.release.as_deref(), Some("6.1.0-50-cloud-amd64"));
        assert_eq!((report.passed, report.skipped.len()), (1, 1));
        assert_eq!(report.commands.len(), 2);
        let output = ["guest: PASS a/b", "text", "guest: SKIP c/d: no hugepages"];
        assert_eq!(report.commands[1].output, output);
        assert_eq!(report.problems(), Vec::<String>::new());
    }

    #[test]
    fn everything_that_can_go_wrong_is_a_problem() {
        for (from, to, problem) in [
            ("PASS a/b", "FAIL a/b: why", "FAIL a/b: why"),
            ("rc 0 dmaspan", "rc 137 dmaspan", "`dmaspan-guest cases` ended with 137"),
            ("guest: rc 0 dmaspan-guest cases\r\n", "", "`dmaspan-guest cases` did not end"),
            ("guest: end\r\n", "", "it did not come to its end"),
            ("taint 4096", "taint 512", "the kernel had a warning"),
            ("taint 4096", "taint 128", "the kernel had an oops"),
            ("guest: taint 4096\r\n", "", "the kernel did not say whether it is tainted"),
            ("guest: taint 4096", "guest: error no room", "its init: no room"),
        ] {
            let console = CONSOLE.replace(from, to);
            assert_eq!(Report::parse(&console).problems(), [problem]);
        }
        assert_eq!(Report::parse("").problems(), ["it did not come to its end"]);
    }

    #[test]
    fn a_figure_of_this_machines_cpus_is_what_they_took_between_two_marks() {
        let console = "guest: figure 2.5 s a name\nguest: mark\nguest: mark\n\
            guest: mark\nguest: host-cpu 4 another\n";
        let mut report = Report::parse(console);
        report.host_cpu(&[1, 2, 6].map(Duration::from_micros));
        let shown = report.figures.iter().map(|each| (each.name.as_str(), each.number));
        assert_eq!(shown.collect::<Vec<_>>(), [("a name", 2.5), ("another", 1.0)]);
        let problems = Report::parse("guest: figure 2.5\nguest: host-cpu x y\n").problems();
        assert!(problems[..2].iter().all(|problem| problem.ends_with(" is no figure")));
    }

    #[test]
    fn a_sum_is_a_hash_a_length_and_an_offset() {
        let report = Report::parse("guest: sha256 ab12 4096 512\nguest: sha256 ab12 many 512\n");
        let sum = Sum { hash: "ab12".to_owned(), len: 4096, offset: 512 };
        assert_eq!(report.sums, [sum]);
        assert!(report.problems()[0].ends_with(" is no sum"));
    }

    #[test]
    fn the_last_file_that_was_flushed_counts() {
        let report = Report::parse("guest: flushed 0\nguest: flushed 7\nguest: server kill\n");
        assert_eq!(report.flushed, Some(7));
        assert_eq!(Report::parse("guest: server kill\n").flushed, None);
    }

    #[test]
    fn escape_sequences_vanish() {
        assert_eq!(clean("\u{1b}[1;31ma\u{1b}[mb\u{1b}cc\r"), "abc");
        assert_eq!(clean("\u{1b}["), "");
        assert_eq!(clean("\u{1b}"), "");
    }
}
