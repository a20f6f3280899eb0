//! Arm's long descriptors as AArch32 walks them, both stages.

use dmaspan::io_pgtable::{Arena, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1Config, ArmLpaeS2Config};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::arm_lpae::{
    Arm32LpaeS1Walker, Arm32LpaeS2Walker, Arm32S1Registers, Arm32S2Registers,
};

use super::checked;

struct Stage1;

impl Subject for Stage1 {
    type Format = ArmLpae32S1;
    type Walker = Arm32LpaeS1Walker;

    fn configs() -> Vec<(String, ArmLpae32S1)> {
        [(32, 40), (32, 32), (30, 36), (25, 32)]
            .map(|(input_bits, output_bits)| {
                let config = ArmLpaeS1Config::new(input_bits, output_bits);
                let name = format!("{input_bits} to {output_bits} bits");
                (name, ArmLpae32S1::new(config).unwrap())
            })
            .into()
    }

    fn walker(format: &ArmLpae32S1, root: PhysAddr, _top_level: u32) -> Arm32LpaeS1Walker {
        let registers = format.registers(root);
        Arm32LpaeS1Walker::new(Arm32S1Registers {
            ttbr: registers.ttbr0,
            ttbcr: registers.ttbcr,
            mair: [registers.mair0, registers.mair1],
            ..Default::default()
        })
        .unwrap()
    }

    fn strict(walker: &Self::Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

struct Stage2;

impl Subject for Stage2 {
    type Format = ArmLpae32S2;
    type Walker = Arm32LpaeS2Walker;

    fn configs() -> Vec<(String, ArmLpae32S2)> {
        [(40, 40), (32, 40), (36, 36), (31, 32), (25, 32)]
            .map(|(input_bits, output_bits)| {
                let config = ArmLpaeS2Config::new(input_bits, output_bits);
                let name = format!("{input_bits} to {output_bits} bits");
                (name, ArmLpae32S2::new(config).unwrap())
            })
            .into()
    }

    fn walker(format: &ArmLpae32S2, root: PhysAddr, _top_level: u32) -> Arm32LpaeS2Walker {
        let registers = format.registers(root);
        Arm32LpaeS2Walker::new(Arm32S2Registers { vttbr: registers.vttbr, vtcr: registers.vtcr })
            .unwrap()
    }

    fn strict(walker: &Self::Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(stage_1, Stage1);
format_suite!(stage_2, Stage2);
