//! The place and the form of a report.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use clap::ValueEnum;
use dmaspan_cli::options::OutputFormat;

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

/// Writes a file whole or not at all: who reads it meanwhile reads what was there before.
///
/// # Errors
///
/// Why it was not written, in one line with the file's name.
pub(crate) fn write_whole(path: &Path, content: impl AsRef<[u8]>) -> Result<(), String> {
    let cannot =
        |why: &dyn std::fmt::Display| format!("{} cannot be written: {why}", path.display());
    // A link stays, and what it leads to is written.
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if fs::metadata(&place).is_ok_and(|metadata| !metadata.is_file()) {
        // A terminal or a pipe cannot be replaced.
        let opened = File::options().write(true).open(&place);
        let written = opened.and_then(|mut file| file.write_all(content.as_ref()));
        return written.map_err(|error| cannot(&error));
    }
    let Some(name) = place.file_name() else { return Err(cannot(&"it is no name of a file")) };
    // In the same folder, since a rename does not leave its file system. The collector reads files
    // that end in .prom alone.
    let mut partial = std::ffi::OsString::from(".");
    partial.push(name);
    partial.push(format!(".{}", std::process::id()));
    let partial = place.with_file_name(partial);
    let written = File::create(&partial).and_then(|mut file| {
        file.write_all(content.as_ref())?;
        file.sync_all()?;
        fs::rename(&partial, &place)
    });
    written.map_err(|error| {
        let _ = fs::remove_file(&partial);
        cannot(&error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_reads_a_file_while_it_is_replaced_reads_the_old_one_or_the_new_one_whole() {
        let folder = std::env::temp_dir().join(format!("dmaspan-whole-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("report.prom");
        let texts = ["a".repeat(1 << 20), "b".repeat(1 << 19)];
        write_whole(&file, &texts[0]).unwrap();
        std::thread::scope(|threads| {
            let writer = threads.spawn(|| {
                for number in 0..20 {
                    write_whole(&file, &texts[number % 2]).unwrap();
                }
            });
            let mut reads = 0;
            while reads == 0 || !writer.is_finished() {
                let read = fs::read_to_string(&file).unwrap();
                assert!(texts.contains(&read), "{} bytes", read.len());
                reads += 1;
            }
        });
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_is_replaced_and_nothing_else_is_left() {
        let folder = std::env::temp_dir().join(format!("dmaspan-output-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("report.prom");
        for text in ["one", "another"] {
            write_whole(&file, text).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        let error = write_whole(&folder.join("none/report.prom"), "x").unwrap_err();
        assert!(error.contains("none/report.prom cannot be written: "), "{error}");
        assert!(write_whole(&folder, "x").is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
    }
}
