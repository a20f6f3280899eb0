//! The table "How fast" of the README has the figures of the runs that stand in the book's folder
//! of benchmarks, each as its command printed it with `--format json`.

use serde_json::Value;

use super::{README, Runs, digits, row};

/// A file of the book's folder of benchmarks, the keys that choose one of its rows, and the place
/// of the ratio in the row.
struct Figure {
    file: &'static str,
    row: &'static [(&'static str, &'static str)],
    ratio: &'static str,
}

/// A figure of `cargo xtask peers`.
const fn peers(row: &'static [(&'static str, &'static str)]) -> Figure {
    Figure { file: "ratios.json", row, ratio: "/ratio" }
}

/// A figure of `dmaspan map`.
const fn map(row: &'static [(&'static str, &'static str)], ratio: &'static str) -> Figure {
    Figure { file: "map.json", row, ratio }
}

/// A figure of `cargo xtask peers --series`: the instructions of Linux with the series, by ours.
const fn series(row: &'static [(&'static str, &'static str)]) -> Figure {
    Figure { file: "series.json", row, ratio: "/ratio" }
}

/// Gives the figure of a case, an operation and a peer.
macro_rules! beside {
    ($case:literal, $operation:literal, $peer:literal) => {
        peers(&[("case", $case), ("op", $operation), ("peer", $peer)])
    };
}

/// Gives the figures of a map and of an unmap.
macro_rules! both {
    ($case:literal, $peer:literal) => {
        &[beside!($case, "map", $peer), beside!($case, "unmap", $peer)]
    };
}

/// The cases of the table, and their figures.
const HEADLINES: [(&str, &[Figure]); 14] = [
    ("512 pages of 4K, one call: map, unmap", both!("lpae/4k_512", "io-pgtable-arm")),
    ("the same, VT-d", both!("vtd_ss/4k_512", "generic_pt vtdss")),
    ("one page of 4K: map, unmap", both!("lpae/4k_1", "io-pgtable-arm")),
    ("16 GiB as 4K, fresh tables: map, unmap", both!("lpae/16g_4k", "io-pgtable-arm")),
    ("512 scattered pages: map", &[beside!("lpae/scattered_4k_512", "map", "io-pgtable-arm")]),
    (
        "1 GiB of 2M leaves, unmap with its spans",
        &[beside!("lpae/spans_1g", "unmap", "io-pgtable-arm, by 2M steps")],
    ),
    (
        "a domain, 256 pages: map, unmap and sync",
        both!("lpae/domain_4k_256", "io-pgtable-arm, page by page"),
    ),
    (
        "an IOVA for a page, allocated and freed",
        &[beside!("iova/pair_1_threads_1", "pair", "iova.c")],
    ),
    (
        "a page through the whole DMA API, lazily",
        &[beside!("lpae/dma_pair_4k_1", "pair", "io-pgtable-arm, tables only")],
    ),
    (
        "a bounce slot for 4K: one, two threads",
        &[
            beside!("swiotlb/pair_4k_threads_1", "pair", "swiotlb.c"),
            beside!("swiotlb/pair_4k_threads_2", "pair", "swiotlb.c"),
        ],
    ),
    (
        "1 GiB of THP: table work of map, unmap",
        &[
            map(&[("memory", "thp")], "/table_speedup/map"),
            map(&[("memory", "thp")], "/table_speedup/unmap"),
        ],
    ),
    (
        "1 GiB of base pages: the same",
        &[
            map(&[("memory", "base")], "/table_speedup/map"),
            map(&[("memory", "base")], "/table_speedup/unmap"),
        ],
    ),
    (
        "256 MiB of THP in a container, instructions: map, unmap",
        &[
            series(&[("case", "container_lpae/256m_thp_cheap"), ("op", "map")]),
            series(&[("case", "container_lpae/256m_thp_cheap"), ("op", "unmap")]),
        ],
    ),
    (
        "8 MiB of a registered buffer, all pieces, instructions",
        &[series(&[("case", "registered/walk_8m_256m_thp"), ("op", "pair")])],
    ),
];

/// Where the table and the runs differ, a line each: figures, cases of the table that no run is
/// known of, and cases that it does not have.
pub(super) fn problems(readme: &str, runs: &Runs) -> Vec<String> {
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
        let ratios = measured.iter().map(|figure| {
            let row = row(runs.rows(figure.file), figure.row)?;
            let ratio = row.pointer(figure.ratio).and_then(Value::as_f64);
            ratio.map(digits).ok_or_else(|| format!("{} has no {}", figure.file, figure.ratio))
        });
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

/// The case and the figures of a line of the table, which has a command in its last column.
fn headline(line: &str) -> Option<(&str, &str)> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let ["", case, _, figures, command, ""] = cells[..] else { return None };
    command.starts_with("`cargo ").then_some((case, figures))
}

#[cfg(test)]
mod tests {
    use super::super::{Runs, tests::read};
    use super::*;

    fn runs() -> Runs {
        Runs::of_the_tree(None).unwrap()
    }

    fn found(readme: &str) -> Vec<String> {
        problems(readme, &runs())
    }

    #[test]
    fn the_table_of_the_readme_has_the_figures_of_the_runs_in_the_tree() {
        assert_eq!(found(&read(README)), Vec::<String>::new());
    }

    #[test]
    fn a_figure_that_is_not_the_runs_is_found_whatever_its_command() {
        for (label, _) in HEADLINES {
            let wrong = |line: &str| match headline(line) {
                Some((case, figures)) if case == label => {
                    line.replace(&format!("| {figures} |"), "| 7777 |")
                }
                _ => line.to_owned(),
            };
            let readme: Vec<String> = read(README).lines().map(wrong).collect();
            let problems = found(&readme.join("\n"));
            assert_eq!(problems.len(), 1, "{problems:?}");
            let expected = format!("README.md: `{label}` has 7777, and the rows have ");
            assert!(problems[0].starts_with(&expected), "{problems:?}");
        }
    }

    #[test]
    fn a_case_that_only_one_side_has_is_found() {
        let missing = found(&read(README).replace("| the same, VT-d |", "| the same, AMD |"));
        assert_eq!(missing.len(), 2, "{missing:?}");
        assert!(missing[0].contains("no case `the same, VT-d`"), "{missing:?}");
        assert!(missing[1].contains("`the same, AMD`"), "{missing:?}");
        let mut runs = runs();
        runs.files.get_mut("ratios.json").unwrap().retain(|row| row["peer"] != "iova.c");
        let missing = problems(&read(README), &runs);
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert!(
            missing[0].ends_with("no row of iova/pair_1_threads_1, pair, iova.c"),
            "{missing:?}"
        );
    }
}
