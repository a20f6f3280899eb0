//! A flattened device tree: Devicetree Specification 0.4, chapter 5, and Linux's bindings
//! `iommu/iommu.txt`, `pci/pci-iommu.txt` and `reserved-memory.yaml`.

use alloc::string::String;
use alloc::vec::Vec;

use super::bytes::Bytes;
use super::{FirmwareError, IommuKind, IommuMap, IommuUnit, Requesters, ReservedMemory, Route, To};

const TABLE: &str = "device tree";
/// The tokens of the structure block: 5.4.1.
const BEGIN: u32 = 1;
const END: u32 = 2;
const PROPERTY: u32 = 3;
const NOTHING: u32 = 4;
const ALL: u32 = 9;
/// How deep nodes may be and how long their names: with both, a path is short.
const DEPTH: usize = 32;
const NAME: u64 = 127;

struct Node<'a> {
    parent: Option<usize>,
    name: &'a [u8],
    properties: Vec<(&'a [u8], Bytes<'a>)>,
}

impl<'a> Node<'a> {
    fn get(&self, name: &str) -> Option<Bytes<'a>> {
        let mut all = self.properties.iter();
        all.find(|(one, _)| *one == name.as_bytes()).map(|&(_, value)| value)
    }

    fn number(&self, name: &'static str) -> Result<Option<u32>, FirmwareError> {
        self.get(name).map(|value| value.be32(value.start(), name)).transpose()
    }

    /// How many words an address or a size of its children has: 2.3.5.
    fn cells(&self, name: &'static str, default: u32) -> Result<usize, FirmwareError> {
        let Some(value) = self.get(name) else { return Ok(default as usize) };
        let cells = value.be32(value.start(), name)?;
        value.check(name, value.start(), cells.into(), 0..=4)?;
        Ok(cells as usize)
    }

    fn is_compatible(&self, with: &[&str]) -> bool {
        let all = self.get("compatible").map_or(&[][..], |value| value.as_slice());
        all.split(|&byte| byte == 0).any(|one| with.iter().any(|with| with.as_bytes() == one))
    }

    /// The design of the IOMMU that it is, where it is one that is on.
    fn kind(&self) -> Option<IommuKind> {
        let status = self.get("status").map_or(&b"okay"[..], |status| status.as_slice());
        if !status.starts_with(b"ok") {
            return None;
        }
        let v2 = ["arm,smmu-v1", "arm,smmu-v2", "arm,mmu-400", "arm,mmu-401", "arm,mmu-500"];
        if self.is_compatible(&v2) {
            Some(IommuKind::SmmuV2)
        } else if self.is_compatible(&["arm,smmu-v3"]) {
            Some(IommuKind::SmmuV3)
        } else if self.is_compatible(&["riscv,iommu", "riscv,pci-iommu"]) {
            Some(IommuKind::Riscv)
        } else {
            None
        }
    }
}

/// The nodes, parents before children.
struct Tree<'a>(Vec<Node<'a>>);

