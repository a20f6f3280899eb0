//! A table of figures from guests of several kernels.

use super::boots::Boot;
use super::log::Figure;

/// The lines of a boot's table: a figure each, a column for each kernel in the order in which the
/// boot names them, and the first by the last where there are two. None where nothing was measured.
pub(super) fn table(boot: &Boot, measured: &[(&str, &[Figure])]) -> Vec<String> {
    let of = |name: &str| measured.iter().find(|(kernel, _)| *kernel == name);
    let kernels: Vec<_> = boot.named().filter_map(of).filter(|of| !of.1.is_empty()).collect();
    let Some((_, first)) = kernels.first() else { return Vec::new() };
    let width = first.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
    let mut lines = vec![format!("{}:", boot.name)];
    let mut head = format!("  {:width$}", "");
    kernels.iter().for_each(|(kernel, _)| head.push_str(&format!("  {kernel:>12}")));
    if kernels.len() > 1 {
        head.push_str("  first / last");
    }
    lines.push(head);
    for figure in *first {
        let same = |(_, figures): &(&str, &[Figure])| {
            figures.iter().find(|each| each.name == figure.name).cloned()
        };
        let all: Vec<Option<Figure>> = kernels.iter().map(|of| same(of)).collect();
        let mut line = format!("  {:width$}", figure.name);
        for each in &all {
            let shown = each.as_ref().map_or_else(|| "-".to_owned(), shown);
            line.push_str(&format!("  {shown:>12}"));
        }
        if let [Some(first), .., Some(last)] = all.as_slice() {
            line.push_str(&format!("  {:>12}", digits(first.number / last.number)));
        }
        lines.push(line);
    }
    lines
}

fn shown(figure: &Figure) -> String {
    match figure.unit.as_str() {
        "-" => format!("{:.0}", figure.number),
        unit => format!("{} {unit}", digits(figure.number)),
    }
}

/// Three digits, or all of a whole part that has more.
fn digits(number: f64) -> String {
    let mut decimals = 2;
    let mut scaled = number.abs();
    while scaled >= 10.0 && decimals > 0 {
        scaled /= 10.0;
        decimals -= 1;
    }
    while scaled < 1.0 && scaled > 0.0 {
        scaled *= 10.0;
        decimals += 1;
    }
    format!("{number:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::super::boots::BOOTS;
    use super::*;

    #[test]
    fn kernels_stand_in_the_order_of_the_boot_and_the_last_column_is_their_ratio() {
        let boot = BOOTS.iter().find(|boot| boot.name == "swiotlb").unwrap();
        let figure = |name: &str, number| Figure { name: name.into(), number, unit: "µs".into() };
        let before = [figure("long name", 1234.5), figure("b", 2.0)];
        let after = [figure("long name", 12.345), figure("c", 1.0)];
        let lines = table(boot, &[("6.1", &after), ("5.10", &before)]);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&lines[1]), "5.10 6.1 first / last");
        assert_eq!(words(&lines[2]), "long name 1234 µs 12.3 µs 100");
        assert_eq!(words(&lines[3]), "b 2.00 µs -");
        assert_eq!(lines.len(), 4);
        assert_eq!(table(boot, &[("6.1", &[])]), Vec::<String>::new());
        let shown = [0.000_147, 0.0, 9.994, 12.34, 134_173.4].map(digits);
        assert_eq!(shown, ["0.000147", "0.00", "9.99", "12.3", "134173"]);
    }
}
