//! These rules forbid words in the tree.

use crate::lexer::Token;
use crate::problem::Problem;
use crate::tree::Tree;

/// Marks of unfinished work.
const MARKS: [&str; 3] = ["TODO", "FIXME", "XXX"];
/// Macros of unfinished work.
const MACROS: [&str; 3] = ["todo", "unimplemented", "dbg"];
/// Words about plans, in lower case; `#` stands for a number.
const PLANS: [&[&str]; 4] =
    [&["phase", "#"], &["for", "now"], &["later", "version"], &["in", "the", "future"]];
/// Words that begin a clause and name no subject.
const CLAUSES: [&str; 7] = ["What", "Who", "Which", "Whether", "How", "Where", "Why"];
/// First folders of absolute paths that only one machine has.
const PLACES: [&str; 3] = ["work", "root", "home"];

/// Finds marks and macros of unfinished work.
pub fn leftovers(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, rust) in tree.rust("") {
        let marks = rust.tokens.iter().chain(&rust.comments);
        let marks = marks.filter(|token| MARKS.contains(&token.text.as_str()));
        let macros = (0..rust.tokens.len())
            .filter(|&index| MACROS.contains(&rust.text(index)) && rust.text(index + 1) == "!");
        for token in marks.chain(macros.map(|index| &rust.tokens[index])) {
            let what = format!("`{}` marks unfinished work; finish or remove it", token.text);
            problems.push(Problem::new(&file.path, token.line, what));
        }
    }
    problems
}

/// Finds words about plans in comments, across their line breaks.
pub fn plans(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, rust) in tree.rust("") {
        for (index, first) in rust.comments.iter().enumerate() {
            for plan in PLANS.iter().filter(|plan| says(&rust.comments[index..], plan)) {
                let what = format!(
                    "\"{}\" speaks of plans; say what the code does, and keep plans out of it",
                    plan.join(" ")
                );
                problems.push(Problem::new(&file.path, first.line, what));
            }
        }
    }
    problems
}

fn says(words: &[Token], wanted: &[&str]) -> bool {
    let matches = |(word, wanted): (&Token, &&str)| match *wanted {
        "#" => word.text.bytes().all(|byte| byte.is_ascii_digit()),
        wanted => word.text.eq_ignore_ascii_case(wanted),
    };
    words.len() >= wanted.len() && words.iter().zip(wanted).all(matches)
}

/// Finds modules whose documentation begins without a subject.
pub fn headless(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, _) in tree.rust("") {
        let first = (1..).zip(file.text.lines()).find(|(_, line)| line.starts_with("//! "));
        let Some((number, line)) = first else { continue };
        let word = line["//! ".len()..].split(' ').next().unwrap_or_default();
        if CLAUSES.contains(&word) {
            let what =
                format!("the module's first sentence begins with \"{word}\"; name what it is");
            problems.push(Problem::new(&file.path, number, what));
        }
    }
    problems
}

/// Finds paths that only one machine has.
pub fn machine_paths(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.files() {
        for (number, line) in (1..).zip(file.text.lines()) {
            for place in PLACES.map(|place| format!("/{place}/")) {
                let mut found = line.match_indices(&place).map(|(at, _)| &line[..at]);
                if found.any(|before| !before.ends_with(is_path)) {
                    let what = format!("names a path of one machine, {place}; name no such path");
                    problems.push(Problem::new(&file.path, number, what));
                }
            }
        }
    }
    problems
}

/// Whether an absolute path cannot begin behind this character.
fn is_path(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '-' | '.' | '}' | ')' | '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rule: fn(&Tree) -> Vec<Problem>, path: &str, text: &str) -> Vec<usize> {
        rule(&Tree::of(&[(path, text)])).iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn marks_and_macros_of_unfinished_work_are_found() {
        assert_eq!(lines(leftovers, "a.rs", "// TODO: x\nfn XXX() {}\n/* FIXME */"), [2, 1, 3]);
        assert_eq!(lines(leftovers, "a.rs", "todo!()\nunimplemented! {}\ndbg!(x)"), [1, 2, 3]);
        assert!(lines(leftovers, "a.rs", "let x = \"TODO\"; // todo, XXXL\ndbg(x)").is_empty());
    }

    #[test]
    fn words_about_plans_are_found_across_lines() {
        assert_eq!(lines(plans, "a.rs", "// Phase 4\n// enough for\n// now."), [1, 2]);
        assert_eq!(lines(plans, "a.rs", "/// in the future\n// a later version"), [1, 2]);
        let harmless =
            "// in both phases; the phase of a wave; for nowhere\nlet for_now = \"for now\";";
        assert!(lines(plans, "a.rs", harmless).is_empty());
    }

    #[test]
    fn modules_whose_first_sentence_has_no_subject_are_found() {
        assert_eq!(lines(headless, "a.rs", "\n//! What it is.\n//! Which too.\n"), [2]);
        assert!(lines(headless, "a.rs", "//! Tables.\n//!\n//! What they are.\n").is_empty());
        assert!(lines(headless, "a.rs", "/// What it is.\nstruct A;\n").is_empty());
    }

    #[test]
    fn paths_of_one_machine_are_found_in_any_file() {
        for place in PLACES {
            let text = format!("fine\nsee /{place}/a and `/{place}/b`\n");
            assert_eq!(lines(machine_paths, "a.md", &text), [2]);
            let inner = format!("a/{place}/b ../{place}/ https://example.org/{place}/");
            assert!(lines(machine_paths, "a.md", &inner).is_empty());
        }
    }
}
