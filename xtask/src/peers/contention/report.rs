//! The result, for people and for programs.

use std::fmt::Write as _;

use serde_json::json;

use super::counts::{Place, Shared, Sums};
use super::projection::{LARGE_NS, MANY, projected};
use super::{Contention, Counted, Side};

/// Places in the code that are named for a side of a case, of writes and of loads.
const MOST_PLACES: usize = 8;

/// A table for people: the counts, the code that writes what others write, and the projection.
pub(in super::super) fn table(result: &Contention, version: &str) -> String {
    let cases = &result.cases;
    let who = if version.is_empty() { "" } else { &format!("Linux {version} and dmaspan: ") };
    let mut text = format!(
        "{who}CPUs in turn, of a map and its unmap\n\
         shared: to or from cache lines that another CPU writes\n\n\
         {:45}{:>8}{:>16}{:>16}{:>16}\n{:53}{:>9}{:>7}{:>9}{:>7}{:>9}{:>7}\n",
        "",
        "locked",
        "shared writes",
        "shared loads",
        "lines moved",
        "",
        "",
        "tables",
        "",
        "tables",
        "",
        "tables"
    );
    for Counted { case, sides } in cases {
        for (nth, Side { who, counts, .. }) in sides.iter().enumerate() {
            let Sums { locked, writes, table_writes, loads, table_loads } = counts.pair();
            let case = if nth == 0 { case } else { "" };
            let [moves, table_moves] = counts.moves();
            let pairs = [(writes, table_writes), (loads, table_loads), (moves, table_moves)];
            let _ = write!(text, "{case:26}{who:19}{:>8}", count(locked));
            for (other, table) in pairs {
                let _ = write!(text, "{:>9}{:>7}", count(other), count(table));
            }
            text += "\n";
        }
    }
    text += "\nby the code: w writes there, l loads; t: tables\n";
    for Counted { case, sides } in cases {
        for Side { who, counts, .. } in sides {
            let [mut writes, mut loads] = [MOST_PLACES; 2];
            for Place { name, is_table, is_load, each, .. } in &counts.places {
                let left = if *is_load { &mut loads } else { &mut writes };
                if *left > 0 {
                    *left -= 1;
                    let way = if *is_load { "l" } else { "w" };
                    let table = if *is_table { "t" } else { "" };
                    let each = count(*each);
                    let _ = writeln!(text, "{case:26}{who:20}{each:>7} {way}{table:1} {name}");
                }
            }
        }
    }
    text + &projection(result)
}

/// What many CPUs do, where times were taken.
fn projection(result: &Contention) -> String {
    let Some(line_ns) = result.line_ns else { return String::new() };
    let [many, most] = MANY;
    let mut text = format!(
        "\nmillions of pairs a second, projected. A line takes {line_ns:.0} ns from a CPU of this\n\
         machine to the other, as measured, and {LARGE_NS} ns where there are {many} or {most}\n\n\
         {:46}{:>7}{:>7}{:>9}\n{:46}{:>7}{:>7}{:>9}{many:>8}{most:>8}\n",
        "", "1 CPU", "2", "2", "", "", "", "measured"
    );
    for Counted { case, sides } in &result.cases {
        for (nth, side) in sides.iter().enumerate() {
            let Some(alone_ns) = side.alone_ns else { continue };
            let case = if nth == 0 { case } else { "" };
            let two = millions(projected(&side.counts, 2, alone_ns, line_ns).rate);
            let measured = side.two_ns.map_or_else(String::new, |ns| millions(2e9 / ns));
            let alone = millions(1e9 / alone_ns);
            let mut line = format!("{case:26}{:20}{alone:>7}{two:>7}{measured:>9}", side.who);
            let mut limit = None;
            for cpus in MANY {
                let of_many = projected(&side.counts, cpus, alone_ns, LARGE_NS);
                let _ = write!(line, "{:>8}", millions(of_many.rate));
                limit = of_many.limit;
            }
            let limit = limit.as_ref().map_or_else(String::new, limit_name);
            let _ = writeln!(text, "{}", format!("{line}  {limit}").trim_end());
        }
    }
    text
}

fn limit_name(line: &Shared) -> String {
    let what = if line.is_table { "a table's line" } else { "a line" };
    format!("{what}, {} a pair", count(line.moves))
}

/// A number of accesses: none at all is `0`, so that what is rare is told from it.
fn count(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:.2}") }
}