impl<'a> Tree<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, FirmwareError> {
        const MAGIC: u32 = 0xd00d_feed;
        let all = Bytes::new(TABLE, bytes);
        let found = all.be32(0, "magic number")?;
        if found != MAGIC {
            return Err(FirmwareError::Signature { table: TABLE, found });
        }
        let all = all.part(0, all.be32(4, "total size")? as usize, "tree")?;
        let block = |offset, size, what| {
            all.part(all.be32(offset, what)? as usize, all.be32(size, what)? as usize, what)
        };
        let compatible = all.be32(24, "oldest compatible version")?;
        all.check("oldest compatible version", 24, compatible.into(), 0..=17)?;
        let structure = block(8, 36, "structure block")?;
        let strings = block(12, 32, "strings block")?;
        let mut tree = Self(Vec::new());
        tree.fill(structure, strings)?;
        Ok(tree)
    }

    fn fill(&mut self, structure: Bytes<'a>, strings: Bytes<'a>) -> Result<(), FirmwareError> {
        let aligned = |at: usize| (at - structure.start()).next_multiple_of(4) + structure.start();
        let mut open = Vec::new();
        let mut at = structure.start();
        loop {
            let token = structure.be32(at, "token")?;
            let parent = open.last().copied();
            let limits = match parent {
                _ if self.0.is_empty() => u64::from(BEGIN)..=u64::from(NOTHING),
                None => u64::from(NOTHING)..=u64::from(ALL),
                Some(_) => u64::from(BEGIN)..=u64::from(NOTHING),
            };
            structure.check("token", at, token.into(), limits)?;
            at += 4;
            match token {
                BEGIN => {
                    structure.check("depth", at, open.len() as u64, 0..=DEPTH as u64 - 1)?;
                    let name = structure.text(at, "name of a node")?;
                    structure.check("length of a name", at, name.len() as u64, 0..=NAME)?;
                    at = aligned(at + name.len() + 1);
                    open.push(self.0.len());
                    self.0.push(Node { parent, name, properties: Vec::new() });
                }
                END => {
                    open.pop();
                }
                PROPERTY => {
                    let bytes = structure.be32(at, "length of a property")? as usize;
                    let name = structure.be32(at + 4, "name of a property")? as usize;
                    let name = strings.start().saturating_add(name);
                    let name = strings.text(name, "name of a property")?;
                    let value = structure.part(at + 8, bytes, "property")?;
                    at = aligned(value.end());
                    if let Some(node) = parent.and_then(|index| self.0.get_mut(index)) {
                        node.properties.push((name, value));
                    }
                }
                ALL => return Ok(()),
                _ => {}
            }
        }
    }

    fn parent(&self, node: &Node<'a>) -> Option<&Node<'a>> {
        self.0.get(node.parent?)
    }

    /// The path, as `/soc/disk@1000`.
    fn path(&self, node: &Node<'a>) -> String {
        let mut names = Vec::new();
        let mut at = Some(node);
        while let Some(node) = at {
            names.push(node.name);
            at = self.parent(node);
        }
        names.pop(); // the root's, which has none
        let mut path = String::new();
        for name in names.iter().rev() {
            path.push('/');
            path.push_str(&String::from_utf8_lossy(name));
        }
        path
    }

    /// The first address of `reg`, as the CPU reaches it: 2.3.6 and 2.3.8. None where a bus on the
    /// way is not mapped.
    fn address(&self, node: &Node<'a>) -> Result<Option<u64>, FirmwareError> {
        let Some(reg) = node.get("reg") else { return Ok(None) };
        let mut bus = self.parent(node);
        let Some(parent) = bus else { return Ok(None) };
        let mut address = number(&reg, reg.start(), parent.cells("#address-cells", 2)?)?;
        while let Some(here) = bus {
            bus = self.parent(here);
            let Some(above) = bus else { break };
            let Some(ranges) = here.get("ranges") else { return Ok(None) };
            if ranges.as_slice().is_empty() {
                continue;
            }
            let (child, parent) =
                (here.cells("#address-cells", 2)?, above.cells("#address-cells", 2)?);
            let size = here.cells("#size-cells", 1)?;
            let entry = 4 * (child + parent + size);
            let mut found = None;
            for range in ranges.parts(ranges.start(), 4, "ranges", |_, _| Ok(entry)) {
                let range = range?;
                let at = range.start();
                let first = number(&range, at, child)?;
                let to = number(&range, at + 4 * child, parent)?;
                let bytes = number(&range, at + 4 * (child + parent), size)?;
                let offset = address.checked_sub(first).filter(|&offset| offset < bytes);
                found = found.or(offset.and_then(|offset| to.checked_add(offset)));
            }
            let Some(to) = found else { return Ok(None) };
            address = to;
        }
        Ok(Some(address))
    }
}

/// A number of `cells` words; of more than two, the last two count.
fn number(value: &Bytes<'_>, at: usize, cells: usize) -> Result<u64, FirmwareError> {
    let mut number = 0;
    for cell in 0..cells {
        number = number << 32 | u64::from(value.be32(at + 4 * cell, "address")?);
    }
    Ok(number)
}

/// A node to which others refer: by which number, and the place of the IOMMU that it is.
struct Target {
    handle: u32,
    cells: Option<u32>,
    unit: Option<usize>,
    node: usize,
}

impl IommuMap {
    /// Reads a flattened device tree.
    ///
    /// Devices that an IOMMU serves for which this crate has no driver, or one that is off, have no
    /// streams.
    ///
    /// # Errors
    ///
    /// The tree is not believed; see [`FirmwareError`].
    pub fn device_tree(bytes: &[u8]) -> Result<Self, FirmwareError> {
        let tree = Tree::new(bytes)?;
        let mut map = Self::default();
        let segments = segments(&tree)?;
        let segment = |index: usize| {
            let found = segments.binary_search_by_key(&index, |&(node, _)| node).ok()?;
            segments.get(found).map(|&(_, segment)| segment)
        };
        let mut targets = Vec::new();
        for (index, node) in tree.0.iter().enumerate() {
            let mut unit = None;
            if let Some(kind) = node.kind() {
                let pci = match (node.parent.and_then(segment), node.get("reg")) {
                    // The first word says bus, device and function: IEEE 1275's binding to PCI.
                    (Some(segment), Some(reg)) => {
                        let [_, high, low, _] = reg.be32(reg.start(), "reg")?.to_be_bytes();
                        Some((segment, u16::from_be_bytes([high, low])))
                    }
                    _ => None,
                };
                let base = if pci.is_some() { Some(0) } else { tree.address(node)? };
                if let Some(base) = base {
                    unit = Some(map.units.len());
                    map.units.push(IommuUnit { kind, base, pci });
                }
            }
            if let Some(handle) = node.number("phandle")? {
                let cells = node.number("#iommu-cells")?;
                targets.push(Target { handle, cells, unit, node: index });
            }
        }
        targets.sort_by_key(|target| target.handle);
        for (index, node) in tree.0.iter().enumerate() {
            map.devices(&tree, node, &targets)?;
            if let (Some(value), Some(segment)) = (node.get("iommu-map"), segment(index)) {
                let mask = node.number("iommu-map-mask")?.unwrap_or(0xffff);
                map.functions(&value, segment, mask, &targets)?;
            }
            if let Some(value) = node.get("iommu-addresses") {
                map.addresses(&tree, node, &value, &targets)?;
            }
        }
        Ok(map)
    }

