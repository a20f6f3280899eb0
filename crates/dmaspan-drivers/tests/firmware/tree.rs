//! Device trees with what QEMU's machines do not have.

use dmaspan_drivers::firmware::{DmaRequester, IommuKind, IommuMap, ReservedMemory};

use super::{named, stream, unit};

/// A flattened tree that is being made.
#[derive(Default)]
struct Made {
    structure: Vec<u8>,
    strings: Vec<u8>,
}

impl Made {
    fn word(&mut self, word: u32) -> &mut Self {
        self.structure.extend(word.to_be_bytes());
        self
    }

    fn padded(&mut self, bytes: &[u8]) -> &mut Self {
        self.structure.extend_from_slice(bytes);
        self.structure.resize(self.structure.len().next_multiple_of(4), 0);
        self
    }

    fn begin(&mut self, name: &str) -> &mut Self {
        self.word(1).padded(format!("{name}\0").as_bytes())
    }

    fn end(&mut self) -> &mut Self {
        self.word(2)
    }

    fn text(&mut self, name: &str, value: &str) -> &mut Self {
        self.property(name, format!("{value}\0").as_bytes())
    }

    fn words(&mut self, name: &str, words: &[u32]) -> &mut Self {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.property(name, &bytes)
    }

    fn property(&mut self, name: &str, value: &[u8]) -> &mut Self {
        let at = self.strings.len() as u32;
        self.strings.extend(format!("{name}\0").bytes());
        self.word(3).word(value.len() as u32).word(at).padded(value)
    }

    fn done(&mut self) -> Vec<u8> {
        self.word(9);
        let (structure, strings) = (self.structure.len() as u32, self.strings.len() as u32);
        let total = 56 + structure + strings;
        let head = [0xd00d_feed, total, 56, 56 + structure, 40, 17, 16, 0, strings, structure];
        let head = head.iter().flat_map(|word| word.to_be_bytes());
        head.chain([0; 16]).chain(self.structure.drain(..)).chain(self.strings.drain(..)).collect()
    }
}

/// A root, and a bus whose addresses are 0x1000_0000 above its own.
fn made() -> Made {
    let mut made = Made::default();
    made.begin("").words("#address-cells", &[2]).words("#size-cells", &[2]);
    made.begin("soc").words("#address-cells", &[1]).words("#size-cells", &[1]);
    made.words("ranges", &[0, 0, 0x1000_0000, 0x0100_0000]);
    made
}

#[test]
fn devices_have_the_streams_of_iommus_and_addresses_go_through_buses() {
    let mut made = made();
    made.begin("gpu@0").words("phandle", &[3]).words("iommus", &[7, 5, 0x7f, 8, 9]).end();
    made.begin("dsp@0").words("iommus", &[9, 1]).end();
    made.begin("smmu@2000").text("compatible", "vendor,one\0arm,mmu-500");
    made.words("reg", &[0x2000, 0x1000]).words("phandle", &[7]).words("#iommu-cells", &[2]).end();
    made.begin("smmu@3000").text("compatible", "arm,smmu-v3");
    made.words("reg", &[0x3000, 0x1000]).words("phandle", &[8]).words("#iommu-cells", &[1]).end();
    made.begin("smmu@4000").text("compatible", "arm,smmu-v3").text("status", "disabled");
    made.words("reg", &[0x4000, 0x1000]).words("phandle", &[9]).words("#iommu-cells", &[1]).end();
    made.end();
    made.begin("reserved-memory").words("#address-cells", &[2]).words("#size-cells", &[2]);
    made.property("ranges", &[]);
    made.begin("frame@8").words("reg", &[0, 0x8000_0000, 0, 0x1000]);
    made.words("iommu-addresses", &[3, 0, 0x4000, 0, 0x1000]).end();
    made.begin("hole").words("iommu-addresses", &[3, 0, 0x9000, 0, 0x1000]).end();
    let map = IommuMap::device_tree(&made.end().end().done()).unwrap();
    let units = [unit(IommuKind::SmmuV2, 0x1000_2000), unit(IommuKind::SmmuV3, 0x1000_3000)];
    assert_eq!(map.units(), units);
    assert_eq!(named(&map, "/soc/gpu@0"), [(0, 5), (1, 9)]);
    assert_eq!((named(&map, "/soc/dsp@0"), named(&map, "/soc")), (vec![], vec![]));
    let found: Vec<_> = map.reserved(DmaRequester::Named("/soc/gpu@0")).collect();
    let at = |first, paddr| ReservedMemory { first, last: first + 0xfff, paddr };
    assert_eq!(found, [at(0x4000, Some(0x8000_0000)), at(0x9000, None)]);
}

