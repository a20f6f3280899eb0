//! The output of `dmaspan plan` for people.

use comfy_table::Table;
use dmaspan_linux::plan::forecast::{
    Forecast, ForecastMap, LeafCount, PaperLayout, PlanFinding, PlanSeverity, RegionPages,
};

use super::report::{interface, names, whose};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::text::{
    LOOK, RIGHT, WIDTH, WRONG, align_right, new_table, push_hanging, push_table, push_wrapped,
    ratio,
};
use dmaspan_cli::units;

/// More maps are only counted.
const MAPS_MOST: usize = 32;

/// The report, in lines of 80 columns.
pub(super) fn render(
    title: &str,
    layout: &PaperLayout,
    forecast: &Forecast,
    notes: &[String],
) -> String {
    let mut text = String::new();
    push_wrapped(&mut text, "", &heading(title, layout));
    if !forecast.maps.is_empty() {
        push_table(&mut text, &maps(layout, forecast));
        if let Some(more) = forecast.maps.len().checked_sub(MAPS_MOST).filter(|more| *more > 0) {
            push_wrapped(&mut text, "", &format!("and {more} maps more, which JSON lists"));
        }
        text.push('\n');
        push_sums(&mut text, layout, forecast);
    }
    for finding in &forecast.findings {
        text.push('\n');
        push_finding(&mut text, finding);
    }
    if !notes.is_empty() {
        text.push('\n');
    }
    for note in notes {
        push_wrapped(&mut text, "note: ", note);
    }
    text.push('\n');
    push_marked(&mut text, forecast.verdict(), &verdict(layout, forecast));
    text
}

/// What is planned, for which IOMMU.
pub(super) fn heading(title: &str, layout: &PaperLayout) -> String {
    let iommu = &layout.iommu;
    let sizes: Vec<u64> =
        (0..u64::BITS).map(|lg2| 1 << lg2).filter(|size| iommu.page_sizes & size != 0).collect();
    let kind = iommu.kind.map_or("its IOMMU".to_owned(), |kind| kind.to_string());
    let by = match interface(layout.limits.locked_by) {
        "type1" => "VFIO type1",
        other => other,
    };
    let kernel = layout.kernel.map_or(String::new(), |kernel| format!(" of Linux {kernel}"));
    format!(
        "{title}, mapped by {by}{kernel} for {kind} with {} address bits and pages of {}",
        iommu.address_bits,
        units::page_sizes(&sizes)
    )
}

/// Columns, the first of which is left out where lines would be too wide.
const SPARE: [&str; 3] = ["backing", "spans", "best"];

fn maps(layout: &PaperLayout, forecast: &Forecast) -> Table {
    let table = |left_out: &[&str]| {
        let keep = |column: &str| !left_out.contains(&column);
        let header = ["map", "at", "size", "backing", "spans", "leaves", "best"];
        let columns: Vec<usize> =
            (0..).zip(header).filter(|(_, name)| keep(name)).map(|(column, _)| column).collect();
        let mut table = new_table(columns.iter().filter_map(|&column| header.get(column)));
        align_right(&mut table, 1);
        for map in forecast.maps.iter().take(MAPS_MOST) {
            let cells = [
                name(&names(map, layout)),
                address(map.iova.start().get()),
                units::page_size(map.len()),
                backing(map, layout),
                spans(map),
                leaves(&map.leaves),
                leaves(&map.best),
            ];
            table.add_row(columns.iter().filter_map(|&column| cells.get(column)));
        }
        table
    };
    let fits = |table: &Table| table.lines().all(|line| line.trim_end().chars().count() <= WIDTH);
    let tables = (0..=SPARE.len()).map(|count| table(SPARE.get(..count).unwrap_or_default()));
    let mut narrower = tables.skip_while(|table| !fits(table));
    narrower.next().unwrap_or_else(|| table(&SPARE))
}

/// An address as people write it where it is a multiple of 1 GiB.
fn address(at: u64) -> String {
    if at != 0 && at.is_multiple_of(1 << 30) { units::page_size(at) } else { format!("{at:#x}") }
}

/// Longer names are cut.
const NAME_MOST: usize = 16;

fn name(names: &[String]) -> String {
    let all = match names {
        [one] => one.clone(),
        [first, rest @ ..] => format!("{first} +{}", rest.len()),
        [] => String::new(),
    };
    match all.char_indices().nth(NAME_MOST) {
        Some(_) => all.chars().take(NAME_MOST - 1).chain(['~']).collect(),
        None => all,
    }
}

