//! Compares this module with the kernel's headers, as the C compiler of this machine reads them.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use dmaspan::container::type1::uapi as type1;

use super::{io_uring, iommufd, vfio};

/// A structure as it is declared here.
pub(crate) struct Structure {
    pub(crate) name: &'static str,
    /// Its documentation, which names the structure of C.
    pub(crate) doc: &'static str,
    pub(crate) size: usize,
    /// Names, sizes and offsets.
    pub(crate) fields: &'static [(&'static str, usize, usize)],
}

impl Structure {
    /// The structure of C.
    fn c_name(&self) -> &'static str {
        let name = self.doc.split_once("`struct ").and_then(|(_, rest)| rest.split_once('`'));
        name.expect("the documentation names a structure").0
    }

    /// Where C's field is: its structure, its name, and what lies before that structure.
    fn c_field(&self, field: &'static str) -> Option<(&'static str, &'static str, &'static str)> {
        const FEATURE: &str = "sizeof(struct vfio_device_feature)";
        const BUFFER: &str =
            "sizeof(struct vfio_device_feature) + sizeof(struct vfio_device_feature_dma_buf)";
        const DIRTY: &str = "sizeof(struct vfio_iommu_type1_dirty_bitmap)";
        const DMA_BUF: &str = "vfio_device_feature_dma_buf";
        const GET: &str = "vfio_iommu_type1_dirty_bitmap_get";
        Some(match (self.name, field) {
            // Their names and places differ from one kernel to the next.
            (_, "reserved" | "pad" | "resv" | "resv2") => return None,
            ("FeatureDmaBuf", "offset" | "length") => ("vfio_region_dma_range", field, BUFFER),
            ("FeatureDmaBuf", "dma_buf_flags") => (DMA_BUF, "flags", FEATURE),
            ("FeatureDmaBuf", "region_index" | "open_flags" | "nr_ranges") => {
                (DMA_BUF, field, FEATURE)
            }
            ("Type1DirtyGet", "iova" | "size") => (GET, field, DIRTY),
            ("Type1DirtyGet", "bitmap_pgsize") => (GET, "bitmap.pgsize", DIRTY),
            ("Type1DirtyGet", "bitmap_size") => (GET, "bitmap.size", DIRTY),
            ("Type1DirtyGet", "bitmap_data") => (GET, "bitmap.data", DIRTY),
            _ => (self.c_name(), field, "0"),
        })
    }
}

/// Declares a list of the numbers of C, and ours.
macro_rules! numbers {
    ($($ours:path = $c:ident,)*) => {
        fn numbers() -> Vec<(&'static str, u64)> {
            vec![$((stringify!($c), u64::from($ours)),)*]
        }
    };
}

