//! The suite of dmaspan-sim, run on every format of the core.

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpaeS1, ArmLpaeS1Config, DirtyTracking, Format, Half, Riscv,
    RiscvConfig, RiscvMemoryTypes, RiscvMode, RiscvStage,
};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::amd_v1::AmdV1Walker;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::riscv::RiscvWalker;
use dmaspan_sim::walker::{self, Checked, Requester, Switch};
use dmaspan_sim::{Arena, format_suite};

const WIDTHS: [u32; 6] = [32, 36, 40, 42, 44, 48];

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
        let config = |name: &str, config| (name.to_owned(), ArmLpaeS1::new(config).unwrap());
        let mut configs = vec![
            config("48 bits with groups", ArmLpaeS1Config { page_sizes: groups, ..plain }),
            config("the most bits", ArmLpaeS1Config::new(most, most)),
            config("25 to 32 bits", ArmLpaeS1Config::new(25, 32)),
            config("upper half", ArmLpaeS1Config { half: Half::Upper, ..plain }),
        ];
        // Those of Linux's self-test.
        for ias in WIDTHS {
            for oas in WIDTHS.into_iter().filter(|&oas| oas >= ias) {
                let name = format!("{ias} to {oas} bits");
                configs.push(config(&name, ArmLpaeS1Config::new(ias, oas)));
            }
        }
        configs
    }

    fn walker(format: &Self::Format, root: PhysAddr, _top_level: u32) -> Self::Walker {
        crate::common::walker(format, root)
    }

    fn strict(walker: &Self::Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        walker.survey(tables, range, |_| ()).map_err(|bad| bad.to_string())
    }
}

format_suite!(arm_s1_4k, ArmS1<12>);
format_suite!(arm_s1_16k, ArmS1<14>);
format_suite!(arm_s1_64k, ArmS1<16>);
format_suite!(amd_v1, Amd);
format_suite!(riscv, RiscvTables);

/// What the walkers' own check of whole tables finds.
fn checked<W: Checked>(walker: &W, tables: &Arena, range: IovaRange) -> Result<(), String> {
    walker.survey(tables, range, |_| ()).map_err(|bad| bad.to_string())
}

/// AMD's host tables: every power of two, trees that begin with any number of levels and grow.
struct Amd;

impl Subject for Amd {
    type Format = AmdV1;
    type Walker = AmdV1Walker;

    fn configs() -> Vec<(String, AmdV1)> {
        let dirty = DirtyTracking::Hardware;
        let three = Some(1 << 12 | 1 << 21 | 1 << 30);
        let plain = AmdV1Config::new(48, 48);
        let configs = [
            ("48 bits", plain),
            ("48 bits, three sizes", AmdV1Config { page_sizes: three, ..plain }),
            ("64 bits, dirty", AmdV1Config { dirty, ..AmdV1Config::new(64, 52) }),
            ("64 bits from 1 level", AmdV1Config { first_levels: 1, ..AmdV1Config::new(64, 52) }),
            ("48 bits at once", AmdV1Config { first_levels: 4, dirty, ..plain }),
            ("30 to 32 bits", AmdV1Config { first_levels: 2, ..AmdV1Config::new(30, 32) }),
        ];
        configs.map(|(name, config)| (name.to_owned(), AmdV1::new(config).unwrap())).into()
    }

    fn walker(format: &AmdV1, root: PhysAddr, top_level: u32) -> AmdV1Walker {
        let dte = format.registers(root, top_level).dte;
        AmdV1Walker::new(walker::amd_v1::AmdV1Registers { dte }).unwrap()
    }

    fn strict(walker: &AmdV1Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

/// RISC-V: three to five levels, both halves of the first stage, and the second stage.
struct RiscvTables;

impl Subject for RiscvTables {
    type Format = Riscv;
    type Walker = RiscvWalker;

    fn configs() -> Vec<(String, Riscv)> {
        use RiscvMode::{Sv39, Sv48, Sv57};
        let (dirty, stage) = (DirtyTracking::Hardware, RiscvStage::Second);
        let upper = RiscvStage::First(Half::Upper);
        let memory_types = RiscvMemoryTypes::Svpbmt;
        let napot = |mode| {
            let singles = Riscv::PAGE_SIZES & if mode == Sv39 { (1 << 31) - 1 } else { u64::MAX };
            Some(singles & ((1 << 48) - 1) | Riscv::NAPOT_SIZES)
        };
        let configs = [
            ("Sv39", RiscvConfig::new(Sv39, 56)),
            ("Sv48", RiscvConfig { dirty, ..RiscvConfig::new(Sv48, 56) }),
            ("Sv57", RiscvConfig { memory_types, ..RiscvConfig::new(Sv57, 56) }),
            ("Sv39 of 32 bits", RiscvConfig { dirty, ..RiscvConfig::new(Sv39, 32) }),
            ("upper Sv48", RiscvConfig { stage: upper, ..RiscvConfig::new(Sv48, 44) }),
            ("Sv39x4", RiscvConfig { stage, dirty, ..RiscvConfig::new(Sv39, 56) }),
            ("Sv57x4", RiscvConfig { stage, ..RiscvConfig::new(Sv57, 50) }),
            (
                "Sv39 with 64K",
                RiscvConfig { dirty, page_sizes: napot(Sv39), ..RiscvConfig::new(Sv39, 56) },
            ),
            (
                "Sv48x4 with 64K",
                RiscvConfig { stage, page_sizes: napot(Sv48), ..RiscvConfig::new(Sv48, 56) },
            ),
        ];
        configs.map(|(name, config)| (name.to_owned(), Riscv::new(config).unwrap())).into()
    }

    fn walker(format: &Riscv, root: PhysAddr, _top_level: u32) -> RiscvWalker {
        let registers = format.registers(root);
        // The second stage alone has a root of four tables.
        let stage = match format.geometry().root.lg2_size {
            12 => walker::riscv::RiscvStage::First { fsc: registers.atp },
            _ => walker::riscv::RiscvStage::Second { iohgatp: registers.atp },
        };
        RiscvWalker::new(walker::riscv::RiscvRegisters {
            stage,
            // SADE and GADE.
            updates: if registers.tc & 0b11 << 7 != 0 { Switch::On } else { Switch::Off },
            svnapot: Switch::On,
            svpbmt: Switch::On,
            requester: Requester::User,
            sum: Switch::Off,
        })
        .unwrap()
    }

    fn strict(walker: &RiscvWalker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}
