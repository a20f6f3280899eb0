//! Reports as one page of HTML: readable without network and without script, by day and by night,
//! on a screen and on paper.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use svg::Document;
use svg::node::element::{Rectangle, Title};

/// How the page looks.
const STYLE: &str = include_str!("style.css");
/// What sorts its tables, where script runs.
const SCRIPT: &str = include_str!("sort.js");

/// How finely a strip is divided.
pub(crate) const STRIP: u32 = 480;
const STRIP_HEIGHT: f64 = 24.0;

/// A page.
pub(crate) fn document(title: &str, about: &str, body: &Markup) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header { h1 { (title) } p.about { (about) } }
                main { (body) }
                footer { p { "dmaspan " (version) } }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string()
}

/// A figure with its name, for a list of class `figures`.
pub(crate) fn figure(value: &str, name: &str) -> Markup {
    html! { li { span { (name) } strong { (value) } } }
}

/// A text in which what is in backticks is code.
pub(crate) fn words(text: &str) -> Markup {
    html! {
        @for (number, part) in text.split('`').enumerate() {
            @if number % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// A part of a strip, in steps of which it has [`STRIP`]: where it begins, how long and how high it
/// is, of 1 at most, and how it looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Part {
    pub(crate) start: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
    pub(crate) class: &'static str,
}

/// A horizontal strip of coloured parts, as wide as the page lets it be; `label` says what it
/// shows.
pub(crate) fn strip(label: &str, parts: &[Part]) -> Markup {
    let mut picture = Document::new()
        .set("class", "strip")
        .set("viewBox", format!("0 0 {STRIP} {STRIP_HEIGHT}"))
        .set("preserveAspectRatio", "none")
        .set("role", "img")
        .set("aria-label", label)
        .add(Title::new(label))
        .add(rectangle(0.0, f64::from(STRIP), 1.0, "ground"));
    for part in parts {
        picture = picture.add(rectangle(part.start, part.width, part.height, part.class));
    }
    html! { (PreEscaped(picture.to_string())) }
}

fn rectangle(start: f64, width: f64, height: f64, class: &str) -> Rectangle {
    let short = |number: f64| (number * 100.0).round() / 100.0;
    Rectangle::new()
        .set("x", short(start))
        .set("y", short(STRIP_HEIGHT * (1.0 - height)))
        .set("width", short(width))
        .set("height", short(STRIP_HEIGHT * height))
        .set("class", class)
}

/// A strip that is filled in proportion to `value` of `most`.
pub(crate) fn bar(label: &str, value: f64, most: f64, class: &'static str) -> Markup {
    let width = if most > 0.0 { f64::from(STRIP) * (value / most).clamp(0.0, 1.0) } else { 0.0 };
    strip(label, &[Part { start: 0.0, width, height: 1.0, class }])
}

/// A table with rows of cells, that scrolls by itself where it is wider than the page.
pub(crate) fn table(caption: &str, header: &[&str], rows: &[Vec<Cell>]) -> Markup {
    html! {
        section.scroll aria-label=(caption) tabindex="0" {
            table {
                caption { (caption) }
                thead {
                    tr {
                        @for (column, name) in header.iter().enumerate() {
                            th scope="col" class=[is_number(rows, column).then_some("number")] {
                                (name)
                            }
                        }
                    }
                }
                tbody {
                    @for row in rows {
                        tr { @for cell in row { (cell.markup()) } }
                    }
                }
            }
        }
    }
}

/// Whether a column has numbers, which stand on the right.
fn is_number(rows: &[Vec<Cell>], column: usize) -> bool {
    rows.iter().any(|row| row.get(column).is_some_and(|cell| cell.key.is_some()))
}

/// A cell, and what it is sorted by where that is not its text.
pub(crate) struct Cell {
    text: String,
    /// A whole number.
    key: Option<String>,
}

impl Cell {
    /// A text.
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), key: None }
    }

    /// A number as `text` shows it.
    pub(crate) fn number(number: u64, text: impl Into<String>) -> Self {
        Self { text: text.into(), key: Some(number.to_string()) }
    }

    /// A ratio or rate as `text` shows it.
    pub(crate) fn real(value: f64, text: impl Into<String>) -> Self {
        Self { text: text.into(), key: Some(format!("{:.0}", value * 1000.0)) }
    }

    fn markup(&self) -> Markup {
        match &self.key {
            Some(key) => html! { td.number data-sort=(key) { (self.text) } },
            None => html! { td { (self.text) } },
        }
    }
}

/// In a table of text it is its text.
impl From<Cell> for comfy_table::Cell {
    fn from(cell: Cell) -> Self {
        Self::new(cell.text)
    }
}

/// The class of leaves of a size.
pub(crate) const fn leaf_class(bytes: u64) -> &'static str {
    match bytes {
        0..=0x4000 => "leaf-small",
        0x4001..=0xf_ffff => "leaf-group",
        0x10_0000..=0x3fff_ffff => "leaf-large",
        _ => "leaf-huge",
    }
}

/// What the colours of leaves mean.
pub(crate) const LEAF_CLASSES: [(&str, &str); 4] = [
    ("leaf-small", "4K and 16K leaves"),
    ("leaf-group", "64K to 512K leaves"),
    ("leaf-large", "1M to 512M leaves"),
    ("leaf-huge", "1G leaves and larger"),
];

/// The colours of some parts, explained.
pub(crate) fn legend(classes: &[(&str, &str)]) -> Markup {
    html! {
        ul.legend {
            @for (class, name) in classes {
                li { span.swatch.(class) aria-hidden="true" {} (name) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_shown_is_escaped_and_nothing_is_loaded() {
        let hostile = "<script>alert(\"1\")</script>&";
        let rows = [vec![Cell::text(hostile), Cell::number(5, hostile)]];
        let body = html! {
            (table(hostile, &[hostile], &rows))
            (bar(hostile, 1.0, 2.0, "leaf-small"))
            (figure(hostile, hostile))
        };
        let page = document(hostile, hostile, &body);
        assert!(!page.contains("<script>alert"), "{page}");
        // An attribute ends at a quote.
        assert!(
            !page.contains("=\"<") && !page.contains("(\"1\")&lt;/script&gt;&amp;\""),
            "{page}"
        );
        for part in ["http://", "https://", "src=", "href=", "@import", "url("] {
            let rest = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!rest.contains(part), "{part}");
        }
        assert!(page.starts_with("<!DOCTYPE html>"));
    }

    #[test]
    fn a_bar_is_never_longer_than_its_strip() {
        for (value, most, width) in [(1.0, 2.0, 240.0), (3.0, 2.0, 480.0), (1.0, 0.0, 0.0)] {
            let text = bar("b", value, most, "leaf-huge").into_string();
            let part = format!("width=\"{width}\"");
            let filled = text.lines().find(|line| line.contains("leaf-huge")).unwrap();
            assert!(filled.contains(&part), "{text}");
        }
    }
}
