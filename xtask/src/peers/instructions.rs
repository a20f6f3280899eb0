//! Counts of the instructions that both sides execute for the same operations, which no other
//! program on the machine changes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use super::plan::{BUILDS, Comparison, Peer, Versus};

/// Rounds of the two counts of a case, whose difference is of rounds alone.
const ROUNDS: [u32; 2] = [1, 3];

/// A map and its unmap, or what else a case has: all that a round does.
const PAIR: &str = "pair";

/// A case that was counted: instructions of a map and an unmap, or of what else the case has.
pub(super) struct Count {
    case: String,
    peer: String,
    theirs: f64,
    own: f64,
}

/// Whether this machine has what counts them.
pub(super) fn are_counted() -> bool {
    let valgrind = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
    valgrind.is_ok_and(|status| status.success())
}

/// Counts all comparisons with Linux that have one thread, and which this Linux has. Of its two
/// builds the one with fewer instructions counts.
///
/// # Errors
///
/// What is missing or failed, in one line.
pub(super) fn count(
    comparisons: &[Comparison],
    work: &Path,
    own: &Path,
    is_built: impl Fn(&Comparison, &Peer) -> bool,
) -> Result<Vec<Count>, String> {
    let mut counter = Counter::default();
    let mut counts: Vec<Count> = Vec::new();
    for comparison in comparisons {
        let Versus::Linux(peer) = comparison.versus else { continue };
        let (case, name) = (comparison.name(), comparison.peer.clone());
        let is_double = counts.iter().any(|count| (&count.case, &count.peer) == (&case, &name));
        if is_double || case.contains("_threads_2") || !is_built(comparison, peer) {
            continue;
        }
        eprintln!("peers: counting {case}, {name}");
        let mut theirs = f64::INFINITY;
        for build in BUILDS {
            let program = work.join(comparison.version).join(build).join(peer.program);
            let count = counter.count(&program, peer.format, &comparison.their_case, PAIR)?;
            theirs = theirs.min(count);
        }
        let own = counter.count(own, comparison.format, &comparison.case, PAIR)?;
        counts.push(Count { case, peer: name, theirs, own });
    }
    Ok(counts)
}

/// What was counted, so that nothing is twice.
#[derive(Default)]
pub(super) struct Counter {
    counted: BTreeMap<(String, String, String, &'static str), f64>,
}

impl Counter {
    /// Instructions of an operation: a pair from what more rounds take more, and a map or an unmap
    /// as the program has it counted alone.
    ///
    /// # Errors
    ///
    /// The program failed, or valgrind printed no count, in one line.
    pub(super) fn count(
        &mut self,
        program: &Path,
        format: &str,
        case: &str,
        operation: &'static str,
    ) -> Result<f64, String> {
        let name = (program.display().to_string(), format.to_owned(), case.to_owned(), operation);
        if let Some(&count) = self.counted.get(&name) {
            return Ok(count);
        }
        let count = if operation == PAIR {
            let [(first, _), (second, operations)] = [
                collected(program, format, case, ROUNDS[0], None)?,
                collected(program, format, case, ROUNDS[1], None)?,
            ];
            (second - first) / f64::from(ROUNDS[1] - ROUNDS[0]) / operations
        } else {
            // The first round is not counted, and what it leaves behind is there in the second.
            let (count, operations) = collected(program, format, case, 2, Some(operation))?;
            count / operations
        };
        self.counted.insert(name, count);
        Ok(count)
    }
}

/// The instructions of a process with so many rounds, or of one operation in all but the first of
/// them; and the operations of a round.
fn collected(
    program: &Path,
    format: &str,
    case: &str,
    rounds: u32,
    only: Option<&str>,
) -> Result<(f64, f64), String> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    if let Some(operation) = only {
        valgrind.arg("--collect-atstart=no").env("PEERS_COUNTED_OP", operation);
    }
    let output = valgrind
        .arg(program)
        .args([format, case])
        .env("PEERS_COUNTED_ROUNDS", rounds.to_string())
        .output();
    let output = output.map_err(|error| format!("`valgrind` did not start: {error}"))?;
    let (printed, said) = (text(&output.stdout), text(&output.stderr));
    let counted = said.rsplit("Collected :").next().and_then(|rest| rest.split_whitespace().next());
    let operations = printed.split_whitespace().last();
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<f64>().ok());
    match (output.status.success(), number(counted), number(operations)) {
        (true, Some(counted), Some(operations)) if operations > 0.0 => Ok((counted, operations)),
        _ => Err(format!("`{} {format} {case}` was not counted: {said}", program.display())),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A table for people.
pub(super) fn table(counts: &[Count], version: &str) -> String {
    let mut text = format!(
        "Linux {version} and dmaspan\ninstructions of a pair; of Linux the build with fewer\n\n"
    );
    for Count { case, peer, theirs, own } in counts {
        let line = format!("{case:30} {peer:29} {theirs:>8.0} {own:>8.0}");
        text += &format!("{line} {:>6.2}×\n", theirs / own);
    }
    text
}

/// One array of `{"case", "peer", "peer_instructions", "instructions", "ratio"}`.
pub(super) fn json(counts: &[Count]) -> String {
    let rounded = |value: f64| (value * 100.0).round() / 100.0;
    let rows = counts.iter().map(|Count { case, peer, theirs, own }| {
        // One by one: an object of serde_json sorts its keys.
        let (case, peer, ratio) = (json!(case), json!(peer), json!(rounded(theirs / own)));
        let [theirs, own] = [theirs, own].map(|count| json!(rounded(*count)));
        let counts = format!(r#""peer_instructions": {theirs}, "instructions": {own}"#);
        format!(r#"  {{"case": {case}, "peer": {peer}, {counts}, "ratio": {ratio}}}"#)
    });
    format!("[\n{}\n]", rows.collect::<Vec<_>>().join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Vec<Count> {
        let count = |case: &str, theirs, own| Count {
            case: case.to_owned(),
            peer: "dma-iommu.c, vtdss, page by page".to_owned(),
            theirs,
            own,
        };
        vec![count("dma_vtdss/single_512_strict", 1892.25, 872.0), count("lpae/4k_1", 1e6, 1e7)]
    }

    #[test]
    fn programs_read_the_same_counts() {
        let json: serde_json::Value = serde_json::from_str(&json(&counts())).unwrap();
        let expected = json!({
            "case": "dma_vtdss/single_512_strict",
            "peer": "dma-iommu.c, vtdss, page by page",
            "peer_instructions": 1892.25,
            "instructions": 872.0,
            "ratio": 2.17,
        });
        assert_eq!(json[0], expected);
        assert_eq!(json.as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_line_has_both_counts_and_their_ratio() {
        let text = table(&counts(), "7.0");
        assert!(text.lines().any(|line| line.ends_with("     1892      872   2.17×")), "{text}");
        assert!(text.lines().any(|line| line.ends_with(" 1000000 10000000   0.10×")), "{text}");
    }
}
