//! The formats that can be measured, by name.

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2,
    ArmLpaeS2Config, ArmV7s, ArmV7sConfig, ConfigError, DirtyTracking, Riscv, RiscvConfig,
    RiscvMode, VtdSs, VtdSsConfig, X86_64, X86_64Config,
};

use dmaspan_sim::mock::MockFormat;

use super::Bench;
use super::report::FormatRows;
use super::work::BenchError;

/// A format with a configuration that is usual for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedFormat {
    /// What the command line calls it.
    pub(crate) name: &'static str,
    /// What it is.
    pub(crate) about: &'static str,
    /// Measures it.
    pub(super) measure: fn(&Bench<'_>, &'static NamedFormat) -> Result<FormatRows, BenchError>,
}

/// All of them, in the order of the report.
pub(crate) static FORMATS: &[NamedFormat] = &[
    NamedFormat {
        name: "arm-lpae",
        about: "Arm 64-bit stage 1, granule 4K",
        measure: |bench, named| {
            bench.format(named, || ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)))
        },
    },
    NamedFormat {
        name: "arm-lpae-16k",
        about: "Arm 64-bit stage 1, granule 16K",
        measure: |bench, named| {
            bench.format(named, || ArmLpaeS1::<14>::new(ArmLpaeS1Config::new(48, 48)))
        },
    },
    NamedFormat {
        name: "arm-lpae-64k",
        about: "Arm 64-bit stage 1, granule 64K",
        measure: |bench, named| {
            bench.format(named, || ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(48, 48)))
        },
    },
    NamedFormat {
        name: "arm-lpae-s2",
        about: "Arm 64-bit stage 2, granule 4K, 40 bits",
        measure: |bench, named| {
            bench.format(named, || ArmLpaeS2::<12>::new(ArmLpaeS2Config::new(40, 48)))
        },
    },
    NamedFormat {
        name: "arm-32-lpae",
        about: "Arm 32-bit long descriptors, stage 1",
        measure: |bench, named| {
            bench.format(named, || ArmLpae32S1::new(ArmLpaeS1Config::new(32, 40)))
        },
    },
    NamedFormat {
        name: "arm-32-lpae-s2",
        about: "Arm 32-bit long descriptors, stage 2",
        measure: |bench, named| {
            bench.format(named, || ArmLpae32S2::new(ArmLpaeS2Config::new(40, 40)))
        },
    },
    NamedFormat {
        name: "arm-v7s",
        about: "Arm short descriptors, with 16M",
        measure: |bench, named| bench.format(named, arm_v7s),
    },
    NamedFormat {
        name: "vtd-ss",
        about: "VT-d second stage, 4 levels",
        measure: |bench, named| bench.format(named, || VtdSs::new(VtdSsConfig::new(48, 52))),
    },
    NamedFormat {
        name: "x86-64",
        about: "x86-64 first stage, 4 levels",
        measure: |bench, named| bench.format(named, || X86_64::new(X86_64Config::new(48, 52))),
    },
    NamedFormat {
        name: "x86-64-la57",
        about: "x86-64 first stage, 5 levels",
        measure: |bench, named| bench.format(named, || X86_64::new(X86_64Config::new(57, 52))),
    },
    NamedFormat {
        name: "amd-v1",
        about: "AMD v1, a tree that grows from 3 levels on",
        measure: |bench, named| bench.format(named, || AmdV1::new(AmdV1Config::new(64, 52))),
    },
    NamedFormat {
        name: "riscv-sv39",
        about: "RISC-V Sv39",
        measure: |bench, named| bench.format(named, || riscv(RiscvMode::Sv39)),
    },
    NamedFormat {
        name: "riscv-sv48",
        about: "RISC-V Sv48",
        measure: |bench, named| bench.format(named, || riscv(RiscvMode::Sv48)),
    },
    NamedFormat {
        name: "riscv-sv57",
        about: "RISC-V Sv57",
        measure: |bench, named| bench.format(named, || riscv(RiscvMode::Sv57)),
    },
    NamedFormat {
        name: "mock",
        about: "a format for tests, granule 2K",
        measure: |bench, named| bench.format(named, || MockFormat::new(43, DirtyTracking::Off)),
    },
];

fn arm_v7s() -> Result<ArmV7s, ConfigError> {
    // With supersections, as Linux's drivers ask for.
    let page_sizes = Some(1 << 12 | 1 << 16 | 1 << 20 | 1 << 24);
    ArmV7s::new(ArmV7sConfig { page_sizes, ..ArmV7sConfig::new(32, 32) })
}

fn riscv(mode: RiscvMode) -> Result<Riscv, ConfigError> {
    Riscv::new(RiscvConfig::new(mode, 56))
}

/// The format of that name.
///
/// # Errors
///
/// A line that lists all names.
pub(crate) fn by_name(name: &str) -> Result<&'static NamedFormat, String> {
    let name = name.trim();
    FORMATS.iter().find(|format| format.name == name).ok_or_else(|| {
        let names: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
        format!("no format is called {name:?}; there are {}", names.join(", "))
    })
}

/// All names and what they are, a line each: for the help.
pub(crate) fn listed() -> String {
    let lines = FORMATS.iter().map(|format| format!("  {:<16}{}\n", format.name, format.about));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_is_the_only_one() {
        for (at, format) in FORMATS.iter().enumerate() {
            let found = by_name(&format!(" {} ", format.name)).unwrap();
            let first = FORMATS.iter().position(|other| other.name == found.name);
            assert_eq!(first, Some(at));
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_all_that_are_known() {
        let error = by_name("arm").unwrap_err();
        assert!(FORMATS.iter().all(|format| error.contains(format.name)), "{error}");
    }
}
