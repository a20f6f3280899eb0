//! Reads and writes of a disk by registered buffers of several huge pages, which io_uring keeps as
//! so many pieces from Linux 6.12 on.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::{Result, figure};

/// The series' own load, on a disk that nobody needs.
const BENCH: &str = "dmaspan-bench fixed /dev/nvme0n1 --depth 64 --count 192 --runs 3 --write \
    --format json";
/// No scheduler of I/O, as kernels choose different ones.
const SCHEDULER: &str = "/sys/block/nvme0n1/queue/scheduler";
/// How long the kernel waits for a command, in milliseconds, and a day of it: where instructions
/// are counted, the guest's clock jumps from timer to timer while the disk works, and the usual 30
/// seconds can pass while a busy machine reads 8 MiB.
const TIMEOUT: &str = "/sys/block/nvme0n1/queue/io_timeout";
const A_DAY: &str = "86400000";

pub(super) fn measure() -> Result {
    fs::write(SCHEDULER, "none")?;
    fs::write(TIMEOUT, A_DAY)?;
    let mut words = BENCH.split_whitespace();
    let program = words.next().ok_or("no program")?;
    let output = Command::new(program).args(words).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    println!("{} at a time, {}", report["depth"], report["disk"]);
    let rows = report["rows"].as_array().ok_or("no rows")?;
    for row in rows {
        let text = |name: &str| row[name].as_str().unwrap_or_default();
        let what = format!("{} of 8M, {}", text("op"), text("way"));
        for (name, label) in [("cpu_ns", "CPU of the process"), ("thread_ns", "of the thread")] {
            let ns = row[name].as_f64().ok_or("no time")?;
            figure(&format!("{what}: {label}"), ns / 1e3, "µs");
        }
        figure(&format!("{what}: requests"), row["requests"].as_f64().ok_or("no count")?, "");
    }
    Ok(())
}
