//! A QEMU that runs, planned: what is found is what mapping the same memory finds.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::{IovaRange, PhysAddr, Prot, Span, UserRange};
use dmaspan_linux::hugetlb::HugetlbReservation;
use dmaspan_linux::machine::{MachineFiles, ProcessChoice};
use dmaspan_linux::plan::forecast::{
    Backing, Forecast, IommuModel, PaperIommu, PaperLayout, PaperLimits, PaperRegion,
};
use dmaspan_linux::vfio::LockedBy;
use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
use dmaspan_qemu::Arch;
use serde_json::Value;

use crate::turn::turn;

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");
const NAME: &str = "qemu::a_running_qemu_has_the_regions_and_spans_that_mapping_its_memory_finds";
/// The program that the child of the test becomes.
const CHILD: &str = "DMASPAN_TEST_BECOMES";

/// The memory of the guest: 2 GiB.
const PRIVATE: u64 = 1 << 30;
const SHARED: u64 = 512 << 20;

/// A QEMU whose memory is all there, which goes with this.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Qemu {
    /// Starts it with private memory of one kind, and shared memory of another. That a process has
    /// no transparent huge pages is a property of it, which a child of this one passes on.
    fn start(program: &str, private: Backing, shared: Backing) -> Self {
        let is_hugetlb = shared == Backing::Hugetlb;
        let hugetlb = if is_hugetlb { ",hugetlb=on,hugetlbsize=2M" } else { "" };
        let memory = [
            format!("memory-backend-ram,id=private,size={PRIVATE},prealloc=on"),
            format!("memory-backend-memfd,id=file,size={SHARED},prealloc=on"),
            format!("memory-backend-memfd,id=huge,size={SHARED},prealloc=on{hugetlb}"),
        ];
        let mut command = match private {
            Backing::Thp => Command::new(program),
            _ => {
                let mut child = Command::new(env::current_exe().unwrap());
                child.args(["--exact", NAME, "--nocapture", "--"]).env(CHILD, program);
                child
            }
        };
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-S", "-M", "q35"]);
        command.args(["-m", "2G", "-qmp", "stdio"]);
        for memory in memory {
            command.args(["-object", &memory]);
        }
        for id in ["private", "file", "huge"] {
            command.args(["-numa", &format!("node,memdev={id}")]);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // It greets when the machine is made.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let qemu = Self(child);
        assert!(lines.any(|line| line.unwrap().contains("\"QMP\"")), "QEMU ended at once");
        qemu
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// In the child: it becomes QEMU, and has no transparent huge pages then.
fn become_qemu(program: &str) -> ! {
    rustix::thread::disable_transparent_huge_pages(true).unwrap();
    let arguments = env::args().skip_while(|argument| argument != "--").skip(1);
    panic!("{}", Command::new(program).args(arguments).env_remove(CHILD).exec())
}

/// The spans of a range, by an entry for each page (Documentation/admin-guide/mm/pagemap.rst).
fn page_by_page(pid: u32, range: UserRange) -> Vec<Span<PhysAddr>> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let page = MemoryKind::Base.page_size();
    let pages = range.checked_len().unwrap() / page;
    let mut entries = vec![0; usize::try_from(pages * 8).unwrap()];
    pagemap.read_exact_at(&mut entries, range.start().get() / page * 8).unwrap();
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for entry in entries.as_chunks().0 {
        let entry = u64::from_ne_bytes(*entry);
        assert_ne!(entry >> 63, 0, "a page is not in memory");
        let at = (entry & ((1 << 55) - 1)) * page;
        match spans.last_mut() {
            Some((start, len)) if *start + *len == at => *len += page,
            _ => spans.push((at, page)),
        }
    }
    spans.into_iter().map(|(start, len)| Span::new(PhysAddr::new(start), len).unwrap()).collect()
}

/// The spans that pinning finds: of a file, the memory that this process maps of it itself.
fn pinned(pid: u32, range: UserRange) -> Vec<Span<PhysAddr>> {
    let (start, end) = (range.start().get(), range.last().get() + 1);
    let file = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
    let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let memory = Arc::new(Memory::from_file(file, 0, end - start).unwrap());
    let pinner = LinuxPinner::<PhysAddr>::new().unwrap();
    let buffer = pinner.pin_whole(&memory, Prot::READ_WRITE).unwrap();
    buffer.segments().iter().collect()
}

/// Maps the spans where the forecast has them, and compares the leaves.
fn map_all(forecast: &Forecast, regions: &[PaperRegion]) {
    let format = X86_64::new(X86_64Config::new(48, 52)).unwrap();
    let tables = Arena::new(PhysAddr::new(1 << 46), 64 << 20);
    let mut table = PageTable::new(format, tables).unwrap();
    for map in &forecast.maps {
        let mut iova = map.iova.start();
        for region in &map.regions {
            let region = &regions[*region];
            table.whole().map_spans(iova, region.spans.as_ref().unwrap(), region.prot).unwrap();
            iova = iova.wrapping_add(region.len());
        }
    }
    let census = table.whole().census(IovaRange::ALL);
    for (size, count) in forecast.leaves() {
        assert_eq!(census.count(size.ilog2()), count, "leaves of {size:#x}");
    }
    assert_eq!(forecast.table_bytes, table.memory().table_bytes());
}

/// What `dmaspan plan` says of a process.
fn said(pid: u32) -> Value {
    let pid = pid.to_string();
    let arguments = ["plan", "--pid", &pid, "--iommu", "vtd", "--format", "json"];
    let output = Command::new(DMASPAN).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn compare(qemu: &Qemu, expected: &[(Backing, u64)]) {
    let (pid, machine) = (qemu.pid(), MachineFiles::new());
    let memory = machine.memory_of(pid, &ProcessChoice::Large, &mut |_, _| {}).unwrap();
    let mut found: Vec<_> =
        memory.regions.iter().map(|region| (region.backing, region.len())).collect();
    found.sort_unstable_by_key(|(backing, _)| backing.name());
    assert_eq!(found, expected, "{:?}", memory.ranges);
    assert_eq!((memory.untouched, memory.no_frames), (0, None));
    for region in &memory.regions {
        let spans = region.spans.as_ref().unwrap();
        assert_eq!(*spans, page_by_page(pid, region.user), "{}", region.backing);
        if matches!(region.backing, Backing::Memfd | Backing::Hugetlb) {
            assert_eq!(*spans, pinned(pid, region.user), "{}", region.backing);
        }
    }
    let regions = memory.regions;
    let layout = PaperLayout {
        regions: regions.clone(),
        iommu: PaperIommu::new(IommuModel::Vtd),
        limits: PaperLimits::unlimited(LockedBy::Process),
        kernel: machine.kernel(),
        devices: 1,
        has_viommu: false,
        device_node: None,
    };
    let forecast = Forecast::new(&layout).unwrap();
    map_all(&forecast, &regions);
    let report = said(pid);
    assert_eq!(report["locked"]["bytes"], PRIVATE + 2 * SHARED);
    let maps = report["maps"].as_array().unwrap();
    assert_eq!(maps.len(), expected.len());
    for (map, said) in forecast.maps.iter().zip(maps) {
        let spans: usize =
            map.regions.iter().map(|region| regions[*region].spans.as_ref().unwrap().len()).sum();
        assert_eq!(said["spans"], serde_json::json!([spans, spans]));
        let leaves = said["leaves"].as_object().unwrap();
        for leaf in &map.leaves {
            assert_eq!(leaves[&leaf.size.to_string()], leaf.count);
        }
        let backing = regions[map.regions[0]].backing;
        println!("{backing}: {} bytes, {spans} spans, {:?}", map.len(), map.leaves);
    }
}

#[test]
fn a_running_qemu_has_the_regions_and_spans_that_mapping_its_memory_finds() {
    if let Ok(program) = env::var(CHILD) {
        become_qemu(&program);
    }
    let Some(qemu) = dmaspan_qemu::ready(Arch::X86_64) else { return };
    let program = qemu.path.to_str().unwrap();
    if let Err(why) = LinuxPinner::<PhysAddr>::new() {
        return eprintln!("SKIP: {why}");
    }
    let thp = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let has_thp = thp.is_ok_and(|thp| !thp.contains("[never]"));
    let _turn = turn();
    for private in [Backing::Base, Backing::Thp] {
        if private == Backing::Thp && !has_thp {
            eprintln!("SKIP of transparent huge pages: the kernel gives none");
            continue;
        }
        let mut reserved = HugetlbReservation::for_memory(MemoryKind::MemfdHugetlb2M, SHARED);
        if let Err(why) = &reserved {
            eprintln!("SKIP of hugetlb pages: {why}");
        }
        let shared = if reserved.is_ok() { Backing::Hugetlb } else { Backing::Memfd };
        let running = Qemu::start(program, private, shared);
        if let Ok(Some(reserved)) = &mut reserved {
            reserved.mapped();
        }
        let mut expected = [(private, PRIVATE), (shared, SHARED), (Backing::Memfd, SHARED)];
        expected.sort_unstable_by_key(|(backing, _)| backing.name());
        compare(&running, &expected);
        // Pages in use would stay as surplus ones.
        drop(running);
        drop(reserved);
    }
}