numbers! {
    io_uring::UNREGISTER_BUFFERS = IORING_UNREGISTER_BUFFERS,
    io_uring::REGISTER_BUFFERS2 = IORING_REGISTER_BUFFERS2,
    io_uring::REGISTER_BUFFERS_UPDATE = IORING_REGISTER_BUFFERS_UPDATE,
    io_uring::REGISTER_CLONE_BUFFERS = IORING_REGISTER_CLONE_BUFFERS,
    io_uring::REGISTER_SPARSE = IORING_RSRC_REGISTER_SPARSE,
    io_uring::CLONE_DST_REPLACE = IORING_REGISTER_DST_REPLACE,
    iommufd::DESTROY = IOMMU_DESTROY,
    iommufd::IOAS_ALLOC = IOMMU_IOAS_ALLOC,
    iommufd::IOAS_ALLOW_IOVAS = IOMMU_IOAS_ALLOW_IOVAS,
    iommufd::IOAS_COPY = IOMMU_IOAS_COPY,
    iommufd::IOAS_IOVA_RANGES = IOMMU_IOAS_IOVA_RANGES,
    iommufd::IOAS_MAP = IOMMU_IOAS_MAP,
    iommufd::IOAS_MAP_FILE = IOMMU_IOAS_MAP_FILE,
    iommufd::IOAS_UNMAP = IOMMU_IOAS_UNMAP,
    iommufd::OPTION = IOMMU_OPTION,
    iommufd::HWPT_ALLOC = IOMMU_HWPT_ALLOC,
    iommufd::GET_HW_INFO = IOMMU_GET_HW_INFO,
    iommufd::HWPT_SET_DIRTY_TRACKING = IOMMU_HWPT_SET_DIRTY_TRACKING,
    iommufd::HWPT_GET_DIRTY_BITMAP = IOMMU_HWPT_GET_DIRTY_BITMAP,
    iommufd::MAP_FIXED_IOVA = IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd::MAP_WRITEABLE = IOMMU_IOAS_MAP_WRITEABLE,
    iommufd::MAP_READABLE = IOMMU_IOAS_MAP_READABLE,
    iommufd::OPTION_RLIMIT_MODE = IOMMU_OPTION_RLIMIT_MODE,
    iommufd::OPTION_HUGE_PAGES = IOMMU_OPTION_HUGE_PAGES,
    iommufd::OPTION_SET = IOMMU_OPTION_OP_SET,
    iommufd::OPTION_GET = IOMMU_OPTION_OP_GET,
    iommufd::HWPT_ALLOC_DIRTY_TRACKING = IOMMU_HWPT_ALLOC_DIRTY_TRACKING,
    iommufd::HW_CAP_DIRTY_TRACKING = IOMMU_HW_CAP_DIRTY_TRACKING,
    iommufd::DIRTY_TRACKING_ENABLE = IOMMU_HWPT_DIRTY_TRACKING_ENABLE,
    iommufd::DIRTY_BITMAP_NO_CLEAR = IOMMU_HWPT_GET_DIRTY_BITMAP_NO_CLEAR,
    vfio::GROUP_GET_STATUS = VFIO_GROUP_GET_STATUS,
    vfio::GROUP_SET_CONTAINER = VFIO_GROUP_SET_CONTAINER,
    vfio::GROUP_GET_DEVICE_FD = VFIO_GROUP_GET_DEVICE_FD,
    vfio::DEVICE_GET_INFO = VFIO_DEVICE_GET_INFO,
    vfio::DEVICE_GET_REGION_INFO = VFIO_DEVICE_GET_REGION_INFO,
    vfio::DEVICE_GET_IRQ_INFO = VFIO_DEVICE_GET_IRQ_INFO,
    vfio::DEVICE_SET_IRQS = VFIO_DEVICE_SET_IRQS,
    vfio::DEVICE_RESET = VFIO_DEVICE_RESET,
    vfio::DEVICE_FEATURE = VFIO_DEVICE_FEATURE,
    vfio::DEVICE_BIND_IOMMUFD = VFIO_DEVICE_BIND_IOMMUFD,
    vfio::DEVICE_ATTACH_IOMMUFD_PT = VFIO_DEVICE_ATTACH_IOMMUFD_PT,
    vfio::DEVICE_DETACH_IOMMUFD_PT = VFIO_DEVICE_DETACH_IOMMUFD_PT,
    vfio::GROUP_VIABLE = VFIO_GROUP_FLAGS_VIABLE,
    vfio::DEVICE_HAS_RESET = VFIO_DEVICE_FLAGS_RESET,
    vfio::DEVICE_IS_PCI = VFIO_DEVICE_FLAGS_PCI,
    vfio::REGION_READ = VFIO_REGION_INFO_FLAG_READ,
    vfio::REGION_WRITE = VFIO_REGION_INFO_FLAG_WRITE,
    vfio::REGION_MMAP = VFIO_REGION_INFO_FLAG_MMAP,
    vfio::REGION_CAPS = VFIO_REGION_INFO_FLAG_CAPS,
    vfio::REGION_CAP_SPARSE_MMAP = VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    vfio::PCI_CONFIG_REGION = VFIO_PCI_CONFIG_REGION_INDEX,
    vfio::PCI_MSIX_IRQ = VFIO_PCI_MSIX_IRQ_INDEX,
    vfio::IRQ_SET_DATA_NONE = VFIO_IRQ_SET_DATA_NONE,
    vfio::IRQ_SET_DATA_EVENTFD = VFIO_IRQ_SET_DATA_EVENTFD,
    vfio::IRQ_SET_ACTION_TRIGGER = VFIO_IRQ_SET_ACTION_TRIGGER,
    vfio::FEATURE_GET = VFIO_DEVICE_FEATURE_GET,
    vfio::FEATURE_DMA_BUF = VFIO_DEVICE_FEATURE_DMA_BUF,
    type1::VFIO_GET_API_VERSION = VFIO_GET_API_VERSION,
    type1::VFIO_CHECK_EXTENSION = VFIO_CHECK_EXTENSION,
    type1::VFIO_SET_IOMMU = VFIO_SET_IOMMU,
    type1::VFIO_IOMMU_GET_INFO = VFIO_IOMMU_GET_INFO,
    type1::VFIO_IOMMU_MAP_DMA = VFIO_IOMMU_MAP_DMA,
    type1::VFIO_IOMMU_UNMAP_DMA = VFIO_IOMMU_UNMAP_DMA,
    type1::VFIO_IOMMU_DIRTY_PAGES = VFIO_IOMMU_DIRTY_PAGES,
    type1::VFIO_TYPE1V2_IOMMU = VFIO_TYPE1v2_IOMMU,
    type1::VFIO_DMA_MAP_FLAG_READ = VFIO_DMA_MAP_FLAG_READ,
    type1::VFIO_DMA_MAP_FLAG_WRITE = VFIO_DMA_MAP_FLAG_WRITE,
    type1::VFIO_DMA_UNMAP_FLAG_ALL = VFIO_DMA_UNMAP_FLAG_ALL,
    type1::VFIO_IOMMU_INFO_PGSIZES = VFIO_IOMMU_INFO_PGSIZES,
    type1::VFIO_IOMMU_INFO_CAPS = VFIO_IOMMU_INFO_CAPS,
    type1::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE = VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    type1::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL = VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
    type1::VFIO_IOMMU_DIRTY_PAGES_FLAG_START = VFIO_IOMMU_DIRTY_PAGES_FLAG_START,
    type1::VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP = VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP,
    type1::VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP = VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP,
}

