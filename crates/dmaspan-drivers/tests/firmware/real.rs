//! ACPI tables with what real machines have. The tables are made here: the bytes of the machines
//! are their vendors', who have put them under no licence.

use dmaspan_drivers::firmware::{IommuKind, IommuMap};

use super::made::{acpi, iort, node, same, structure, words};
use super::{reserved, stream, unit};

/// Microsoft's Surface Laptop Studio: `surface_laptop_studio_1/dmar.dsl` of
/// <https://github.com/linux-surface/acpidumps>. Its graphics and two roots of Thunderbolt have a
/// unit each, and a fourth has all others. The buses behind the roots are what this test says.
#[test]
fn dmar_of_a_surface_laptop_studio_gives_graphics_and_thunderbolt_units_of_their_own() {
    let one = |flags: u32, base: u32, scopes: &[u8]| {
        structure(0, &[words(&[flags, base, 0]), scopes.to_vec()].concat())
    };
    let graphics = [1, 8, 0, 0, 0, 0, 2, 0];
    let memory = [words(&[0, 0x8380_0000, 0, 0x87bf_ffff, 0]), graphics.to_vec()].concat();
    let body = [
        [&[0x26, 5][..], &[0; 10]].concat(),
        one(0, 0xfed9_0000, &graphics),
        one(0, 0xfed8_4000, &[2, 8, 0, 0, 0, 0, 7, 0]),
        one(0, 0xfed8_5000, &[2, 8, 0, 0, 0, 0, 7, 1]),
        // An interrupt controller and a timer, which have names of their own.
        one(1, 0xfed9_1000, &[3, 8, 0, 0, 2, 0, 0x1e, 7, 4, 8, 0, 0, 0, 0, 0x1e, 6]),
        structure(1, &memory),
    ];
    let buses = |_, id| match id {
        0x38 => Some(0x01..=0x2b),
        0x39 => Some(0x2c..=0x56),
        _ => None,
    };
    let map = IommuMap::dmar(&acpi(b"DMAR", &body.concat()), buses).unwrap();
    let bases = [0xfed9_0000, 0xfed8_4000, 0xfed8_5000, 0xfed9_1000];
    assert_eq!(map.units(), bases.map(|base| unit(IommuKind::Vtd, base)));
    let by_unit = [
        [0x10].as_slice(),
        &[0x38, 0x100, 0x2bff],
        &[0x39, 0x2c00, 0x56ff],
        &[0x00, 0xa0, 0xf6, 0xf7, 0x5700],
    ];
    for (unit, ids) in by_unit.into_iter().enumerate() {
        for &id in ids {
            assert_eq!(stream(&map, id), Some((unit, id.into())), "{id:#x}");
        }
    }
    assert_eq!(reserved(&map, 0x10), [same(0x8380_0000, 0x87bf_ffff)]);
    assert_eq!(reserved(&map, 0xa0), []);
}

