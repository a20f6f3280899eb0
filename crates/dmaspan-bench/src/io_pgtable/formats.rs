//! The formats that can be measured, by name.

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2,
    ArmLpaeS2Config, ArmV7s, ArmV7sConfig, DirtyTracking, Riscv, RiscvConfig, RiscvMode, VtdSs,
    VtdSsConfig, X86_64, X86_64Config,
};

use dmaspan_cli::progress::Progress;
use dmaspan_sim::mock::MockFormat;

use super::Plan;
use crate::failed::Failed;
use crate::report::Fields;

/// A format with a configuration that is usual for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedFormat {
    /// What the command line calls it.
    pub(crate) name: &'static str,
    /// What it is.
    pub(crate) about: &'static str,
}

/// The formats by name, each of a type and by a configuration. The table has no pointers to what
/// measures them: whatever reads names would be compiled with all of that.
macro_rules! formats {
    ($(($name:literal, $about:literal, $format:ty, $($config:expr),+);)+) => {
        /// All of them, in the order of the report.
        pub(crate) static FORMATS: &[NamedFormat] =
            &[$(NamedFormat { name: $name, about: $about }),+];

        /// Measures a format.
        ///
        /// # Errors
        ///
        /// A case that could not be measured.
        pub(super) fn measure(
            plan: &Plan,
            named: &'static NamedFormat,
            progress: &Progress,
        ) -> Result<Vec<Fields>, Failed> {
            match named.name {
                $($name => super::measure(plan, named, progress, || <$format>::new($($config),+)),)+
                name => Err(Failed::new(format_args!("no format is called {name:?}"))),
            }
        }
    };
}

formats! {
    ("arm-lpae", "Arm 64-bit stage 1, granule 4K", ArmLpaeS1<12>, s1(48, 48));
    ("arm-lpae-16k", "Arm 64-bit stage 1, granule 16K", ArmLpaeS1<14>, s1(48, 48));
    ("arm-lpae-64k", "Arm 64-bit stage 1, granule 64K", ArmLpaeS1<16>, s1(48, 48));
    ("arm-lpae-s2", "Arm 64-bit stage 2, granule 4K, 40 bits", ArmLpaeS2<12>, s2(40, 48));
    ("arm-32-lpae", "Arm 32-bit long descriptors, stage 1", ArmLpae32S1, s1(32, 40));
    ("arm-32-lpae-s2", "Arm 32-bit long descriptors, stage 2", ArmLpae32S2, s2(40, 40));
    ("arm-v7s", "Arm short descriptors, with 16M", ArmV7s, v7s());
    ("vtd-ss", "VT-d second stage, 4 levels", VtdSs, VtdSsConfig::new(48, 52));
    ("x86-64", "x86-64 first stage, 4 levels", X86_64, X86_64Config::new(48, 52));
    ("x86-64-la57", "x86-64 first stage, 5 levels", X86_64, X86_64Config::new(57, 52));
    ("amd-v1", "AMD v1, a tree that grows from 3 levels on", AmdV1, AmdV1Config::new(64, 52));
    ("riscv-sv39", "RISC-V Sv39", Riscv, RiscvConfig::new(RiscvMode::Sv39, 56));
    ("riscv-sv48", "RISC-V Sv48", Riscv, RiscvConfig::new(RiscvMode::Sv48, 56));
    ("riscv-sv57", "RISC-V Sv57", Riscv, RiscvConfig::new(RiscvMode::Sv57, 56));
    ("mock", "a format for tests, granule 2K", MockFormat, 43, DirtyTracking::Off);
}

fn s1(input_bits: u32, output_bits: u32) -> ArmLpaeS1Config {
    ArmLpaeS1Config::new(input_bits, output_bits)
}

fn s2(input_bits: u32, output_bits: u32) -> ArmLpaeS2Config {
    ArmLpaeS2Config::new(input_bits, output_bits)
}

/// With supersections, as Linux's drivers ask for.
fn v7s() -> ArmV7sConfig {
    let page_sizes = Some(1 << 12 | 1 << 16 | 1 << 20 | 1 << 24);
    ArmV7sConfig { page_sizes, ..ArmV7sConfig::new(32, 32) }
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
