//! The readers of the program, from a file of any bytes to a report: the first byte chooses the
//! reader, the second how it reads and reports, the others are the file. The variable `READER` is
//! the first byte where it is set, so that a reader can be fuzzed alone.
#![no_main]
#![expect(dead_code, reason = "the program's modules have more than the readers need")]

#[path = "../../crates/dmaspan-cli/src/html/mod.rs"]
mod html;
#[path = "../../crates/dmaspan-cli/src/inspect/mod.rs"]
mod inspect;
#[path = "../../crates/dmaspan-cli/src/metrics.rs"]
mod metrics;
#[path = "../../crates/dmaspan-cli/src/output.rs"]
mod output;
#[path = "../../crates/dmaspan-cli/src/plan/mod.rs"]
mod plan;

use std::sync::LazyLock;

use clap::Parser;

use inspect::Failed;
use inspect::args::InspectArgs;
use plan::args::PlanArgs;

#[derive(Parser)]
struct Inspect {
    #[command(flatten)]
    args: InspectArgs,
}

#[derive(Parser)]
struct Plan {
    #[command(flatten)]
    args: PlanArgs,
}

/// A core file or memory from 0 on, as each family of tables.
const IOMMUS: [&str; 8] = [
    "vtd",
    "vtd,stage=1",
    "amd",
    "smmuv3",
    "smmuv3,stage=2,granule=64k",
    "riscv",
    "riscv,stage=2",
    "v7s",
];
const FORMATS: [&str; 4] = ["table", "json", "html", "prometheus"];

static FILE: LazyLock<String> =
    LazyLock::new(|| format!("/dev/shm/dmaspan-fuzz-{}", std::process::id()));
static READER: LazyLock<Option<u8>> =
    LazyLock::new(|| std::env::var("READER").ok().map(|text| text.parse().expect("a number")));

fn check(format: &str, report: Result<String, String>) {
    match report {
        Ok(report) if format == "json" => {
            serde_json::from_str::<serde_json::Value>(&report).expect("JSON");
        }
        Ok(report) => assert!(!report.is_empty()),
        // What it quotes may have breaks of lines, which the program prints as escapes.
        Err(why) => assert!(!why.trim().is_empty(), "{why:?}"),
    }
}

fn inspect(words: &[&str], format: &str) {
    let words = ["inspect", &FILE, "--iova", "0x1000", "--phys", "0x2000", "--format", format]
        .into_iter()
        .chain(words.iter().copied());
    let args = Inspect::try_parse_from(words).expect("words that the program takes").args;
    check(
        format,
        inspect::run(&args).map_err(|error| match error {
            Failed::Usage(why) | Failed::Dump(why) => why,
        }),
    );
}

fn plan(option: &str, format: &str) {
    let words = ["plan", option, &FILE, "--format", format];
    let args = Plan::try_parse_from(words).expect("words that the program takes").args;
    check(format, plan::run(&args).map(|(report, _)| report).map_err(|error| error.to_string()));
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [reader, how, file @ ..] = bytes else { return };
    std::fs::write(&*FILE, file).expect("a file in memory");
    let how = usize::from(*how);
    let (format, iommu) = (FORMATS[how % 4], IOMMUS[how / 4 % 8]);
    match READER.unwrap_or(*reader) % 6 {
        0 => inspect(&["--kind", "debugfs"], format),
        1 => inspect(&["--kind", "lines"], format),
        2 => inspect(&["--kind", "elf", "--iommu", iommu, "--root", "0x1000"], format),
        3 => {
            let (iommu, registers) = [
                ("vtd", "0x0"),
                ("vtd", "0x400"),
                ("amd", "0x1"),
                ("smmuv3", "0x0,0x3"),
                ("smmuv3", "0x0,0x10209"),
                ("riscv", "0x2,0x0"),
                ("riscv", "0x4,0x400000"),
                ("riscv", "0x3,0x0"),
            ][how / 4 % 8];
            let how = ["--kind", "raw", "--iommu", iommu, "--device-table", registers];
            inspect(&how, format);
        }
        4 => plan("--layout", format),
        _ => plan("--qemu-cmdline", format),
    }
});
