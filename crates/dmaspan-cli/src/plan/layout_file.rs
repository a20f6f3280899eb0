//! A layout in a file of TOML.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_linux::plan::forecast::{
    Backing, IommuModel, LinuxVersion, PaperIommu, PaperLayout, PaperLimits, PaperPool,
    PaperRegion, RegionPages, ReservedIovas,
};
use dmaspan_linux::vfio::LockedBy;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;

use dmaspan_cli::size::ByteSize;

/// A layout that was not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutError {
    /// There is no such file, or it cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Something in it is no layout.
    #[error("{}, line {line}: {what}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1 on.
        line: usize,
        /// What is wrong there.
        what: String,
    },
}

/// The largest file that is taken for a layout: a line for each of 65,535 mappings has room in it.
const LARGEST: u64 = 16 << 20;

/// Reads a layout.
///
/// # Errors
///
/// [`LayoutError`], with the line that is wrong.
pub(crate) fn read(path: &Path) -> Result<PaperLayout, LayoutError> {
    let unreadable = |source| LayoutError::Unreadable { path: path.to_owned(), source };
    let size = fs::metadata(path).map_err(unreadable)?.len();
    if size > LARGEST {
        let why = format!("it has {}, more than any layout", ByteSize::new(size));
        return Err(unreadable(std::io::Error::other(why)));
    }
    let text = fs::read_to_string(path).map_err(unreadable)?;
    parse(&text).map_err(|Wrong { at, what }| {
        let line = line_of(&text, at);
        LayoutError::Line { path: path.to_owned(), line, what }
    })
}

/// The line of a byte, from 1 on.
fn line_of(text: &str, at: usize) -> usize {
    text.get(..at).unwrap_or(text).matches('\n').count() + 1
}

/// What is wrong, and in which byte of the text.
#[derive(Debug)]
struct Wrong {
    at: usize,
    what: String,
}

