//! The manuals' names for tables, entries and fields. The sources are those that each format's file
//! names.

use crate::io_pgtable::manual::{EntryField, Manual, ManualEntry, ManualLevel};

/// The fields of an entry as manuals number their bits: `"name" bit` or `"name" high:low`.
macro_rules! fields {
    (@one $name:literal $bit:literal) => { EntryField::bit($name, $bit) };
    (@one $name:literal $high:literal $low:literal) => { EntryField::bits($name, $high, $low) };
    [$($name:literal $high:literal $(: $low:literal)?),* $(,)?] => {
        &[$(fields!(@one $name $high $($low)?)),*]
    };
}

const fn level(
    table: &'static str,
    link: ManualEntry,
    leaf: ManualEntry,
    group: ManualEntry,
) -> ManualLevel {
    ManualLevel { table, link, leaf, group }
}

/// A level whose entries have one name, and no groups.
const fn uniform(
    table: &'static str,
    entry: &'static str,
    link: &'static [EntryField],
    leaf: &'static [EntryField],
) -> ManualLevel {
    let leaf = ManualEntry::new(entry, leaf);
    level(table, ManualEntry::new(entry, link), leaf, leaf)
}

/// SDM, volume 3A, 4.5.4, tables 4-14 to 4-20.
pub(super) const X86_64: Manual = {
    const LINK: &[EntryField] = fields!["P" 0, "R/W" 1, "U/S" 2, "PWT" 3, "PCD" 4, "A" 5, "XD" 63];
    const PAGE: &[EntryField] = fields![
        "P" 0, "R/W" 1, "U/S" 2, "PWT" 3, "PCD" 4, "A" 5, "D" 6, "PAT" 7, "G" 8, "XD" 63,
    ];
    const LARGE: &[EntryField] = fields![
        "P" 0, "R/W" 1, "U/S" 2, "PWT" 3, "PCD" 4, "A" 5, "D" 6, "PS" 7, "G" 8, "PAT" 12, "XD" 63,
    ];
    const LEVELS: &[ManualLevel] = &[
        uniform("page table", "PTE", LINK, PAGE),
        uniform("page directory", "PDE", LINK, LARGE),
        uniform("page-directory-pointer table", "PDPTE", LINK, LARGE),
        uniform("PML4 table", "PML4E", LINK, LARGE),
        uniform("PML5 table", "PML5E", LINK, LARGE),
    ];
    Manual { title: "x86-64 page tables", levels: LEVELS }
};

/// VT-d, 9.8.
pub(super) const VTD_SS: Manual = {
    const LINK: &[EntryField] = fields!["R" 0, "W" 1, "X" 2, "A" 8];
    const PAGE: &[EntryField] = fields![
        "R" 0, "W" 1, "X" 2, "EMT" 5:3, "IPAT" 6, "A" 8, "D" 9, "SNP" 11,
    ];
    const LARGE: &[EntryField] = fields![
        "R" 0, "W" 1, "X" 2, "EMT" 5:3, "IPAT" 6, "PS" 7, "A" 8, "D" 9, "SNP" 11,
    ];
    const LEVELS: &[ManualLevel] = &[
        uniform("second-stage page table", "SS-PTE", LINK, PAGE),
        uniform("second-stage page directory", "SS-PDE", LINK, LARGE),
        uniform("second-stage page-directory-pointer table", "SS-PDPTE", LINK, LARGE),
        uniform("second-stage PML4 table", "SS-PML4E", LINK, LARGE),
        uniform("second-stage PML5 table", "SS-PML5E", LINK, LARGE),
    ];
    Manual { title: "VT-d second-stage page tables", levels: LEVELS }
};

