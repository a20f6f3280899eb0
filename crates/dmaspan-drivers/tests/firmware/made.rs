//! ACPI tables with what QEMU's machines do not have.

use dmaspan_drivers::firmware::{DmaRequester, FirmwareError, IommuMap, ReservedMemory};

use super::{named, reserved, stream};

/// A table whose length and sum are right.
pub(crate) fn acpi(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let mut table = vec![0; 36];
    table[..4].copy_from_slice(signature);
    table.extend_from_slice(body);
    seal(&mut table);
    table
}

/// Makes a table's length and sum right.
pub(crate) fn seal(table: &mut [u8]) {
    let length = (table.len() as u32).to_le_bytes();
    table[4..8].copy_from_slice(&length);
    table[9] = 0;
    table[9] = table.iter().fold(0u8, |sum, &byte| sum.wrapping_sub(byte));
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn same(first: u64, last: u64) -> ReservedMemory {
    ReservedMemory { first, last, paddr: Some(first) }
}

/// A structure of DMAR or IVRS: the type, and what follows the length.
pub(crate) fn structure(kind: u16, body: &[u8]) -> Vec<u8> {
    let length = (4 + body.len()) as u16;
    [&kind.to_le_bytes()[..], &length.to_le_bytes(), body].concat()
}

#[test]
fn a_unit_for_all_others_comes_after_the_scopes_and_reserved_memory_is_of_its_functions() {
    let unit = |flags: u32, base: u32, scope: &[u8]| {
        structure(0, &[words(&[flags, base, 0]), scope.to_vec()].concat())
    };
    // An endpoint behind a bridge: 00:1c.0, then device 3, function 1.
    let scope = [1, 10, 0, 0, 0, 0, 0x1c, 0, 3, 1];
    let memory = [words(&[0, 0x8000_0000, 0, 0x8000_ffff, 0]), scope.to_vec()].concat();
    let body = [vec![0; 12], unit(1, 0x1000, &[]), unit(0, 0x2000, &scope), structure(1, &memory)];
    let map = IommuMap::dmar(&acpi(b"DMAR", &body.concat()), |_, id| (id == 0xe0).then_some(5..=5));
    let map = map.unwrap();
    assert_eq!((stream(&map, 0x519), stream(&map, 0x518)), (Some((1, 0x519)), Some((0, 0x518))));
    assert_eq!(reserved(&map, 0x519), [same(0x8000_0000, 0x8000_ffff)]);
    assert_eq!(reserved(&map, 0x518), []);
}

#[test]
fn aliases_of_amd_vi_are_the_streams_and_its_memory_is_of_ranges() {
    let entries = [
        [0x43, 0x00, 0x01, 0, 0, 0x20, 0x01, 0].as_slice(), // from 0x100 on, by the alias 0x120,
        &[4, 0x0f, 0x01, 0],                                // to 0x10f
        &[0x42, 0x30, 0, 0, 0, 0x31, 0, 0],
        &[1, 0, 0, 0],
    ];
    let unit = [words(&[0x0040_0002, 0xfed8_0000, 0, 0, 0]), entries.concat()].concat();
    let memory = words(&[0x010f_0100, 0, 0, 0x7000_0000, 0, 0x2000, 0]);
    let body = [vec![0; 12], structure(0x10, &unit), structure(0x0122, &memory)];
    let map = IommuMap::ivrs(&acpi(b"IVRS", &body.concat())).unwrap();
    assert_eq!(stream(&map, 0x10f), Some((0, 0x120)));
    assert_eq!(stream(&map, 0x30), Some((0, 0x31)));
    assert_eq!(stream(&map, 0x32), Some((0, 0x32)));
    assert_eq!(reserved(&map, 0x100), [same(0x7000_0000, 0x7000_1fff)]);
    assert_eq!(reserved(&map, 0x110), []);
}

/// A node of IORT: type, mappings, and what is before these; mappings are 5 words.
pub(crate) fn node(kind: u8, before: &[u8], mappings: &[[u32; 5]]) -> Vec<u8> {
    let offset = 16 + before.len() as u32;
    let length = (offset as usize + 20 * mappings.len()) as u16;
    let mut node = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    node[1..3].copy_from_slice(&length.to_le_bytes());
    node.extend(words(&[mappings.len() as u32, offset]));
    node.extend_from_slice(before);
    node.extend(mappings.iter().flat_map(|mapping| words(mapping)));
    node
}

pub(crate) fn iort(nodes: &[Vec<u8>]) -> Vec<u8> {
    let head = words(&[nodes.len() as u32, 48, 0]);
    acpi(b"IORT", &[head, nodes.concat()].concat())
}

#[test]
fn named_devices_have_streams_of_smmus_and_reserved_memory_follows_the_stream() {
    let smmu = node(3, &words(&[0x2b40_0000, 0]), &[]);
    let name = [vec![0; 13], b"\\_SB.GPU\0\0\0".to_vec()].concat();
    let gpu = node(1, &name, &[[0, 0, 7, 48, 1], [0, 0, 9, 48, 1]]);
    let memory = words(&[0, 1, 28, 0x9000_0000, 0, 0x1000, 0, 0]);
    let held = node(6, &memory, &[[0, 0, 9, 48, 1]]);
    let map = IommuMap::iort(&iort(&[smmu, gpu, held])).unwrap();
    assert_eq!(named(&map, "\\_SB.GPU"), [(0, 7), (0, 9)]);
    assert_eq!(named(&map, "\\_SB.DSP"), []);
    let found: Vec<_> = map.reserved(DmaRequester::Named("\\_SB.GPU")).collect();
    assert_eq!(found, [same(0x9000_0000, 0x9000_0fff)]);
}

#[test]
fn a_refusal_names_the_table_the_place_and_the_limit() {
    let said = |table: &[u8]| IommuMap::iort(table).unwrap_err().to_string();
    let smmu = node(4, &words(&[0, 0]), &[]);
    let root = |mapping| iort(&[smmu.clone(), node(2, &words(&[0; 6]), &[mapping])]);
    assert_eq!(
        said(&root([0, 0, 0, 49, 0])),
        "the reference at 0x7c of the IORT leads to 0x31, where no IOMMU is"
    );
    assert_eq!(
        said(&root([1, u32::MAX, 0, 48, 0])),
        "the number of IDs at 0x74 of the IORT is 0x100000000, but may be 0x1 to 0xffffffff"
    );
    let mut table = iort(std::slice::from_ref(&smmu));
    table[49] = 60;
    super::made::seal(&mut table);
    assert_eq!(said(&table), "the node at 0x30 of the IORT has 0x3c bytes, but these end at 0x48");
    table[50] = 1;
    assert_eq!(
        IommuMap::iort(&table).unwrap_err(),
        FirmwareError::Checksum { table: "IORT", sum: 1 }
    );
    assert_eq!(said(super::AMD), "this is no IORT: its first four bytes are 0x49565253");
    assert!(said(b"IO").contains("the signature at 0x0 of the IORT has 0x4 bytes"));
}
