//! Context banks, and what hardware has.

use dmaspan::Prot;
use dmaspan::io_pgtable::{
    Arena, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS2, ArmV7s, TableMemory,
};
use dmaspan::iommu::{HardwareError, IommuOps};
use dmaspan_drivers::Error;
use dmaspan_drivers::arm_smmu::{Has, SmmuV2Config};
use dmaspan_sim::smmu_v2::{Aarch32, PageSize, SmmuConfig, Stages};

use super::rig::{Rig, Tables, granule, map, target, unmap};
use crate::for_all_tables;

#[test]
fn banks_with_stage_2_alone_are_taken_first_and_all_come_back() {
    let hardware = SmmuConfig { context_banks: 4, stage2_banks: 2, ..Default::default() };
    let rig = Rig::with(hardware, SmmuV2Config::new());
    let two = |rig: &Rig| rig.driver.ops::<ArmLpaeS2<12>>();
    let one = |rig: &Rig| rig.driver.ops::<ArmLpaeS1<12>>();
    let taken = [two(&rig), two(&rig), two(&rig), one(&rig)].map(Result::unwrap);
    assert_eq!(taken.each_ref().map(|ops| ops.bank()), [0, 1, 2, 3]);
    let none = Error::NoIds { what: "context banks", limit: 4 };
    assert_eq!(two(&rig).unwrap_err(), none);
    let [first, second, third, fourth] = taken;
    drop(first);
    // Stage 1 cannot have that one.
    assert_eq!(one(&rig).unwrap_err(), none);
    drop((second, third, fourth));
    let taken = [one(&rig), one(&rig), two(&rig), two(&rig)].map(Result::unwrap);
    assert_eq!(taken.each_ref().map(|ops| ops.bank()), [2, 3, 0, 1]);
}

#[test]
fn a_domain_is_not_taken_away_from_a_stream_that_has_it() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<ArmLpaeS1<12>>(1), rig.domain::<ArmLpaeS1<12>>());
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    stream.attach(target(&domain)).unwrap();
    let what = "a stream is still attached to this domain";
    assert_eq!(domain.ops().detach(), Err(HardwareError { what, status: 0 }));
    assert_eq!(rig.reads(1, 0), Some(0x8000_0000));
    stream.detach().unwrap();
    assert_eq!(domain.ops().detach(), Ok(()));
    // It can be attached anew.
    stream.attach(target(&domain)).unwrap();
    assert_eq!(rig.reads(1, 0), Some(0x8000_0000));
}

fn works<F: Tables>(hardware: SmmuConfig, config: SmmuV2Config)
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::with(hardware, config);
    let page = granule::<F>();
    let domains = [rig.domain::<F>(), rig.domain::<F>()];
    let streams = [rig.stream::<F>(1), rig.stream::<F>(2)];
    let top = |domain: &super::rig::TestDomain<F>| domain.geometry().aperture.last().get() + 1;
    for ((domain, stream), paddr) in domains.iter().zip(&streams).zip([1u64 << 31, 3 << 30]) {
        stream.attach(target(domain)).unwrap();
        map(domain, 0, paddr, 2 * page, Prot::READ_WRITE);
        // The uppermost address of the aperture.
        map(domain, top(domain) - page, paddr, page, Prot::READ_WRITE);
    }
    let last = top(&domains[0]) - 1;
    assert_eq!(rig.reads(1, last), Some((1 << 31) + page - 1), "{} {hardware:?}", F::NAME);
    assert_eq!(
        [1, 2].map(|id| rig.reads(id, page)),
        [(1 << 31) + page, (3 << 30) + page].map(Some)
    );
    unmap(&domains[0], page, page);
    assert_eq!([1, 2].map(|id| rig.reads(id, page)), [None, Some((3 << 30) + page)]);
    unmap(&domains[0], top(&domains[0]) - page, page);
    assert_eq!(rig.reads(1, last), None, "{} {hardware:?}", F::NAME);
    assert!(rig.reads(1, 0).is_some() && rig.reads(2, last).is_some());
    streams[0].detach().unwrap();
    assert_eq!(rig.reads(1, 0), None);
    let counters = rig.hardware.counters();
    assert_eq!((counters.undefined_reads, counters.undefined_writes), (0, 0), "{}", F::NAME);
    assert_eq!(counters.misconfigured, 0, "{}", F::NAME);
}

