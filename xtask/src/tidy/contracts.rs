//! This rule says that each unsafe trait has a test by an implementer that keeps its promises and
//! is hostile in all else.

use crate::problem::Problem;
use crate::tree::Tree;

/// Where the product declares unsafe traits.
const PRODUCT: [&str; 3] =
    ["crates/dmaspan/src/", "crates/dmaspan-drivers/src/", "crates/dmaspan-linux/src/"];

const CORE: &str = "crates/dmaspan/tests/contracts/";
const DRIVERS: &str = "crates/dmaspan-drivers/tests/arm_smmu_v3/";

/// The test of a contract, or why it has none.
enum Contract {
    /// A function of that name, in a file of this folder.
    Test(&'static str, &'static str, &'static str),
    /// Nobody else can implement the trait, for this reason.
    Closed(#[expect(dead_code, reason = "it is for who reads the list")] &'static str),
}

use Contract::{Closed, Test};

/// By the trait's name, sorted.
const CONTRACTS: [(&str, Contract); 19] = [
    (
        "BouncePool",
        Test(
            CORE,
            "bounce_pool.rs",
            "a_hostile_bounce_pool_shows_devices_nothing_but_slots_that_are_held",
        ),
    ),
    (
        "DmaMemory",
        Test(CORE, "dma_memory.rs", "hostile_dma_memory_is_reached_by_no_device_behind_its_end"),
    ),
    (
        "DriverOps",
        Test(
            CORE,
            "port.rs",
            "hostile_driver_ops_leave_a_stream_at_no_memory_of_a_domain_that_went",
        ),
    ),
    (
        "Format",
        Test(
            CORE,
            "format.rs",
            "a_hostile_format_leaves_no_device_at_memory_that_went_nor_walks_freed_tables",
        ),
    ),
    (
        "FrameAlloc",
        Test(
            CORE,
            "frame_alloc.rs",
            "a_hostile_frame_alloc_gets_no_frame_back_that_a_device_or_a_walk_reaches",
        ),
    ),
    (
        "FromRegistered",
        Test(
            CORE,
            "dma_memory.rs",
            "a_hostile_from_registered_keeps_buffers_from_devices_when_they_went",
        ),
    ),
    (
        "Host",
        Test(DRIVERS, "contracts.rs", "a_hostile_host_gets_no_structure_back_that_hardware_reads"),
    ),
    (
        "HostMemory",
        Test(
            CORE,
            "host_memory.rs",
            "a_hostile_host_memory_stays_while_anything_holds_it_and_no_longer",
        ),
    ),
    (
        "IommuOps",
        Test(CORE, "iommu_ops.rs", "hostile_iommu_ops_leave_no_device_at_memory_that_went"),
    ),
    ("Kernel", Closed("the crate's own files implement it, over system calls")),
    (
        "Pinner",
        Test(
            CORE,
            "pinner.rs",
            "a_hostile_pinner_leaves_no_device_at_what_was_unpinned_or_revoked",
        ),
    ),
    (
        "PoolMemory",
        Test(
            CORE,
            "pool_memory.rs",
            "a_hostile_pool_memory_is_reached_by_no_device_when_it_was_freed",
        ),
    ),
    (
        "Port",
        Test(
            CORE,
            "port.rs",
            "a_hostile_port_leaves_its_stream_at_no_memory_of_a_domain_that_went",
        ),
    ),
    ("PortHooks", Closed("drivers alone make the streams that have them")),
    ("Request", Closed("a macro implements it for structures of the kernel, each with its reason")),
    ("Sealed", Closed("it seals numbers, of which any bytes are one")),
    (
        "Structure",
        Test(DRIVERS, "contracts.rs", "a_hostile_host_gets_no_structure_back_that_hardware_reads"),
    ),
    (
        "TableMemory",
        Test(
            CORE,
            "table_memory.rs",
            "a_hostile_table_memory_leaves_no_device_at_memory_that_went_nor_walks_freed_tables",
        ),
    ),
    (
        "UserTables",
        Test(CORE, "user_tables.rs", "a_hostile_user_tables_gives_no_device_what_is_not_pinned"),
    ),
];

/// Finds unsafe traits that are in no list or whose test is missing, and entries of traits that are
/// no more.
pub fn tested(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut found = Vec::new();
    for (file, rust) in PRODUCT.iter().flat_map(|at| tree.rust(at)) {
        for index in 0..rust.tokens.len() {
            if !rust.says(index, &["unsafe", "trait"]) {
                continue;
            }
            let name = rust.text(index + 2);
            found.push(name);
            let contract = CONTRACTS.iter().find(|(listed, _)| *listed == name);
            let what = match contract.map(|(_, contract)| contract) {
                Some(Closed(_)) => continue,
                Some(Test(folder, path, test)) if has_test(tree, folder, path, test) => continue,
                Some(Test(folder, path, test)) => {
                    format!(
                        "the contract of `{name}` is to be tested by `{test}` in {folder}{path}"
                    )
                }
                None => format!(
                    "no test keeps the promises of `{name}` and is hostile in all else; write one \
                     in {CORE} and list it in xtask/src/tidy/contracts.rs"
                ),
            };
            problems.push(Problem::new(&file.path, rust.tokens[index].line, what));
        }
    }
    for (name, _) in CONTRACTS.iter().filter(|(name, _)| !found.contains(name)) {
        let what = format!("there is no unsafe trait `{name}`");
        problems.push(Problem::new("xtask/src/tidy/contracts.rs", 1, what));
    }
    problems
}

/// Whether that file has the test.
fn has_test(tree: &Tree, folder: &str, path: &str, test: &str) -> bool {
    let path = format!("{folder}{path}");
    let rust = tree.file(&path).and_then(|file| file.rust.as_ref());
    rust.is_some_and(|rust| {
        (0..rust.tokens.len()).any(|at| rust.says(at, &["#", "[", "test", "]", "fn", test]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trait_without_a_test_and_an_entry_without_a_trait_are_found() {
        let test = |name: &str| format!("#[test]\nfn {name}() {{}}");
        let found = |files: &[(&str, &str)]| {
            let problems = tested(&Tree::of(files));
            let of_source = |problem: &&Problem| problem.path.starts_with("crates/");
            let of_list = problems.iter().filter(|problem| !of_source(problem)).count();
            (problems.iter().filter(of_source).count(), of_list)
        };
        let all = CONTRACTS.len();
        let (path, port) = ("crates/dmaspan/src/a.rs", "pub unsafe trait Port {}");
        let kept = test("a_hostile_port_leaves_its_stream_at_no_memory_of_a_domain_that_went");
        let tests = "crates/dmaspan/tests/contracts/port.rs";
        assert_eq!(found(&[(path, "unsafe trait New {}\ntrait Safe {}")]), (1, all));
        assert_eq!(found(&[(path, port)]), (1, all - 1), "the test is not there");
        assert_eq!(found(&[(path, port), (tests, &test("another"))]), (1, all - 1));
        assert_eq!(found(&[(path, port), (tests, &kept)]), (0, all - 1));
        assert_eq!(found(&[(path, "unsafe trait Sealed {}")]), (0, all - 1));
        assert!(CONTRACTS.is_sorted_by_key(|(name, _)| *name));
    }
}