fn millions(rate: f64) -> String {
    let value = rate / 1e6;
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// An object: how long a line takes, and rows of cases and sides with their counts by operation,
/// the lines that are shared, the code that writes there, and what is projected.
pub(in super::super) fn json(result: &Contention) -> String {
    let rows = result.cases.iter().flat_map(|counted| {
        counted.sides.iter().map(|side| row(&counted.case, side, result.line_ns))
    });
    let rows: Vec<_> = rows.collect();
    format!("{:#}", json!({"line_ns": result.line_ns, "large_line_ns": LARGE_NS, "rows": rows}))
}

fn row(case: &str, side: &Side, line_ns: Option<f64>) -> serde_json::Value {
    let counts = &side.counts;
    let operations = counts.operations.iter().map(|(name, sums)| {
        json!({
            "op": name,
            "locked": sums.locked,
            "shared_writes": sums.writes,
            "shared_table_writes": sums.table_writes,
            "shared_loads": sums.loads,
            "shared_table_loads": sums.table_loads,
        })
    });
    let lines = counts.shared.iter().map(|line| {
        json!({
            "address": format!("{:#x}", line.address),
            "is_table": line.is_table,
            "cpus": line.cpus,
            "moves": line.moves,
            "read_moves": line.read_moves,
            "reading": line.reading,
        })
    });
    let places = counts.places.iter().map(|place| {
        json!({
            "place": place.name,
            "is_table": place.is_table,
            "is_load": place.is_load,
            "each": place.each,
            "lines": place.lines.iter().map(|line| format!("{line:#x}")).collect::<Vec<_>>(),
        })
    });
    let projection = side.alone_ns.map(|alone_ns| {
        let of = |cpus, line_ns| projected(counts, cpus, alone_ns, line_ns).rate;
        json!({
            "alone_ns": alone_ns,
            "two_ns": side.two_ns,
            "two": line_ns.map(|line_ns| of(2, line_ns)),
            "many": MANY.map(|cpus| json!({"cpus": cpus, "pairs_per_s": of(cpus, LARGE_NS)})),
        })
    });
    json!({
        "case": case,
        "who": side.who,
        "operations": operations.collect::<Vec<_>>(),
        "lines": lines.collect::<Vec<_>>(),
        "places": places.collect::<Vec<_>>(),
        "projection": projection,
    })
}

#[cfg(test)]
mod tests {
    use super::super::counts::Counts;
    use super::*;

    fn result() -> Contention {
        let sums = Sums { locked: 4.0, writes: 2.0, table_writes: 0.004, ..Sums::default() };
        let shared = Shared {
            address: 0x1040,
            is_table: false,
            cpus: 4,
            by_all: true,
            moves: 2.0,
            read_moves: 0.0,
            reading: 0.0,
        };
        let counts = Counts {
            operations: vec![("map".to_owned(), sums), ("unmap".to_owned(), sums)],
            shared: vec![shared],
            cpus: 4,
            places: vec![Place {
                name: "alloc (iova/mod.rs:7)".to_owned(),
                is_table: false,
                is_load: false,
                each: 4.0,
                lines: [0x1040].into(),
            }],
        };
        let side = |who: &str, counts| Side {
            who: who.to_owned(),
            counts,
            alone_ns: Some(100.0),
            two_ns: Some(125.0),
        };
        let sides = vec![side("iova.c", counts), side("dmaspan", Counts::default())];
        Contention {
            cases: vec![Counted { case: "iova/pair_64".to_owned(), sides }],
            line_ns: Some(40.0),
        }
    }

    #[test]
    fn the_table_has_counts_their_code_and_the_projection() {
        let text = table(&result(), "7.2");
        let has =
            |end: &str| assert!(text.lines().any(|line| line.ends_with(end)), "{end}\n{text}");
        has("iova.c                 8.00     4.00   0.01        0      0     2.00      0");
        has("dmaspan                   0        0      0        0      0        0      0");
        has("iova.c                 4.00 w  alloc (iova/mod.rs:7)");
        // Two CPUs: 100 ns and two lines of 40 ns; many: as many as a line of 100 ns lets through.
        has("iova.c                 10.0   11.1     16.0     5.0     5.0  a line, 2.00 a pair");
        has("dmaspan                10.0   20.0     16.0     640    2560");
    }

    #[test]
    fn programs_read_the_same_counts() {
        let json: serde_json::Value = serde_json::from_str(&json(&result())).unwrap();
        let row = &json["rows"][0];
        assert_eq!((&row["case"], &row["who"]), (&json!("iova/pair_64"), &json!("iova.c")));
        assert_eq!(row["operations"][1]["shared_writes"], 2.0);
        assert_eq!(row["lines"][0]["moves"], 2.0);
        assert_eq!(row["places"][0]["place"], "alloc (iova/mod.rs:7)");
        assert_eq!(row["projection"]["many"][1]["cpus"], 256);
        assert_eq!(json["line_ns"], 40.0);
    }
}
