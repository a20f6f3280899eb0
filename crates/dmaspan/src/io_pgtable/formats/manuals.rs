//! The manuals' names for tables, entries and fields. The sources are those that each format's file
//! names.

use crate::io_pgtable::manual::{EntryField, Manual, ManualEntry, ManualLevel};

const fn bit(name: &'static str, bit: u32) -> EntryField {
    EntryField::bit(name, bit)
}

const fn bits(name: &'static str, high: u32, low: u32) -> EntryField {
    EntryField::bits(name, high, low)
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
    const LINK: &[EntryField] = &[
        bit("P", 0),
        bit("R/W", 1),
        bit("U/S", 2),
        bit("PWT", 3),
        bit("PCD", 4),
        bit("A", 5),
        bit("XD", 63),
    ];
    const PAGE: &[EntryField] = &[
        bit("P", 0),
        bit("R/W", 1),
        bit("U/S", 2),
        bit("PWT", 3),
        bit("PCD", 4),
        bit("A", 5),
        bit("D", 6),
        bit("PAT", 7),
        bit("G", 8),
        bit("XD", 63),
    ];
    const LARGE: &[EntryField] = &[
        bit("P", 0),
        bit("R/W", 1),
        bit("U/S", 2),
        bit("PWT", 3),
        bit("PCD", 4),
        bit("A", 5),
        bit("D", 6),
        bit("PS", 7),
        bit("G", 8),
        bit("PAT", 12),
        bit("XD", 63),
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
    const LINK: &[EntryField] = &[bit("R", 0), bit("W", 1), bit("X", 2), bit("A", 8)];
    const PAGE: &[EntryField] = &[
        bit("R", 0),
        bit("W", 1),
        bit("X", 2),
        bits("EMT", 5, 3),
        bit("IPAT", 6),
        bit("A", 8),
        bit("D", 9),
        bit("SNP", 11),
    ];
    const LARGE: &[EntryField] = &[
        bit("R", 0),
        bit("W", 1),
        bit("X", 2),
        bits("EMT", 5, 3),
        bit("IPAT", 6),
        bit("PS", 7),
        bit("A", 8),
        bit("D", 9),
        bit("SNP", 11),
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
    const LINK: ManualEntry = ManualEntry::new(
        "PDE",
        &[bit("PR", 0), bit("A", 5), bits("NextLevel", 11, 9), bit("IR", 61), bit("IW", 62)],
    );
    const LEAF: ManualEntry = ManualEntry::new(
        "PTE",
        &[
            bit("PR", 0),
            bit("A", 5),
            bit("D", 6),
            bits("NextLevel", 11, 9),
            bit("U", 59),
            bit("FC", 60),
            bit("IR", 61),
            bit("IW", 62),
        ],
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
    const FIELDS: &[EntryField] = &[
        bit("V", 0),
        bit("R", 1),
        bit("W", 2),
        bit("X", 3),
        bit("U", 4),
        bit("G", 5),
        bit("A", 6),
        bit("D", 7),
        bits("RSW", 9, 8),
        bits("PBMT", 62, 61),
        bit("N", 63),
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
    const LEAF: &[EntryField] = &[
        bits("AttrIndx", 4, 2),
        bit("NS", 5),
        bits("AP[2:1]", 7, 6),
        bits("SH", 9, 8),
        bit("AF", 10),
        bit("nG", 11),
        bit("DBM", 51),
        bit("Contiguous", 52),
        bit("PXN", 53),
        bit("UXN", 54),
    ];
    const LINK: ManualEntry = ManualEntry::new(
        "table descriptor",
        &[bit("PXNTable", 59), bit("UXNTable", 60), bits("APTable", 62, 61), bit("NSTable", 63)],
    );
    &long_levels(LINK, LEAF)
};

const ARM_S2_LEVELS: &[ManualLevel] = {
    const LEAF: &[EntryField] = &[
        bits("MemAttr", 5, 2),
        bits("S2AP", 7, 6),
        bits("SH", 9, 8),
        bit("AF", 10),
        bit("DBM", 51),
        bit("Contiguous", 52),
        bits("XN", 54, 53),
    ];
    &long_levels(ManualEntry::new("table descriptor", &[]), LEAF)
};

/// DDI 0487, G5.5: stage 1 in AArch32.
pub(super) const ARM_32_S1: Manual = {
    const LEAF: &[EntryField] = &[
        bits("AttrIndx", 4, 2),
        bit("NS", 5),
        bits("AP[2:1]", 7, 6),
        bits("SH", 9, 8),
        bit("AF", 10),
        bit("nG", 11),
        bit("Contiguous", 52),
        bit("PXN", 53),
        bit("XN", 54),
    ];
    const LINK: ManualEntry = ManualEntry::new(
        "table descriptor",
        &[bit("PXNTable", 59), bit("XNTable", 60), bits("APTable", 62, 61), bit("NSTable", 63)],
    );
    const LEVELS: &[ManualLevel] = &long_levels(LINK, LEAF);
    Manual { title: "VMSAv8-32 long descriptors, stage 1", levels: LEVELS }
};

/// The same, stage 2.
pub(super) const ARM_32_S2: Manual = {
    const LEAF: &[EntryField] = &[
        bits("MemAttr", 5, 2),
        bits("S2AP", 7, 6),
        bits("SH", 9, 8),
        bit("AF", 10),
        bit("Contiguous", 52),
        bits("XN", 54, 53),
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
    const LINK: ManualEntry = ManualEntry::new(
        "page table descriptor",
        &[bit("PXN", 2), bit("NS", 3), bits("Domain", 8, 5)],
    );
    const SMALL: ManualEntry = ManualEntry::new(
        "small page descriptor",
        &[
            bit("XN", 0),
            bit("B", 2),
            bit("C", 3),
            bits("AP[1:0]", 5, 4),
            bits("TEX", 8, 6),
            bit("AP[2]", 9),
            bit("S", 10),
            bit("nG", 11),
        ],
    );
    const LARGE: ManualEntry = ManualEntry::new(
        "large page descriptor",
        &[
            bit("B", 2),
            bit("C", 3),
            bits("AP[1:0]", 5, 4),
            bit("AP[2]", 9),
            bit("S", 10),
            bit("nG", 11),
            bits("TEX", 14, 12),
            bit("XN", 15),
        ],
    );
    const SECTION: &[EntryField] = &[
        bit("B", 2),
        bit("C", 3),
        bit("XN", 4),
        bits("Domain", 8, 5),
        bits("AP[1:0]", 11, 10),
        bits("TEX", 14, 12),
        bit("AP[2]", 15),
        bit("S", 16),
        bit("nG", 17),
        bit("NS", 19),
    ];
    const SUPERSECTION: &[EntryField] = &[
        bit("B", 2),
        bit("C", 3),
        bit("XN", 4),
        bits("AP[1:0]", 11, 10),
        bits("TEX", 14, 12),
        bit("AP[2]", 15),
        bit("S", 16),
        bit("nG", 17),
        bit("NS", 19),
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
    const LINK: ManualEntry = ManualEntry::new(
        "page table descriptor",
        &[bit("PA[33]", 4), bit("PA[34]", 5), bit("PA[32]", 9)],
    );
    const PAGE: &[EntryField] = &[
        bit("B", 2),
        bit("C", 3),
        bit("PA[33]", 4),
        bit("PA[34]", 5),
        bit("PA[32]", 9),
        bit("S", 10),
        bit("nG", 11),
    ];
    const SECTION: &[EntryField] = &[
        bit("B", 2),
        bit("C", 3),
        bit("PA[33]", 4),
        bit("PA[34]", 5),
        bit("PA[32]", 9),
        bits("TEX", 14, 12),
        bit("S", 16),
        bit("nG", 17),
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
