//! Tables that are cut, damaged or nonsense are refused or read, and never a panic or without end.

use dmaspan_drivers::firmware::{DmaRequester, IommuMap};
use proptest::prelude::*;

use super::made::seal;
use super::*;

const TABLES: [&[u8]; 10] =
    [VTD, VTD_ATS, AMD, SMMU, SMMUS, RISCV, RISCV_PCI, SMMU_TREE, RISCV_TREE, RISCV_PCI_TREE];

/// Reads a table as each of the five, and asks for what it says.
fn read(table: &[u8]) -> usize {
    let maps = [
        IommuMap::dmar(table, |_, id| Some((id >> 8) as u8..=0xff)),
        IommuMap::ivrs(table),
        IommuMap::iort(table),
        IommuMap::rimt(table),
        IommuMap::device_tree(table),
    ];
    let mut believed = 0;
    for map in maps.into_iter().flatten() {
        believed += 1;
        for id in [0, 0x10, 0xfa, 0xffff] {
            let requester = DmaRequester::Pci { segment: 0, id };
            assert!(map.streams(requester).all(|found| found.unit < map.units().len()));
            assert!(map.reserved(requester).all(|memory| memory.first <= memory.last));
        }
    }
    believed
}

fn is_acpi(table: &[u8]) -> bool {
    table[0].is_ascii_uppercase()
}

#[test]
fn a_table_that_is_cut_anywhere_is_refused() {
    for table in TABLES {
        assert_eq!(read(table), 1);
        for end in 0..table.len() {
            assert_eq!(read(&table[..end]), 0, "{end} bytes");
        }
    }
}

#[test]
fn an_acpi_table_that_is_cut_and_says_so_does_not_make_readers_panic() {
    for table in TABLES.into_iter().filter(|table| is_acpi(table)) {
        for end in 36..table.len() {
            let mut table = table[..end].to_vec();
            seal(&mut table);
            read(&table);
        }
    }
}

#[test]
fn any_byte_may_be_another_and_no_reader_panics() {
    for table in TABLES {
        for at in 0..table.len() {
            for value in [0, 0xff, table[at] ^ 4] {
                let mut table = table.to_vec();
                table[at] = value;
                if is_acpi(&table) && !(4..8).contains(&at) {
                    seal(&mut table);
                }
                read(&table);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_may_be_others_and_no_reader_panics(
        which in 0..TABLES.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let mut table = TABLES[which].to_vec();
        for (at, value) in changes {
            let at = at.index(table.len());
            table[at] = value;
        }
        if is_acpi(&table) {
            seal(&mut table);
        }
        read(&table);
    }
}