/// Whether `text` has the name as a word of its own.
fn has_word(text: &str, name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.match_indices(name).any(|(at, _)| {
        let around =
            [text.as_bytes().get(at.wrapping_sub(1)), text.as_bytes().get(at + name.len())];
        !around.into_iter().flatten().any(|&byte| is_part(byte))
    })
}

/// Statements that compare what the headers have with ours, and the names that they have not.
fn statements(headers: &str) -> (String, Vec<&'static str>) {
    let (mut source, mut missing) = (String::new(), Vec::new());
    for (name, ours) in numbers() {
        if has_word(headers, name) {
            let _ = writeln!(source, "EQUAL({name}, {ours}ull, \"{name}\");");
        } else {
            missing.push(name);
        }
    }
    let structures = [vfio::STRUCTURES, iommufd::STRUCTURES, io_uring::STRUCTURES];
    for structure in structures.into_iter().flatten() {
        let c_name = structure.c_name();
        if !headers.contains(&format!("struct {c_name} {{")) {
            missing.push(c_name);
            continue;
        }
        let Structure { name, size, .. } = structure;
        if structure.doc.contains("as of Linux") {
            // Later ones are longer.
            let _ = writeln!(source, "EQUAL(sizeof(struct {c_name}) >= {size}, 1, \"{name}\");");
        } else if structure.doc.matches("`struct").count() == 1 {
            let _ = writeln!(source, "EQUAL(sizeof(struct {c_name}), {size}, \"{name}\");");
        }
        for &(field, len, offset) in structure.fields {
            let Some((c_name, c_field, base)) = structure.c_field(field) else { continue };
            if !headers.contains(&format!("struct {c_name} {{")) {
                missing.push(c_name);
                continue;
            }
            let what = format!("{name}.{field}");
            let at = format!("{base} + offsetof(struct {c_name}, {c_field})");
            let _ = writeln!(source, "EQUAL({at}, {offset}, \"{what}\");");
            let long = format!("sizeof(((struct {c_name} *)0)->{c_field})");
            let _ = writeln!(source, "EQUAL({long}, {len}, \"length of {what}\");");
        }
    }
    (source, missing)
}

/// The headers are those of `linux/` in the folder that the variable `DMASPAN_UAPI` names, which
/// have to have everything, or the machine's, whose gaps are skipped.
#[test]
fn structures_and_numbers_are_those_of_the_c_headers() {
    let named = env::var_os("DMASPAN_UAPI").map(PathBuf::from);
    let folder = named.clone().unwrap_or_else(|| PathBuf::from("/usr/include"));
    let present: Vec<_> = ["linux/vfio.h", "linux/iommufd.h", "linux/io_uring.h"]
        .into_iter()
        .filter(|header| folder.join(header).exists())
        .collect();
    if present.is_empty() {
        assert!(named.is_none(), "{} has no linux/vfio.h", folder.display());
        println!("SKIP: this machine has no headers of Linux");
        return;
    }
    let mut headers = String::new();
    let mut source = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in present {
        headers += &fs::read_to_string(folder.join(header)).unwrap();
        let _ = writeln!(source, "#include <{header}>");
    }
    let (statements, missing) = statements(&headers);
    source += "static int wrong;\n#define EQUAL(theirs, ours, name) do { \\\n\
               if ((unsigned long long)(theirs) != (unsigned long long)(ours)) { wrong = 1; \\\n\
               printf(\"%s: %llu, not %llu\\n\", name, (unsigned long long)(theirs), \\\n\
               (unsigned long long)(ours)); } } while (0)\nint main(void) {\n";
    source += &statements;
    source += "return wrong;\n}\n";
    let out = env::temp_dir().join(format!("dmaspan-uapi-{}", std::process::id()));
    let c = out.with_extension("c");
    fs::write(&c, source).unwrap();
    let built = Command::new("cc").arg("-I").arg(&folder).arg("-o").arg(&out).arg(&c).output();
    let Ok(built) = built else {
        fs::remove_file(&c).unwrap();
        println!("SKIP: this machine has no C compiler");
        return;
    };
    let said = String::from_utf8_lossy(&built.stderr).into_owned();
    let ran = Command::new(&out).output();
    fs::remove_file(&c).unwrap();
    let _ = fs::remove_file(&out);
    assert!(built.status.success(), "the headers have other names: {said}");
    let ran = ran.unwrap();
    assert!(ran.status.success(), "C has {}", String::from_utf8_lossy(&ran.stdout));
    if !missing.is_empty() {
        assert!(named.is_none(), "{} has no {missing:?}", folder.display());
        println!("SKIP: the headers of this machine do not have {missing:?}");
    }
}