#[test]
fn registers_in_pages_of_64k_are_found() {
    for pages_lg2 in [1, 4, 7] {
        let (page_size, context_banks) = (PageSize::Size64K, 2);
        let hardware = SmmuConfig { page_size, pages_lg2, context_banks, ..Default::default() };
        for_all_tables!(works, hardware, SmmuV2Config::new());
    }
    let context_banks = 128;
    let hardware = SmmuConfig { pages_lg2: 8, context_banks, ..Default::default() };
    for_all_tables!(works, hardware, SmmuV2Config::new());
}

#[test]
fn ids_of_8_and_of_16_bits_are_where_hardware_looks_for_them() {
    for vmid16 in [false, true] {
        let hardware = SmmuConfig { vmid16, ..Default::default() };
        let first_id = 0xe0;
        for_all_tables!(works, hardware, SmmuV2Config { first_id, ..SmmuV2Config::new() });
    }
    let hardware = SmmuConfig { vmid16: true, ..Default::default() };
    let config = SmmuV2Config { first_id: 0xfe00, ..SmmuV2Config::new() };
    works::<ArmLpaeS1<12>>(hardware, config);
    works::<ArmLpaeS2<12>>(hardware, config);
    works::<ArmLpae32S2>(hardware, config);
    let rig = Rig::with(hardware, config);
    let refused = rig.driver.ops::<ArmV7s>().unwrap_err();
    assert_eq!(refused, Error::Config { what: "the ASID", value: 0xfe00, limit: 0xff });
    let rig = Rig::with(SmmuConfig::default(), config);
    let refused = rig.driver.ops::<ArmLpaeS2<16>>().unwrap_err();
    assert_eq!(refused, Error::Config { what: "the VMID", value: 0xfe01, limit: 0xff });
}

#[test]
fn all_of_a_small_upstream_bus_is_translated() {
    for upstream_bits in [32, 36, 40, 42, 44, 49] {
        let bits = upstream_bits.min(48);
        let (ipa_bits, output_bits) = (bits, bits);
        let hardware = SmmuConfig { upstream_bits, ipa_bits, output_bits, ..Default::default() };
        works::<ArmLpaeS1<12>>(hardware, SmmuV2Config::new());
        works::<ArmLpaeS1<14>>(hardware, SmmuV2Config::new());
        works::<ArmLpaeS1<16>>(hardware, SmmuV2Config::new());
        works::<ArmLpaeS2<12>>(hardware, SmmuV2Config::new());
        works::<ArmLpaeS2<14>>(hardware, SmmuV2Config::new());
        works::<ArmLpaeS2<16>>(hardware, SmmuV2Config::new());
        works::<ArmLpae32S1>(hardware, SmmuV2Config::new());
    }
}

#[test]
fn what_the_hardware_does_not_have_is_refused() {
    let refused = |result: Result<_, Error>| match result {
        Err(Error::Unsupported { what, .. }) => what,
        Err(other) => panic!("{other}"),
        Ok(super::rig::Ops { .. }) => panic!("taken"),
    };
    let rig = |config| Rig::with(config, SmmuV2Config::new());
    let one = rig(SmmuConfig { stages: Stages::One, granules: 1 << 12, ..Default::default() });
    assert_eq!(refused(one.driver.ops::<ArmLpaeS2<12>>()), "such a stage");
    assert_eq!(refused(one.driver.ops::<ArmLpaeS1<14>>()), "such a granule");
    assert!(one.driver.ops::<ArmLpaeS1<12>>().is_ok());
    let (stages, banks) = (Stages::Two, SmmuConfig::default().context_banks);
    let two = rig(SmmuConfig { stages, stage2_banks: banks, ..Default::default() });
    assert_eq!(refused(two.driver.ops::<ArmLpaeS1<12>>()), "such a stage");
    assert!(two.driver.ops::<ArmLpaeS2<12>>().is_ok());
    let long = rig(SmmuConfig { aarch32: Aarch32::Long, ..Default::default() });
    assert_eq!(refused(long.driver.ops::<ArmV7s>()), "such page tables");
    assert!(long.driver.ops::<ArmLpae32S1>().is_ok());
    let none = rig(SmmuConfig { aarch32: Aarch32::None, ..Default::default() });
    assert_eq!(refused(none.driver.ops::<ArmLpae32S1>()), "such page tables");
    let features = none.driver.features();
    assert_eq!((features.long_descriptors, features.short_descriptors), (Has::No, Has::No));
}
