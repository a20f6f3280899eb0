//! The table "How fast" of the README has the figures of the rows that the picture is drawn from.

use serde_json::Value;

use super::{README, digits, ratio};

/// A row of the rows: case, operation and peer.
type Measured = (&'static str, &'static str, &'static str);

const ARM: &str = "io-pgtable-arm";
const VTD: &str = "generic_pt vtdss";
const BY_PAGE: &str = "io-pgtable-arm, page by page";
const ONE_SLOT: [&str; 2] = ["swiotlb/pair_4k_threads_1", "swiotlb/pair_4k_threads_2"];

/// The cases of the table whose command is one of `cargo xtask peers`, and their figures.
const HEADLINES: [(&str, &[Measured]); 10] = [
    (
        "512 pages of 4K, one call: map, unmap",
        &[("lpae/4k_512", "map", ARM), ("lpae/4k_512", "unmap", ARM)],
    ),
    ("the same, VT-d", &[("vtd_ss/4k_512", "map", VTD), ("vtd_ss/4k_512", "unmap", VTD)]),
    ("one page of 4K: map, unmap", &[("lpae/4k_1", "map", ARM), ("lpae/4k_1", "unmap", ARM)]),
    (
        "16 GiB as 4K, fresh tables: map, unmap",
        &[("lpae/16g_4k", "map", ARM), ("lpae/16g_4k", "unmap", ARM)],
    ),
    ("512 scattered pages: map", &[("lpae/scattered_4k_512", "map", ARM)]),
    (
        "1 GiB of 2M leaves, unmap with its spans",
        &[("lpae/spans_1g", "unmap", "io-pgtable-arm, by 2M steps")],
    ),
    (
        "a domain, 256 pages: map, unmap and sync",
        &[("lpae/domain_4k_256", "map", BY_PAGE), ("lpae/domain_4k_256", "unmap", BY_PAGE)],
    ),
    ("an IOVA for a page, allocated and freed", &[("iova/pair_1_threads_1", "pair", "iova.c")]),
    (
        "a page through the whole DMA API, lazily",
        &[("lpae/dma_pair_4k_1", "pair", "io-pgtable-arm, tables only")],
    ),
    (
        "a bounce slot for 4K: one, two threads",
        &[(ONE_SLOT[0], "pair", "swiotlb.c"), (ONE_SLOT[1], "pair", "swiotlb.c")],
    ),
];

/// Where the table and the rows differ, a line each: figures, cases of the table that no rows are
/// known of, and cases that it does not have.
pub(super) fn problems(readme: &str, rows: &[Value]) -> Vec<String> {
    let table: Vec<(&str, &str)> = readme.lines().filter_map(headline).collect();
    let mut problems: Vec<String> = HEADLINES
        .iter()
        .filter(|(case, _)| !table.iter().any(|(label, _)| label == case))
        .map(|(case, _)| format!("{README}: the table has no case `{case}`"))
        .collect();
    for (label, figures) in table {
        let Some((_, measured)) = HEADLINES.iter().find(|(case, _)| *case == label) else {
            let what = "xtask/src/picture/headlines.rs does not say which rows it is of";
            problems.push(format!("{README}: of `{label}` {what}"));
            continue;
        };
        let ratios = measured
            .iter()
            .map(|(case, operation, peer)| ratio(rows, case, operation, peer).map(digits));
        match ratios.collect::<Result<Vec<_>, _>>() {
            Ok(ratios) if ratios.join(", ") == figures => {}
            Ok(ratios) => problems.push(format!(
                "{README}: `{label}` has {figures}, and the rows have {}",
                ratios.join(", ")
            )),
            Err(why) => problems.push(format!("{README}: `{label}`: {why}")),
        }
    }
    problems
}

/// The case and the figures of a line of the table whose command compares with Linux's own code.
fn headline(line: &str) -> Option<(&str, &str)> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let ["", case, _, figures, command, ""] = cells[..] else { return None };
    command.starts_with("`cargo xtask peers").then_some((case, figures))
}

#[cfg(test)]
mod tests {
    use super::super::{ROWS, parsed, tests::read};
    use super::*;

    fn found(readme: &str) -> Vec<String> {
        problems(readme, &parsed(&read(ROWS)).unwrap())
    }

    #[test]
    fn the_table_of_the_readme_has_the_figures_of_the_rows_in_the_tree() {
        assert_eq!(found(&read(README)), Vec::<String>::new());
    }

    #[test]
    fn a_figure_that_is_not_the_rows_is_found() {
        let readme = read(README).replace("| 5.7, 12 |", "| 5.7, 13 |");
        let expected = "README.md: `512 pages of 4K, one call: map, unmap` has 5.7, 13, and the \
                        rows have 5.7, 12";
        assert_eq!(found(&readme), [expected]);
    }

    #[test]
    fn a_case_that_only_one_side_has_is_found() {
        let missing = found(&read(README).replace("| the same, VT-d |", "| the same, AMD |"));
        assert_eq!(missing.len(), 2, "{missing:?}");
        assert!(missing[0].contains("no case `the same, VT-d`"), "{missing:?}");
        assert!(missing[1].contains("`the same, AMD`"), "{missing:?}");
        let rows = parsed(&read(ROWS).replace("iova.c", "x")).unwrap();
        let missing = problems(&read(README), &rows);
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert!(missing[0].ends_with("no ratio of iova/pair_1_threads_1, pair, beside iova.c"));
    }
}
