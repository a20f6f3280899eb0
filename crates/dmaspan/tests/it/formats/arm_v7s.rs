//! Arm's short descriptors: 32-bit entries, repeated ones, and MediaTek's longer addresses.

use dmaspan::io_pgtable::{Arena, ArmV7s, ArmV7sConfig, ArmV7sVariant, Format};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::arm_v7s::{
    ArmV7sWalkRegisters, ArmV7sWalker, SCTLR_AFE, SCTLR_TRE, Variant,
};

use super::checked;

pub(crate) struct ShortDescriptors;

impl Subject for ShortDescriptors {
    type Format = ArmV7s;
    type Walker = ArmV7sWalker;

    fn configs() -> Vec<(String, ArmV7s)> {
        let plain = ArmV7sConfig::new(32, 32);
        let page_sizes = Some(ArmV7s::PAGE_SIZES);
        let variant = ArmV7sVariant::MediaTek;
        let high_tables = ArmV7sVariant::MediaTekHighTables;
        let long = ArmV7sConfig { variant, page_sizes, ..ArmV7sConfig::new(34, 35) };
        let configs = [
            ("no supersections", plain),
            ("all sizes", ArmV7sConfig { page_sizes, ..plain }),
            ("MediaTek", long),
            ("MediaTek, 34 bits", ArmV7sConfig { output_bits: 34, variant: high_tables, ..long }),
        ];
        configs.map(|(name, config)| (name.to_owned(), ArmV7s::new(config).unwrap())).into()
    }

    fn walker(format: &ArmV7s, root: PhysAddr, _top_level: u32) -> ArmV7sWalker {
        let registers = format.registers(root);
        let variant = match format.geometry().aperture.last().get() >> 32 {
            0 => Variant::Arm,
            _ => Variant::MediaTek { input_lg2: 34 },
        };
        ArmV7sWalker::new(ArmV7sWalkRegisters {
            ttbr: registers.ttbr,
            ttbcr: registers.tcr,
            prrr: registers.prrr,
            nmrr: registers.nmrr,
            sctlr: SCTLR_TRE | SCTLR_AFE,
            variant,
            ..Default::default()
        })
        .unwrap()
    }

    fn strict(walker: &Self::Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(suite, ShortDescriptors);
