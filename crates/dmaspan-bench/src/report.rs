//! The results of a benchmark: named figures, as one object for programs and as tables for people.

use std::fmt::Display;

use comfy_table::Table;
use dmaspan_cli::series::{SeriesRow, SeriesTable};
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{RIGHT, align_right, new_table, push_table, push_wrapped};
use serde::{Serialize, Serializer};
use serde_json::Value;

/// Figures and words by their names, in their order. A name that begins with a dot is for the
/// tables alone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields(Vec<(&'static str, Value)>);

impl Fields {
    /// With these behind.
    pub(crate) fn and<const N: usize>(mut self, fields: [(&'static str, Value); N]) -> Self {
        self.0.extend(fields);
        self
    }

    /// With one more, where there is one.
    pub(crate) fn some(mut self, name: &'static str, value: Option<impl Into<Value>>) -> Self {
        self.0.extend(value.map(|value| (name, value.into())));
        self
    }

    /// With what the authors of a series measured of this, and what differs there, in words that
    /// fit a table; as it is where they measured nothing of the kind.
    pub(crate) fn series<'r>(
        self,
        table: &SeriesTable,
        rows: impl IntoIterator<Item = &'r SeriesRow>,
        differs: &str,
    ) -> Self {
        let values = table.values(rows, &differs.replace('\n', " "));
        if values.is_empty() {
            return self;
        }
        let series = serde_json::to_value(values).unwrap_or_default();
        self.and([(".differs", differs.into()), ("series", series)])
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|field| field.0 == name).map(|field| &field.1)
    }

    /// A figure; 0 where there is none.
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.get(name).and_then(Value::as_f64).unwrap_or(0.0)
    }

    /// A word; none where there is none.
    pub(crate) fn word(&self, name: &str) -> &str {
        self.get(name).and_then(Value::as_str).unwrap_or("")
    }

    /// Whether a field has this value.
    pub(crate) fn has(&self, name: &str, value: impl Into<Value>) -> bool {
        self.get(name).is_some_and(|found| *found == value.into())
    }

    /// Whether something is so.
    pub(crate) fn is(&self, name: &str) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Whether there is such a field.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn cell(&self, name: &str, show: fn(f64) -> String) -> String {
        match self.get(name) {
            Some(Value::String(word)) => word.clone(),
            Some(value) if value.is_number() => show(self.number(name)),
            _ => "-".to_owned(),
        }
    }
}

impl<const N: usize> From<[(&'static str, Value); N]> for Fields {
    fn from(fields: [(&'static str, Value); N]) -> Self {
        Self(fields.into())
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let shown = self.0.iter().filter(|(name, _)| !name.starts_with('.'));
        serializer.collect_map(shown.map(|(name, value)| (name, value)))
    }
}

/// A column of a table: its header, the field that is in it, and how a figure is shown.
pub(crate) type Column<H = &'static str> = (H, &'static str, fn(f64) -> String);

/// A table with a line for each row, below the `.section` that it is of, where it is of one, and
/// behind its `.label`.
pub(crate) fn table<'r, H: Display>(
    corner: &str,
    columns: &[Column<H>],
    rows: impl IntoIterator<Item = &'r Fields>,
) -> Table {
    let headers = columns.iter().map(|column| column.0.to_string());
    let mut table = new_table([corner.to_owned()].into_iter().chain(headers).collect::<Vec<_>>());
    let rows: Vec<&Fields> = rows.into_iter().collect();
    let mut sections: Vec<&str> = Vec::new();
    for row in &rows {
        let section = row.word(".section");
        if sections.contains(&section) {
            continue;
        }
        sections.push(section);
        if !section.is_empty() {
            table.add_row([section]);
        }
        for row in rows.iter().filter(|row| row.word(".section") == section) {
            let cells = columns.iter().map(|column| row.cell(column.1, column.2));
            let indent = if section.is_empty() { "" } else { " " };
            let label = format!("{indent}{}", row.word(".label"));
            table.add_row([label].into_iter().chain(cells).collect::<Vec<_>>());
        }
    }
    align_right(&mut table, 1);
    table
}

/// What was measured. `--format json` prints its fields.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    head: Fields,
    rows: Vec<Fields>,
    #[serde(flatten)]
    tail: Fields,
    /// The title, tables and what they mean.
    #[serde(skip)]
    text: String,
    #[serde(skip)]
    notes: Vec<String>,
    /// What was checked.
    #[serde(skip)]
    done: &'static str,
}

impl Report {
    /// The fields before the rows and behind them; for people, the title and what was checked.
    pub(crate) fn new(
        [head, tail]: [Fields; 2],
        rows: Vec<Fields>,
        title: &str,
        done: &'static str,
    ) -> Self {
        let mut text = String::new();
        push_wrapped(&mut text, "", title);
        Self { head, rows, tail, text, notes: Vec::new(), done }
    }

    /// Adds a paragraph.
    pub(crate) fn say(&mut self, words: &str) {
        self.text.push('\n');
        push_wrapped(&mut self.text, "", words);
    }

    /// Adds a table.
    pub(crate) fn show(&mut self, table: &Table) {
        push_table(&mut self.text, table);
    }

    /// Adds a table of some of the rows.
    pub(crate) fn tabulate(
        &mut self,
        corner: &str,
        columns: &[Column],
        choose: impl Fn(&Fields) -> bool,
    ) {
        let table = table(corner, columns, self.rows.iter().filter(|row| choose(row)));
        self.show(&table);
    }

    /// Adds a note to those at the end.
    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Notes why instructions were not counted, where they were not.
    pub(crate) fn note_uncounted(&mut self, why: Option<&str>) {
        if let Some(why) = why {
            self.note(format!("instructions are not counted: {why}"));
        }
    }

    /// The report as text, with a newline at its end.
    pub(crate) fn render(&self) -> String {
        let mut text = format!("{}\n", self.text);
        self.notes.iter().for_each(|note| push_wrapped(&mut text, "note: ", note));
        text.push('\n');
        push_wrapped(&mut text, &format!("{RIGHT} "), self.done);
        text
    }
}

/// `1 page`, `4 pages`.
pub(crate) fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// How many times faster, of times as they are printed.
pub(crate) fn speedup(old: f64, new: f64) -> f64 {
    // What is never 0, however fast: a picosecond.
    rounded(old / new.max(0.001))
}

/// A whole number.
pub(crate) fn count(number: f64) -> String {
    format!("{number}")
}
