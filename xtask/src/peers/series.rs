//! The five series for Linux, each beside Linux's own code before it and behind it.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::json;

use super::instructions::Counter;
use super::plan::{self, BUILDS, Comparison, Peer};
use super::samples::Samples;
use super::table::digits;
use super::{Built, Options};

/// A series, and the versions of Linux between which it came.
#[derive(Debug, PartialEq, Eq)]
pub struct Series {
    pub(super) name: &'static str,
    claim: &'static str,
    before: &'static str,
    after: &'static str,
    /// dmaspan's format, and the part of Linux that does the same.
    format: &'static str,
    peer: &'static Peer,
    cases: &'static [Case],
    /// The place of the case that the series is about.
    main: usize,
    /// What the table does not show, and why.
    note: &'static str,
}

/// Something that both sides do.
#[derive(Debug, PartialEq, Eq)]
struct Case {
    title: &'static str,
    /// What dmaspan's benchmark calls it, and Linux's.
    own: &'static str,
    theirs: &'static str,
    /// Each with how many times less it takes with the series, as the authors measured it; empty
    /// where they did not. `unmap_rest` is what an unmap does but for look-ups of addresses, and is
    /// counted alone.
    operations: &'static [(&'static str, &'static str)],
}

const fn case(
    title: &'static str,
    [own, theirs]: [&'static str; 2],
    operations: &'static [(&'static str, &'static str)],
) -> Case {
    Case { title, own, theirs, operations }
}

/// An unmap without look-ups of addresses.
const REST: &str = "unmap_rest";
const NOT_CLAIMED: &[(&str, &str)] = &[("map", ""), ("unmap", "")];

/// All series, in the order of the layers from tables to programs.
pub(super) const ALL: [Series; 5] = [
    Series {
        name: "map-pages",
        claim: "one call for many pages of one size walks the tables once",
        before: "5.10",
        after: "6.1",
        format: "lpae",
        peer: &plan::IO_PGTABLE_ARM,
        cases: &[
            case(
                "1 page of 4K",
                ["domain_4k_1", "4k_1_core"],
                &[("map", "1.00×"), ("unmap", "1.62×")],
            ),
            case("8 pages", ["domain_4k_8", "4k_8_core"], &[("map", "2.50×"), ("unmap", "1.93×")]),
            case(
                "32 pages",
                ["domain_4k_32", "4k_32_core"],
                &[("map", "9.00×"), ("unmap", "2.39×")],
            ),
            case(
                "64 pages",
                ["domain_4k_64", "4k_64_core"],
                &[("map", "9.25×"), ("unmap", "2.43×")],
            ),
            case(
                "256 pages",
                ["domain_4k_256", "4k_256_core"],
                &[("map", "17.5×"), ("unmap", "2.79×")],
            ),
        ],
        main: 4,
        note: "iommu_map() and iommu_unmap() over io-pgtable-arm, beside a Domain. The series \
               measured the DMA API with an SMMUv3, whose answer its unmaps wait for.",
    },
    Series {
        name: "swiotlb",
        claim: "a lock for each area of the pool in place of one (patch 1 of 3)",
        before: "5.10",
        after: "6.1",
        format: "swiotlb",
        peer: &plan::SWIOTLB,
        cases: &[
            case(
                "256 slots of 4K, 1 thread",
                ["burst256_4k_threads_1", "burst256_4k_threads_1"],
                &[("pair", "1.04–1.12×")],
            ),
            case("1 slot, 1 thread", ["pair_4k_threads_1", "pair_4k_threads_1"], &[("pair", "")]),
            case(
                "256 slots, 2 threads",
                ["burst256_4k_threads_2", "burst256_4k_threads_2"],
                &[("pair", "2.30–2.64×")],
            ),
            case("1 slot, 2 threads", ["pair_4k_threads_2", "pair_4k_threads_2"], &[("pair", "")]),
        ],
        main: 2,
        note: "A slot is taken and released, without copies. No Linux has patches 2 and 3, which \
               the claim's figures are with, of whole I/Os by 1 and 4 jobs. Instructions do not \
               show who waits for a lock; two threads want two CPUs that do nothing else.",
    },
    Series {
        name: "large-folios",
        claim: "VFIO type1 pins and unpins all of a large folio at once",
        before: "6.12",
        after: "7.2",
        format: "container_lpae",
        peer: &plan::TYPE1_ARM,
        cases: &[
            case(
                "256 MiB of THP",
                ["256m_thp_cheap", "256m_thp_cheap"],
                &[("map", "1.74×"), ("unmap", ""), ("unmap_rest", "3.00×")],
            ),
            case(
                "1 GiB of hugetlb, 1G",
                ["1g_hugetlb_cheap", "1g_hugetlb_cheap"],
                &[("map", "1.68×"), ("unmap", ""), ("unmap_rest", "3.02×")],
            ),
            case(
                "256 MiB of base pages",
                ["256m_base_cheap", "256m_base_cheap"],
                &[("map", "0.97×"), ("unmap", ""), ("unmap_rest", "1.08×")],
            ),
            case("256 MiB of THP, dear pins", ["256m_thp_dear", "256m_thp_dear"], NOT_CLAIMED),
        ],
        main: 0,
        note: "A kernel pins besides, which is simulated: 4 instructions a page of 4 KiB where \
               pins are cheap, 200 where they are dear, on all sides. rest is an unmap without \
               look-ups of addresses: both Linuxes look each page up in the IOMMU's table, and \
               io-pgtable-arm's look-up became slower between them, by another change.",
    },
    Series {
        name: "huge-pfnmaps",
        claim: "VFIO type1 follows a BAR by the leaves of the CPU's tables",
        before: "6.12",
        after: "7.2",
        format: "container_lpae",
        peer: &plan::TYPE1_ARM,
        cases: &[
            case(
                "1 GiB of a BAR by 1G leaves",
                ["1g_bar_by_1g_cheap", "1g_bar_by_1g_cheap"],
                &[("map", ">1000×"), ("unmap", ""), ("unmap_rest", "")],
            ),
            case("by 2M leaves", ["1g_bar_by_2m_cheap", "1g_bar_by_2m_cheap"], NOT_CLAIMED),
            case("by 4K leaves", ["1g_bar_by_4k_cheap", "1g_bar_by_4k_cheap"], NOT_CLAIMED),
        ],
        main: 0,
        note: "A look-up of a leaf is simulated: 100 instructions and a lock, on all sides. The \
               series has 32 GiB: some 8388608 look-ups that become 32.",
    },
    Series {
        name: "registered",
        claim: "io_uring keeps a registered buffer of huge pages as that many pieces",
        before: "6.1",
        after: "6.12",
        format: "registered",
        peer: &plan::RSRC,
        cases: &[
            case(
                "8 MiB in 2M pages, all pieces",
                ["walk_8m_256m_thp", "walk_8m_256m_thp"],
                &[("pair", "512×")],
            ),
            case("1 MiB, all pieces", ["walk_1m_256m_thp", "walk_1m_256m_thp"], &[("pair", "")]),
            case(
                "1 MiB, the first piece",
                ["import_1m_256m_thp", "import_1m_256m_thp"],
                &[("pair", "")],
            ),
            case(
                "256 MiB registered, and its end",
                ["256m_thp_cheap", "256m_thp_cheap"],
                &[("pair", "")],
            ),
        ],
        main: 0,
        note: "An I/O imports a part of a buffer and looks at its pieces. The claim is of the \
               pieces: 2048 that become 4; the series has shares of a profile.",
    },
];

/// The series of these names, with commas between them.
pub(super) fn named(value: &str) -> Result<Vec<&'static Series>, String> {
    let names: Vec<&str> = ALL.iter().map(|series| series.name).collect();
    let all = names.join(", ");
    let none = |name| format!("there is no series `{name}`; there are {all}");
    let known = |name| ALL.iter().find(|series| series.name == name).ok_or_else(|| none(name));
    value.split(',').map(known).collect()
}

