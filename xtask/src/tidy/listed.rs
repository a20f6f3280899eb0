//! This rule says what needs a test of its own, or has to say in `listed.txt` why it needs none:
//! unsafe traits, public methods that move bytes, and code that writes files.
//!
//! An unsafe trait is tested by an implementer that keeps its promises and is hostile in all else.
//! A method that moves bytes which a device or another thread may be moving, too, runs on two
//! threads at once; it is found by what it takes, or by what it is called. A file may be a link
//! that somebody else made, or keep what others may not read, so nothing opens it for writing that
//! is there already.

use crate::lexer::Lexed;
use crate::lines::TestCode;
use crate::problem::Problem;
use crate::tree::Tree;

/// A line is a kind, a name, and a test or a reason of several words.
const LIST: &str = "xtask/src/tidy/listed.txt";

/// What is needed where nothing is listed, by kind.
const NEEDS: [(&str, &str); 3] = [
    ("trait", "needs a test that keeps its promises and is hostile in all else"),
    (
        "method",
        "moves bytes and needs a test on two threads, which names and calls it in \
         crates/dmaspan/tests/at_once/main.rs or crates/dmaspan-linux/src/mem/at_once.rs",
    ),
    ("file", "needs `dmaspan_linux::replace` or `create_new` where it writes, or follows links"),
];

/// Where methods move bytes that others move, too.
const MOVERS: &str = "crates/dmaspan/src/bytes.rs crates/dmaspan/src/container/access.rs \
    crates/dmaspan/src/dma/ crates/dmaspan/src/follow.rs crates/dmaspan/src/iommu/soft/ \
    crates/dmaspan/src/regbuf/ crates/dmaspan/src/swiotlb/ crates/dmaspan-linux/src/ adapters/";

/// What a method takes that moves bytes.
const TAKEN: [&[&str]; 6] =
    [&["[", "u8", "]"], &["Vec", "<", "u8"], &["Transfer"], &["InSlot"], &["To"], &["Scalar"]];

/// Types whose methods move bytes without taking any, and what the names of those begin with. Of
/// the macro `accesses` they are the types below.
const OWNERS: &str = "BounceMemory CoherentFrames Device FrameBounce Held HostBytes Lease Memory \
    Pool SharedWord accesses bytes";
const VERBS: &str = "check clear copy exchange fetch fill link load map read store swap sync to \
    unmap write zero";

/// The types whose methods the macro `accesses` makes.
const ACCESSES: [&str; 2] = ["Coherent", "CoherentBlock"];

/// Words that open a file for writing whether or not it is there.
const WRITERS: [&[&str]; 5] = [
    &["File", "::", "create", "("],
    &["fs", "::", "write"],
    &["fs", "::", "copy"],
    &[".", "create", "(", "true", ")"],
    &[".", "truncate", "(", "true", ")"],
];

/// Finds what has neither its test nor a reason, and lines of the list that are of nothing.
pub fn tested(tree: &Tree) -> Vec<Problem> {
    let list = tree.file(LIST).map_or("", |list| list.text.as_str());
    let mut listed: Vec<_> = (1..).zip(list.lines()).map(|(line, text)| (line, text, 0)).collect();
    listed.retain(|(_, text, _)| !text.is_empty() && !text.starts_with('#'));
    let mut problems = Vec::new();
    for (kind, name, path, line) in items(tree) {
        let mut has_test = kind == "method" && runs_beside_others(tree, &name);
        for (_, text, uses) in &mut listed {
            let mut parts = text.splitn(3, ' ');
            let is_of = |of: &str| of == name || of.ends_with([':', '/']) && name.starts_with(of);
            if parts.next() == Some(kind) && parts.next().is_some_and(is_of) {
                *uses += 1;
                let why = parts.next().unwrap_or_default();
                has_test |= why.contains(' ') || kind == "trait" && is_test(tree, why);
            }
        }
        if let Some((_, need)) = NEEDS.iter().find(|(of, _)| !has_test && *of == kind) {
            let what =
                format!("`{name}` {need}; {LIST} has the test of a trait, and reasons for none");
            problems.push(Problem::new(path, line, what));
        }
    }
    for (line, text, _) in listed.iter().filter(|(_, _, uses)| *uses == 0) {
        problems.push(Problem::new(LIST, *line, format!("there is no such thing: {text}")));
    }
    problems
}

/// Whether there is a test of that name.
fn is_test(tree: &Tree, name: &str) -> bool {
    let test = format!("#[test]\nfn {name}() {{");
    tree.files().iter().any(|file| file.text.contains(&test))
}

