//! The place and the form of a report.

use std::io::Write;
use std::path::Path;

use clap::ValueEnum;
use dmaspan_cli::options::OutputFormat;
use dmaspan_linux::replace::WholeFile;
use dmaspan_linux::stdio;

/// Says how a report is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportFormat {
    /// Tables for people
    Table,
    /// One object for programs
    Json,
    /// A page to show and to print
    Html,
    /// Figures for node_exporter's textfile collector
    Prometheus,
}

impl ReportFormat {
    /// How its text goes to standard output.
    pub(crate) const fn as_text(self) -> OutputFormat {
        match self {
            Self::Json => OutputFormat::Json,
            _ => OutputFormat::Table,
        }
    }
}

/// Writes a report to a file as it would be printed: nothing in it is a command for who reads it.
///
/// # Errors
///
/// As of [`write_whole`].
pub(crate) fn write_report(path: &Path, format: ReportFormat, text: &str) -> Result<(), String> {
    let clean = if format == ReportFormat::Json { stdio::clean_json } else { stdio::clean };
    write_whole(path, clean(text))
}

/// Writes a file whole or not at all: who reads it meanwhile reads what was there before.
///
/// # Errors
///
/// Why it was not written, in one line with the file's name.
pub(crate) fn write_whole(path: &Path, content: impl AsRef<[u8]>) -> Result<(), String> {
    let written = WholeFile::at(path).and_then(|mut new| {
        new.write_all(content.as_ref())?;
        new.finish()
    });
    written.map_err(|error| format!("{} cannot be written: {error}", path.display()))
}
