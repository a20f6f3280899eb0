//! The tables of all commands share this: marks, wrapping, alignment.

use std::env;
use std::io::{self, IsTerminal};

use comfy_table::{CellAlignment, LineStyle, Row, Table, TableStyle};

use crate::units;

/// How wide lines may be.
pub const WIDTH: usize = 80;

/// What a benchmark says of its times.
pub const TIMES: &str = "the times are this machine's: compare the ratios, not the times";

/// What it says of them with `--quick`.
pub const QUICK: &str = "one short round shows that all works, not how fast it is: leave \
    --quick out for figures";

/// What stands before what is right.
pub const RIGHT: &str = "✓";
/// What stands before what may be wrong.
pub const LOOK: &str = "!";
/// What stands before what is wrong.
pub const WRONG: &str = "✗";

/// Whether standard output has colours: on a terminal that is not told otherwise (no-color.org).
pub fn is_coloured() -> bool {
    let forbidden = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_none_or(|value| value == "dumb");
    io::stdout().is_terminal() && !forbidden && !dumb
}

/// A text for standard output with its marks green, yellow and red, where that has colours: at
/// last, as tables count the characters of their cells, and a text that is
/// [cleaned](dmaspan_linux::stdio::clean) has none.
pub fn coloured(text: &str) -> String {
    if is_coloured() { in_colours(text) } else { text.to_owned() }
}

fn in_colours(text: &str) -> String {
    let mut coloured = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let words = line.trim_start_matches(' ');
        let (indent, _) = line.split_at(line.len() - words.len());
        match words.strip_prefix(LOOK).filter(|rest| rest.starts_with(' ')) {
            Some(rest) => coloured.push_str(&format!("{indent}\x1b[33m{LOOK}\x1b[0m{rest}")),
            None => coloured.push_str(line),
        }
    }
    let marks = [(RIGHT, "\x1b[32m✓\x1b[0m"), (WRONG, "\x1b[31m✗\x1b[0m")];
    marks.iter().fold(coloured, |text, (plain, marked)| text.replace(plain, marked))
}

/// How many times faster something is; below 1 where it is slower.
pub fn ratio(speedup: f64) -> String {
    format!("{}×", units::three_digits(speedup))
}

/// A table with a line under its header and no other.
pub fn new_table(header: impl Into<Row>) -> Table {
    let line = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(line)).set_header(header);
    table
}

/// Aligns all columns from `first` on as numbers are.
pub fn align_right(table: &mut Table, first: usize) {
    for column in table.column_iter_mut().skip(first) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Adds a table below an empty line.
pub fn push_table(text: &mut String, table: &Table) {
    text.push('\n');
    text.push_str(&table.trim_fmt());
    text.push('\n');
}

/// Adds `words` after `label`, broken into lines that are not too wide.
pub fn push_wrapped(text: &mut String, label: &str, words: &str) {
    let indent = if label.is_empty() { "" } else { "  " };
    push_words(text, label, indent, unbroken(words));
}

/// Adds `words` after `label`, broken into lines that begin below the end of the label.
pub fn push_hanging(text: &mut String, label: &str, words: &str) {
    push_words(text, label, &" ".repeat(label.chars().count()), unbroken(words));
}

/// Adds words after `label`, in lines that are not too wide, all but the first of which begin with
/// `indent`.
pub fn push_words<W: AsRef<str>>(
    text: &mut String,
    label: &str,
    indent: &str,
    words: impl IntoIterator<Item = W>,
) {
    let mut line = label.to_owned();
    let mut is_empty = true;
    let room = WIDTH.saturating_sub(indent.chars().count());
    let words = words.into_iter().flat_map(|word| cut(word.as_ref(), room));
    for word in words {
        let wide = line.chars().count() + usize::from(!is_empty) + word.chars().count();
        if wide > WIDTH && line != indent {
            text.push_str(line.trim_end());
            text.push('\n');
            line = indent.to_owned();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(&word);
        is_empty = false;
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

/// A word in pieces that have room in a line, each as long as it can be: no two fit in one line.
fn cut(word: &str, room: usize) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut rest: Vec<char> = word.chars().collect();
    while rest.len() > room.max(1) {
        let in_room = rest.get(..room.max(1)).unwrap_or(&rest);
        let border = in_room.iter().rposition(|c| matches!(c, ' ' | ',' | '/'));
        let behind = rest.split_off(border.map_or(in_room.len(), |border| border + 1));
        pieces.push(rest.iter().collect());
        rest = behind;
    }
    pieces.push(rest.iter().collect());
    pieces
}

/// The words of a text, where what is in backticks is one word: a command to copy.
fn unbroken(words: &str) -> Vec<String> {
    let mut unbroken: Vec<String> = Vec::new();
    let mut is_inside = false;
    for word in words.split_whitespace() {
        match unbroken.last_mut() {
            Some(last) if is_inside => *last = format!("{last} {word}"),
            _ => unbroken.push(word.to_owned()),
        }
        is_inside ^= word.matches('`').count() % 2 == 1;
    }
    unbroken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_have_their_colours_and_nothing_else_has_one() {
        let text = in_colours("✓ 1!\n  ! look ! here\n a ✗ b\n!x");
        let marked =
            "\x1b[32m✓\x1b[0m 1!\n  \x1b[33m!\x1b[0m look ! here\n a \x1b[31m✗\x1b[0m b\n!x";
        assert_eq!(text, marked);
    }

    #[test]
    fn a_command_is_never_broken() {
        let mut text = String::new();
        let words = format!("{} or `echo 3 > /proc/file`, as root", "word ".repeat(12));
        push_wrapped(&mut text, "note: ", &words);
        assert!(text.contains("\n  `echo 3 > /proc/file`, as root\n"), "{text}");
        assert_eq!(unbroken("a `b` `c d`e f"), ["a", "`b`", "`c d`e", "f"]);

        for len in 50..WIDTH - 1 {
            let (mut text, command) = (String::new(), format!("`{}/{}`", "a".repeat(40), len));
            let command = command.replace('/', &format!("/{}/", "b".repeat(len - 48)));
            push_wrapped(&mut text, "skipped hugetlb: ", &format!("words {command} words"));
            assert!(text.contains(&command), "{text}");
        }
    }

    #[test]
    fn what_is_wider_than_a_line_is_cut_and_none_of_it_is_lost() {
        for separator in ["", ",", "/", ", "] {
            let long = format!("`{}`", format!("part{separator}").repeat(60));
            for before in ["", "some words of it: ", &"word ".repeat(15)] {
                let mut text = String::new();
                push_wrapped(&mut text, "note: ", &format!("{before}{long} and more"));
                assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
                let bare = |text: &str| text.replace(char::is_whitespace, "");
                assert_eq!(bare(&text), bare(&format!("note: {before}{long} and more")));
            }
        }
    }
}