/// AMD IOMMU, 2.2.3, the tables of PDE and PTE. The manual counts levels from 1.
pub(super) const AMD_V1: Manual = {
    const LINK: ManualEntry =
        ManualEntry::new("PDE", fields!["PR" 0, "A" 5, "NextLevel" 11:9, "IR" 61, "IW" 62]);
    const LEAF: ManualEntry = ManualEntry::new(
        "PTE",
        fields!["PR" 0, "A" 5, "D" 6, "NextLevel" 11:9, "U" 59, "FC" 60, "IR" 61, "IW" 62],
    );
    const LEVELS: &[ManualLevel] = &[
        level("level 1 table", LINK, LEAF, LEAF),
        level("level 2 table", LINK, LEAF, LEAF),
        level("level 3 table", LINK, LEAF, LEAF),
        level("level 4 table", LINK, LEAF, LEAF),
        level("level 5 table", LINK, LEAF, LEAF),
        level("level 6 table", LINK, LEAF, LEAF),
    ];
    Manual { title: "AMD I/O page tables for host translations", levels: LEVELS }
};

/// Privileged Architecture, "Sv39" and its siblings, "Svnapot" and "Svpbmt".
const RISCV_LEVELS: &[ManualLevel] = {
    const FIELDS: &[EntryField] = fields![
        "V" 0, "R" 1, "W" 2, "X" 3, "U" 4, "G" 5, "A" 6, "D" 7, "RSW" 9:8, "PBMT" 62:61, "N" 63,
    ];
    const LINK: ManualEntry = ManualEntry::new("pointer PTE", FIELDS);
    const LEAF: ManualEntry = ManualEntry::new("leaf PTE", FIELDS);
    const NAPOT: ManualEntry = ManualEntry::new("NAPOT PTE", FIELDS);
    &[
        level("level 0 page table", LINK, LEAF, NAPOT),
        level("level 1 page table", LINK, LEAF, NAPOT),
        level("level 2 page table", LINK, LEAF, NAPOT),
        level("level 3 page table", LINK, LEAF, NAPOT),
        level("level 4 page table", LINK, LEAF, NAPOT),
    ]
};

pub(super) const fn riscv(title: &'static str) -> Manual {
    Manual { title, levels: RISCV_LEVELS }
}

/// DDI 0487, D8.3.1: descriptors of any granule, by the fields of leaves.
const fn long_levels(link: ManualEntry, leaf: &'static [EntryField]) -> [ManualLevel; 4] {
    let page = ManualEntry::new("page descriptor", leaf);
    let block = ManualEntry::new("block descriptor", leaf);
    [
        level("level 3 table", link, page, page),
        level("level 2 table", link, block, block),
        level("level 1 table", link, block, block),
        level("level 0 table", link, block, block),
    ]
}

const ARM_S1_LEVELS: &[ManualLevel] = {
    const LEAF: &[EntryField] = fields![
        "AttrIndx" 4:2, "NS" 5, "AP[2:1]" 7:6, "SH" 9:8, "AF" 10, "nG" 11, "DBM" 51,
        "Contiguous" 52, "PXN" 53, "UXN" 54,
    ];
    const LINK: ManualEntry = ManualEntry::new(
        "table descriptor",
        fields!["PXNTable" 59, "UXNTable" 60, "APTable" 62:61, "NSTable" 63],
    );
    &long_levels(LINK, LEAF)
};

const ARM_S2_LEVELS: &[ManualLevel] = {
    const LEAF: &[EntryField] = fields![
        "MemAttr" 5:2, "S2AP" 7:6, "SH" 9:8, "AF" 10, "DBM" 51, "Contiguous" 52, "XN" 54:53,
    ];
    &long_levels(ManualEntry::new("table descriptor", &[]), LEAF)
};

/// DDI 0487, G5.5: stage 1 in AArch32.
pub(super) const ARM_32_S1: Manual = {
    const LEAF: &[EntryField] = fields![
        "AttrIndx" 4:2, "NS" 5, "AP[2:1]" 7:6, "SH" 9:8, "AF" 10, "nG" 11, "Contiguous" 52,
        "PXN" 53, "XN" 54,
    ];
    const LINK: ManualEntry = ManualEntry::new(
        "table descriptor",
        fields!["PXNTable" 59, "XNTable" 60, "APTable" 62:61, "NSTable" 63],
    );
    const LEVELS: &[ManualLevel] = &long_levels(LINK, LEAF);
    Manual { title: "VMSAv8-32 long descriptors, stage 1", levels: LEVELS }
};