/// The versions of Linux that are needed, oldest first.
pub(super) fn versions(series: &[&Series]) -> Vec<&'static str> {
    let is_needed =
        |version| series.iter().any(|series| [series.before, series.after].contains(&version));
    plan::LINUXES.into_iter().filter(|version| is_needed(*version)).collect()
}

impl Series {
    /// Its cases with both versions of Linux.
    fn comparisons(&self) -> impl Iterator<Item = Comparison> + '_ {
        [self.before, self.after].into_iter().flat_map(move |version| {
            self.cases.iter().flat_map(move |case| {
                let operations = case.operations.iter();
                let timed = operations.filter(|(operation, _)| *operation != REST);
                timed.map(move |&(operation, _)| self.comparison(version, case, operation))
            })
        })
    }

    fn comparison(
        &self,
        version: &'static str,
        case: &Case,
        operation: &'static str,
    ) -> Comparison {
        let own = (self.format, case.own);
        Comparison::with(own, operation, version, (self.peer, case.theirs))
    }
}

/// What all of them compare.
pub(super) fn comparisons(series: &[&'static Series]) -> Vec<Comparison> {
    series.iter().flat_map(|series| series.comparisons()).collect()
}

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
pub(super) fn report(
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
        super::Output::Json => json(&rows, full),
        super::Output::Table => {
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
    fn every_series_has_two_versions_that_are_built_and_a_case_that_it_is_about() {
        for series in &ALL {
            let place = |version| plan::LINUXES.iter().position(|known| *known == version);
            assert!(place(series.before).unwrap() < place(series.after).unwrap());
            let main = &series.cases[series.main];
            assert!(main.operations.iter().any(|(_, claim)| !claim.is_empty()), "{}", series.name);
        }
        assert_eq!(versions(&[&ALL[0], &ALL[3]]), ["5.10", "6.1", "6.12", "7.2"]);
    }

    #[test]
    fn a_series_that_there_is_not_is_refused_with_those_that_there_are() {
        let names = |value: &str| {
            named(value).map(|all| all.iter().map(|series| series.name).collect::<Vec<_>>())
        };
        assert_eq!(names("registered,swiotlb"), Ok(vec!["registered", "swiotlb"]));
        let error = names("folios").unwrap_err();
        assert!(error.contains("`folios`") && error.contains("large-folios"), "{error}");
    }

    #[test]
    fn every_case_is_compared_with_both_versions() {
        let all = comparisons(&[&ALL[2]]);
        assert_eq!(all.len(), 2 * 4 * 2);
        let is_of = |version| all.iter().filter(|one| one.version == version).count();
        assert_eq!((is_of("6.12"), is_of("7.2")), (8, 8));
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
