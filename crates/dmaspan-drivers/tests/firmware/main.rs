//! Firmware's tables of IOMMUs: those of QEMU's machines, tables that tests make, some of them with
//! what real machines have, and damaged ones.

#![expect(clippy::cast_possible_truncation, reason = "tables of tests are short")]

mod damage;
mod made;
mod real;
mod tree;

use dmaspan_drivers::firmware::{DmaRequester, IommuKind, IommuMap, IommuUnit, ReservedMemory};

const VTD: &[u8] = include_bytes!("data/q35-vtd.dmar");
const VTD_ATS: &[u8] = include_bytes!("data/q35-vtd-ats.dmar");
const AMD: &[u8] = include_bytes!("data/q35-amd.ivrs");
const SMMU: &[u8] = include_bytes!("data/virt-smmuv3.iort");
const SMMUS: &[u8] = include_bytes!("data/virt-smmuv3-2.iort");
const RISCV: &[u8] = include_bytes!("data/virt-riscv.rimt");
const RISCV_PCI: &[u8] = include_bytes!("data/virt-riscv-pci.rimt");
const SMMU_TREE: &[u8] = include_bytes!("data/virt-smmuv3.dtb");
const RISCV_TREE: &[u8] = include_bytes!("data/virt-riscv.dtb");
const RISCV_PCI_TREE: &[u8] = include_bytes!("data/virt-riscv-pci.dtb");

/// The unit and the stream of a PCI function of segment 0.
fn stream(map: &IommuMap, id: u16) -> Option<(usize, u32)> {
    let found = map.streams(DmaRequester::Pci { segment: 0, id }).next();
    found.map(|found| (found.unit, found.stream))
}

fn named(map: &IommuMap, name: &str) -> Vec<(usize, u32)> {
    map.streams(DmaRequester::Named(name)).map(|found| (found.unit, found.stream)).collect()
}

fn reserved(map: &IommuMap, id: u16) -> Vec<ReservedMemory> {
    map.reserved(DmaRequester::Pci { segment: 0, id }).collect()
}

fn unit(kind: IommuKind, base: u64) -> IommuUnit {
    IommuUnit { kind, base, pci: None }
}

#[test]
fn vtd_of_q35_serves_the_functions_of_its_scopes_and_those_behind_its_bridges() {
    let map = IommuMap::dmar(VTD, |segment, id| (segment == 0 && id == 0x08).then_some(1..=2));
    let map = map.unwrap();
    assert_eq!(map.units(), [unit(IommuKind::Vtd, 0xfed9_0000)]);
    for id in [0x00, 0x08, 0xf8, 0xfa, 0xfb, 0x100, 0x1ff, 0x2ff] {
        assert_eq!(stream(&map, id), Some((0, id.into())), "{id:#x}");
    }
    for id in [0x10, 0xf9, 0x300] {
        assert_eq!(stream(&map, id), None, "{id:#x}");
    }
    assert_eq!(map.streams(DmaRequester::Pci { segment: 1, id: 0 }).next(), None);
    let bridgeless = IommuMap::dmar(VTD_ATS, |_, _| None).unwrap();
    assert_eq!(stream(&bridgeless, 0xfa), Some((0, 0xfa)));
    assert_eq!(stream(&bridgeless, 0x100), None);
}

#[test]
fn amd_vi_of_q35_is_a_pci_function_described_once() {
    let map = IommuMap::ivrs(AMD).unwrap();
    let [unit] = map.units() else { panic!("{:?}", map.units()) };
    assert_eq!((unit.kind, unit.base), (IommuKind::AmdVi, 0xfed8_0000));
    assert_eq!(unit.pci, Some((0, 0x08)));
    assert_eq!(stream(&map, 0x10), Some((0, 0x10)));
    assert_eq!(stream(&map, 0x18), None);
}

#[test]
fn smmus_of_virt_serve_a_bus_each() {
    let map = IommuMap::iort(SMMU).unwrap();
    assert_eq!(map.units(), [unit(IommuKind::SmmuV3, 0x0905_0000)]);
    assert_eq!((stream(&map, 0x10), stream(&map, 0xff)), (Some((0, 0x10)), Some((0, 0xff))));
    assert_eq!(stream(&map, 0x100), None);
    let map = IommuMap::iort(SMMUS).unwrap();
    let units = [0x0c00_0000, 0x0c02_0000].map(|base| unit(IommuKind::SmmuV3, base));
    assert_eq!(map.units(), units);
    assert_eq!((stream(&map, 0x10), stream(&map, 0x1010)), (Some((0, 0x10)), Some((1, 0x1010))));
    assert_eq!(stream(&map, 0x1100), None);
}

#[test]
fn riscv_of_virt_serves_all_buses_and_as_a_function_those_behind_it() {
    let map = IommuMap::rimt(RISCV).unwrap();
    assert_eq!(map.units(), [unit(IommuKind::Riscv, 0x0301_0000)]);
    assert_eq!((stream(&map, 0), stream(&map, 0xffff)), (Some((0, 0)), Some((0, 0xffff))));
    let map = IommuMap::rimt(RISCV_PCI).unwrap();
    let pci = Some((0, 0x18));
    assert_eq!(map.units(), [IommuUnit { pci, ..unit(IommuKind::Riscv, 0) }]);
    assert_eq!((stream(&map, 0x19), stream(&map, 0xffff)), (Some((0, 0x19)), Some((0, 0xffff))));
    assert_eq!((stream(&map, 0x10), stream(&map, 0x18)), (None, None));
}

#[test]
fn device_trees_of_virt_say_what_its_tables_say() {
    let map = IommuMap::device_tree(SMMU_TREE).unwrap();
    assert_eq!(map.units(), [unit(IommuKind::SmmuV3, 0x0905_0000)]);
    assert_eq!((stream(&map, 0x10), stream(&map, 0xffff)), (Some((0, 0x10)), Some((0, 0xffff))));
    let map = IommuMap::device_tree(RISCV_TREE).unwrap();
    assert_eq!(map.units(), [unit(IommuKind::Riscv, 0x0301_0000)]);
    assert_eq!((stream(&map, 0), stream(&map, 0xffff)), (Some((0, 0)), Some((0, 0xffff))));
    let map = IommuMap::device_tree(RISCV_PCI_TREE).unwrap();
    let pci = Some((0, 0x18));
    assert_eq!(map.units(), [IommuUnit { pci, ..unit(IommuKind::Riscv, 0) }]);
    assert_eq!((stream(&map, 0x10), stream(&map, 0x20)), (Some((0, 0x10)), Some((0, 0x20))));
    assert_eq!(stream(&map, 0x18), None);
}
