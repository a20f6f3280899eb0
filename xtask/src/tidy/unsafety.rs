//! This rule says where the word `unsafe` may stand.
//!
//! That each block has its reason beside it is the compiler's and clippy's to check.

use crate::lexer::Lexed;
use crate::problem::Problem;
use crate::tree::Tree;

const CORE: &str = "crates/dmaspan/src/";
/// Where the core promises something itself: in which files, and by which trait.
const PROMISES: [(&str, &str); 5] = [
    ("io_pgtable/formats/", "Format"),
    ("platform.rs", "RawMutex"),
    ("dma/memory.rs", "DmaMemory"),
    ("dma/memory.rs", "FromRegistered"),
    ("dma/bounce.rs", "BouncePool"),
];
const LINUX: &str = "crates/dmaspan-linux/src/";
/// What the Linux crate promises anywhere.
const LINUX_PROMISES: [&str; 2] = ["Pinner", "PoolMemory"];
const DRIVERS: &str = "crates/dmaspan-drivers/src/";
/// What the drivers promise anywhere.
const DRIVERS_PROMISES: [&str; 4] = ["IommuOps", "Port", "PortHooks", "Host"];
const QEMU: &str = "crates/dmaspan-qemu/src/";
/// What the test harness promises anywhere.
const QEMU_PROMISES: [&str; 5] = ["Host", "Structure", "DmaMemory", "TableMemory", "PoolMemory"];
/// Where benchmarks stand in for hardware and for a former Linux, without what those promise.
const MODELS: &str = "crates/dmaspan-bench/src/models/";
const PROGRAMS: [&str; 2] = ["crates/dmaspan-cli/src/", "crates/dmaspan-bench/src/"];
const NVME: &str = "examples/nvme/src/";
/// What the example declares where, and where it is more than that: the files that promise what
/// VFIO does, that PRPs are right and that an allocator is one.
const NVME_DECLARES: [(&str, &str); 2] = [("access.rs", "trait"), ("io.rs", "fn")];
const NVME_PROMISES: [&str; 3] =
    ["vfio.rs", "bin/dmaspan-nvme/counting.rs", "bin/dmaspan-nvme/hand.rs"];
const PEERS: &str = "crates/dmaspan-peers/src/";
/// Where the comparison with Linux frees tables that no hardware walks, and what it promises.
const PEERS_PLACE: &str = "run.rs";
const PEERS_PROMISE: &str = "TableMemory";
const GUEST: &str = "crates/dmaspan-guest/src/";
/// Where the guests' program does what its system calls and applications do.
const GUEST_PLACES: [&str; 2] = ["cases/plain.rs", "cases/adopted.rs"];

