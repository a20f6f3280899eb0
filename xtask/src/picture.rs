//! `cargo xtask picture` draws the picture of the README from the rows that `cargo xtask peers
//! --format json` prints, and compares the README's table with them.

mod headlines;

use std::fs;
use std::path::Path;

use serde_json::Value;
use svg::Document;
use svg::node::element::{Group, Rectangle, Style, Text};

use crate::{Checked, Outcome};

/// The rows that the picture in the tree is drawn from.
const ROWS: &str = "docs/src/benchmarks/ratios.json";
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

/// Draws the picture from the rows in `file`, or from those in the tree, and compares the README's
/// table with them.
///
/// # Errors
///
/// That a file cannot be read or written, which row is missing, or which figures of the README are
/// not those of the rows, a line each.
pub fn draw(file: Option<&str>) -> Checked {
    let rows = file.map_or_else(|| crate::root().join(ROWS), |file| Path::new(file).to_path_buf());
    let read = |path: &Path| {
        fs::read_to_string(path)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))
    };
    let text = read(&rows)?;
    let picture = picture(&text).map_err(|why| format!("{}: {why}", rows.display()))?;
    let place = crate::root().join(PICTURE);
    fs::write(&place, picture)
        .map_err(|error| format!("{} cannot be written: {error}", place.display()))?;
    crate::say(&format!("picture: {PICTURE} is drawn from {}", rows.display()));
    let readme = read(&crate::root().join(README))?;
    let problems = headlines::problems(&readme, &parsed(&text)?);
    if problems.is_empty() { Ok(Outcome::Passed) } else { Err(problems.join("\n   ")) }
}

/// The rows of a file.
fn parsed(rows: &str) -> Result<Vec<Value>, String> {
    let rows: Value = serde_json::from_str(rows).map_err(|error| error.to_string())?;
    let Value::Array(rows) = rows else { return Err("not an array of rows".to_owned()) };
    Ok(rows)
}

/// The picture of these rows.
///
/// # Errors
///
/// What is wrong with the rows.
fn picture(rows: &str) -> Result<String, String> {
    let rows = parsed(rows)?;
    let mut bars = Vec::new();
    for (case, operation, label) in CASES {
        let ratios = PEERS.iter().map(|peer| {
            let case = format!("{}/{case}", peer.format);
            Ok((peer, ratio(&rows, &case, operation, peer.peer)?))
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

/// The ratio of a row.
fn ratio(rows: &[Value], case: &str, operation: &str, peer: &str) -> Result<f64, String> {
    let is_it = |row: &&Value| row["case"] == case && row["op"] == operation && row["peer"] == peer;
    let ratio = rows.iter().find(is_it).and_then(|row| row["ratio"].as_f64());
    ratio
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .ok_or_else(|| format!("no ratio of {case}, {operation}, beside {peer}"))
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
        fs::read_to_string(crate::root().join(path)).unwrap()
    }

    #[test]
    fn the_picture_in_the_tree_is_drawn_from_the_rows_in_the_tree() {
        let is_same = picture(&read(ROWS)).unwrap() == read(PICTURE);
        assert!(is_same, "run `cargo xtask picture`");
    }

    #[test]
    fn bars_are_as_long_as_their_ratios() {
        let rows = read(ROWS).replace("\"ratio\": 1.56", "\"ratio\": 29.4");
        let (before, after) = (picture(&read(ROWS)).unwrap(), picture(&rows).unwrap());
        // Of the ratios in the tree 14.7 is the most; its bar is half as long as that of 29.4.
        let width = format!("width=\"{}\"", WIDTH - LEFT - 64.0);
        let half = format!("width=\"{}\"", (WIDTH - LEFT - 64.0) / 2.0);
        assert!(before.contains(&width) && after.contains(&width) && after.contains(&half));
        assert!(after.contains("29×") && !before.contains("29×"));
    }

    #[test]
    fn a_row_that_is_missing_or_no_ratio_is_named() {
        let without = read(ROWS).replace("lpae/16g_2m", "lpae/x");
        let why = picture(&without).unwrap_err();
        assert_eq!(why, "no ratio of lpae/16g_2m, map, beside io-pgtable-arm");
        assert!(picture(&read(ROWS).replace("1.56", "-1")).is_err());
        assert!(picture("{}").is_err() && picture("x").is_err());
    }
}
