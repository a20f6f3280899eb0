//! The boot of a VM, in a QEMU that runs in this guest, with a device whose BAR is large.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Result, figure};

/// The VM: its kernel is this guest's, finds nothing to begin with, panics, and so ends it.
const QEMU: &str = "qemu-system-x86_64 -M q35 -m 512M -nodefaults -display none \
    -device vfio-pci,host=0000:00:07.0 -kernel /vmlinuz -append panic=-1 -no-reboot \
    -trace vfio_listener*";
/// A range that is longer than this is the BAR.
const LARGE: u64 = 1 << 30;

/// Boots the VM, and says how long that took and which part of it requests about the BAR were: from
/// the line of QEMU's trace about one to the line behind it.
pub(super) fn measure() -> Result {
    let mut words = QEMU.split_whitespace();
    let program = words.next().ok_or("no program")?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let begin = Instant::now();
    let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
    let trace = child.stderr.take().ok_or("no trace")?;
    let (mut took, mut counts) = ([Duration::ZERO; 2], [0.0; 2]);
    let mut since: Option<(usize, Instant)> = None;
    for line in BufReader::new(trace).lines() {
        let line = line?;
        if let Some((which, since)) = since.take() {
            took[which] += since.elapsed();
            counts[which] += 1.0;
        }
        println!("{line}");
        since = large(&line).map(|which| (which, Instant::now()));
    }
    let status = child.wait()?;
    let all = begin.elapsed();
    if !status.success() {
        return Err(format!("{program} ended with {status}").into());
    }
    if counts[0] == 0.0 {
        return Err("the VM mapped no large BAR".into());
    }
    for (what, which) in [("map", 0), ("unmap", 1)] {
        figure(&format!("{what}s of the large BAR"), counts[which], "");
        figure(&format!("time for these {what}s"), took[which].as_secs_f64(), "s");
    }
    figure("the VM's boot", all.as_secs_f64(), "s");
    Ok(())
}

/// Whether a line of the trace is about a map of the BAR, 0, or about its unmap, 1.
fn large(line: &str) -> Option<usize> {
    let (what, range) = line.split_once(" 0x")?;
    let which = match what {
        "vfio_listener_region_add_ram region_add [ram]" => 0,
        "vfio_listener_region_del region_del" => 1,
        _ => return None,
    };
    let (start, rest) = range.split_once(" - 0x")?;
    let last = rest.split(' ').next()?;
    let [start, last] = [start, last].map(|digits| u64::from_str_radix(digits, 16).ok());
    (last?.checked_sub(start?)? > LARGE).then_some(which)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_the_bar_are_told_from_those_about_memory() {
        for (line, which) in [
            (
                "vfio_listener_region_add_ram region_add [ram] 0xf000000000 - 0xf7ffffffff [0x7f]",
                Some(0),
            ),
            ("vfio_listener_region_del region_del 0xf000000000 - 0xf7ffffffff", Some(1)),
            ("vfio_listener_region_del region_del 0x0 - 0x1fffffff", None),
            ("vfio_listener_region_skip SKIPPING region_add 0x0 - 0xf7ffffffff", None),
            ("qemu-system-x86_64: a warning", None),
        ] {
            assert_eq!(large(line), which, "{line}");
        }
    }
}
