//! The suite of dmaspan-sim, run on every format of the core.

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, Half};
use dmaspan_sim::Arena;
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

/// Arm's stage 1: widths of every number of levels, both halves, with and without groups.
struct ArmS1<const G: u32>;

impl<const G: u32> Subject for ArmS1<G> {
    type Format = ArmLpaeS1<G>;
    type Walker = ArmLpaeS1Walker;

    fn configs() -> Vec<(String, Self::Format)> {
        let most = if G == 16 { 52 } else { 48 };
        let plain = ArmLpaeS1Config::new(48, 48);
        let sizes = ArmLpaeS1::<G>::PAGE_SIZES & ((1 << 42) - 1);
        let groups = Some(sizes | ArmLpaeS1::<G>::CONTIGUOUS_SIZES);
        let configs = [
            ("48 bits", plain),
            ("48 bits with groups", ArmLpaeS1Config { page_sizes: groups, ..plain }),
            ("the most bits", ArmLpaeS1Config::new(most, most)),
            ("36 to 40 bits", ArmLpaeS1Config::new(36, 40)),
            ("25 to 32 bits", ArmLpaeS1Config::new(25, 32)),
            (
                "upper 42 bits",
                ArmLpaeS1Config { half: Half::Upper, ..ArmLpaeS1Config::new(42, 44) },
            ),
        ];
        configs.map(|(name, config)| (name.to_owned(), ArmLpaeS1::new(config).unwrap())).into()
    }

    fn walker(format: &Self::Format, root: PhysAddr, _top_level: u32) -> Self::Walker {
        crate::common::walker(format, root)
    }

    fn strict(
        walker: &Self::Walker,
        tables: &Arena,
        range: dmaspan::IovaRange,
    ) -> Result<(), String> {
        walker.survey(tables, range, |_| ()).map_err(|bad| bad.to_string())
    }
}

format_suite!(arm_s1_4k, ArmS1<12>);
format_suite!(arm_s1_16k, ArmS1<14>);
format_suite!(arm_s1_64k, ArmS1<16>);