/// Finds unsafe code where the design has none: in the core only declarations of unsafe traits and
/// functions and a few promises, in the Linux crate only `sys/` and `mem/` and
/// implementations of `Pinner` and `PoolMemory`, in the drivers `mmio.rs` and what they promise as
/// drivers, in the harness for QEMU `ram.rs` and promises, in the guests' program
/// `cases/plain.rs` and `cases/adopted.rs`, in the comparison with Linux `run.rs` and a promise, in
/// the programs nothing but in the benchmarks' `models/`, and in the NVMe driver declarations, what
/// VFIO promises, PRPs for comparison, and a counting allocator.
pub fn placement(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, rust) in tree.rust("crates/").chain(tree.rust(NVME)) {
        let path = file.path.as_str();
        for index in (0..rust.tokens.len()).filter(|&index| rust.text(index) == "unsafe") {
            let what = if path.starts_with(CORE) {
                let declares = matches!(rust.text(index + 1), "trait" | "fn");
                let promises = PROMISES.iter().any(|(place, name)| {
                    path[CORE.len()..].starts_with(place) && implements(rust, index, name)
                });
                if declares || promises {
                    continue;
                }
                "the core declares unsafe traits and functions and does nothing unsafe itself; \
                 take what is needed through such a trait"
            } else if let Some(inner) = path.strip_prefix(LINUX) {
                let folder = inner.split('/').next().unwrap_or(inner).trim_end_matches(".rs");
                let promises = LINUX_PROMISES.iter().any(|name| implements(rust, index, name));
                if matches!(folder, "sys" | "mem") || promises {
                    continue;
                }
                "unsafe code of this crate stands in `sys/` and `mem/`; move it there behind a \
                 safe function"
            } else if let Some(inner) = path.strip_prefix(DRIVERS) {
                let declares = matches!(rust.text(index + 1), "trait" | "fn");
                let promises = DRIVERS_PROMISES.iter().any(|name| implements(rust, index, name));
                if inner == "mmio.rs" || declares || promises {
                    continue;
                }
                "unsafe code of the drivers stands in `mmio.rs`, besides the promises of \
                 `IommuOps`, `Port`, `PortHooks` and `Host`"
            } else if let Some(inner) = path.strip_prefix(QEMU) {
                let promises = QEMU_PROMISES.iter().any(|name| implements(rust, index, name));
                if inner == "ram.rs" || promises {
                    continue;
                }
                "unsafe code of the harness stands in `ram.rs`"
            } else if let Some(inner) = path.strip_prefix(GUEST) {
                if GUEST_PLACES.contains(&inner) {
                    continue;
                }
                "unsafe code of the guests' program stands in `cases/plain.rs` and \
                 `cases/adopted.rs`"
            } else if let Some(inner) = path.strip_prefix(PEERS) {
                if inner == PEERS_PLACE || implements(rust, index, PEERS_PROMISE) {
                    continue;
                }
                "unsafe code of the comparison with Linux stands in `run.rs`, which frees tables, \
                 besides the promise of `TableMemory`"
            } else if path.starts_with(MODELS) {
                continue;
            } else if PROGRAMS.iter().any(|program| path.starts_with(program)) {
                "a program has no unsafe code; move it to a library crate behind a safe function"
            } else if let Some(inner) = path.strip_prefix(NVME) {
                let declares = NVME_DECLARES.contains(&(inner, rust.text(index + 1)));
                if declares || NVME_PROMISES.contains(&inner) {
                    continue;
                }
                "the NVMe driver has no unsafe code: what it relies on is promised in `vfio.rs`, \
                 by whoever implements the traits of `access.rs`"
            } else {
                continue;
            };
            problems.push(Problem::new(path, rust.tokens[index].line, what.to_owned()));
        }
    }
    problems
}

