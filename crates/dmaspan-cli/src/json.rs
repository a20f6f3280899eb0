//! A report for programs is one object, whose names and units are a contract.

use serde::Serialize;

/// A report as pretty JSON, with a newline at its end.
pub fn render(report: &impl Serialize) -> String {
    // Serialising numbers, texts and maps with integer keys cannot fail.
    let mut text = serde_json::to_string_pretty(report).unwrap_or_default();
    text.push('\n');
    text
}