fn backing(map: &ForecastMap, layout: &PaperLayout) -> String {
    let first = map.regions.first().and_then(|region| layout.regions.get(*region));
    let Some(region) = first else { return String::new() };
    match region.pages {
        RegionPages::Of(size) if region.backing.is_counted() => {
            format!("{} {}", region.backing, units::page_size(size))
        }
        RegionPages::Partly { size, huge } => {
            let percent = huge.saturating_mul(100) / region.len().max(1);
            format!("{} {} {percent}%", region.backing, units::page_size(size))
        }
        _ => region.backing.to_string(),
    }
}

/// A number of at most five characters.
fn short(number: u64) -> String {
    match number {
        ..100_000 => number.to_string(),
        _ if number >> 10 < 10_000 => format!("{}K", number >> 10),
        _ if number >> 20 < 10_000 => format!("{}M", number >> 20),
        _ => format!("{}G", number >> 30),
    }
}

fn spans(map: &ForecastMap) -> String {
    match (map.spans_least, map.spans_most) {
        (least, most) if least == most => short(least),
        (_, most) => format!("to {}", short(most)),
    }
}

/// How many leaves there are of the size that most bytes are in, and how many others.
fn leaves(leaves: &[LeafCount]) -> String {
    let Some(most) = leaves.iter().max_by_key(|leaf| leaf.size.saturating_mul(leaf.count)) else {
        return String::new();
    };
    let all = leaves.iter().map(|leaf| leaf.count).fold(0, u64::saturating_add);
    let first = format!("{}×{}", short(most.count), units::page_size(most.size));
    match all - most.count {
        0 => first,
        others => format!("{first} +{}", short(others)),
    }
}

fn push_sums(text: &mut String, layout: &PaperLayout, forecast: &Forecast) {
    let limits = &layout.limits;
    let mappings = match limits.mappings_left() {
        Some(left) => format!("{} of {left} that can be made", forecast.maps.len()),
        None => format!("{}, which nothing limits", forecast.maps.len()),
    };
    push_wrapped(text, "Mappings: ", &mappings);
    let locked = ByteSize::new(forecast.locked);
    let limit = match limits.memlock {
        Some(limit) => format!(
            "{locked}; the {} may lock {} and has locked {}",
            whose(limits.locked_by),
            ByteSize::new(limit),
            ByteSize::new(limits.locked)
        ),
        None => format!("{locked}, which nothing limits"),
    };
    push_wrapped(text, "Locked: ", &limit);
    let (now, best) = (forecast.table_bytes, forecast.best_table_bytes);
    let tables = format!("{}, at best {}", ByteSize::new(now), ByteSize::new(best));
    push_wrapped(text, "Tables: ", &tables);
    let cost = forecast.cost;
    let lookups = format!(
        "{} look-ups, at best {}; a map costs {} and an unmap {} what huge pages cost",
        cost.lookups,
        cost.best_lookups,
        ratio(cost.map_ratio),
        ratio(cost.unmap_ratio)
    );
    push_wrapped(text, "Kernel: ", &lookups);
}

/// A mark, and words behind it.
fn push_marked(text: &mut String, severity: PlanSeverity, words: &str) {
    let mark = match severity {
        PlanSeverity::Note => RIGHT,
        PlanSeverity::Slow => LOOK,
        PlanSeverity::Fails => WRONG,
    };
    push_wrapped(text, &format!("{mark} "), words);
}

fn push_finding(text: &mut String, finding: &PlanFinding) {
    push_marked(text, finding.severity(), &finding.to_string());
    for mend in finding.mends() {
        push_hanging(text, "  - ", &format!("{}: {}", mend.action, mend.gain));
    }
}

/// How it ends, in words.
pub(super) fn verdict(layout: &PaperLayout, forecast: &Forecast) -> String {
    let regions = layout.regions.len();
    let maps = forecast.maps.len();
    let these = match (regions, maps) {
        (1, _) => "1 region is 1 map".to_owned(),
        (_, 1) => format!("{regions} regions are 1 map"),
        _ => format!("{regions} regions are {maps} maps"),
    };
    match forecast.verdict() {
        PlanSeverity::Note => format!("it fits: {these}, no dearer than huge pages"),
        PlanSeverity::Slow => format!("it fits: {these}, which cost more than they have to"),
        PlanSeverity::Fails => {
            let count = |finding: &&PlanFinding| finding.severity() == PlanSeverity::Fails;
            let count = forecast.findings.iter().filter(count).count();
            let reasons = if count == 1 { "reason" } else { "reasons" };
            format!("mapping would fail, for {count} {reasons}")
        }
    }
}
