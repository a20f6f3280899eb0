//! The list of `dmaspan devices`, for people.

use comfy_table::{ContentArrangement, Table};

use super::args::DevicesArgs;
use super::report::{Device, GroupRow, Report, Verdict};
use dmaspan_cli::text::{RIGHT, WIDTH, WRONG, new_table, push_table, push_words, push_wrapped};
use dmaspan_cli::units;

/// How many functions are explained without being asked for.
const FEW: usize = 4;

/// The report as text, with a newline at its end.
pub(super) fn render(report: &Report, args: &DevicesArgs) -> String {
    let mut text = String::new();
    push_wrapped(&mut text, "", &heading(report));
    if !report.devices.is_empty() {
        push_table(&mut text, &table(&report.devices));
    }
    let is_asked = !args.bdfs.is_empty();
    let mut endpoints = report.devices.iter().filter(|device| !device.bridge).peekable();
    let first = endpoints.peek().copied();
    // What is wrong with the machine is said once, not of each function.
    let of_machine = first.filter(|_| endpoints.all(|device| device.type1.of_machine));
    let explained = match (of_machine, &report.devices[..]) {
        (Some(first), _) if !is_asked => {
            push_verdicts(&mut text, first);
            &[]
        }
        (_, devices) if is_asked || devices.len() <= FEW => devices,
        _ => {
            let more =
                "`dmaspan devices BDF` says why a device is not usable, and what changes that";
            text.push('\n');
            push_wrapped(&mut text, "", more);
            &[]
        }
    };
    for device in explained {
        push_device(&mut text, device);
    }
    if !report.hints.is_empty() {
        text.push('\n');
    }
    for hint in &report.hints {
        push_wrapped(&mut text, "note: ", hint);
    }
    text
}

fn heading(report: &Report) -> String {
    let iommu = match report.iommu {
        "active" => "the IOMMU is active",
        "off" => "the kernel does not use the IOMMU",
        _ => "no IOMMU was found",
    };
    let all = report.devices.len();
    let usable = report.devices.iter().filter(|device| is_usable(device)).count();
    let functions = if all == 1 { "PCI function" } else { "PCI functions" };
    format!("{all} {functions}, {usable} usable by this process; {iommu}")
}

const fn is_usable(device: &Device) -> bool {
    device.type1.usable || device.iommufd.usable || device.noiommu.usable
}

/// One row for each function, ordered by groups.
fn table(devices: &[Device]) -> Table {
    let mut table = new_table(["group", "function", "what", "driver", "usable"]);
    let limit = u16::try_from(WIDTH).unwrap_or(u16::MAX);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(limit);
    let mut rows: Vec<&Device> = devices.iter().collect();
    let number = |device: &Device| device.group.as_ref().map(|group| group.number);
    rows.sort_by_key(|device| (number(device).map_or(u64::MAX, u64::from), device.bdf.clone()));
    let mut last = None;
    for device in rows {
        let group = match number(device) {
            None => "-".to_owned(),
            Some(number) if last == Some(number) => " └".to_owned(),
            Some(number) => number.to_string(),
        };
        last = number(device);
        let what = format!("{}:{} {}", device.vendor, device.device, device.class_name);
        let driver = device.driver.as_deref().unwrap_or("-");
        table.add_row([&group, &device.bdf, &what, driver, &usable(device)]);
    }
    table
}

/// By what it is usable, or the reason that decides, in a word or two.
fn usable(device: &Device) -> String {
    let ways =
        [("type1", &device.type1), ("iommufd", &device.iommufd), ("noiommu", &device.noiommu)];
    let open: Vec<&str> =
        ways.iter().filter(|(_, verdict)| verdict.usable).map(|(name, _)| *name).collect();
    if !open.is_empty() {
        return format!("{RIGHT} {}", open.join(", "));
    }
    let reasons = &device.type1.reasons;
    // What is not loaded comes with the binding, and is no news for each function.
    let decides = |name: &str| name != "no-vfio-pci";
    let by_weight = [
        reasons.iter().find(|reason| reason.is_final),
        reasons.iter().find(|reason| decides(reason.name)),
        reasons.first(),
    ];
    let name = by_weight.into_iter().flatten().next().map_or("", |reason| reason.name);
    format!("{WRONG} {}", name.replace('-', " ").replace("iommu", "IOMMU"))
}

