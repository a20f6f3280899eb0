//! This rule says which methods have a test that runs them on two threads at once: all public ones
//! that move bytes which a device or another thread may be moving, too.
//!
//! A method is found by what it takes (bytes, or what a pool is told to copy) or by what it is
//! called. Its test names it, and calls it.

use crate::lexer::Lexed;
use crate::lines::TestCode;
use crate::problem::Problem;
use crate::tree::Tree;

/// Where the tests are, in each of which `"Type::method", |at, len| …` says what runs.
const TESTS: [&str; 2] =
    ["crates/dmaspan/tests/at_once/main.rs", "crates/dmaspan-linux/src/mem/at_once.rs"];

/// Where methods move such bytes.
const PLACES: [&str; 9] = [
    "crates/dmaspan/src/bytes.rs",
    "crates/dmaspan/src/container/access.rs",
    "crates/dmaspan/src/dma/",
    "crates/dmaspan/src/follow.rs",
    "crates/dmaspan/src/iommu/soft/",
    "crates/dmaspan/src/regbuf/",
    "crates/dmaspan/src/swiotlb/",
    "crates/dmaspan-linux/src/",
    "adapters/",
];

/// What a method takes that moves bytes.
const TAKEN: [&[&str]; 5] = [&["[", "u8", "]"], &["Transfer"], &["InSlot"], &["To"], &["Scalar"]];

/// Types whose methods move bytes without taking any, and what the names of those begin with.
const OWNERS: [&str; 5] = ["Device", "Memory", "Pool", "SharedWord", "bytes"];
const VERBS: [&str; 13] = [
    "check", "clear", "copy", "fill", "link", "load", "map", "read", "store", "sync", "unmap",
    "write", "zero",
];

/// Macros that make methods, and the types that have them.
const MADE: [(&str, &[&str]); 1] = [("accesses", &["Coherent", "CoherentBlock"])];

/// Methods that need no such test, by what their names begin with, and why.
const OTHERWISE: [(&str, &str); 22] = [
    ("AnyPool::", "the pool inside copies"),
    ("Arc::", "what it points to copies"),
    ("Container::", "its pinner reads and writes"),
    ("ContiguousMemory::", "its `Memory` reads and writes"),
    ("Copied::", "leases read and write, under a lock"),
    ("Device::map_buffer", "a registered buffer is never bounced"),
    ("FrameBounce::pointer", "it moves nothing"),
    ("Held::", "the memory of its region reads and writes"),
    ("LeafPinner::", "whoever has the tables reads and writes"),
    ("LinuxPinner::", "a `Memory` reads and writes"),
    ("MappedBounce::", "its `Memory` reads and writes"),
    ("Mapped::", "the device maps, under a lock"),
    ("ModelBackend::", "it moves registers"),
    ("NoIommuPinner::", "a `Memory` reads and writes"),
    ("NoPool::", "it has no slots"),
    ("P::", "what it points to reads and writes"),
    ("PhysicalMemory::", "a `Memory` reads and writes"),
    ("PinnedBounce::", "it copies as `DirectMap`"),
    ("PoolMemory::pointer", "it moves nothing"),
    ("SoftDevice::", "its bus reads and writes"),
    ("Unreachable::", "there is nothing"),
    ("VirtioSlot::", "it shares under a lock"),
];

/// Finds public methods that move bytes and are in no test on two threads, and reasons that are
/// nobody's any more.
pub fn on_two_threads(tree: &Tree) -> Vec<Problem> {
    let tests: Vec<&str> =
        TESTS.iter().filter_map(|path| Some(tree.file(path)?.text.as_str())).collect();
    let mut problems = Vec::new();
    let mut excused = [false; OTHERWISE.len()];
    for (path, line, name) in movers(tree) {
        let reason = OTHERWISE.iter().position(|(start, _)| name.starts_with(start));
        if let Some(at) = reason {
            excused[at] = true;
        } else if !tests.iter().any(|test| runs(test, &name)) {
            let what = format!(
                "`{name}` moves bytes and runs beside nothing; name it and call it in {}",
                TESTS.join(" or ")
            );
            problems.push(Problem::new(&path, line, what));
        }
    }
    for ((name, _), _) in OTHERWISE.iter().zip(excused).filter(|(_, excused)| !excused) {
        let what =
            format!("`{name}` has a reason to run in no test on two threads, and is nowhere");
        problems.push(Problem::of_file("xtask/src/tidy/movers.rs", what));
    }
    problems
}

/// Whether a test names a method, alone or among others, and calls it before it names the next one.
fn runs(test: &str, name: &str) -> bool {
    let method = name.rsplit("::").next().unwrap_or(name);
    test.match_indices(name).any(|(at, _)| {
        let rest = &test[at + name.len()..];
        let is_named = test[..at].ends_with(['"', ' ']) && rest.starts_with(['"', ' ']);
        let next = ["mover(\"", "beside_a_device(\""].map(|next| rest.find(next));
        let own = next.into_iter().flatten().min().unwrap_or(rest.len());
        is_named
            && [format!("{method}("), format!("{method}::<")].iter().any(|call| {
                rest[..own].match_indices(call.as_str()).any(|(at, _)| {
                    let before = rest[..at].chars().next_back();
                    matches!(before, Some('.' | ':'))
                })
            })
    })
}

