//! The report: what was counted and timed of the series, for people and for programs.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::json;

use super::super::instructions::Counter;
use super::super::plan::{self, BUILDS};
use super::super::samples::Samples;
use super::super::table::digits;
use super::super::{Built, Options, Output};
use super::{Case, REST, Series};

/// Before, after and ours.
type Three = [f64; 3];

/// An operation of a case that was counted and timed.
struct Row {
    series: &'static Series,
    case: &'static Case,
    operation: &'static str,
    claim: &'static str,
    /// Not of several threads.
    instructions: Option<Three>,
    ns: Option<Three>,
}

/// How many times less the series takes, and how many times less than that is ours.
fn gains([before, after, own]: Three) -> [f64; 2] {
    [before / after, after / own]
}

/// Counts the instructions of all operations, which `samples` has the times of.
///
/// # Errors
///
/// What is missing or failed, in one line.
fn rows(options: &Options, own: &Path, samples: &Samples) -> Result<Vec<Row>, String> {
    let mut counter = Counter::default();
    let mut rows = Vec::new();
    for &series in &options.series {
        for case in series.cases {
            for &(operation, claim) in case.operations {
                let instructions = match case.own.contains("_threads_2") {
                    true => None,
                    false => Some(count(options, own, &mut counter, (series, case, operation))?),
                };
                let linux = |version| {
                    samples.fastest(&plan::who(version, series.peer), case.theirs, operation)
                };
                let own =
                    samples.median(&format!("dmaspan/{}", series.format), case.own, operation);
                let ns = linux(series.before).zip(linux(series.after)).zip(own);
                let ns = ns.map(|((before, after), own)| [before, after, own]);
                rows.push(Row { series, case, operation, claim, instructions, ns });
            }
        }
    }
    Ok(rows)
}

fn count(
    options: &Options,
    own: &Path,
    counter: &mut Counter,
    (series, case, operation): (&Series, &Case, &'static str),
) -> Result<Three, String> {
    eprintln!("peers: counting {}, {operation} of {}", series.name, case.title);
    let mut linux = |version| {
        let mut fewest = f64::INFINITY;
        for build in BUILDS {
            let program = options.work.join(version).join(build).join(series.peer.program);
            let count = counter.count(&program, series.peer.format, case.theirs, operation)?;
            fewest = fewest.min(count);
        }
        Ok::<f64, String>(fewest)
    };
    let (before, after) = (linux(series.before)?, linux(series.after)?);
    Ok([before, after, counter.count(own, series.format, case.own, operation)?])
}

/// Counts, and returns what is printed of counts and times.
///
/// # Errors
///
/// What is missing or failed, in one line.
pub(in super::super) fn report(
    options: &Options,
    own: &Path,
    samples: &Samples,
    built: &Built,
) -> Result<String, String> {
    let rows = rows(options, own, samples)?;
    let full = |version: &str| {
        built.get(version).map_or_else(|| version.to_owned(), |linux| linux.full.clone())
    };
    Ok(match options.output {
        Output::Json => json(&rows, full),
        Output::Table => {
            let tables = options.series.iter().map(|series| {
                let of_series = rows.iter().filter(|row| row.series == *series);
                table(series, &of_series.collect::<Vec<_>>(), &full)
            });
            let tables: String = tables.collect();
            let runs = match options.runs {
                1 => "one process".to_owned(),
                runs => format!("medians of {runs} processes"),
            };
            let summary = summary(&rows);
            format!("{} times are {runs}.\n{tables}\n{summary}", LEGEND.trim_end())
        }
    })
}

const LEGEND: &str = "\
Linux's own code, unmodified: of a version before each series and of one behind
it; then dmaspan. Instructions are those of one operation. before/after is what
the series gained in Linux's code, after/ours what dmaspan has beyond it, and
claim what the series' authors measured, as before/after. Of Linux the better
build counts;
";

/// The columns behind an operation: their widths and the lines of their heads.
const COLUMNS: [(usize, [&str; 3]); 8] = [
    (9, ["", "before", ""]),
    (8, ["", "after", ""]),
    (9, ["instructions", "before/", "after"]),
    (8, ["", "ours", ""]),
    (8, ["", "after/", "ours"]),
    (10, ["", "before/", "after"]),
    (8, ["clock", "after/", "ours"]),
    (11, ["", "claim", ""]),
];

fn line(first: &str, cells: [String; 8]) -> String {
    let mut line = format!("{first:9}");
    for (cell, (width, _)) in cells.iter().zip(COLUMNS) {
        let _ = write!(line, "{cell:>width$}");
    }
    line.trim_end().to_owned() + "\n"
}

/// The heads of the columns, with a rule below them.
fn head() -> String {
    let heads = (0..3).map(|nth| line("", COLUMNS.map(|(_, head)| head[nth].to_owned())));
    heads.collect::<String>() + &"─".repeat(80) + "\n"
}

/// The lines of rows, those of a case below its title.
fn lines<'r>(rows: impl IntoIterator<Item = &'r Row>, title: impl Fn(&Row) -> String) -> String {
    let (mut text, mut last) = (String::new(), None);
    for row in rows {
        if last != Some(row.case) {
            let _ = writeln!(text, " {}", title(row));
        }
        last = Some(row.case);
        let none = || "-".to_owned();
        let counts = row.instructions.map_or_else(|| [(); 3].map(|()| none()), |it| it.map(many));
        let [before, after, own] = counts;
        let gained = |three: Option<Three>| {
            three.map_or_else(|| [none(), none()], |three| gains(three).map(times))
        };
        let [fewer, fewer_still] = gained(row.instructions);
        let [faster, faster_still] = gained(row.ns);
        let claim = if row.claim.is_empty() { none() } else { row.claim.to_owned() };
        let cells = [before, after, fewer, own, fewer_still, faster, faster_still, claim];
        let operation = if row.operation == REST { "rest" } else { row.operation };
        text += &line(&format!("  {operation}"), cells);
    }
    text
}

