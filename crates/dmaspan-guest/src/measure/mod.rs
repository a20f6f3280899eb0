//! Measurements of this guest's kernel, of all that the five series for Linux are about.
//!
//! Each figure is a line `guest: figure NUMBER UNIT NAME`: `cargo xtask guest` puts those of
//! several kernels beside each other. Where instructions are counted a nanosecond is one of them.

mod bars;
mod boot;
mod bounce;
mod folios;
mod pins;
mod raw;
mod registered;
mod requests;
mod tables;
mod vm;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// The function whose BAR 2 is as large as the guest was told: QEMU's `pci-testdev`.
const LARGE: &str = "0000:00:07.0";

/// Measures what `name` names; `None` where nothing has the name.
pub(crate) fn run(name: &str) -> Option<ExitCode> {
    let measured = match name {
        "tables" => tables::measure(),
        "bars" => bars::measure(),
        "boot" => boot::measure(),
        "vm" => vm::measure(),
        "folios" => folios::measure(),
        "registered" => registered::measure(),
        "bounce" => bounce::measure(),
        "pins" => pins::measure(),
        "requests" => requests::measure(),
        _ => return None,
    };
    Some(match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dmaspan-guest: {error}");
            ExitCode::FAILURE
        }
    })
}

/// Has the machine that emulates this one note what CPU time it took so far: `guest: mark`.
fn mark() {
    println!("guest: mark");
}

/// Says a figure of that machine, `guest: host-cpu COUNT NAME`: what its CPUs took between the last
/// two marks, for one of so many.
fn host_cpu(count: f64, name: &str) {
    println!("guest: host-cpu {count} {name}");
}

/// Says a figure; of a count the unit is empty.
pub(crate) fn figure(name: &str, number: f64, unit: &str) {
    let unit = if unit.is_empty() { "-" } else { unit };
    println!("guest: figure {number:.7} {unit} {name}");
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The median of some times.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