    /// The property `iommus`: a reference and its words, once or more.
    fn devices(
        &mut self,
        tree: &Tree<'_>,
        node: &Node<'_>,
        targets: &[Target],
    ) -> Result<(), FirmwareError> {
        let Some(value) = node.get("iommus") else { return Ok(()) };
        let path = tree.path(node).into();
        let mut at = value.start();
        while at < value.end() {
            let (target, cells) = iommu(&value, at, targets)?;
            value.check("#iommu-cells", at, cells.into(), 0..=4)?;
            let stream = if cells == 0 { 0 } else { value.be32(at + 4, "stream")? };
            value.part(at, 4 + 4 * cells as usize, "iommus")?;
            let from = Requesters::Named(alloc::sync::Arc::clone(&path));
            self.routes.push(Route { from, unit: target.unit, to: To::Stream(stream) });
            at += 4 + 4 * cells as usize;
        }
        Ok(())
    }

    /// The property `iommu-map`: a requester ID, a reference, a stream and how many there are.
    fn functions(
        &mut self,
        value: &Bytes<'_>,
        segment: u16,
        mask: u32,
        targets: &[Target],
    ) -> Result<(), FirmwareError> {
        for entry in value.parts(value.start(), 16, "iommu-map", |_, _| Ok(16)) {
            let entry = entry?;
            let at = entry.start();
            let first = entry.be32(at, "requester ID")?;
            let (target, _) = iommu(&entry, at + 4, targets)?;
            let output = entry.be32(at + 8, "stream")?;
            let count = entry.be32(at + 12, "number of requester IDs")?;
            if count == 0 {
                continue;
            }
            let last = entry.last("number of requester IDs", at + 12, first, count.into())?;
            entry.last("number of streams", at + 12, output, count.into())?;
            let from = Requesters::Pci { segment, ids: first..=last, mask };
            self.routes.push(Route { from, unit: target.unit, to: To::Base(output) });
        }
        Ok(())
    }

    /// The property `iommu-addresses` of reserved memory: a device, and where it is to find the
    /// memory, in the words of the root.
    fn addresses(
        &mut self,
        tree: &Tree<'_>,
        node: &Node<'_>,
        value: &Bytes<'_>,
        targets: &[Target],
    ) -> Result<(), FirmwareError> {
        let Some(parent) = tree.parent(node) else { return Ok(()) };
        let (cells, size) = (parent.cells("#address-cells", 2)?, parent.cells("#size-cells", 1)?);
        let bytes = 4 * (1 + cells + size);
        let paddr = tree.address(node)?;
        for entry in value.parts(value.start(), 4, "iommu-addresses", |_, _| Ok(bytes)) {
            let entry = entry?;
            let at = entry.start();
            let device = target(&entry, at, targets)?;
            let first = number(&entry, at + 4, cells)?;
            let length = at + 4 + 4 * cells;
            let last = entry.last_byte(length, first, number(&entry, length, size)?)?;
            let Some(device) = tree.0.get(device.node) else { continue };
            let from = Requesters::Named(tree.path(device).into());
            self.reserved.push((from, ReservedMemory { first, last, paddr }));
        }
        Ok(())
    }
}

/// The host bridges of PCI and their segments, in order.
fn segments(tree: &Tree<'_>) -> Result<Vec<(usize, u16)>, FirmwareError> {
    let mut all = Vec::new();
    let mut unnumbered = 0;
    for (index, node) in tree.0.iter().enumerate() {
        if node.get("device_type").is_none_or(|kind| kind.as_slice() != b"pci\0") {
            continue;
        }
        let segment = match node.get("linux,pci-domain") {
            Some(value) => {
                let domain = value.be32(value.start(), "linux,pci-domain")?.into();
                value.check("linux,pci-domain", value.start(), domain, 0..=0xffff)?
            }
            None => {
                unnumbered += 1;
                unnumbered - 1
            }
        };
        all.push((index, u16::try_from(segment).unwrap_or(u16::MAX)));
    }
    Ok(all)
}

/// The node to which a reference leads.
fn target<'t>(
    value: &Bytes<'_>,
    at: usize,
    targets: &'t [Target],
) -> Result<&'t Target, FirmwareError> {
    let handle = value.be32(at, "reference")?;
    let found = targets.binary_search_by_key(&handle, |target| target.handle);
    let none =
        FirmwareError::NoIommu { table: TABLE, what: "reference", offset: at, target: handle };
    found.ok().and_then(|index| targets.get(index)).ok_or(none)
}

/// The IOMMU to which a reference leads, and how many words a stream has there.
fn iommu<'t>(
    value: &Bytes<'_>,
    at: usize,
    targets: &'t [Target],
) -> Result<(&'t Target, u32), FirmwareError> {
    let found = target(value, at, targets)?;
    let none = FirmwareError::NoIommu {
        table: TABLE,
        what: "reference",
        offset: at,
        target: found.handle,
    };
    Ok((found, found.cells.ok_or(none)?))
}
