use std::fs;

use dmaspan_linux::plan::forecast::Forecast;

use super::*;

const RAM: &str = "[[region]]\nname = \"ram\"\nsize = \"1G\"\n";

/// The line and the words of what is wrong.
fn wrong(text: &str) -> (usize, String) {
    let Wrong { at, what } = parse(text).unwrap_err();
    (text[..at].matches('\n').count() + 1, what)
}

#[test]
fn every_mistake_names_its_line_and_what_would_do() {
    for (text, line, part) in [
        ("", 1, "no [[region]]"),
        ("kernel = \"six\"\n", 1, "write it like 6.18"),
        ("kernel = 6.18\n", 1, "expected a string"),
        ("\n\ninterface = \"kvm\"\n", 3, "take type1 or iommufd"),
        ("devices = 0\n", 1, "1 or more"),
        ("devices = -1\n", 1, "invalid value"),
        ("[iommu]\nkind = \"smmu\"\n", 2, "take vtd, amd, smmuv3 or riscv"),
        ("[iommu]\nbits = 39\n", 1, "missing field `kind`"),
        ("[iommu]\nkind = \"vtd\"\nbits = 64\n", 3, "32 to 57 address bits, not 64"),
        ("[iommu]\nkind = \"vtd\"\ngranule = \"64K\"\n", 3, "no granule of 64 KiB: take 4K"),
        ("[iommu]\nkind = \"vtd\"\npage_sizes = [5000]\n", 3, "take powers of two"),
        ("[iommu]\nkind = \"vtd\"\npage_sizes = [\"2M\"]\n", 3, "4 KiB to 64 KiB"),
        ("[iommu]\nkind = \"vtd\"\napertures = [{ first = 9, last = 8 }]\n", 3, "below the first"),
        ("[iommu]\nkind = \"vtd\"\napertures = []\n", 2, "no aperture"),
        (
            "[iommu]\nkind = \"vtd\"\n[[iommu.reserved]]\nfirst = 0\nlast = \"1M\"\n\
             [[iommu.reserved]]\nfirst = \"1M\"\nlast = \"2M\"\n",
            6,
            "0x0..=0x100000 and 0x100000..=0x200000 overlap",
        ),
        ("[limits]\nmemlock = \"lots\"\n", 2, "a size is a number of bytes or like 512M"),
        ("[limits]\nmemlock = -1\n", 2, "negative"),
        ("[limits]\nmemlok = \"1G\"\n", 2, "unknown field `memlok`"),
        ("[[region]]\nname = \"ram\"\n", 1, "missing field `size`"),
        ("[[region]]\nsize = 0\n", 2, "whole pages of 4 KiB"),
        ("[[region]]\nsize = 4097\n", 2, "whole pages of 4 KiB"),
        ("[[region]]\nsize = \"3M\"\nbacking = \"hugetlb\"\n", 2, "whole hugetlb pages of 2 MiB"),
        ("[[region]]\nsize = \"3M\"\nbacking = \"paper\"\n", 3, "take one of base, thp, hugetlb"),
        ("[[region]]\nsize = \"4M\"\npage = \"3M\"\n", 3, "power of two from 4K to 16G"),
        ("[[region]]\nsize = \"4M\"\naccess = \"x\"\n", 3, "r, w or rw"),
        ("[[region]]\nsize = \"4M\"\nat = \"0xg\"\n", 3, "no hexadecimal number"),
        ("[[region]]\nsize = \"4M\"\nat = 1.5\n", 3, "a number of bytes, or a text"),
        ("[[region]]\nsize = \"16777215T\"\n", 1, "more memory than any machine has"),
        ("[[bar]]\nsize = \"3M\"\n", 2, "a power of two, 4K or more"),
        ("[[bar]]\nsize = \"8G\"\nhost = \"0xffffffffffffffff\"\n", 1, "wraps"),
        ("[[region]]\nsize = \"4M\"\n[[region]]\nsise = 4\n", 4, "unknown field `sise`"),
        ("[[region]]\nname = \"\\u001b[31m\"\nsize = 4096\n", 1, "control characters"),
        (
            "[[region]]\nname = \"ram\"\nat = 0\nsize = \"2G\"\n[[bar]]\nname = \"BAR 0\"\n\
             at = \"1G\"\nsize = \"1G\"\n",
            5,
            "BAR 0 at 0x40000000..=0x7fffffff and ram of line 1 at 0x0..=0x7fffffff overlap",
        ),
        (
            "[[region]]\nat = \"1G\"\nsize = \"2G\"\n\n[[region]]\nat = 0\nsize = \"4G\"\n",
            5,
            "region 1 at 0x0..=0xffffffff and region 0 of line 1 at 0x40000000..=0xbfffffff",
        ),
        ("region = 4\n", 1, "expected"),
        ("[[region]\n", 1, "]"),
        ("a = \u{1}\n", 1, ""),
    ] {
        let (found, what) = wrong(text);
        assert!(found == line && what.contains(part), "{text}: line {found}: {what}");
        assert!(!what.contains('\n'), "{what}");
    }
}

