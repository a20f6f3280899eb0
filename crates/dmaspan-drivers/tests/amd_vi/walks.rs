//! Hardware that keeps walks until a command takes them.

use dmaspan_drivers::amd_vi::AmdViConfig;
use dmaspan_sim::iotlb::{AbsentEntries, IotlbConfig};
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};

use crate::fake::{CAPABILITY, NP_CACHE, Rig, config};
use crate::walked::{CacheCommand, Walked};

fn storm(capability: u32, absent: AbsentEntries, seed: u64) {
    let rig = Rig::with(AmdViConfig { capability, ..config() });
    let domain = rig.domain();
    let (root, level) = domain.root_and_level();
    let dte = domain.format().registers(root, level).dte;
    let walker = AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap();
    let told = || {
        rig.fake.take().into_iter().filter_map(|seen| CacheCommand::amd_vi(seen.command)).collect()
    };
    let config = IotlbConfig { absent, ..IotlbConfig::default() };
    let space = domain.ops().domain_id().into();
    Walked::new(&domain, (walker, config), space, &told, seed).storm(100);
}

#[test]
fn nothing_is_kept_that_the_tables_contradict() {
    for seed in 0..2 {
        storm(CAPABILITY, AbsentEntries::NotCached, seed);
    }
}

#[test]
fn entries_of_any_level_that_were_absent_are_seen_once_they_are_mapped() {
    for seed in 0..2 {
        storm(CAPABILITY | NP_CACHE, AbsentEntries::Cached, seed);
    }
}
