//! `dmaspan doctor` says what of the machine makes mapping fail or slow.

use std::path::PathBuf;

use dmaspan_linux::machine::{MachineCheck, MachineFiles};
use serde::Serialize;

use dmaspan_cli::json;
use dmaspan_cli::options::OutputFormat;
use dmaspan_cli::text::{RIGHT, WRONG, push_hanging};

pub(crate) const DOCTOR_ABOUT: &str = "\
Say what of this machine makes mapping fail or slow.

The program looks at transparent huge pages, the pools of hugetlb pages by NUMA
node, the limit of locked memory and the memory cgroup of this process, the
IOMMU, VFIO and the kernel's version. A line is right or has the command that
changes it, which you run yourself, as root: this program changes nothing.

With --format json the report is one object with checks, each of which has name,
right, text and change.";

pub(crate) const DOCTOR_EXAMPLES: &str = "\
Examples:
  dmaspan doctor                             what to change
  dmaspan doctor --format json               a report for scripts

Exit codes: 0 all is right; 1 something is not; 2 wrong usage.";

/// How to print it.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Format of the output: table or json
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: OutputFormat,

    /// A folder with the sys and proc of another machine
    #[arg(long, hide = true, default_value = "/")]
    pub(crate) root: PathBuf,
}

/// All that is printed for programs. Its names are a contract.
#[derive(Debug, Serialize)]
struct DoctorReport {
    checks: Vec<CheckRow>,
}

/// One thing about the machine, as it is printed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CheckRow {
    pub(crate) name: &'static str,
    pub(crate) right: bool,
    pub(crate) text: String,
    /// The command that changes it, where it is not right.
    pub(crate) change: Option<String>,
}

/// What there is to say of a machine.
pub(crate) fn checks(machine: &MachineFiles) -> Vec<CheckRow> {
    let row = |check: MachineCheck| {
        let MachineCheck { name, is_right: right, text, change, .. } = check;
        CheckRow { name, right, text, change }
    };
    machine.checks().into_iter().map(row).collect()
}

/// The report as it is printed, and whether all is right.
pub(crate) fn run(args: &DoctorArgs) -> (String, bool) {
    let checks = checks(&MachineFiles::at(&args.root));
    let is_right = checks.iter().all(|check| check.right);
    let text = match args.format {
        OutputFormat::Table => paragraph(&checks),
        OutputFormat::Json => json::render(&DoctorReport { checks }),
    };
    (text, is_right)
}

/// A line for each check, and one more for what changes it.
pub(crate) fn paragraph(checks: &[CheckRow]) -> String {
    let mut text = String::new();
    for check in checks {
        let mark = if check.right { RIGHT } else { WRONG };
        push_hanging(&mut text, &format!("{mark} "), &check.text);
        if let Some(change) = &check.change {
            push_hanging(&mut text, "  ", change);
        }
    }
    text
}