/// Whether a mover of the tests on two threads names a method, alone or among others, and calls it.
fn runs_beside_others(tree: &Tree, name: &str) -> bool {
    let method = name.rsplit(':').next().unwrap_or(name);
    let calls = |run: &str| {
        run.match_indices(method).any(|(at, _)| {
            let (before, behind) = (&run[..at], &run[at + method.len()..]);
            before.ends_with(['.', ':']) && (behind.starts_with('(') || behind.starts_with("::<"))
        })
    };
    tree.files().iter().filter(|file| NEEDS[1].1.contains(&file.path)).any(|file| {
        let text = file.text.replace("beside_a_device(", "mover(");
        text.split("mover(\"")
            .filter_map(|mover| mover.split_once('"'))
            .any(|(names, run)| names.split(' ').any(|named| named == name) && calls(run))
    })
}

/// What needs a test or a reason: its kind, name, file and line.
fn items(tree: &Tree) -> Vec<(&'static str, String, &str, usize)> {
    let test_code = TestCode::of(tree);
    let mut items = Vec::new();
    for (file, rust) in tree.rust("") {
        let is_mover = MOVERS.split(' ').any(|place| file.path.starts_with(place));
        let is_test = test_code.of_file(&file.path, rust);
        for (at, token) in rust.tokens.iter().enumerate() {
            let (kind, names) = if rust.says(at, &["unsafe", "trait"]) {
                ("trait", vec![rust.text(at + 2).to_owned()])
            } else if is_mover && token.text == "fn" {
                ("method", mover(rust, at))
            } else if WRITERS.iter().any(|words| rust.says(at, words)) {
                ("file", vec![file.path.clone()])
            } else {
                continue;
            };
            if !is_test(token.line) {
                let item = |name| (kind, name, file.path.as_str(), token.line);
                items.extend(names.into_iter().map(item));
            }
        }
    }
    items
}

/// The names of the function at `fn` where it is public, has a body and moves bytes.
fn mover(rust: &Lexed, method: usize) -> Vec<String> {
    let mut end = method;
    while !matches!(rust.text(end), "{" | ";" | "") {
        end = if matches!(rust.text(end), "(" | "[") { rust.behind(end) } else { end + 1 };
    }
    let name = rust.text(method + 1);
    let (owner, is_public) = owner(rust, method);
    let says = |words: &[&str]| (method..end).any(|at| rust.says(at, words));
    let is_verb = |verb| name.split('_').next() == Some(verb);
    let moves = TAKEN.iter().any(|taken| says(taken))
        || OWNERS.split(' ').any(|other| other == owner) && VERBS.split(' ').any(is_verb);
    // Of a value, or by an address.
    let reaches = says(&["self"]) || says(&["*"]);
    if !(is_public && moves && reaches && rust.text(end) == "{") {
        return Vec::new();
    }
    let owners = if owner == "accesses" { &ACCESSES[..] } else { &[owner] };
    owners.iter().map(|owner| format!("{owner}::{name}")).collect()
}