/// The table of a series.
fn table(series: &Series, rows: &[&Row], full: &impl Fn(&str) -> String) -> String {
    let (before, after) = (full(series.before), full(series.after));
    let mut text = format!("\n{}: {}\n", series.name, series.claim);
    let _ = writeln!(text, "before: Linux {before}; after: Linux {after}\n");
    text += &head();
    text += &lines(rows.iter().copied(), |row| row.case.title.to_owned());
    text + "\n" + &wrapped(series.note)
}

/// What each series is about, in one table: all that is claimed of its main case.
fn summary(rows: &[Row]) -> String {
    let is_main =
        |row: &&Row| *row.case == row.series.cases[row.series.main] && !row.claim.is_empty();
    let main = rows.iter().filter(is_main);
    let text = "In short, what each series is about:\n\n".to_owned() + &head();
    text + &lines(main, |row| format!("{}, {}", row.series.name, row.case.title))
}

/// Lines of at most 80 characters.
fn wrapped(text: &str) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 80 {
            lines += &line;
            lines.push('\n');
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines + &line + "\n"
}

/// A count with three digits.
fn many(count: f64) -> String {
    match count {
        ..1e4 => format!("{count:.0}"),
        1e4..1e6 => format!("{}k", digits(count / 1e3)),
        _ => format!("{}M", digits(count / 1e6)),
    }
}

fn times(ratio: f64) -> String {
    match ratio {
        ..1e4 => format!("{}×", digits(ratio)),
        _ => format!("{}k×", digits(ratio / 1e3)),
    }
}

/// One array of rows; where a figure was not taken its place is `null`.
fn json(rows: &[Row], full: impl Fn(&str) -> String) -> String {
    let rounded = |value: f64| json!((value * 1000.0).round() / 1000.0).to_string();
    let text = |value: &str| json!(value).to_string();
    let rows = rows.iter().map(|row| {
        // One by one: an object of serde_json sorts its keys.
        let mut fields = vec![
            ("series", text(row.series.name)),
            ("case", text(&format!("{}/{}", row.series.format, row.case.own))),
            ("op", text(row.operation)),
            ("before", text(&full(row.series.before))),
            ("after", text(&full(row.series.after))),
            ("claim", text(row.claim)),
        ];
        for (three, names) in [
            (
                row.instructions,
                ["before_instructions", "after_instructions", "instructions", "gain", "ratio"],
            ),
            (row.ns, ["before_ns", "after_ns", "ns", "clock_gain", "clock_ratio"]),
        ] {
            let values: Vec<String> = match three {
                Some(three) => three.into_iter().chain(gains(three)).map(rounded).collect(),
                None => vec!["null".to_owned(); 5],
            };
            fields.extend(names.into_iter().zip(values));
        }
        let fields = fields.iter().map(|(name, value)| format!(r#""{name}": {value}"#));
        format!("  {{{}}}", fields.collect::<Vec<_>>().join(", "))
    });
    format!("[\n{}\n]", rows.collect::<Vec<_>>().join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::super::ALL;
    use super::*;

    fn rows_of(series: &'static Series) -> Vec<Row> {
        let row = |case: &'static Case, &(operation, claim): &(&'static str, &'static str)| Row {
            series,
            case,
            operation,
            claim,
            instructions: (!case.own.contains("_threads_2")).then_some([105e6, 1332.0, 6887.0]),
            ns: (operation != REST).then_some([1e7, 470.0, 330.0]),
        };
        let cases = series.cases.iter();
        cases.flat_map(|case| case.operations.iter().map(move |it| row(case, it))).collect()
    }

    #[test]
    fn a_table_has_both_gains_of_counts_and_of_times_beside_the_claim() {
        let rows = rows_of(&ALL[3]);
        let text = table(&ALL[3], &rows.iter().collect::<Vec<_>>(), &str::to_owned);
        let row = text.lines().find(|line| line.starts_with("  map")).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        let expected =
            ["map", "105M", "1332", "78.8k×", "6887", "0.19×", "21.3k×", "1.42×", ">1000×"];
        assert_eq!(cells, expected);
        assert!(text.contains("before: Linux 6.12; after: Linux 7.2\n"), "{text}");
    }

    #[test]
    fn tables_and_summaries_fit_a_terminal() {
        let rows: Vec<Row> = ALL.iter().flat_map(rows_of).collect();
        let tables = ALL.iter().map(|series| {
            let rows: Vec<&Row> = rows.iter().filter(|row| row.series == series).collect();
            table(series, &rows, &|version| format!("{version}.123-1~bpo12+1"))
        });
        let text = tables.collect::<String>() + LEGEND + &summary(&rows);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
            assert_eq!(line, line.trim_end());
        }
        let short = summary(&rows);
        for series in &ALL {
            assert!(short.contains(&format!(" {}, ", series.name)), "{short}");
        }
    }

    #[test]
    fn programs_read_the_same_figures_and_null_where_there_is_none() {
        let rows = rows_of(&ALL[1]);
        let json: serde_json::Value = serde_json::from_str(&json(&rows, str::to_owned)).unwrap();
        assert_eq!(json[0]["case"], "swiotlb/burst256_4k_threads_1");
        assert_eq!((&json[0]["instructions"], &json[0]["ratio"]), (&6887.0.into(), &0.193.into()));
        let two = &json[2];
        assert!(two["instructions"].is_null() && two["gain"].is_null(), "{two}");
        assert_eq!((&two["clock_ratio"], &two["before"]), (&1.424.into(), &"5.10".into()));
    }
}
