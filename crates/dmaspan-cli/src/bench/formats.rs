//! The formats that can be measured, by name.

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpaeS1, ArmLpaeS1Config, ConfigError, Riscv, RiscvConfig, RiscvMode,
};

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
        measure: |bench, named| bench.format(named, arm_lpae_s1::<12>),
    },
    NamedFormat {
        name: "arm-lpae-16k",
        about: "Arm 64-bit stage 1, granule 16K",
        measure: |bench, named| bench.format(named, arm_lpae_s1::<14>),
    },
    NamedFormat {
        name: "arm-lpae-64k",
        about: "Arm 64-bit stage 1, granule 64K",
        measure: |bench, named| bench.format(named, arm_lpae_s1::<16>),
    },
    NamedFormat {
        name: "amd-v1",
        about: "AMD v1, a tree that grows from three levels on",
        measure: |bench, named| bench.format(named, || AmdV1::new(AmdV1Config::new(64, 52))),
    },
    NamedFormat {
        name: "riscv-sv39",
        about: "RISC-V Sv39, lower half",
        measure: |bench, named| bench.format(named, || riscv(RiscvMode::Sv39)),
    },
    NamedFormat {
        name: "riscv-sv48",
        about: "RISC-V Sv48, lower half",
        measure: |bench, named| bench.format(named, || riscv(RiscvMode::Sv48)),
    },
    NamedFormat {
        name: "riscv-sv57",
        about: "RISC-V Sv57, lower half",
        measure: |bench, named| bench.format(named, || riscv(RiscvMode::Sv57)),
    },
];

fn arm_lpae_s1<const G: u32>() -> Result<ArmLpaeS1<G>, ConfigError> {
    ArmLpaeS1::new(ArmLpaeS1Config::new(48, 48))
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
    let lines = FORMATS.iter().map(|format| format!("  {:<14}{}\n", format.name, format.about));
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
