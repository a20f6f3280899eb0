//! `cargo xtask picture` draws the picture of the README from the rows that `cargo xtask peers
//! --format json` prints, and compares the README's table with them and with other runs.

mod headlines;

use std::collections::BTreeMap;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use serde_json::Value;
use svg::Document;
use svg::node::element::{Group, Rectangle, Style, Text};

use crate::{Checked, Outcome};

/// The book's folder of runs, each as its command printed it with `--format json`.
const RUNS: &str = "docs/src/benchmarks";
/// The run of `cargo xtask peers`, from which the picture is drawn.
const ROWS: &str = "ratios.json";
/// The runs of `dmaspan map` and of `cargo xtask peers --series`.
const OTHERS: [&str; 2] = ["map.json", "series.json"];
/// The page whose table has the same figures.
const README: &str = "README.md";
/// The picture.
const PICTURE: &str = "docs/src/ratios.svg";

/// What a bar compares: the format of dmaspan, the peer, and how the legend names both.
struct Peer {
    format: &'static str,
    peer: &'static str,
    legend: &'static str,
    class: &'static str,
}

const PEERS: [Peer; 2] = [
    Peer {
        format: "lpae",
        peer: "io-pgtable-arm",
        legend: "Arm LPAE beside io-pgtable-arm",
        class: "arm",
    },
    Peer {
        format: "vtd_ss",
        peer: "generic_pt vtdss",
        legend: "VT-d beside generic_pt",
        class: "vtd",
    },
];

/// The cases that are drawn: name, operation and label.
const CASES: [(&str, &str, &str); 8] = [
    ("4k_1", "map", "one page of 4K: map"),
    ("4k_1", "unmap", "unmap"),
    ("4k_512", "map", "512 × 4K, one call: map"),
    ("4k_512", "unmap", "unmap"),
    ("16g_4k", "map", "16 GiB as 4K: map"),
    ("16g_4k", "unmap", "unmap"),
    ("16g_2m", "map", "16 GiB as 2M: map"),
    ("16g_2m", "unmap", "unmap"),
];

const WIDTH: f64 = 720.0;
/// Where bars begin, below the labels' right end.
const LEFT: f64 = 200.0;
const TOP: f64 = 64.0;
const BAR: f64 = 12.0;
/// From case to case.
const STEP: f64 = 34.0;

