//! This rule says where the word `unsafe` may stand.
//!
//! That each block has its reason beside it is the compiler's and clippy's to check.

use crate::problem::Problem;
use crate::tree::Tree;

/// A part of the tree, and where unsafe code may stand in it. Places are what the paths of files
/// begin with, from there on.
struct Part {
    at: &'static str,
    /// Where it may declare unsafe traits and functions, by the word behind `unsafe`.
    declares: &'static [(&'static str, &'static str)],
    /// Where it may promise something: by which trait.
    promises: &'static [(&'static str, &'static str)],
    /// Where anything may be unsafe.
    places: &'static [&'static str],
    /// What is to be done with all else.
    otherwise: &'static str,
}

/// Traits and functions, anywhere.
const DECLARATIONS: &[(&str, &str)] = &[("", "trait"), ("", "fn")];

/// A program, which has no unsafe code.
const fn program(at: &'static str) -> Part {
    let otherwise =
        "a program has no unsafe code; move it to a library crate behind a safe function";
    Part { at, declares: &[], promises: &[], places: &[], otherwise }
}

/// In this order: the first part that has a file counts.
const PARTS: [Part; 14] = [
    Part {
        at: "crates/dmaspan/src/",
        declares: DECLARATIONS,
        promises: &[
            ("io_pgtable/formats/", "Format"),
            ("io_pgtable/memory.rs", "TableMemory"),
            ("platform.rs", "RawMutex"),
            ("iommu/soft/mod.rs", "IommuOps"),
            ("iommu/soft/mod.rs", "DriverOps"),
            ("iommu/soft/stream.rs", "Port"),
            ("dma/memory.rs", "DmaMemory"),
            ("dma/memory.rs", "FromRegistered"),
            ("dma/bounce.rs", "BouncePool"),
            ("iommu/observer.rs", "IommuOps"),
            ("dma/coherent.rs", "DmaMemory"),
            ("iommu/observer.rs", "DriverOps"),
            ("follow.rs", "Pinner"),
            ("dma/any.rs", "DmaMemory"),
            ("dma/any.rs", "FromRegistered"),
            ("dma/any.rs", "BouncePool"),
        ],
        // Tables are made out of memory there, and memory that devices write is read and written.
        places: &[
            "bytes.rs",
            "io_pgtable/arena.rs",
            "io_pgtable/arena/",
            "io_pgtable/frames.rs",
            "io_pgtable/frames/",
            "dma/coherent/frames.rs",
            "dma/bounce/frames.rs",
        ],
        otherwise: "the core declares unsafe traits and functions and does nothing unsafe itself, \
                    besides making tables out of memory in `io_pgtable/arena.rs` and \
                    `io_pgtable/frames.rs`, and accesses to memory that devices write in \
                    `bytes.rs`, `dma/coherent/frames.rs` and `dma/bounce/frames.rs`; take what is \
                    needed through such a trait",
    },
    Part {
        at: "crates/dmaspan-linux/src/",
        // What adopts the files of others, and what hands out a device that reaches all memory.
        declares: &[("vfio/type1.rs", "fn"), ("vfio/ioas.rs", "fn"), ("vfio/noiommu.rs", "fn")],
        promises: &[("", "Pinner"), ("", "PoolMemory"), ("physical/", "DmaMemory")],
        places: &["sys/", "sys.rs", "mem/", "mem.rs", "physical/tests.rs"],
        otherwise: "unsafe code of this crate stands in `sys/` and `mem/`; move it there behind a \
                    safe function",
    },
    Part {
        at: "crates/dmaspan-drivers/src/",
        declares: DECLARATIONS,
        promises: &[
            ("", "IommuOps"),
            ("", "DriverOps"),
            ("", "Port"),
            ("", "PortHooks"),
            ("", "Host"),
            ("host.rs", "Structure"),
        ],
        places: &["mmio.rs", "mmio/"],
        otherwise: "unsafe code of the drivers stands in `mmio`, besides the promises of \
                    `IommuOps`, `DriverOps`, `Port`, `PortHooks` and `Host`, and of `Structure` \
                    in `host.rs`",
    },
    Part {
        at: "crates/dmaspan-qemu/src/",
        declares: &[],
        promises: &[
            ("", "Host"),
            ("", "Structure"),
            ("", "DmaMemory"),
            ("", "TableMemory"),
            ("", "PoolMemory"),
        ],
        places: &["ram.rs"],
        otherwise: "unsafe code of the harness stands in `ram.rs`",
    },
    Part {
        // What system calls and applications do.
        at: "crates/dmaspan-guest/src/",
        declares: &[],
        promises: &[],
        places: &["cases/plain.rs", "cases/adopted.rs", "cases/noiommu.rs", "measure/raw.rs"],
        otherwise: "unsafe code of the guests' program stands in `cases/plain.rs`, \
                    `cases/adopted.rs`, `cases/noiommu.rs` and `measure/raw.rs`",
    },
    Part {
        at: "crates/dmaspan-peers/src/",
        declares: &[],
        promises: &[("", "TableMemory")],
        places: &["run.rs"],
        otherwise: "unsafe code of the comparison with Linux stands in `run.rs`, which frees \
                    tables, besides the promise of `TableMemory`",
    },
    program("crates/dmaspan-cli/src/"),
    Part {
        // These stand in for hardware and for a former Linux, without what those promise.
        places: &["models/"],
        ..program("crates/dmaspan-bench/src/")
    },
    Part {
        at: "adapters/vfio-ioctls/src/",
        declares: &[("guest.rs", "fn"), ("space.rs", "fn")],
        promises: &[],
        // What a VMM promises of its guest's memory and of its container goes on to dmaspan-linux.
        places: &["guest.rs", "space.rs"],
        otherwise: "unsafe code of the adapter stands in `guest.rs` and `space.rs`",
    },
    Part {
        at: "adapters/vm-memory/src/",
        declares: &[],
        promises: &[("lib.rs", "IommuOps")],
        places: &["lib.rs"],
        otherwise: "unsafe code of the adapter stands in `lib.rs`",
    },
    Part {
        at: "adapters/dma-api/src/",
        declares: &[("lib.rs", "fn")],
        promises: &[],
        // It promises that buffers are where they are, and that handles lead to them.
        places: &["lib.rs"],
        otherwise: "unsafe code of the adapter stands in `lib.rs`",
    },
    Part {
        at: "adapters/virtio-drivers/src/",
        declares: &[("", "fn")],
        promises: &[("lib.rs", "Hal")],
        places: &["lib.rs", "mapped.rs", "copied.rs"],
        otherwise: "unsafe code of the adapter stands in `lib.rs`, `mapped.rs` and `copied.rs`",
    },
    Part {
        at: "examples/kernel/src/",
        declares: &[],
        promises: &[("memory.rs", "DmaMemory"), ("nvme.rs", "SharedMemory"), ("nvme.rs", "Access")],
        // The machine, its memory, and what a kernel promises dmaspan.
        places: &[
            "cpu/",
            "firmware/",
            "main.rs",
            "glue.rs",
            "guest/mod.rs",
            "iommu.rs",
            "memory.rs",
            "pci.rs",
            "plant.rs",
        ],
        otherwise: "unsafe code of the kernel stands in `cpu/`, where it begins in `main.rs`, in \
                    what it promises dmaspan in `glue.rs`, `iommu.rs`, `memory.rs` and `plant.rs`, \
                    where it runs a guest in `guest/mod.rs`, and where it finds the machine in \
                    `firmware/` and `pci.rs`; its drivers have none",
    },
    Part {
        at: "examples/nvme/src/",
        declares: &[("access.rs", "trait"), ("io.rs", "fn")],
        promises: &[],
        // They promise what VFIO does, that an allocator is one, and that PRPs are right.
        places: &[
            "vfio.rs",
            "bin/dmaspan-nvme/counting.rs",
            "bin/dmaspan-nvme/hand.rs",
            "bin/dmaspan-nvme/space.rs",
        ],
        otherwise: "the NVMe driver has no unsafe code: what it relies on is promised in \
                    `vfio.rs`, by whoever implements the traits of `access.rs`",
    },
];

