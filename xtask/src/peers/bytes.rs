//! `cargo xtask peers --bytes`: dmaspan's tables beside those that Linux's own code writes.

use std::process::{Command, Stdio};

use super::{Options, build_peers, build_program, output_of};
use crate::{Checked, Outcome};

/// The package, and its program, that drives both sides.
const COMPARISON: &str = "dmaspan-peers";

/// Shows what io_uring charges for clones of registered buffers.
fn show_clones(options: &Options, version: &str) -> Result<(), String> {
    build_peers(options, version, &[])?;
    let program = options.work.join(version).join("u/registered");
    crate::say(output_of(Command::new(program).args(["registered", "clones"]))?.trim_end());
    crate::say("");
    Ok(())
}

/// Builds both sides and compares them.
///
/// # Errors
///
/// What is missing, or that something differs; the program has said what by then.
pub(super) fn run(options: &Options) -> Checked {
    let version = options.linux[0];
    build_peers(options, version, &["bytes"])?;
    // As part of the two packages: nothing that the timed benchmark stands on is built anew.
    let both = ["-p", COMPARISON, "-p", "dmaspan-bench", "--bin", COMPARISON];
    let program = build_program(&both, COMPARISON)?;
    let mut command = Command::new(&program);
    command.arg(options.work.join(version).join("bytes/bytes")).args(["--case", &options.case]);
    if options.findings {
        command.arg("--findings");
        show_clones(options, version)?;
    }
    if let Some(seed) = options.seed {
        command.args(["--seed", &seed.to_string()]);
    }
    if let Some(configurations) = options.configurations {
        command.args(["--configurations", &configurations.to_string()]);
    }
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(Outcome::Passed),
        Ok(_) => Err("the tables differ from Linux's; how is above".to_owned()),
        Err(error) => Err(format!("`{}` did not start: {error}", program.display())),
    }
}
