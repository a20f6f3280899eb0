//! Descriptors and registers, bit by bit, against values worked out by hand from the manual
//! (DDI 0487, D8.3 and the register descriptions in D24).

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ArmS1Registers, Half, PageTable};
use dmaspan::{Coherency, PhysAddr, Prot};
use dmaspan_sim::walker::{TableWords, WalkPath, Walker};

use crate::common::{arena, map, span, walker};

/// The descriptors on the way to `iova`, the root's first.
fn descriptors<const G: u32>(
    config: ArmLpaeS1Config,
    prot: Prot,
    paddr: u64,
    len: u64,
) -> Vec<u64> {
    let mut table = PageTable::new(ArmLpaeS1::<G>::new(config).unwrap(), arena()).unwrap();
    map(&mut table, 0, &[span(paddr, len)], prot).unwrap();
    let walker = walker(table.format(), table.root());
    let iova = dmaspan::Iova::new(0);
    let access = dmaspan_sim::walker::Access::Read;
    let root = walker.root(iova, access).unwrap();
    let mut path = WalkPath::new();
    let _ = walker.walk_from(table.memory(), root, iova, access, &mut path);
    path.iter().map(|step| table.memory().read_u64(step.entry_paddr).unwrap()).collect()
}

#[test]
fn page_descriptors_have_the_bits_of_the_manual() {
    let page = |prot| descriptors::<12>(ArmLpaeS1Config::new(48, 48), prot, 0x5000, 4096)[3];
    // Valid and page 0b11, AttrIndx 1 in bits 4:2, AP[1] bit 6, SH 0b11 in bits 9:8, AF 10, nG 11.
    assert_eq!(page(Prot::READ_WRITE | Prot::CACHE), 0x5f47);
    // AttrIndx 0 and SH 0b10: non-cacheable, outer shareable.
    assert_eq!(page(Prot::READ_WRITE), 0x5e43);
    // AP[2] bit 7: read-only.
    assert_eq!(page(Prot::READ), 0x5ec3);
    // AttrIndx 2: device.
    assert_eq!(page(Prot::READ_WRITE | Prot::MMIO), 0x5e4b);
    // AP[1] clear: privileged only.
    assert_eq!(page(Prot::READ_WRITE | Prot::PRIV), 0x5e03);
    // UXN and PXN, bits 54 and 53.
    assert_eq!(page(Prot::READ_WRITE | Prot::NOEXEC), 0x0060_0000_0000_5e43);
}

#[test]
fn block_group_and_table_descriptors_have_the_bits_of_the_manual() {
    let config = ArmLpaeS1Config::new(48, 48);
    let walk = descriptors::<12>(config, Prot::READ_WRITE | Prot::CACHE, 0x4020_0000, 2 << 20);
    // A block is 0b01. Tables are 0b11 and an address, and no attribute.
    assert_eq!(walk[2], 0x4020_0f45);
    assert_eq!(walk[1] & 0xfff, 0b11);
    assert_eq!(walk[0] >> 48, 0);
    let sizes = Some(ArmLpaeS1::<12>::PAGE_SIZES | ArmLpaeS1::<12>::CONTIGUOUS_SIZES);
    let config = ArmLpaeS1Config { page_sizes: sizes, ..config };
    let walk = descriptors::<12>(config, Prot::READ_WRITE | Prot::CACHE, 0x4001_0000, 1 << 16);
    // Contiguous is bit 52.
    assert_eq!(walk[3], 0x0010_0000_4001_0f47);
    // With 64K, address bits 51:48 are in bits 15:12.
    let config = ArmLpaeS1Config::new(52, 52);
    let walk = descriptors::<16>(config, Prot::READ_WRITE | Prot::CACHE, 0xa << 48, 1 << 16);
    assert_eq!(walk.last(), Some(&0xaf47));
}

#[test]
fn registers_have_the_bits_of_the_manual() {
    fn registers<const G: u32>(config: ArmLpaeS1Config) -> ArmS1Registers {
        ArmLpaeS1::<G>::new(config).unwrap().registers(PhysAddr::new(0x4321_0000))
    }
    let config = ArmLpaeS1Config::new(48, 48);
    // T0SZ 16, IRGN0 and ORGN0 0b01, SH0 0b11, TG0 0b00, EPD1 bit 23, IPS 0b101.
    let plain = registers::<12>(config);
    assert_eq!(plain, ArmS1Registers { ttbr: 0x4321_0000, tcr: 0x5_0080_3510, mair: 0xf404_ff44 });
    assert_eq!(registers::<14>(config).tcr, 0x5_0080_b510, "TG0 0b10");
    assert_eq!(registers::<16>(config).tcr, 0x5_0080_7510, "TG0 0b01");
    let walks = Coherency::NonCoherent;
    assert_eq!(registers::<12>(ArmLpaeS1Config { walks, ..config }).tcr, 0x5_0080_2010);
    let half = Half::Upper;
    // T1SZ 16, IRGN1, ORGN1, SH1 as before, TG1 0b10, 0b01, 0b11; EPD0 bit 7.
    assert_eq!(registers::<12>(ArmLpaeS1Config { half, ..config }).tcr, 0x5_b510_0080);
    assert_eq!(registers::<14>(ArmLpaeS1Config { half, ..config }).tcr, 0x5_7510_0080);
    assert_eq!(registers::<16>(ArmLpaeS1Config { half, ..config }).tcr, 0x5_f510_0080);
    for (output_bits, ips) in [(32, 0), (36, 1), (40, 2), (42, 3), (44, 4), (48, 5)] {
        let tcr = registers::<12>(ArmLpaeS1Config { output_bits, ..config }).tcr;
        assert_eq!(tcr >> 32, ips, "{output_bits} bits");
    }
    let high = ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(52, 52)).unwrap();
    // TTBR has address bits 51:48 in bits 5:2; IPS 0b110.
    let registers = high.registers(PhysAddr::new(0x9_0000_4321_0000));
    assert_eq!((registers.ttbr, registers.tcr >> 32), (0x4321_0024, 6));
}
