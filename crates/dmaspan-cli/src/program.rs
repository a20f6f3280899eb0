//! The end of a program: exit codes, errors in one line, reports on standard output.

use std::env;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;
use dmaspan_linux::stdio;

use crate::options::OutputFormat;
use crate::text::{self, coloured};

/// The check or the mapping failed.
pub const FAILED: u8 = 1;
/// The command line asks for what cannot be done.
pub const WRONG_USAGE: u8 = 2;

/// Prints a report to standard output; the exit code where that fails.
#[must_use]
pub fn print_text(format: OutputFormat, text: &str) -> Option<ExitCode> {
    printed(match format {
        OutputFormat::Table => stdio::print_styled(&coloured(&stdio::clean(text))),
        OutputFormat::Json => stdio::print_json(text),
    })
}

fn printed(printed: io::Result<stdio::Printed>) -> Option<ExitCode> {
    // Where nobody listens any more there is nobody to tell.
    let error = printed.err()?;
    Some(fail(FAILED, &format!("the report cannot be written: {error}")))
}

/// Says on standard error, in one line, why the program ends with `code`.
pub fn fail(code: u8, why: &str) -> ExitCode {
    tell("error", why);
    ExitCode::from(code)
}

/// Says something on standard error, in one line that begins with what it is. Input that it quotes
/// is anybody's.
pub fn tell(what: &str, words: &str) {
    let _ = writeln!(io::stderr(), "{what}: {}", stdio::clean_line(words));
}

/// Ends a program whose command line was not parsed: prints the help that was asked for, or says in
/// one line what is wrong. `commands` are the program's, the first of which is named where the
/// command line names none.
pub fn not_parsed(error: &clap::Error, program: &str, commands: &[&str]) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let text = error.render();
        let text = if text::is_coloured() { text.ansi().to_string() } else { text.to_string() };
        return printed(stdio::print_styled(&text)).unwrap_or(ExitCode::SUCCESS);
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // On standard error, where nothing can be said of a failure.
        let _ = error.print();
    } else {
        let first = env::args_os().nth(1);
        let is_first = |command: &&&str| first.as_ref().is_some_and(|word| word == **command);
        let command = commands.iter().find(is_first).or(commands.first());
        let command = command.map_or(program.to_owned(), |name| format!("{program} {name}"));
        let line = one_line(&error.to_string(), &command);
        let _ = writeln!(io::stderr(), "{}", stdio::clean_line(&line));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_USAGE))
}

/// The lines of a message that say what is wrong, as one, and the command whose help says more.
#[must_use]
pub fn one_line(message: &str, command: &str) -> String {
    let lines = message.lines().map(str::trim);
    let about_it = lines.take_while(|line| {
        !line.starts_with("Usage:") && !line.starts_with("For more information")
    });
    let words: Vec<&str> =
        about_it.filter(|line| !line.is_empty() && !line.starts_with("tip:")).collect();
    format!("{} (`{command} --help` says more)", words.join(" "))
}