impl Wrong {
    fn new(span: &Range<usize>, what: impl fmt::Display) -> Self {
        Self { at: span.start, what: what.to_string() }
    }
}

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutFile {
    kernel: Option<Spanned<String>>,
    interface: Option<Spanned<String>>,
    devices: Option<Spanned<u32>>,
    #[serde(default)]
    viommu: bool,
    device_node: Option<u32>,
    iommu: Option<Spanned<IommuRow>>,
    #[serde(default)]
    limits: LimitsRow,
    #[serde(default)]
    region: Vec<Spanned<RegionRow>>,
    #[serde(default)]
    bar: Vec<Spanned<BarRow>>,
    #[serde(default)]
    pool: Vec<Spanned<PoolRow>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolRow {
    page: Bytes,
    pages: u64,
    free: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IommuRow {
    kind: Spanned<String>,
    bits: Option<Spanned<u32>>,
    granule: Option<Spanned<Bytes>>,
    page_sizes: Option<Spanned<Vec<Bytes>>>,
    apertures: Option<Vec<Spanned<RangeRow>>>,
    reserved: Option<Vec<Spanned<RangeRow>>>,
}

/// IOVAs, the last included.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RangeRow {
    name: Option<String>,
    first: Bytes,
    last: Bytes,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsRow {
    memlock: Option<Bytes>,
    locked: Option<Bytes>,
    mappings: Option<u64>,
    mapped: Option<u64>,
    cgroup: Option<Bytes>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RegionRow {
    name: Option<String>,
    at: Option<Bytes>,
    size: Spanned<Bytes>,
    backing: Option<Spanned<String>>,
    page: Option<Spanned<Bytes>>,
    memory: Option<String>,
    offset: Option<Spanned<Bytes>>,
    node: Option<u32>,
    access: Option<Spanned<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BarRow {
    name: Option<String>,
    at: Option<Bytes>,
    size: Spanned<Bytes>,
    host: Option<Bytes>,
}

/// A number of bytes or an address: a number, or a text like `"2G"` or `"0xfee00000"`.
#[derive(Clone, Copy, Debug)]
struct Bytes(u64);

/// Reads a size or an address.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim();
    if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        let number = u64::from_str_radix(&hex.replace('_', ""), 16);
        return number.map_err(|_| format!("`{text}` is no hexadecimal number of 64 bits"));
    }
    digits.parse::<ByteSize>().map(ByteSize::bytes).map_err(|error| format!("`{text}`: {error}"))
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a text like \"2G\" or \"0xfee00000\"")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Bytes, E> {
                let number = u64::try_from(number);
                number.map(Bytes).map_err(|_| E::custom("it is negative"))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Bytes, E> {
                Ok(Bytes(number))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                bytes(text).map(Bytes).map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

fn parse(text: &str) -> Result<PaperLayout, Wrong> {
    let file: LayoutFile = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let what = error.message().lines().collect::<Vec<_>>().join(", ");
        Wrong { at, what }
    })?;
    let iommu = match &file.iommu {
        Some(row) => iommu(row)?,
        None => PaperIommu::new(IommuModel::Vtd),
    };
    let kernel = match &file.kernel {
        Some(text) => Some(text.as_ref().parse().map_err(|error| Wrong::new(&text.span(), error))?),
        None => None::<LinuxVersion>,
    };
    let locked_by = match &file.interface {
        Some(name) => interface(name.as_ref()).map_err(|what| Wrong::new(&name.span(), what))?,
        None => LockedBy::Process,
    };
    let devices = match &file.devices {
        Some(count) if *count.as_ref() == 0 => {
            return Err(Wrong::new(&count.span(), "no device, which needs no mapping: 1 or more"));
        }
        Some(count) => *count.as_ref(),
        None => 1,
    };
    let mut regions = Regions::new(iommu.granule());
    for row in &file.region {
        regions.add_memory(row)?;
    }
    for row in &file.bar {
        regions.add_bar(row)?;
    }
    if regions.all.is_empty() {
        return Err(Wrong { at: 0, what: "it has no [[region]] and no [[bar]]".to_owned() });
    }
    let begins = file.region.iter().map(Spanned::span).chain(file.bar.iter().map(Spanned::span));
    let begins: Vec<usize> = begins.map(|span| span.start).collect();
    no_overlap(text, &begins, &regions.all)?;
    let mut limits = limits(&file.limits, locked_by);
    limits.pools = file.pool.iter().map(pool).collect::<Result<_, _>>()?;
    let (has_viommu, device_node) = (file.viommu, file.device_node);
    Ok(PaperLayout {
        regions: regions.all,
        iommu,
        limits,
        kernel,
        devices,
        has_viommu,
        device_node,
    })
}

/// Two regions that are to be seen at the same address are a mistake of the later one, which names
/// the line of the other.
fn no_overlap(text: &str, begins: &[usize], regions: &[PaperRegion]) -> Result<(), Wrong> {
    let placed = |(begin, region): (&usize, &PaperRegion)| {
        let range = IovaRange::from_len(region.iova?, region.len()).ok()?;
        Some((range, *begin, region.name.clone()))
    };
    let mut all: Vec<_> = begins.iter().zip(regions).filter_map(placed).collect();
    all.sort_by_key(|(range, begin, _)| (range.start(), *begin));
    for pair in all.windows(2) {
        let [low, high] = pair else { continue };
        if high.0.start() <= low.0.last() {
            let (first, second) = if low.1 < high.1 { (low, high) } else { (high, low) };
            let what = format!(
                "{} at {} and {} of line {} at {} overlap",
                second.2,
                second.0,
                first.2,
                line_of(text, first.1),
                first.0
            );
            return Err(Wrong { at: second.1, what });
        }
    }
    Ok(())
}

fn pool(row: &Spanned<PoolRow>) -> Result<PaperPool, Wrong> {
    let (span, PoolRow { page: Bytes(page), pages, free }) = (row.span(), row.as_ref());
    let free = free.unwrap_or(*pages);
    if !page.is_power_of_two() || free > *pages {
        let what = "a pool has pages of a power of two, no more of them free than there are";
        return Err(Wrong::new(&span, what));
    }
    Ok(PaperPool { page: *page, pages: *pages, free })
}

/// Which interface of the kernel.
pub(super) fn interface(name: &str) -> Result<LockedBy, String> {
    match name {
        "type1" => Ok(LockedBy::Process),
        "iommufd" => Ok(LockedBy::User),
        other => Err(format!("`{other}` is no interface: take type1 or iommufd")),
    }
}

fn limits(row: &LimitsRow, locked_by: LockedBy) -> PaperLimits {
    let usual = PaperLimits::unlimited(locked_by);
    PaperLimits {
        memlock: row.memlock.map(|Bytes(bytes)| bytes),
        locked: row.locked.map_or(0, |Bytes(bytes)| bytes),
        mappings: row.mappings.or(usual.mappings),
        mapped: row.mapped.unwrap_or(0),
        cgroup_left: row.cgroup.map(|Bytes(bytes)| bytes),
        ..usual
    }
}

fn iommu(row: &Spanned<IommuRow>) -> Result<PaperIommu, Wrong> {
    let row = row.as_ref();
    let kind: IommuModel =
        row.kind.as_ref().parse().map_err(|error| Wrong::new(&row.kind.span(), error))?;
    let mut iommu = PaperIommu::new(kind);
    if let Some(bits) = &row.bits {
        iommu = iommu.with_bits(*bits.as_ref()).map_err(|error| Wrong::new(&bits.span(), error))?;
    }
    if let Some(granule) = &row.granule {
        let Bytes(bytes) = *granule.as_ref();
        iommu = iommu.with_granule(bytes).map_err(|error| Wrong::new(&granule.span(), error))?;
    }
    if let Some(sizes) = &row.page_sizes {
        let wrong = |what: &dyn fmt::Display| Wrong::new(&sizes.span(), what);
        let mut all = 0;
        for Bytes(size) in sizes.as_ref() {
            if !size.is_power_of_two() {
                return Err(wrong(&format!("{size} is no page size: take powers of two")));
            }
            all |= size;
        }
        iommu = iommu.with_page_sizes(all).map_err(|error| wrong(&error))?;
    }
    if let Some(rows) = &row.apertures {
        iommu.apertures = ranges(rows)?.into_iter().map(|(_, range)| range).collect();
        if iommu.apertures.is_empty() {
            return Err(Wrong::new(&row.kind.span(), "the IOMMU has no aperture: name one"));
        }
    }
    if let Some(rows) = &row.reserved {
        let reserved = |(name, range): (String, IovaRange)| {
            // A terminal that shows it gets no control characters of it.
            ReservedIovas { name: name.replace(char::is_control, "?"), range }
        };
        iommu.reserved = ranges(rows)?.into_iter().map(reserved).collect();
    }
    Ok(iommu)
}

/// Ranges in order, which must not overlap.
fn ranges(rows: &[Spanned<RangeRow>]) -> Result<Vec<(String, IovaRange)>, Wrong> {
    let mut ranges = Vec::new();
    for row in rows {
        let RangeRow { name, first: Bytes(first), last: Bytes(last) } = row.as_ref();
        let Some(range) = IovaRange::new(Iova::new(*first), Iova::new(*last)) else {
            let what = format!("the last address {last:#x} is below the first, {first:#x}");
            return Err(Wrong::new(&row.span(), what));
        };
        ranges.push((row.span(), name.clone().unwrap_or_else(|| "another use".to_owned()), range));
    }
    ranges.sort_by_key(|(_, _, range)| range.start());
    let overlap = ranges.windows(2).find_map(|pair| match pair {
        [(_, _, low), (span, _, high)] if high.start() <= low.last() => Some((span, *low, *high)),
        _ => None,
    });
    if let Some((span, low, high)) = overlap {
        return Err(Wrong::new(span, format!("{low} and {high} overlap")));
    }
    Ok(ranges.into_iter().map(|(_, name, range)| (name, range)).collect())
}

/// Regions, with the memory that they are parts of.
struct Regions {
    granule: u64,
    all: Vec<PaperRegion>,
    /// Memory by its name: its number, its address, and where the next part begins.
    memories: BTreeMap<String, (u64, u64, u64)>,
    /// Where the next memory is.
    next: u64,
}

/// The largest pages that a CPU has: memory begins at a multiple of it.
const MEMORY_ALIGN: u64 = 1 << 30;
const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;

impl Regions {
    fn new(granule: u64) -> Self {
        // A gap between memories, so that none goes on where another ends.
        Self { granule, all: Vec::new(), memories: BTreeMap::new(), next: 1 << 40 }
    }

    fn add_memory(&mut self, row: &Spanned<RegionRow>) -> Result<(), Wrong> {
        let (span, row) = (row.span(), row.as_ref());
        let name = self.name(&span, row.name.as_ref(), "region")?;
        let Bytes(size) = *row.size.as_ref();
        let backing = match &row.backing {
            Some(name) => backing(name)?,
            None => Backing::Base,
        };
        let page = self.page(row, backing)?;
        if size == 0 || !size.is_multiple_of(K4) {
            let what = format!("{name} has {size:#x} bytes: whole pages of 4 KiB can be mapped");
            return Err(Wrong::new(&row.size.span(), what));
        }
        if backing == Backing::Hugetlb && !size.is_multiple_of(page) {
            let what = format!(
                "{name} has {size:#x} bytes, which are not whole hugetlb pages of {}",
                ByteSize::new(page)
            );
            return Err(Wrong::new(&row.size.span(), what));
        }
        let prot = match row.access.as_ref().map(|access| (access.span(), access.as_ref())) {
            None => Prot::READ_WRITE,
            Some((_, access)) if access == "rw" => Prot::READ_WRITE,
            Some((_, access)) if access == "r" => Prot::READ,
            Some((_, access)) if access == "w" => Prot::WRITE,
            Some((span, access)) => {
                return Err(Wrong::new(&span, format!("`{access}` is no access: r, w or rw")));
            }
        };
        let too_much = || Wrong::new(&span, format!("{name}: more memory than any machine has"));
        let (memory, user) = self.place(row, &name, size).ok_or_else(too_much)?;
        self.all.push(PaperRegion {
            name,
            user,
            memory,
            iova: row.at.map(|Bytes(at)| Iova::new(at)),
            prot,
            backing,
            pages: RegionPages::Of(page),
            spans: None,
            resident: 0,
            node: row.node,
        });
        Ok(())
    }

    /// What people call it: by its number, if it does not say.
    fn name(
        &self,
        span: &Range<usize>,
        name: Option<&String>,
        kind: &str,
    ) -> Result<String, Wrong> {
        match name {
            Some(name) if name.contains(char::is_control) => {
                Err(Wrong::new(span, "its name has control characters, which no terminal shows"))
            }
            Some(name) => Ok(name.clone()),
            None => Ok(format!("{kind} {}", self.all.len())),
        }
    }

    /// The pages of memory; those that a CPU of this IOMMU has at least, where nobody says.
    fn page(&self, row: &RegionRow, backing: Backing) -> Result<u64, Wrong> {
        let Some(page) = &row.page else {
            let is_large = matches!(backing, Backing::Thp | Backing::Hugetlb);
            return Ok(if is_large { M2 } else { self.granule.max(K4) });
        };
        let (span, Bytes(page)) = (page.span(), *page.as_ref());
        if !page.is_power_of_two() || !(K4..=16 << 30).contains(&page) {
            let what = format!("{page:#x} is no size of pages: a power of two from 4K to 16G");
            return Err(Wrong::new(&span, what));
        }
        Ok(page)
    }

    /// Which memory a region is of, and where: behind the one before it, if it does not say.
    fn place(&mut self, row: &RegionRow, name: &str, size: u64) -> Option<(u64, UserRange)> {
        let key = row.memory.clone().unwrap_or_else(|| format!("\u{0}{name} {}", self.all.len()));
        let (number, start, behind) = match self.memories.get(&key) {
            Some(memory) => *memory,
            None => (u64::try_from(self.memories.len()).ok()?, self.next, 0),
        };
        let offset = row.offset.as_ref().map_or(behind, |offset| offset.as_ref().0);
        let user = UserRange::from_len(UserAddr::new(start.checked_add(offset)?), size).ok()?;
        let end = offset.checked_add(size)?;
        self.memories.insert(key, (number, start, end));
        let next = start.checked_add(end)?.checked_next_multiple_of(MEMORY_ALIGN)?;
        self.next = self.next.max(next.checked_add(MEMORY_ALIGN)?);
        Some((number, user))
    }

    fn add_bar(&mut self, row: &Spanned<BarRow>) -> Result<(), Wrong> {
        let (span, row) = (row.span(), row.as_ref());
        let name = self.name(&span, row.name.as_ref(), "BAR")?;
        let Bytes(size) = *row.size.as_ref();
        if !size.is_power_of_two() || size < K4 {
            let what = format!("{name} has {size:#x} bytes: a BAR has a power of two, 4K or more");
            return Err(Wrong::new(&row.size.span(), what));
        }
        // Hardware aligns a BAR to its size.
        let at = row.host.map_or(size, |Bytes(host)| host);
        let registers = Span::new(PhysAddr::new(at), size);
        let user = UserRange::from_len(UserAddr::new(at), size);
        let wraps = |error: &dyn fmt::Display| Wrong::new(&span, format!("{name}: {error}"));
        let registers = registers.map_err(|error| wraps(&error))?;
        let user = user.map_err(|error| wraps(&error))?;
        self.all.push(PaperRegion {
            name,
            user,
            memory: u64::MAX - u64::try_from(self.all.len()).unwrap_or(0),
            iova: row.at.map(|Bytes(at)| Iova::new(at)),
            prot: Prot::READ_WRITE,
            backing: Backing::Registers,
            pages: RegionPages::Of(size),
            spans: Some(vec![registers]).filter(|_| row.host.is_some()),
            resident: 0,
            node: None,
        });
        Ok(())
    }
}

fn backing(name: &Spanned<String>) -> Result<Backing, Wrong> {
    let found = Backing::MEMORY.into_iter().find(|backing| backing.name() == name.as_ref());
    found.ok_or_else(|| {
        let names = Backing::MEMORY.map(Backing::name).join(", ");
        Wrong::new(&name.span(), format!("`{}` is no backing: take one of {names}", name.as_ref()))
    })
}

#[cfg(test)]
mod tests;