/// The picture brings its own ground, so that it can be read on a page of any colour.
const STYLE: &str = "
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.ground { fill: #ffffff; stroke: #d0d7de }
.one { fill: #8c959f }
.arm { fill: #0969da }
.vtd { fill: #bf5700 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.ground { fill: #161b22; stroke: #30363d }
.arm { fill: #58a6ff }
.vtd { fill: #f0883e }
}";

/// Rows of the runs that figures are from, by file.
struct Runs {
    files: BTreeMap<&'static str, Vec<Value>>,
}

impl Runs {
    /// The runs in the tree, or those with the rows in `file` in the place of [`ROWS`].
    ///
    /// # Errors
    ///
    /// That a file cannot be read, or has no rows.
    fn of_the_tree(file: Option<&str>) -> Result<Self, String> {
        let folder = crate::root().join(RUNS);
        let rows = file.map_or_else(|| folder.join(ROWS), PathBuf::from);
        let others = OTHERS.iter().map(|name| (*name, folder.join(name)));
        let files = iter::once((ROWS, rows)).chain(others).map(|(name, path)| {
            let rows = parsed(&read(&path)?).map_err(|why| format!("{}: {why}", path.display()))?;
            Ok((name, rows))
        });
        Ok(Self { files: files.collect::<Result<_, String>>()? })
    }

    fn rows(&self, file: &str) -> &[Value] {
        self.files.get(file).map_or(&[], Vec::as_slice)
    }
}

/// Draws the picture from the rows in `file`, or from those in the tree, and compares the README's
/// table with them.
///
/// # Errors
///
/// That a file cannot be read or written, which row is missing, or which figures of the README are
/// not those of the rows, a line each.
pub fn draw(file: Option<&str>) -> Checked {
    let runs = Runs::of_the_tree(file)?;
    let place = crate::root().join(PICTURE);
    fs::write(&place, picture(runs.rows(ROWS))?)
        .map_err(|error| format!("{} cannot be written: {error}", place.display()))?;
    crate::say(&format!("picture: {PICTURE} is drawn from {}", file.unwrap_or(ROWS)));
    let problems = headlines::problems(&read(&crate::root().join(README))?, &runs);
    if problems.is_empty() { Ok(Outcome::Passed) } else { Err(problems.join("\n   ")) }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))
}

/// The rows of a run: an array, or the member `rows` of an object.
fn parsed(text: &str) -> Result<Vec<Value>, String> {
    let mut run: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let rows = if run.is_object() { run["rows"].take() } else { run };
    let Value::Array(rows) = rows else { return Err("has no array of rows".to_owned()) };
    Ok(rows)
}

/// The picture of these rows.
///
/// # Errors
///
/// What is wrong with the rows.
fn picture(rows: &[Value]) -> Result<String, String> {
    let mut bars = Vec::new();
    for (case, operation, label) in CASES {
        let ratios = PEERS.iter().map(|peer| {
            let case = format!("{}/{case}", peer.format);
            Ok((peer, ratio(rows, &case, operation, peer.peer)?))
        });
        bars.push((label, ratios.collect::<Result<Vec<_>, String>>()?));
    }
    let ratios = || bars.iter().flat_map(|(_, bars)| bars.iter().map(|&(_, ratio)| ratio));
    let most = ratios().fold(1.0, f64::max);
    // Room for the figure behind the longest bar.
    let scale = (WIDTH - LEFT - 64.0) / most;

    let (mut cases, mut top) = (Group::new(), TOP);
    for (label, bars) in &bars {
        cases = cases.add(text(LEFT - 10.0, top + BAR + 4.0, label).set("text-anchor", "end"));
        let mut bar_top = top;
        for (peer, ratio) in bars {
            cases = cases.add(bar(LEFT, bar_top, ratio * scale, BAR, peer.class)).add(text(
                LEFT + ratio * scale + 6.0,
                bar_top + BAR - 1.0,
                &format!("{}×", digits(*ratio)),
            ));
            bar_top += BAR + 1.0;
        }
        top += STEP;
    }
    let (height, one) = (top + 12.0, LEFT + scale);
    let mut legend = Group::new();
    for (peer, left) in PEERS.iter().zip([LEFT, LEFT + 240.0]) {
        legend = legend.add(bar(left, 36.0, BAR, BAR, peer.class)).add(text(
            left + BAR + 6.0,
            46.0,
            peer.legend,
        ));
    }
    let title = "How many times faster than Linux's own page tables";
    let document = Document::new()
        .set("viewBox", (0.0, 0.0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("role", "img")
        .set("aria-label", title)
        .add(Style::new(STYLE))
        .add(bar(0.5, 0.5, WIDTH - 1.0, height - 1.0, "ground").set("rx", 6.0))
        .add(text(16.0, 24.0, title).set("class", "title"))
        .add(legend)
        .add(bar(one, TOP - 6.0, 1.0, height - TOP - 6.0, "one"))
        .add(cases);
    Ok(format!("{document}\n"))
}

/// The ratio of a row of `cargo xtask peers`.
fn ratio(rows: &[Value], case: &str, operation: &str, peer: &str) -> Result<f64, String> {
    let ratio = row(rows, &[("case", case), ("op", operation), ("peer", peer)])?["ratio"].as_f64();
    ratio
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .ok_or_else(|| format!("no ratio of {case}, {operation}, beside {peer}"))
}

/// The row whose members have these values.
fn row<'a>(rows: &'a [Value], members: &[(&str, &str)]) -> Result<&'a Value, String> {
    let is_it = |row: &&Value| members.iter().all(|(name, value)| row[name] == *value);
    rows.iter().find(is_it).ok_or_else(|| {
        let values: Vec<&str> = members.iter().map(|(_, value)| *value).collect();
        format!("no row of {}", values.join(", "))
    })
}

fn bar(x: f64, y: f64, width: f64, height: f64, class: &str) -> Rectangle {
    let bar = Rectangle::new().set("x", tenths(x)).set("y", tenths(y)).set("class", class);
    bar.set("width", tenths(width)).set("height", tenths(height))
}

fn text(x: f64, y: f64, text: &str) -> Text {
    Text::new(text).set("x", tenths(x)).set("y", tenths(y))
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Two digits, or all before the point.
fn digits(ratio: f64) -> String {
    match ratio {
        ..1.0 => format!("{ratio:.2}"),
        1.0..10.0 => format!("{ratio:.1}"),
        _ => format!("{ratio:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn read(path: &str) -> String {
        super::read(&crate::root().join(path)).unwrap()
    }

    fn rows() -> Vec<Value> {
        Runs::of_the_tree(None).unwrap().rows(ROWS).to_vec()
    }

    /// The rows of the tree, with another ratio of one page of Arm's.
    fn with(ratio: f64) -> Vec<Value> {
        let mut rows = rows();
        let is_it = |row: &&mut Value| row["case"] == "lpae/4k_1" && row["op"] == "map";
        rows.iter_mut().find(is_it).unwrap()["ratio"] = ratio.into();
        rows
    }

    #[test]
    fn the_picture_in_the_tree_is_drawn_from_the_rows_in_the_tree() {
        let is_same = picture(&rows()).unwrap() == read(PICTURE);
        assert!(is_same, "run `cargo xtask picture`");
    }

    #[test]
    fn bars_are_as_long_as_their_ratios() {
        let has = |picture: &str, width: f64| picture.contains(&format!("width=\"{width}\""));
        let longest = WIDTH - LEFT - 64.0;
        let (once, twice) = (picture(&with(100.0)).unwrap(), picture(&with(200.0)).unwrap());
        assert!(has(&once, longest) && has(&twice, longest));
        let shorter = |picture: &str| {
            let bars = picture.split("class=\"vtd\"").nth(2).unwrap();
            let width = bars.split("width=\"").nth(1).unwrap().split('"').next().unwrap();
            width.parse::<f64>().unwrap()
        };
        assert!((shorter(&once) / shorter(&twice) - 2.0).abs() < 0.1, "{once}\n{twice}");
    }

    #[test]
    fn a_row_that_is_missing_or_no_ratio_is_named() {
        let mut without = rows();
        without.retain(|row| row["case"] != "lpae/16g_2m");
        let why = picture(&without).unwrap_err();
        assert_eq!(why, "no row of lpae/16g_2m, map, io-pgtable-arm");
        assert!(picture(&with(-1.0)).unwrap_err().starts_with("no ratio of lpae/4k_1, map"));
        assert!(parsed("{}").is_err() && parsed("x").is_err());
        assert_eq!(parsed("{\"rows\": [1]}").unwrap(), [1]);
    }
}
