//! A plan for Prometheus. The names and units of its figures are a contract.

use dmaspan_linux::plan::forecast::{Forecast, PaperLayout, PlanFinding, PlanSeverity};

use crate::metrics::Metrics;

/// The figures. `source` is the label that tells one plan from others.
pub(super) fn render(source: &str, layout: &PaperLayout, forecast: &Forecast) -> String {
    let mut metrics = Metrics::new();
    let of_plan = [("source", source.to_owned())];
    let mut add = |name, help, value| metrics.add(name, help, &of_plan, value);
    let verdict = match forecast.verdict() {
        PlanSeverity::Note => 0,
        PlanSeverity::Slow => 1,
        PlanSeverity::Fails => 2,
    };
    let maps = u64::try_from(forecast.maps.len()).unwrap_or(u64::MAX);
    let limits = &layout.limits;
    add("dmaspan_plan_verdict", "Whether mapping fits (0), is slow (1) or fails (2)", verdict);
    add("dmaspan_plan_mappings", "Mappings that are needed", maps);
    if let Some(left) = limits.mappings_left() {
        add("dmaspan_plan_mappings_left", "Mappings that can be made", left);
    }
    add("dmaspan_plan_locked_bytes", "Bytes that would count as locked", forecast.locked);
    let already = "Bytes that count as locked already";
    add("dmaspan_plan_locked_already_bytes", already, limits.locked);
    if let Some(limit) = limits.memlock {
        add("dmaspan_plan_locked_limit_bytes", "Bytes that may be locked", limit);
    }
    add("dmaspan_plan_table_bytes", "Bytes of page tables", forecast.table_bytes);
    let lookups = "Times that the kernel looks up where memory is";
    add("dmaspan_plan_lookups", lookups, forecast.cost.lookups);
    for (size, count) in forecast.leaves() {
        let labels = [("source", source.to_owned()), ("size_bytes", size.to_string())];
        metrics.add("dmaspan_plan_leaves", "Leaves of page tables by their size", &labels, count);
    }
    for finding in forecast.findings.iter().map(PlanFinding::name) {
        let count = forecast.findings.iter().filter(|it| it.name() == finding).count();
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let labels = [("source", source.to_owned()), ("name", finding.to_owned())];
        let help = "What fails or costs more than it has to";
        metrics.add("dmaspan_plan_findings", help, &labels, count);
    }
    metrics.render()
}
