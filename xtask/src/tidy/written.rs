//! This rule says where files are written that may be there already.
//!
//! Such a file may be a link that somebody else made, or keep what others may not read. So programs
//! write by `dmaspan_linux::replace`, or make a file that was not there (`create_new`).

use crate::lines::TestCode;
use crate::problem::Problem;
use crate::tree::Tree;

/// Words that open a file for writing whether or not it is there.
const WORDS: [&[&str]; 5] = [
    &["File", "::", "create", "("],
    &["fs", "::", "write"],
    &["fs", "::", "copy"],
    &[".", "create", "(", "true", ")"],
    &[".", "truncate", "(", "true", ")"],
];

/// What the paths of files begin with that may: numbers of the kernel, a guest, which has one user,
/// and what is written into the build's folder and the working tree.
const PLACES: &str = "crates/dmaspan-linux/src/hugetlb.rs crates/dmaspan-guest/ fuzz/ \
    xtask/src/ci/ xtask/src/cross/tools.rs xtask/src/debian/ xtask/src/guest/ \
    xtask/src/hw/install.rs xtask/src/kernel/ xtask/src/package.rs xtask/src/pages/mod.rs \
    xtask/src/peers/contention/ xtask/src/picture.rs xtask/src/sanitize.rs";

/// Finds files that are written in another way.
pub fn replaced(tree: &Tree) -> Vec<Problem> {
    let tests = TestCode::of(tree);
    let mut problems = Vec::new();
    let files =
        tree.rust("").filter(|(file, _)| !PLACES.split(' ').any(|at| file.path.starts_with(at)));
    for (file, rust) in files {
        let is_test = tests.of_file(&file.path, rust);
        for (index, token) in rust.tokens.iter().enumerate() {
            if WORDS.iter().any(|words| rust.says(index, words)) && !is_test(token.line) {
                let what = "this follows whatever link is there, and leaves half a file where it \
                            fails; write by `dmaspan_linux::replace`, or make a new file by \
                            `create_new`";
                problems.push(Problem::new(&file.path, token.line, what.to_owned()));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_by_the_function_for_it_alone() {
        let text = "fn f() {\n File::create(p);\n std::fs::write(p, b);\n use std::fs::write;\n \
                    File::options().write(true).create(true);\n x.truncate(true);\n \
                    fs::copy(a, b);\n}\n\
                    fn g() { File::create_new(p); bytes.truncate(8); Target::create(p); }\n\
                    #[cfg(test)]\nmod tests { fn f() { fs::write(p, b); } }";
        let lines = |path: &str| -> Vec<usize> {
            replaced(&Tree::of(&[(path, text)])).iter().map(|problem| problem.line).collect()
        };
        for path in ["crates/dmaspan-cli/src/a.rs", "examples/nvme/src/b.rs", "xtask/src/report.rs"]
        {
            assert_eq!(lines(path), [2, 3, 4, 5, 6, 7], "{path}");
        }
        assert!(lines("crates/dmaspan-cli/tests/it/a.rs").is_empty());
        assert!(lines("crates/dmaspan-linux/src/hugetlb.rs").is_empty());
    }
}