fn push_device(text: &mut String, device: &Device) {
    text.push('\n');
    push_wrapped(text, "", &title(device));
    push_wrapped(text, "  ", &place(device));
    for used in &device.uses {
        push_wrapped(text, "  use: ", used);
    }
    push_verdicts(text, device);
    let is_taken = device.driver.as_deref().is_some_and(|driver| driver.contains("vfio"));
    let can_be = !device.type1.reasons.iter().any(|reason| reason.is_final);
    if is_taken || can_be {
        push_commands(text, "to give it back to its driver", &device.give_back);
    }
}

fn title(device: &Device) -> String {
    let Device { bdf, class_name, vendor, device: id, .. } = device;
    let mut title = format!("{bdf} {class_name} {vendor}:{id}");
    for bar in &device.bars {
        let io = if bar.space == "io" { " of ports" } else { "" };
        title = format!("{title}, BAR {} {}{io}", bar.index, units::page_size(bar.bytes));
    }
    if device.kind == "virtual" {
        title.push_str(", virtual function");
    }
    title
}

fn place(device: &Device) -> String {
    let driver = match (&device.driver, &device.driver_override) {
        (Some(driver), _) => format!("driver {driver}"),
        (None, Some(only)) => format!("no driver; only {only} may bind it"),
        (None, None) => "no driver".to_owned(),
    };
    let group = device.group.as_ref().map_or("no group".to_owned(), |row| group(row, &device.bdf));
    match device.numa_node {
        Some(node) => format!("{driver}, NUMA node {node}, {group}"),
        None => format!("{driver}, {group}"),
    }
}

fn group(group: &GroupRow, own: &str) -> String {
    let others = group.members.iter().filter(|member| member.bdf != own);
    let others: Vec<String> = others
        .map(|member| match &member.driver {
            Some(driver) => format!("{} ({driver})", member.bdf),
            None => member.bdf.clone(),
        })
        .collect();
    let with = match &others[..] {
        [] => "alone in it".to_owned(),
        others => format!("with {}", others.join(", ")),
    };
    format!("group {} ({}), {with}", group.number, group.domain)
}

/// Why not, and what to do about it, of both ways; said once where it is the same. Of the way
/// without an IOMMU only where it is open, or can be opened.
fn push_verdicts(text: &mut String, device: &Device) {
    let (type1, iommufd) = (&device.type1, &device.iommufd);
    if type1 == iommufd {
        push_verdict(text, "type1 and iommufd", type1);
    } else {
        push_verdict(text, "type1", type1);
        push_verdict(text, "iommufd", iommufd);
    }
    let noiommu = &device.noiommu;
    if !noiommu.reasons.iter().any(|reason| reason.is_final) {
        push_verdict(text, "noiommu", noiommu);
    }
}

fn push_verdict(text: &mut String, ways: &str, verdict: &Verdict) {
    text.push('\n');
    if verdict.usable {
        push_wrapped(text, "  ", &format!("{RIGHT} usable by {ways}"));
    }
    let is_final = verdict.reasons.iter().any(|reason| reason.is_final);
    // Where one decides the others are no matter.
    for reason in verdict.reasons.iter().filter(|reason| reason.is_final == is_final) {
        push_wrapped(text, &format!("  {WRONG} {ways}: "), &reason.text);
    }
    push_commands(text, &format!("to use it by {ways}"), &verdict.commands);
}

/// Commands below what they do. They are never broken, only comments are.
fn push_commands(text: &mut String, what: &str, commands: &[String]) {
    if commands.is_empty() {
        return;
    }
    let is_by_hand = commands.iter().all(|command| command.starts_with('#'));
    let who = if is_by_hand { "" } else { ", as root" };
    text.push_str(&format!("\n  {what}{who}:\n"));
    for command in commands {
        match command.strip_prefix("# ") {
            Some(comment) => push_words(text, "    # ", "    # ", comment.split_whitespace()),
            None => text.push_str(&format!("    {command}\n")),
        }
    }
}