#[test]
fn regions_that_touch_do_not_overlap() {
    let region = |at: &str| format!("[[region]]\nat = \"{at}\"\nsize = \"1G\"\n");
    let top = "[[bar]]\nat = \"0xfffffffffffff000\"\nsize = 4096\n".to_owned();
    let layout = parse(&[region("1G"), region("0"), region("2G"), RAM.to_owned(), top].concat());
    assert_eq!(layout.unwrap().regions.len(), 5);
}

#[test]
fn parts_of_one_memory_lie_behind_each_other_and_are_one_map_where_their_addresses_do_too() {
    let part = |at: &str| format!("[[region]]\nmemory = \"ram\"\nat = \"{at}\"\nsize = \"1G\"\n");
    let layout = parse(&[part("0"), part("1G"), part("4G")].concat()).unwrap();
    assert_eq!(Forecast::new(&layout).unwrap().maps.len(), 2);
    // Memory of other names is other memory.
    let own = |at: &str| format!("[[region]]\nat = \"{at}\"\nsize = \"1G\"\n");
    let layout = parse(&[own("0"), own("1G"), own("4G")].concat()).unwrap();
    assert_eq!(Forecast::new(&layout).unwrap().maps.len(), 3);
}

#[test]
fn what_a_layout_does_not_say_is_what_is_usual() {
    let layout = parse(RAM).unwrap();
    assert_eq!(layout.iommu, PaperIommu::new(IommuModel::Vtd));
    assert_eq!(layout.limits, PaperLimits::unlimited(LockedBy::Process));
    assert_eq!((layout.kernel, layout.devices, layout.has_viommu), (None, 1, false));
    assert_eq!(layout.regions[0].pages, RegionPages::Of(4096));
    let iommufd = parse(&format!("interface = \"iommufd\"\n{RAM}")).unwrap();
    assert_eq!(iommufd.limits.mappings, None);
    let large = "[iommu]\nkind = \"smmuv3\"\ngranule = \"64K\"\n";
    assert_eq!(parse(&format!("{large}{RAM}")).unwrap().regions[0].pages, RegionPages::Of(65536));
}

#[test]
fn a_file_that_is_missing_too_large_or_no_text_is_an_error_of_its_own() {
    let text = |path: &Path| read(path).unwrap_err().to_string();
    assert!(text(Path::new("/nowhere/x.toml")).contains("/nowhere/x.toml cannot be read"));
    assert!(text(Path::new("/")).contains("cannot be read"));
    let path = std::env::temp_dir().join(format!("dmaspan-layout-{}", std::process::id()));
    fs::write(&path, b"\xff\xfe").unwrap();
    assert!(text(&path).contains("UTF-8"));
    fs::File::create(&path).unwrap().set_len(LARGEST + 1).unwrap();
    assert!(text(&path).contains("more than any layout"));
    fs::remove_file(path).unwrap();
}
