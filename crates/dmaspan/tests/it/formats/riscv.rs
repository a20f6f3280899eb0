//! RISC-V: three to five levels, both halves of the first stage, and the second stage.

use dmaspan::io_pgtable::{
    Arena, DirtyTracking, Format, Half, Riscv, RiscvConfig, RiscvMemoryTypes, RiscvMode, RiscvStage,
};
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::riscv::{self, RiscvWalker};
use dmaspan_sim::walker::{Requester, Switch};

use super::checked;

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
            12 => riscv::RiscvRoot::First { fsc: registers.atp },
            _ => riscv::RiscvRoot::Second { iohgatp: registers.atp },
        };
        RiscvWalker::new(riscv::RiscvWalkRegisters {
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

format_suite!(suite, RiscvTables);
