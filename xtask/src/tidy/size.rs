//! These rules limit files and lines.

use crate::lexer::Lexed;
use crate::lines;
use crate::problem::Problem;
use crate::tree::Tree;

const CODE_LINES: usize = 500;
const TEST_LINES: usize = 1000;
const WIDTH: usize = 100;

/// Finds files with too many lines that are neither blank nor comments. Tests, in their own file or
/// in `mod tests` at the end of one, have a limit of their own.
pub fn lines_of_code(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, rust) in tree.rust("") {
        let first_test = if is_tests(&file.path) { 0 } else { tests_at_end(rust) };
        let tests = rust.code_lines.iter().filter(|&&line| line >= first_test).count();
        let code = rust.code_lines.len() - tests;
        if code > CODE_LINES {
            let what = format!("{code} lines of code, of {CODE_LINES} at most; split the file");
            problems.push(Problem::of_file(&file.path, what));
        }
        if tests > TEST_LINES {
            let what =
                format!("{tests} lines of tests, of {TEST_LINES} at most; split them by topic");
            problems.push(Problem::new(&file.path, first_test.max(1), what));
        }
    }
    problems
}

/// Finds lines of Rust that are too wide.
pub fn line_width(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, _) in tree.rust("") {
        for (number, line) in (1..).zip(file.text.lines()) {
            let width = line.chars().count();
            if width > WIDTH {
                let what = format!("{width} characters wide, of {WIDTH} at most; break the line");
                problems.push(Problem::new(&file.path, number, what));
            }
        }
    }
    problems
}

/// Whether all of a file is tests or benchmarks.
fn is_tests(path: &str) -> bool {
    lines::is_of_tests(path) || lines::is_in(path, "benches")
}

/// The first line of the `mod tests` that ends the file; beyond the last where there is none.
fn tests_at_end(rust: &Lexed) -> usize {
    (0..rust.tokens.len())
        .filter(|&index| rust.says(index, &lines::TEST))
        .filter(|&index| rust.says(index + lines::TEST.len(), &["mod", "tests", "{"]))
        .find(|&index| rust.behind(index + lines::TEST.len() + 2) == rust.tokens.len())
        .map_or(usize::MAX, |index| rust.tokens[index].line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<Problem> {
        lines_of_code(&Tree::of(&[(path, text)]))
    }

    #[test]
    fn one_line_of_code_too_many_is_found() {
        let most = "let x = 1; // code\n".repeat(CODE_LINES);
        assert!(found("a/src/b.rs", &most).is_empty());
        assert_eq!(found("a/src/b.rs", &format!("{most}code();")).len(), 1);
    }

    #[test]
    fn blank_lines_and_comments_do_not_count() {
        let text = "code();\n\n// text\n/* text\n */\n".repeat(CODE_LINES);
        assert!(found("a/src/b.rs", &text).is_empty());
    }

    #[test]
    fn tests_count_apart_and_only_at_the_end() {
        let code = "code();\n".repeat(CODE_LINES);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{code}}}\n");
        assert!(found("a/src/b.rs", &format!("{code}{tests}")).is_empty());
        assert_eq!(found("a/src/b.rs", &format!("{tests}{code}")).len(), 1);
        let problems = found("a/src/b.rs", &format!("{code}{}", tests.replace("()", "()\n;\n")));
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].line, CODE_LINES + 1);
    }

    #[test]
    fn files_of_tests_have_the_larger_limit() {
        let most = "code();\n".repeat(TEST_LINES);
        for path in ["a/src/b/tests.rs", "a/tests/b.rs", "a/benches/b.rs", "a/src/b/tests/c.rs"] {
            assert!(found(path, &most).is_empty(), "{path}");
            assert_eq!(found(path, &format!("{most}code();")).len(), 1, "{path}");
        }
        assert_eq!(found("a/src/contests.rs", &most).len(), 1);
    }

    #[test]
    fn a_wide_line_is_found_by_its_characters() {
        let fits = "ü".repeat(WIDTH);
        let text = format!("// short\n{fits}\n{fits}x\n");
        let problems = line_width(&Tree::of(&[("a.rs", &text), ("a.md", &text)]));
        assert_eq!(problems.iter().map(|problem| problem.line).collect::<Vec<_>>(), [3]);
    }
}