/// Whether `unsafe` at `index` begins an implementation of the trait with that name.
fn implements(rust: &Lexed, index: usize, name: &str) -> bool {
    if rust.text(index + 1) != "impl" {
        return false;
    }
    // The trait's own name is the last word outside of angle brackets before `for`.
    let mut depth = 0usize;
    let mut last = "";
    for token in &rust.tokens[index + 2..] {
        match token.text.as_str() {
            "<" => depth += 1,
            ">" => depth = depth.saturating_sub(1),
            "for" if depth == 0 => return last == name,
            "{" | ";" => return false,
            word if depth == 0 => last = word,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        placement(&Tree::of(&[(path, text)])).iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn the_core_only_declares() {
        let path = "crates/dmaspan/src/iommu/ops.rs";
        assert!(lines(path, "pub unsafe trait T {}\nunsafe fn f() {}\n// unsafe {}").is_empty());
        assert_eq!(lines(path, "fn f() {\n unsafe { g() }\n}\nunsafe impl Send for X {}"), [2, 4]);
        assert_eq!(lines(path, "unsafe extern \"C\" { fn f(); }\n#[unsafe(no_mangle)]"), [1, 2]);
        assert!(lines(path, "#![expect(unsafe_code, reason = \"unsafe {\")]").is_empty());
    }

    #[test]
    fn the_program_has_none() {
        assert_eq!(lines("crates/dmaspan-cli/src/main.rs", "unsafe fn f() {}"), [1]);
        assert_eq!(lines("crates/dmaspan-guest/src/main.rs", "unsafe fn f() {}"), [1]);
        assert!(lines("crates/dmaspan-guest/src/cases/plain.rs", "unsafe fn f() {}").is_empty());
    }

    #[test]
    fn the_comparison_with_linux_frees_tables_and_promises_memory() {
        let text = "fn f() { unsafe { g() } }";
        assert!(lines("crates/dmaspan-peers/src/run.rs", text).is_empty());
        assert_eq!(lines("crates/dmaspan-peers/src/compare.rs", text), [1]);
        let promise = "unsafe impl<W: Word> TableMemory<W> for Memory {}";
        assert!(lines("crates/dmaspan-peers/src/memory.rs", promise).is_empty());
    }

    #[test]
    fn the_linux_crate_has_its_two_places() {
        let text = "fn f() { unsafe { g() } }";
        assert_eq!(lines("crates/dmaspan-linux/src/pinner.rs", text), [1]);
        assert_eq!(lines("crates/dmaspan-linux/src/memory/a.rs", text), [1]);
        for inner in ["sys/mod.rs", "mem/access.rs", "sys.rs", "sys/deep/a.rs"] {
            assert!(
                lines(&format!("crates/dmaspan-linux/src/{inner}"), text).is_empty(),
                "{inner}"
            );
        }
    }

    #[test]
    fn the_drivers_have_registers_and_promises() {
        let text = "fn f() { unsafe { g() } }";
        assert!(lines("crates/dmaspan-drivers/src/mmio.rs", text).is_empty());
        assert_eq!(lines("crates/dmaspan-drivers/src/vtd/mmio.rs", text), [1]);
        assert_eq!(lines("crates/dmaspan-qemu/src/machine.rs", text), [1]);
        assert!(lines("crates/dmaspan-qemu/src/ram.rs", text).is_empty());
        let path = "crates/dmaspan-drivers/src/vtd/a.rs";
        let promises = "unsafe impl<R> Port for X<R> {}\npub unsafe fn new() {}";
        assert!(lines(path, promises).is_empty());
        assert_eq!(lines(path, "unsafe impl Send for X {}"), [1]);
    }

    #[test]
    fn the_nvme_driver_declares_and_vfio_promises() {
        let text = "fn f() { unsafe { g() } }";
        assert!(lines("examples/nvme/src/vfio.rs", text).is_empty());
        assert!(lines("examples/nvme/src/bin/dmaspan-nvme/counting.rs", text).is_empty());
        assert_eq!(lines("examples/nvme/src/queue.rs", text), [1]);
        assert_eq!(lines("examples/nvme/src/bin/dmaspan-nvme/vfio.rs", text), [1]);
        assert_eq!(lines("examples/nvme/src/access.rs", text), [1]);
        assert!(lines("examples/nvme/src/access.rs", "unsafe trait T {}").is_empty());
        assert!(lines("examples/nvme/src/io.rs", "unsafe fn f() {}").is_empty());
        assert_eq!(lines("examples/nvme/src/io.rs", text), [1]);
        assert_eq!(lines("examples/nvme/src/queue.rs", "unsafe fn f() {}"), [1]);
    }

    #[test]
    fn a_format_is_implemented_among_the_formats_alone() {
        let text = "unsafe impl<const G: u32> Format for X<G> {}";
        assert!(lines("crates/dmaspan/src/io_pgtable/formats/x.rs", text).is_empty());
        assert_eq!(lines("crates/dmaspan/src/io_pgtable/x.rs", text), [1]);
        let other = "unsafe impl Send for X {}";
        assert_eq!(lines("crates/dmaspan/src/io_pgtable/formats/x.rs", other), [1]);
    }

    #[test]
    fn memory_of_pools_is_implemented_anywhere_in_the_linux_crate() {
        let text = "unsafe impl PoolMemory for X {}";
        assert!(lines("crates/dmaspan-linux/src/bounce.rs", text).is_empty());
        assert_eq!(lines("crates/dmaspan/src/swiotlb/x.rs", text), [1]);
        assert_eq!(lines("crates/dmaspan-cli/src/a.rs", text), [1]);
        let other = "unsafe impl<M: PoolMemory> Sync for X<M> {}";
        assert_eq!(lines("crates/dmaspan-linux/src/bounce.rs", other), [1]);
    }

    #[test]
    fn a_pinner_is_implemented_anywhere_in_the_linux_crate() {
        let path = "crates/dmaspan-linux/src/pinner.rs";
        assert!(lines(path, "unsafe impl Pinner for X {}").is_empty());
        assert!(lines(path, "unsafe impl<T: A<B>> dmaspan::pin::Pinner for X<T> {}").is_empty());
        assert_eq!(lines(path, "unsafe impl Send for Pinner {}"), [1]);
        assert_eq!(lines(path, "unsafe impl<T: Pinner> Sync for X<T> {}"), [1]);
        assert_eq!(lines("crates/dmaspan-cli/src/a.rs", "unsafe impl Pinner for X {}"), [1]);
    }
}
