//! Every unsafe block of the crate, with the requests that it makes and the functions of C that it
//! calls, is one that `unsafe_blocks.txt` lists, and says why it is sound.
//!
//! What requests read and write is compared with the kernel's headers by the tests of `sys::uapi`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Whether a file is of tests.
fn is_test(path: &Path) -> bool {
    ["tests.rs", "fake.rs", "mock.rs"].into_iter().any(|name| path.ends_with(name))
}

/// The lines of a file, comments emptied, without its tests.
fn code(text: &str) -> Vec<&str> {
    let lines = text.lines().take_while(|line| !line.ends_with("mod tests {"));
    lines.map(|line| if line.trim_start().starts_with("//") { "" } else { line }).collect()
}

/// The name that follows `word` in a line.
fn name_after<'l>(line: &'l str, word: &str) -> Option<&'l str> {
    let (before, rest) = line.split_once(word)?;
    let whole = before.is_empty() || before.ends_with([' ', '(']);
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (whole && end > 0).then(|| &rest[..end])
}

/// What a block asks the kernel for: requests, and functions of C.
fn calls(block: &str) -> BTreeSet<String> {
    let words = block.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    words
        .filter(|word| {
            let last = word.rsplit("::").next().unwrap_or_default();
            let is_number = last.len() > 3 && !last.contains(char::is_lowercase);
            let of_c = word.starts_with("libc::")
                && word.matches("::").count() == 1
                && !last.contains(char::is_uppercase);
            of_c || is_number && (word.starts_with("uapi::") || word.starts_with("type1::"))
        })
        .map(|word| word.trim_start_matches("uapi::").trim_start_matches("type1::").to_owned())
        .collect()
}

/// The text from the first brace on to the one that closes it.
fn braces(lines: &[&str], at: usize, column: usize) -> String {
    let mut depth = 0;
    let mut block = String::new();
    let text = lines[at][column..].chars().chain(lines[at + 1..].iter().flat_map(|l| l.chars()));
    for character in text {
        block.push(character);
        match character {
            '{' => depth += 1,
            '}' if depth == 1 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    block
}

#[test]
fn every_unsafe_block_is_listed_and_says_why_it_is_sound() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    files.sort();
    let mut listed = Vec::new();
    for path in files.iter().filter(|path| !is_test(path)) {
        let text = fs::read_to_string(path).unwrap();
        let (lines, all) = (code(&text), text.lines().collect::<Vec<_>>());
        let file = path.strip_prefix(root.join("src")).unwrap().display().to_string();
        let mut function = "";
        let requests = lines.iter().position(|line| line.ends_with("requests! {"));
        let requests = lines[requests.map_or(lines.len(), |at| at + 1)..].iter();
        for line in requests.take_while(|line| **line != "}") {
            // Whose structure names no memory, so that making the request is safe.
            listed.push(format!("{file}: Request: {}", line.trim().trim_end_matches(',')));
        }
        for (at, line) in lines.iter().enumerate() {
            function = name_after(line, "fn ").unwrap_or(function);
            let block = line.find("unsafe {");
            let what = match (block, line.trim_start().strip_prefix("unsafe impl")) {
                (Some(column), _) => {
                    let calls: Vec<_> = calls(&braces(&lines, at, column)).into_iter().collect();
                    format!("{file}: {function}: {}", calls.join(" "))
                }
                (None, Some(rest)) => {
                    // Without its own parameters, which stand before the name of the trait.
                    let own = rest.starts_with('<').then(|| rest.split_once("> ")).flatten();
                    let rest = own.map_or(rest, |(_, rest)| rest).trim();
                    format!("{file}: impl {}", rest.trim_end_matches([' ', '{']))
                }
                (None, None) => continue,
            };
            // The proof stands above the statement, which may begin some lines before.
            let above = all[..at].iter().rev().take(24).map(|line| line.trim_start());
            let mut above =
                above.take_while(|line| !line.contains("fn ") || line.starts_with("//"));
            assert!(above.any(|line| line.starts_with("// SAFETY")), "no proof: {what}");
            listed.push(what.trim_end_matches([' ', ':']).to_owned());
        }
    }
    let golden = root.join("tests/unsafe_blocks.txt");
    let text = listed.join("\n") + "\n";
    if std::env::var_os("DMASPAN_BLESS").is_some() {
        fs::write(&golden, &text).unwrap();
    }
    let known = fs::read_to_string(&golden).unwrap();
    let known: Vec<&str> = known.lines().collect();
    let new: Vec<_> = listed.iter().filter(|line| !known.contains(&line.as_str())).collect();
    let gone: Vec<_> = known.iter().filter(|line| !listed.iter().any(|it| it == *line)).collect();
    assert!(
        text.lines().eq(known.iter().copied()),
        "read each new unsafe block against the interface that it uses, then write the list with \
         DMASPAN_BLESS=1; new: {new:#?}, gone: {gone:#?}"
    );
}