/// Finds unsafe code where the design has none: in a part of the tree that does not let it stand.
pub fn placement(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, rust) in tree.rust("") {
        let path = file.path.as_str();
        let Some(part) = PARTS.iter().find(|part| path.starts_with(part.at)) else { continue };
        let is_in = |place: &str| path[part.at.len()..].starts_with(place);
        for index in (0..rust.tokens.len()).filter(|&index| rust.text(index) == "unsafe") {
            let is_impl = rust.text(index + 1) == "impl";
            let implemented = if is_impl { rust.implemented(index + 1).0 } else { "" };
            let declares =
                |&(place, what): &(&str, &str)| is_in(place) && rust.text(index + 1) == what;
            let promises = |&(place, name): &(&str, &str)| is_in(place) && implemented == name;
            let may = part.declares.iter().any(declares)
                || part.promises.iter().any(promises)
                || part.places.iter().any(|place| is_in(place));
            if !may {
                let what = part.otherwise.to_owned();
                problems.push(Problem::new(path, rust.tokens[index].line, what));
            }
        }
    }
    problems
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
    fn the_core_makes_tables_out_of_memory_in_two_files() {
        let text = "fn f() { unsafe { g() } }";
        for inner in ["arena.rs", "arena/tests.rs", "frames.rs", "frames/tests.rs"] {
            assert!(lines(&format!("crates/dmaspan/src/io_pgtable/{inner}"), text).is_empty());
        }
        assert_eq!(lines("crates/dmaspan/src/io_pgtable/memory.rs", text), [1]);
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