/// The type, trait or macro around the function at `fn`, and whether the function is public.
fn owner(rust: &Lexed, method: usize) -> (&str, bool) {
    let is_pub = |item: usize| {
        let before =
            (0..item).rev().find(|&at| !matches!(rust.text(at), "unsafe" | "const" | "async"));
        before.is_some_and(|at| rust.text(at) == "pub")
    };
    let is_around = |&at: &usize| {
        let open = (at..method).find(|&at| rust.text(at) == "{");
        open.is_some_and(|open| rust.behind(open) > method)
    };
    let is_owner = |&at: &usize| matches!(rust.text(at), "impl" | "trait" | "macro_rules");
    let Some(at) = (0..method).rev().filter(is_owner).find(is_around) else {
        return ("bytes", is_pub(method));
    };
    let (owner, is_as_public) = match rust.text(at) {
        "impl" => {
            let (of, owner) = rust.implemented(at);
            (owner, !of.is_empty())
        }
        "trait" => (rust.text(at + 1), is_pub(at)),
        _ => (rust.text(at + 2), false),
    };
    (owner, is_as_public || is_pub(method))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TESTED: &str = "mover(\"Pool::sync_for_cpu\", |at, len| pool.sync_for_cpu(&b, at)),\n\
        mover(\"Lease::read Lease::write\", |at, len| lease.read(at, len)),";
    const LINES: &str = "# Those.\n\ntrait Port a_hostile_port\ntrait Sealed it is sealed\n\
        method Quiet:: it moves nothing\nfile fuzz/ it has one user\n";

    /// The kinds and names of what is found in one file, or of the lines that are of nothing.
    fn found(path: &str, text: &str) -> Vec<String> {
        let tests = ("crates/dmaspan/tests/at_once/main.rs", TESTED);
        let hostile = ("crates/dmaspan/tests/a.rs", "#[test]\nfn a_hostile_port() {}");
        let tree = Tree::of(&[(path, text), tests, hostile, (LIST, LINES)]);
        let problems = tested(&tree).into_iter().filter(|problem| problem.path == path);
        problems.map(|problem| problem.what.split('`').nth(1).unwrap().to_owned()).collect()
    }

    #[test]
    fn an_unsafe_trait_has_a_test_that_is_there_or_a_reason() {
        let path = "crates/dmaspan/src/a.rs";
        assert_eq!(found(path, "unsafe trait New {}\ntrait Safe {}"), ["New"]);
        assert!(found(path, "pub unsafe trait Port {}\nunsafe trait Sealed {}").is_empty());
        assert_eq!(found(path, "pub unsafe trait Ports {}"), ["Ports"], "names are whole");
        let tree = Tree::of(&[(path, "pub unsafe trait Port {}"), (LIST, "trait Port a_test")]);
        assert_eq!(tested(&tree).len(), 1, "the test is not there");
    }

    #[test]
    fn a_line_of_nothing_is_found() {
        let problems = tested(&Tree::of(&[(LIST, LINES)]));
        assert_eq!(problems.iter().map(|problem| problem.line).collect::<Vec<_>>(), [3, 4, 5, 6]);
    }

    #[test]
    fn a_public_method_that_moves_bytes_is_named_and_called_by_a_test() {
        let path = "crates/dmaspan/src/swiotlb/a.rs";
        let lease = "impl<M> Lease<M> { pub fn NAME(&self, at: u64, into: &mut [u8]) {} }";
        assert!(found(path, &lease.replace("NAME", "read")).is_empty());
        assert_eq!(found(path, &lease.replace("NAME", "write")), ["Lease::write"], "not called");
        assert_eq!(found(path, &lease.replace("NAME", "peek")), ["Lease::peek"]);
        for taken in
            ["fill(&self, value: u8)", "copy_within(&self, to: u64)", "swap(&self, at: u64)"]
        {
            let moves = format!("impl<M> Lease<M> {{ pub fn {taken} {{}} }}");
            assert_eq!(found(path, &moves).len(), 1, "{taken}");
        }
        let copies = "impl Any { pub fn all(&self) -> Vec<u8> { Vec::new() } }";
        assert_eq!(found(path, copies), ["Any::all"]);
        assert!(found(path, &lease.replace("Lease<", "Quiet<")).is_empty());
        assert!(found(path, &lease.replace("pub fn NAME", "fn read")).is_empty());
        assert!(found(path, &lease.replace("pub fn NAME", "pub(super) fn peek")).is_empty());
        let pool = "impl<M: A<B>> Pool<M> { pub fn NAME(&self, at: u64) {} }";
        assert!(found(path, &pool.replace("NAME", "sync_for_cpu")).is_empty());
        assert_eq!(found(path, &pool.replace("NAME", "sync_for_bus")), ["Pool::sync_for_bus"]);
        assert!(found(path, &pool.replace("NAME", "stats")).is_empty());
        assert!(found("crates/dmaspan-cli/src/a.rs", &pool.replace("NAME", "sync_x")).is_empty());
        let with = "impl Pool { pub fn peek<F: Fn(u64)>(&self, f: F, into: &mut [u8]) {} }";
        assert_eq!(found(path, with), ["Pool::peek"]);
    }

    #[test]
    fn methods_of_traits_macros_and_free_functions_are_found() {
        let path = "crates/dmaspan/src/bytes.rs";
        let by_trait =
            "unsafe impl<A> PoolMemory for X<A> { fn copy(&self, transfer: Transfer) {} }";
        assert_eq!(found(path, by_trait), ["X::copy"]);
        assert!(found(path, "pub trait T { fn copy(&self, transfer: Transfer); }").is_empty());
        let default = "pub trait T { fn copy(&self, transfer: Transfer) {} }";
        assert_eq!(found(path, default), ["T::copy"]);
        assert_eq!(found(path, "pub unsafe fn copy(from: *const u8) {}"), ["bytes::copy"]);
        let made = "macro_rules! accesses { () => { pub fn peek(&self, into: &mut [u8]) {} } }";
        assert_eq!(found(path, made), ["Coherent::peek", "CoherentBlock::peek"]);
    }

    #[test]
    fn files_are_written_by_the_function_for_it_alone() {
        let text = "fn f() {\n File::create(p);\n std::fs::write(p, b);\n use std::fs::write;\n \
                    File::options().write(true).create(true);\n x.truncate(true);\n \
                    fs::copy(a, b);\n}\n\
                    fn g() { File::create_new(p); bytes.truncate(8); Target::create(p); }\n\
                    #[cfg(test)]\nmod tests { fn f() { fs::write(p, b); } }";
        for path in ["crates/dmaspan-cli/src/a.rs", "examples/nvme/src/b.rs", "xtask/src/report.rs"]
        {
            assert_eq!(found(path, text), [path; 6]);
        }
        assert!(found("crates/dmaspan-cli/tests/it/a.rs", text).is_empty());
        assert!(found("fuzz/src/lib.rs", text).is_empty());
    }
}