#[test]
fn masks_and_segments_of_host_bridges_are_heeded() {
    let mut made = made();
    made.begin("smmu@3000").text("compatible", "arm,smmu-v3");
    made.words("reg", &[0x3000, 0x1000]).words("phandle", &[8]).words("#iommu-cells", &[1]).end();
    made.begin("pci@1").text("device_type", "pci").words("iommu-map-mask", &[0xfff8]);
    made.words("iommu-map", &[0, 8, 0x100, 0x10000]).end();
    made.begin("pci@2").text("device_type", "pci").words("linux,pci-domain", &[4]);
    made.words("iommu-map", &[0x10, 8, 0x2000, 1]).end();
    let map = IommuMap::device_tree(&made.end().end().done()).unwrap();
    assert_eq!((stream(&map, 0x13), stream(&map, 0x18)), (Some((0, 0x110)), Some((0, 0x118))));
    let other = map.streams(DmaRequester::Pci { segment: 4, id: 0x10 }).next();
    assert_eq!(other.map(|found| found.stream), Some(0x2000));
    assert_eq!(map.streams(DmaRequester::Pci { segment: 4, id: 0x11 }).next(), None);
}

/// Marvell's Armada 7040: `arch/arm64/boot/dts/marvell/armada-7040.dtsi` and `armada-ap80x.dtsi` of
/// Linux, which are there under the MIT licence too. Three of its buses share 96 streams.
#[test]
fn the_tree_of_an_armada_7040_gives_its_buses_and_disks_the_streams_of_one_smmu() {
    let mut made = Made::default();
    made.begin("").words("#address-cells", &[2]).words("#size-cells", &[2]);
    made.begin("ap806").words("#address-cells", &[2]).words("#size-cells", &[2]);
    made.property("ranges", &[]);
    made.begin("config-space@f0000000").words("#address-cells", &[1]).words("#size-cells", &[1]);
    made.words("ranges", &[0, 0, 0xf000_0000, 0x100_0000]);
    made.begin("iommu@5000000").text("compatible", "marvell,ap806-smmu-500\0arm,mmu-500");
    made.words("reg", &[0x10_0000, 0x10_0000]).words("#iommu-cells", &[1]);
    made.words("phandle", &[5]).end().end().end();
    made.begin("cp0").words("#address-cells", &[2]).words("#size-cells", &[2]);
    for (name, stream) in [
        ("usb@500000", 0x440),
        ("usb@510000", 0x441),
        ("sata@540000", 0x444),
        ("mmc@780000", 0x445),
    ] {
        made.begin(name).words("iommus", &[5, stream]).end();
    }
    made.begin("pcie@f2600000").text("device_type", "pci").words("iommu-map-mask", &[0x31f]);
    let ranges = [[0, 5, 0x480, 0x20], [0x100, 5, 0x4a0, 0x20], [0x200, 5, 0x4c0, 0x20]];
    made.words("iommu-map", ranges.as_flattened()).end();
    let map = IommuMap::device_tree(&made.end().end().done()).unwrap();
    assert_eq!(map.units(), [unit(IommuKind::SmmuV2, 0xf010_0000)]);
    assert_eq!(named(&map, "/cp0/sata@540000"), [(0, 0x444)]);
    assert_eq!(named(&map, "/cp0/mmc@780000"), [(0, 0x445)]);
    let expected = [(0, 0x480), (0x1f, 0x49f), (0x28, 0x488), (0x100, 0x4a0), (0x2ff, 0x4df)];
    for (id, expected) in expected {
        assert_eq!(stream(&map, id), Some((0, expected)), "{id:#x}");
    }
    // The fourth bus has none, and the fifth those of the first.
    assert_eq!((stream(&map, 0x300), stream(&map, 0x400)), (None, Some((0, 0x480))));
}

#[test]
fn a_reference_to_nothing_and_a_tree_without_end_are_refused() {
    let mut tree = made();
    tree.begin("gpu@0").words("iommus", &[7, 5]).end().end().end();
    let said = IommuMap::device_tree(&tree.done()).unwrap_err().to_string();
    assert!(said.ends_with("of the device tree leads to 0x7, where no IOMMU is"), "{said}");
    let mut deep = Made::default();
    for _ in 0..40 {
        deep.begin("");
    }
    let said = IommuMap::device_tree(&deep.done()).unwrap_err().to_string();
    assert!(said.contains("the depth at") && said.ends_with("may be 0x0 to 0x1f"), "{said}");
    let said = IommuMap::device_tree(&made().done()).unwrap_err().to_string();
    assert!(said.contains("the token at"), "{said}");
}