/// Public methods that move bytes: file, line, and `Type::method`.
fn movers(tree: &Tree) -> Vec<(String, usize, String)> {
    let test_code = TestCode::of(tree);
    let mut movers = Vec::new();
    for (file, rust) in tree.rust("") {
        let path = file.path.as_str();
        let is_there = |place: &&str| path.starts_with(*place);
        if !PLACES.iter().any(|place| is_there(&place)) || path.contains("/tests/") {
            continue;
        }
        let is_test = test_code.of_file(path, rust);
        for method in (0..rust.tokens.len()).filter(|&at| rust.text(at) == "fn") {
            let line = rust.tokens[method].line;
            let (owner, of_trait) = owner(rust, method);
            let owner = if owner.is_empty() { "bytes" } else { owner };
            let is_public = of_trait || is_public(rust, method);
            if is_test(line) || !is_public || !moves(rust, method, owner) {
                continue;
            }
            let made = MADE.iter().find(|(name, _)| *name == owner);
            for owner in made.map_or(&[owner][..], |(_, types)| types) {
                let name = format!("{owner}::{}", rust.text(method + 1));
                movers.push((path.to_owned(), line, name));
            }
        }
    }
    movers
}

/// Whether the function at `fn` has a body, and by what it takes or is called moves bytes.
fn moves(rust: &Lexed, method: usize, owner: &str) -> bool {
    let len = rust.tokens.len();
    let Some(open) = (method..len).find(|&at| rust.text(at) == "(") else { return false };
    let end = rust.behind(open);
    let body = (end..len).find(|&at| matches!(rust.text(at), "{" | ";"));
    if body.is_none_or(|at| rust.text(at) == ";") {
        return false;
    }
    let takes = |what: &&[&str]| (method..end).any(|at| rust.says(at, what));
    let verb = rust.text(method + 1).split('_').next().unwrap_or_default();
    // Of a value, or by an address.
    let reaches = (open..end).any(|at| matches!(rust.text(at), "self" | "*"));
    reaches && (TAKEN.iter().any(takes) || OWNERS.contains(&owner) && VERBS.contains(&verb))
}

/// Whether `pub` stands before the function at `fn`, for everybody.
fn is_public(rust: &Lexed, method: usize) -> bool {
    let before = (0..method).rev().find(|&at| !matches!(rust.text(at), "unsafe" | "const"));
    before.is_some_and(|at| rust.text(at) == "pub")
}

/// The type, trait or macro around the function at `fn`, and whether that is as public as a trait.
fn owner(rust: &Lexed, method: usize) -> (&str, bool) {
    let mut found = ("", false);
    let mut at = 0;
    while at < method {
        let (what, next) = (rust.text(at), rust.text(at + 1));
        let is_macro = what == "macro_rules" && next == "!";
        if !is_macro && !matches!(what, "impl" | "trait") {
            at += 1;
            continue;
        }
        let Some(open) = (at..method).find(|&at| rust.text(at) == "{") else { break };
        if rust.behind(open) <= method {
            at = rust.behind(open);
            continue;
        }
        found = match what {
            "impl" => implemented(rust, at, open),
            "trait" => (next, at > 0 && is_public(rust, at)),
            _ => (rust.text(at + 2), false),
        };
        at = open + 1;
    }
    found
}

/// The type that is implemented at `impl`, whose body opens at `open`; whether it is by a trait.
fn implemented(rust: &Lexed, at: usize, open: usize) -> (&str, bool) {
    let (mut depth, mut name, mut of_trait) = (0usize, "", false);
    for at in at + 1..open {
        match rust.text(at) {
            "<" => depth += 1,
            ">" if rust.text(at - 1) != "-" => depth = depth.saturating_sub(1),
            "where" if depth == 0 => break,
            "for" if depth == 0 => (name, of_trait) = ("", true),
            word if depth == 0 && word.chars().all(|each| each.is_alphanumeric()) => name = word,
            _ => {}
        }
    }
    (name, of_trait)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TESTED: &str = "mover(\"Pool::sync_for_cpu\", |at, len| pool.sync_for_cpu(&b, at)),\n\
        mover(\"Lease::read Lease::write\", |at, len| lease.read(at, len)),";

    /// The names of what is found in one file of the core.
    fn found(path: &str, text: &str) -> Vec<String> {
        let tree = Tree::of(&[(path, text), (TESTS[0], TESTED)]);
        let problems = on_two_threads(&tree).into_iter().filter(|problem| problem.path == path);
        problems.map(|problem| problem.what.split('`').nth(1).unwrap().to_owned()).collect()
    }

    #[test]
    fn a_public_method_that_moves_bytes_is_named_and_called_by_a_test() {
        let path = "crates/dmaspan/src/swiotlb/a.rs";
        let lease = "impl<M> Lease<M> { pub fn NAME(&self, at: u64, into: &mut [u8]) {} }";
        assert!(found(path, &lease.replace("NAME", "read")).is_empty());
        assert_eq!(found(path, &lease.replace("NAME", "write")), ["Lease::write"], "not called");
        assert_eq!(found(path, &lease.replace("NAME", "peek")), ["Lease::peek"]);
        assert!(found(path, &lease.replace("pub fn NAME", "fn read")).is_empty());
        assert!(found(path, &lease.replace("pub fn NAME", "pub(super) fn peek")).is_empty());
        let pool = "impl<M: A<B>> Pool<M> { pub fn NAME(&self, at: u64) {} }";
        assert!(found(path, &pool.replace("NAME", "sync_for_cpu")).is_empty());
        assert_eq!(found(path, &pool.replace("NAME", "sync_for_bus")), ["Pool::sync_for_bus"]);
        assert!(found(path, &pool.replace("NAME", "stats")).is_empty());
        assert!(found("crates/dmaspan-cli/src/a.rs", &pool.replace("NAME", "sync_x")).is_empty());
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
    fn a_reason_for_nobody_is_found() {
        let problems = on_two_threads(&Tree::of(&[("crates/dmaspan/src/a.rs", "")]));
        assert_eq!(problems.len(), OTHERWISE.len());
    }
}
