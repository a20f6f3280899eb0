//! Hardware that keeps walks until a command takes them.

use dmaspan::io_pgtable::RiscvStage;
use dmaspan::lg2;
use dmaspan_sim::iotlb::IotlbConfig;
use dmaspan_sim::walker::riscv::{RiscvRoot, RiscvWalkRegisters, RiscvWalker};
use dmaspan_sim::walker::{Requester, Switch};

use crate::hardware::{BASE_FORMAT, FIRST, Fake, SECOND, domain_of};
use crate::walked::{CacheCommand, Walked};

/// The extensions: walks by address, and blocks.
const NL: u64 = 1 << 42;
const S: u64 = 1 << 43;

fn storm(stage: RiscvStage, capabilities: u64, seed: u64) {
    let fake = Fake::new(BASE_FORMAT | capabilities);
    let iommu = fake.driver();
    let domain = domain_of(&iommu, stage, iommu.config(stage).unwrap());
    let atp = domain.format().registers(domain.root()).atp;
    let stage = match stage {
        RiscvStage::Second => RiscvRoot::Second { iohgatp: atp },
        RiscvStage::First(_) => RiscvRoot::First { fsc: atp & !(lg2::mask(16) << 44) },
    };
    let walker = RiscvWalker::new(RiscvWalkRegisters {
        stage,
        updates: Switch::Off,
        svnapot: Switch::On,
        svpbmt: Switch::On,
        requester: Requester::User,
        sum: Switch::Off,
    });
    let told = || fake.take().into_iter().filter_map(CacheCommand::riscv).collect();
    // The first number.
    let config = IotlbConfig::default();
    Walked::new(&domain, (walker.unwrap(), config), 1, &told, seed).storm(100);
}

#[test]
fn nothing_is_kept_that_the_tables_contradict() {
    for seed in 0..3 {
        for capabilities in [0, NL, S, NL | S] {
            storm(FIRST, capabilities, seed);
            storm(SECOND, capabilities, seed);
        }
    }
}