/// A laptop of Lenovo's (OEM `LENOVO`, table `CB-01`) with an AMD CPU. Three blocks describe its
/// IOMMU, the last one with objects of ACPI, and a range of aliases overlaps that of all devices.
#[test]
fn ivrs_of_a_lenovo_laptop_is_one_iommu_and_its_last_bus_has_an_alias() {
    let devices = [
        [3, 0x08, 0x00, 0].as_slice(), // from 0x8 on,
        &[4, 0xfe, 0xff, 0],           // to 0xfffe
        &[0x43, 0x00, 0xff, 0, 0, 0xa5, 0x00, 0],
        &[4, 0xff, 0xff, 0],
        &[0x48, 0, 0, 0, 0, 0xa0, 0, 2], // a timer, and two interrupt controllers
        &[0x48, 0, 0, 0xd7, 0x21, 0xa0, 0, 1],
        &[0x48, 0, 0, 0, 0x22, 1, 0, 1],
    ]
    .concat();
    let head = |attributes: u32| words(&[0x0040_0002, 0xfe00_0000, 0, 0, attributes]);
    let features = words(&[0xa225_4afa, 0x2465_77ef, 0, 0]);
    let objects: Vec<u8> = ["FUR0", "FUR1", "FUR2", "FUR3"]
        .iter()
        .flat_map(|name| {
            let id = [&[0xf0, 0xa5, 0, 0x40][..], b"AMDI0020", &[0; 8], &[2, 9]].concat();
            [id, format!("\\_SB.{name}").into_bytes()].concat()
        })
        .collect();
    let body = [
        words(&[0x0020_3043, 0, 0]),
        structure(0xb010, &[head(0x8004_8f6e), devices.clone()].concat()),
        structure(0x3011, &[head(0x0004_8000), features.clone(), devices.clone()].concat()),
        structure(0x3040, &[head(0x0004_8000), features, devices, objects].concat()),
    ];
    let table = acpi(b"IVRS", &body.concat());
    assert_eq!(table.len(), 0x198, "as long as that of the machine");
    let map = IommuMap::ivrs(&table).unwrap();
    let [unit] = map.units() else { panic!("{:?}", map.units()) };
    assert_eq!((unit.kind, unit.base), (IommuKind::AmdVi, 0xfe00_0000));
    assert_eq!(unit.pci, Some((0, 2)));
    assert_eq!((stream(&map, 0x07), stream(&map, 0x08)), (None, Some((0, 0x08))));
    assert_eq!((stream(&map, 0xfeff), stream(&map, 0xff00)), (Some((0, 0xfeff)), Some((0, 0xa5))));
    assert_eq!(stream(&map, 0xffff), Some((0, 0xa5)));
}

/// HiSilicon's Hi1620: `Silicon/Hisilicon/Hi1620/Hi1620AcpiTables/Hi1620Iort.asl` of
/// edk2-platforms. Twelve bridges, four of them without an SMMU, and each mapping says one ID too
/// many.
#[test]
fn iort_of_a_hi1620_gives_each_bridge_the_smmu_that_it_has() {
    const BASES: [u64; 6] = [
        0x1_4800_0000,
        0x1_0000_0000,
        0x1_4000_0000,
        0x4001_4800_0000,
        0x4001_0000_0000,
        0x4001_4000_0000,
    ];
    /// What serves what has no SMMU.
    const ITS: usize = 6;
    const BRIDGES: [(u16, u32, usize); 12] = [
        (0x0000, 0x4000, 0),
        (0x7b00, 0x100, 0),
        (0x7a00, 0x100, ITS),
        (0x7800, 0x200, ITS),
        (0x7c00, 0x200, 1),
        (0x7400, 0x300, 2),
        (0x8000, 0x2000, 3),
        (0xbb00, 0x100, 3),
        (0xba00, 0x100, ITS),
        (0xb800, 0x200, ITS),
        (0xbc00, 0x200, 4),
        (0xb400, 0x300, 5),
    ];
    let its = node(0, &words(&[1, 0]), &[]);
    let smmus = BASES.map(|base| {
        let base = [base as u32, (base >> 32) as u32];
        let rest = [9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        node(4, &words(&[&base[..], &rest].concat()), &[[0, 1, 0x7f00, 48, 1]])
    });
    let its_bytes = its.len() as u32;
    let place = |unit: usize| match unit {
        ITS => 48,
        unit => 48 + its_bytes + unit as u32 * smmus[0].len() as u32,
    };
    let mappings =
        BRIDGES.map(|(first, count, unit)| [first.into(), count, first.into(), place(unit), 0]);
    let root = node(2, &words(&[1, 0x0100_0000, 0, 0, 0]), &mappings);
    let mut nodes = vec![its];
    nodes.extend(smmus.iter().cloned());
    nodes.push(root);
    let map = IommuMap::iort(&iort(&nodes)).unwrap();
    assert_eq!(map.units(), BASES.map(|base| unit(IommuKind::SmmuV3, base)));
    for (first, count, unit) in BRIDGES {
        for id in [first, first + (count - 1) as u16] {
            let expected = (unit != ITS).then_some((unit, u32::from(id)));
            assert_eq!(stream(&map, id), expected, "{id:#x}");
        }
    }
    assert_eq!(
        stream(&map, 0x7700),
        Some((2, 0x7700)),
        "what the table says where nobody else does"
    );
}
