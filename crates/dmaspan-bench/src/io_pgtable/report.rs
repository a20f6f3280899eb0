//! The results of `dmaspan-bench io-pgtable`, for people and for programs.

use std::mem;

use comfy_table::Table;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{QUICK, TIMES, ratio};
use dmaspan_cli::units::fine_time;

use super::Plan;
use super::cases::Case;
use super::formats::NamedFormat;
use super::timing::Times;
use crate::report::{self, Fields, Report, plural};

/// The operations, in the order of a pass.
const OPS: [&str; 2] = ["map", "unmap"];

/// What was measured of a case, both ways.
pub(super) fn rows(
    format: &NamedFormat,
    case: &Case,
    threads: u64,
    [per_page, batched]: &[Times; 2],
) -> [Fields; 2] {
    [0, 1].map(|op| {
        let [old, new] = [&per_page[op], &batched[op]].map(|series| series.thousandths());
        Fields::from([
            (".section", OPS[op].to_uppercase().into()),
            (".label", case.label.as_str().into()),
            ("format", format.name.into()),
            ("case", case.name.as_str().into()),
            ("threads", threads.into()),
            ("op", OPS[op].into()),
            ("per_page_ns", (old as f64 / 1000.0).into()),
            ("ns", (new as f64 / 1000.0).into()),
            ("speedup", rounded(old as f64 / new.max(1) as f64).into()),
        ])
    })
}

/// How many numbers of threads fit beside each other, and what the fields of each are called there.
const BESIDE: [[&str; 3]; 2] =
    [["left by page", "left", "left faster"], ["right by page", "right", "right faster"]];

/// A table of these rows with these numbers of threads beside each other.
fn table(rows: &[Fields], threads: &[u64]) -> Table {
    let mut lines: Vec<Fields> = Vec::new();
    for row in rows {
        let is_its = |count: &u64| row.has("threads", *count);
        let Some(place) = threads.iter().position(is_its) else { continue };
        let words = |line: &Fields| [".section", ".label"].map(|name| line.word(name).to_owned());
        let at = lines.iter().position(|line| words(line) == words(row)).unwrap_or_else(|| {
            let [section, label] = words(row).map(Into::into);
            lines.push(Fields::from([(".section", section), (".label", label)]));
            lines.len() - 1
        });
        let [old, new, faster] = ["per_page_ns", "ns", "speedup"].map(|name| row.number(name));
        let [by_page, batched, times] = BESIDE[place];
        let figures = [(by_page, old.into()), (batched, new.into()), (times, faster.into())];
        lines[at] = mem::take(&mut lines[at]).and(figures);
    }
    let columns = threads.iter().zip(BESIDE).flat_map(|(&count, [by_page, batched, times])| {
        let who = plural(count, "thread");
        [
            (format!("{who}\nby page"), by_page, fine_time as fn(f64) -> String),
            ("\nbatched".to_owned(), batched, fine_time),
            ("\nfaster".to_owned(), times, ratio),
        ]
    });
    report::table("\nrange", &columns.collect::<Vec<_>>(), &lines)
}

const LEGEND: &str = "Times are of one range: medians, so that waiting for a CPU is left out. By \
    page: a call for each page, in tables that are there already. Batched: one call for the \
    range; its unmap frees the tables that the range covers, and the next map fills them anew. g \
    is the number of smallest pages. scatter is a list of spans: by page means a map call for \
    each span, and a look-up and an unmap call for each leaf; batched, one call maps all, and one \
    unmaps and gives the spans back. Every unmap gathers what hardware would have to forget; none \
    is told. Faster = by page / batched.";
const DONE: &str = "every range led where it was mapped to, and nothing was left after the unmaps";

/// All of it.
pub(super) fn report(plan: &Plan, cpus: u64, rows: Vec<Fields>) -> Report {
    let Plan { formats, threads, load } = plan;
    let rounds = load.effort.rounds;
    let head = Fields::from([("rounds", rounds.into()), ("cpus", cpus.into())]);
    let (rounds_of, cpus_of) = (plural(rounds.into(), "round"), plural(cpus, "CPU"));
    let title =
        format!("IO page tables: a call for each page against one for all; {rounds_of}, {cpus_of}");
    let by_format = formats.iter().map(|format| {
        let of = |row: &&Fields| row.word("format") == format.name;
        (format, rows.iter().filter(of).cloned().collect::<Vec<_>>())
    });
    let by_format: Vec<_> = by_format.collect();
    let mut report = Report::new([head, Fields::default()], rows, &title, DONE);
    for (format, rows) in &by_format {
        report.say(&format!("{}: {}", format.name, format.about));
        threads.chunks(BESIDE.len()).for_each(|threads| report.show(&table(rows, threads)));
    }
    report.say(LEGEND);
    report.note(if rounds == 1 { QUICK } else { TIMES });
    report.note_crowd(threads.last().copied().unwrap_or(0), cpus);
    report
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::io_pgtable::cases::Work;
    use crate::io_pgtable::formats::FORMATS;
    use crate::io_pgtable::timing::{self, Load};
    use crate::time::{Effort, Series};
    use dmaspan_cli::json;
    use dmaspan_cli::text::WIDTH;

    fn case(name: &str, label: &str) -> Case {
        let work = Work::Pages { page_size: 4096, pages: 1 };
        Case { name: name.to_owned(), label: label.to_owned(), bytes: 4096, ranges: 1, work }
    }

    fn of_rounds(rounds: u32) -> Report {
        let series = |ps| {
            let mut series = Series::default();
            series.add(ps, 1000);
            series
        };
        let times =
            [[8_187_000, 987_654_321_000], [14_250, 9_876_543_000]].map(|ways| ways.map(series));
        let mut all = Vec::new();
        for threads in [1, 10] {
            all.extend(rows(&FORMATS[0], &case("2M", "2M (128 × 16K)"), threads, &times));
        }
        all.extend(rows(&FORMATS[0], &case("16G as 512M", "16G as 512M"), 1, &times));
        let (formats, threads) = (vec![&FORMATS[0]], vec![1, 10]);
        let load = Load { effort: Effort::new(rounds, 0), ..timing::QUICK };
        report(&Plan { formats, threads, load }, 2, all)
    }

    #[test]
    fn the_shape_is_the_one_that_scripts_use() {
        let value: Value = serde_json::from_str(&json::render(&of_rounds(7))).unwrap();
        assert_eq!((&value["rounds"], &value["cpus"]), (&json!(7), &json!(2)));
        assert_eq!(value["rows"].as_array().unwrap().len(), 6);
        let row = json!({
            "format": "arm-lpae", "case": "2M", "threads": 1, "op": "map",
            "per_page_ns": 8187.0, "ns": 14.25, "speedup": 574.526,
        });
        assert_eq!(value["rows"][0], row);
        assert_eq!(value["rows"][1]["op"], "unmap");
    }

    #[test]
    fn a_table_is_narrow_and_says_what_was_not_measured() {
        let text = of_rounds(7).render();
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert_eq!(line, line.trim_end());
        }
        for part in ["8.19 µs", "14.2 ns", "575×", "988 ms", "10 threads share 2 CPUs", "✓ every"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("--quick"), "{text}");
        let bulk = text.lines().find(|line| line.starts_with("  16G as 512M")).unwrap();
        assert_eq!(bulk.matches(" -").count(), 3, "{bulk}");
    }

    #[test]
    fn one_round_is_no_measurement() {
        let text = of_rounds(1).render();
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(QUICK) && !words.contains(TIMES), "{text}");
    }
}