/// The same, stage 2.
pub(super) const ARM_32_S2: Manual = {
    const LEAF: &[EntryField] = fields![
        "MemAttr" 5:2, "S2AP" 7:6, "SH" 9:8, "AF" 10, "Contiguous" 52, "XN" 54:53,
    ];
    const LEVELS: &[ManualLevel] = &long_levels(ManualEntry::new("table descriptor", &[]), LEAF);
    Manual { title: "VMSAv8-32 long descriptors, stage 2", levels: LEVELS }
};

pub(super) const fn arm_s1(granule_lg2: u32) -> Manual {
    let title = match granule_lg2 {
        12 => "VMSAv8-64 stage 1, 4K granule",
        14 => "VMSAv8-64 stage 1, 16K granule",
        _ => "VMSAv8-64 stage 1, 64K granule",
    };
    Manual { title, levels: ARM_S1_LEVELS }
}

pub(super) const fn arm_s2(granule_lg2: u32) -> Manual {
    let title = match granule_lg2 {
        12 => "VMSAv8-64 stage 2, 4K granule",
        14 => "VMSAv8-64 stage 2, 16K granule",
        _ => "VMSAv8-64 stage 2, 64K granule",
    };
    Manual { title, levels: ARM_S2_LEVELS }
}

/// DDI 0406C, B3.5.1, figures B3-4 and B3-5.
pub(super) const ARM_V7S: Manual = {
    const LINK: ManualEntry =
        ManualEntry::new("page table descriptor", fields!["PXN" 2, "NS" 3, "Domain" 8:5]);
    const SMALL: ManualEntry = ManualEntry::new(
        "small page descriptor",
        fields!["XN" 0, "B" 2, "C" 3, "AP[1:0]" 5:4, "TEX" 8:6, "AP[2]" 9, "S" 10, "nG" 11],
    );
    const LARGE: ManualEntry = ManualEntry::new(
        "large page descriptor",
        fields!["B" 2, "C" 3, "AP[1:0]" 5:4, "AP[2]" 9, "S" 10, "nG" 11, "TEX" 14:12, "XN" 15],
    );
    const SECTION: &[EntryField] = fields![
        "B" 2, "C" 3, "XN" 4, "Domain" 8:5, "AP[1:0]" 11:10, "TEX" 14:12, "AP[2]" 15, "S" 16,
        "nG" 17, "NS" 19,
    ];
    const SUPERSECTION: &[EntryField] = fields![
        "B" 2, "C" 3, "XN" 4, "AP[1:0]" 11:10, "TEX" 14:12, "AP[2]" 15, "S" 16, "nG" 17, "NS" 19,
    ];
    const LEVELS: &[ManualLevel] = &[
        level("second-level table", LINK, SMALL, LARGE),
        level(
            "first-level table",
            LINK,
            ManualEntry::new("section descriptor", SECTION),
            ManualEntry::new("supersection descriptor", SUPERSECTION),
        ),
    ];
    Manual { title: "VMSAv7 short descriptors", levels: LEVELS }
};

/// Linux's io-pgtable-arm-v7s.c: address bits in the place of permissions.
pub(super) const MEDIATEK: Manual = {
    const LINK: ManualEntry =
        ManualEntry::new("page table descriptor", fields!["PA[33]" 4, "PA[34]" 5, "PA[32]" 9]);
    const PAGE: &[EntryField] = fields![
        "B" 2, "C" 3, "PA[33]" 4, "PA[34]" 5, "PA[32]" 9, "S" 10, "nG" 11,
    ];
    const SECTION: &[EntryField] = fields![
        "B" 2, "C" 3, "PA[33]" 4, "PA[34]" 5, "PA[32]" 9, "TEX" 14:12, "S" 16, "nG" 17,
    ];
    const LEVELS: &[ManualLevel] = &[
        level(
            "second-level table",
            LINK,
            ManualEntry::new("small page descriptor", PAGE),
            ManualEntry::new("large page descriptor", PAGE),
        ),
        level(
            "first-level table",
            LINK,
            ManualEntry::new("section descriptor", SECTION),
            ManualEntry::new("supersection descriptor", SECTION),
        ),
    ];
    Manual { title: "VMSAv7 short descriptors, MediaTek's", levels: LEVELS }
};
