//! `dmaspan inspect` over dumps that were recorded, and over files that are none.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use dmaspan::io_pgtable::{Arena, Format, PageTable, VtdSs, VtdSsConfig, X86_64, X86_64Config};
use dmaspan::{Iova, PhysAddr, Prot, Span};
use serde_json::{Value, json};

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmaspan"));
    command.arg("inspect").args(args).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn report(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--format", "json"]].concat())).unwrap()
}

/// The exit code and the one line of an error.
fn refused(args: &[&str]) -> (i32, String) {
    let output = run(args);
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{args:?}: {line:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    (output.status.code().unwrap(), line.trim_end().to_owned())
}

/// The first address of the tables of [`memory`].
const BASE: u64 = 0x4000_0000;

/// Memory from [`BASE`] on with a table of the format, and its root: 4 MiB and two pages.
fn memory<F: Format<Word = u64>>(format: F) -> (Vec<u8>, u64) {
    let arena = Arena::new(PhysAddr::new(BASE), 1 << 20);
    let mut table = PageTable::new(format, arena.clone()).unwrap();
    let span = |paddr, bytes| Span::new(PhysAddr::new(paddr), bytes).unwrap();
    let spans = [span(0x8000_0000, 4 << 20), span(0x9000_1000, 0x2000)];
    table.whole().map_spans(Iova::new(0x10_0020_0000), &spans, Prot::READ_WRITE).unwrap();
    let words = (0..(64 << 10) / 8)
        .map(|index| arena.load::<u64>(PhysAddr::new(BASE + 8 * index)).unwrap_or(0));
    let bytes = words.flat_map(u64::to_le_bytes).collect();
    (bytes, table.root().get())
}

fn vtd() -> (Vec<u8>, u64) {
    memory(VtdSs::new(VtdSsConfig::new(48, 46)).unwrap())
}

/// What [`memory`] maps, as `inspect` reports it.
fn expected() -> Value {
    json!([
        {
            "iova": 0x10_0020_0000_u64, "paddr": 0x8000_0000_u64, "bytes": 4 << 20,
            "leaf_sizes": [2 << 20, 2 << 20], "prot": "rw",
        },
        {
            "iova": 0x10_0060_0000_u64, "paddr": 0x9000_1000_u64, "bytes": 0x2000,
            "leaf_sizes": [4096, 4096], "prot": "rw",
        },
    ])
}

#[test]
fn a_raw_dump_shows_what_was_mapped_in_it_and_where_addresses_lead() {
    let folder = Folder::new("raw");
    let (bytes, root) = vtd();
    let (file, root) = (folder.file("guest.mem", bytes), format!("nic={root:#x}"));
    let base = ["--base", "0x40000000", "--iommu", "vtd", "--root", &root];
    let questions = ["--iova", "0x1000201234", "--iova", "0x5000", "--phys", "0x90001008"];
    let report = report(&[&[file.as_str()], &base[..], &questions].concat());
    let domain = &report["domains"][0];
    assert_eq!(domain["mappings"], expected());
    assert_eq!((&domain["name"], &domain["table_count"]), (&json!("nic"), &json!(4)));
    assert_eq!(domain["leaves"], json!({"4096": 2, "2097152": 2}));
    let found = |index: usize| &report["lookups"][index]["found"];
    assert_eq!(found(0)[0]["paddr"], json!(0x8000_1234_u64));
    assert_eq!(found(1), &json!([]));
    assert_eq!(found(2)[0]["iova"], json!(0x10_0060_0008_u64));
    let names: Vec<_> =
        report["findings"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, [""; 0]);
    let table = text(&[&[file.as_str()], &base[..]].concat());
    assert!(table.contains("✓ nothing suspicious was found"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let page = text(&[&[file.as_str()], &base[..], &["--format", "html"]].concat());
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("0x1000200000..="), "{page}");
    let figures = text(&[&[file.as_str()], &base[..], &["--format", "prometheus"]].concat());
    assert!(figures.contains("dmaspan_inspect_spans{device=\"nic\""), "{figures}");
}

#[test]
fn mappings_of_what_a_dump_of_memory_does_not_have_are_noted() {
    let folder = Folder::new("outside");
    let (bytes, root) = vtd();
    let (file, root) = (folder.file("guest.mem", bytes), format!("{root:#x}"));
    // A page of what is mapped is in the dump now.
    fs::File::options().write(true).open(&file).unwrap().set_len(0x4000_1000).unwrap();
    let how = [file.as_str(), "--base", "0x40000000", "--iommu", "vtd", "--root", &root];
    let report = report(&how);
    let finding = &report["findings"][0];
    assert_eq!(
        (&finding["name"], &finding["count"], &finding["bytes"]),
        (&json!("outside_dump"), &json!(2), &json!((4 << 20) - 0x1000 + 0x2000))
    );
    assert_eq!(report["domains"][0]["mappings"][0]["in_dump"], json!(false));
}

#[test]
fn the_tables_alone_are_a_core_file_that_says_the_same() {
    let folder = Folder::new("extract");
    let (bytes, root) = memory(X86_64::new(X86_64Config::new(48, 46)).unwrap());
    let (file, root) = (folder.file("guest.mem", &bytes), format!("{root:#x}"));
    let core = folder.0.join("tables.core").display().to_string();
    let how = ["--iommu", "vtd,stage=1", "--root", &root];
    let base = ["--base", "0x40000000", "--tables", &core];
    let whole = report(&[&[file.as_str()], &how[..], &base].concat());
    let alone = report(&[&[core.as_str()], &how[..]].concat());
    assert_eq!(whole["domains"][0]["mappings"], expected());
    assert_eq!(alone["domains"], whole["domains"]);
    assert!(fs::metadata(&core).unwrap().len() < 5 * 4096);
    // Cut off anywhere, it is an error or the same.
    let bytes = fs::read(&core).unwrap();
    for length in (1..bytes.len()).step_by(509) {
        let cut = folder.file("cut.core", &bytes[..length]);
        let (code, line) = refused(&[&[cut.as_str()], &how[..]].concat());
        assert!(code == 1 || length < 4, "{length}: {line}");
    }
}

#[test]
fn two_dumps_differ_by_what_was_mapped_between() {
    let folder = Folder::new("diff");
    let (mut bytes, root) = vtd();
    let before = folder.file("before.mem", &bytes);
    // One of the two pages goes: the entry of the last one is cleared.
    let entry = bytes.chunks(8).position(|word| {
        u64::from_le_bytes(word.try_into().unwrap()) & 0xf_ffff_f000 == 0x9000_2000
    });
    bytes[8 * entry.unwrap()..][..8].fill(0);
    let now = folder.file("now.mem", &bytes);
    let root = format!("{root:#x}");
    let how = ["--base", "0x40000000", "--iommu", "vtd", "--root", &root, "--diff", &before];
    let report = report(&[&[now.as_str()], &how[..]].concat());
    assert_eq!(
        report["diff"][0]["changes"],
        json!([{
            "change": "removed", "iova": 0x10_0060_1000_u64, "bytes": 4096,
            "before": {"paddr": 0x9000_2000_u64, "prot": "rw"}, "after": null,
        }])
    );
    let same = text(&[&[before.as_str()], &how[..]].concat());
    assert!(same.contains("the same mappings as before"), "{same}");
}

#[test]
fn a_report_is_written_whole_or_not_at_all() {
    let folder = Folder::new("output");
    let (bytes, root) = vtd();
    let (file, root) = (folder.file("guest.mem", bytes), format!("{root:#x}"));
    let how = [file.as_str(), "--base", "0x40000000", "--iommu", "vtd", "--root", &root];
    let page = folder.0.join("table.html").display().to_string();
    let printed = text(&[&how[..], &["--format", "html", "--output", &page]].concat());
    assert_eq!(printed, "");
    assert!(fs::read_to_string(&page).unwrap().ends_with("</html>"));
    let missing = folder.0.join("none/table.html").display().to_string();
    let (code, line) = refused(&[&how[..], &["--output", &missing]].concat());
    assert!(code == 1 && line.contains("cannot be written"), "{line}");
}

#[test]
fn what_is_no_dump_is_refused_by_name_and_reason() {
    let folder = Folder::new("refused");
    let (bytes, root) = vtd();
    let file = folder.file("guest.mem", &bytes);
    let root = format!("{root:#x}");
    let vtd = ["--iommu", "vtd", "--root", &root];
    let of = |name: &str, content: &[u8]| folder.file(name, content);
    let (none, here) = (folder.0.join("none"), folder.0.display().to_string());
    let none = none.display().to_string();
    for (file, more, code, part) in [
        (of("empty", b""), &vtd[..], 1, "empty is empty"),
        (none, &vtd[..], 1, "none cannot be read"),
        (here.clone(), &vtd[..], 1, "is a folder"),
        (here, &["--kind", "debugfs"], 1, "is a folder"),
        ("/dev/zero".to_owned(), &vtd[..], 1, "is no regular file"),
        (file.clone(), &[], 2, "needs --root with the address of a table, and --iommu"),
        (file.clone(), &["--root", "0x1000"], 2, "needs --root"),
        (file.clone(), &vtd[..], 1, "the dump has 0x0..=0xffff"),
        (
            file.clone(),
            &["--base", "0x40000000", "--iommu", "vtd", "--root", "0x40000008"],
            1,
            "is not at a multiple of 0x1000 bytes",
        ),
        (
            file.clone(),
            &["--base", "0xffffffffffff0001", "--iommu", "vtd", "--root", "0"],
            1,
            "above the last address",
        ),
        (file.clone(), &["--iommu", "vtd,levels=3", "--root", "0"], 2, "takes no levels"),
        (file.clone(), &["--kind", "elf", "--iommu", "vtd", "--root", "0"], 1, "no whole ELF"),
        (file.clone(), &["--kind", "debugfs"], 1, "line 1: "),
        (of("gz", b"\x1f\x8b\x08\x00"), &vtd[..], 1, "packed by gzip"),
        (of("kdump", b"KDUMP   \x06\x00"), &vtd[..], 1, "makedumpfile -E"),
        (of("flat", b"makedumpfile\x00\x00"), &vtd[..], 1, "makedumpfile -R"),
        (of("vm", b"QEVM\x00\x00\x00\x03"), &vtd[..], 1, "dump-guest-memory"),
        (of("elf", b"\x7fELF\x02\x01\x01"), &vtd[..], 1, "no whole ELF"),
        (of("dmar", b"IOMMU dmar0: Root Table Address: 0x1\n"), &[], 1, "dmar_translation_struct"),
        (of("regs", b"IOMMU: dmar0 Register Base"), &[], 1, "iommu_regset"),
        (of("log", b"[    0.0] Linux version 6.1\n"), &[], 1, "is a text, but neither"),
        (of("device", b"Device 0000:00:05.0\n"), &[], 1, "line 1: "),
        (
            of("off", b"DMA Remapping is not enabled on dmar0\n"),
            &[],
            1,
            "it has no device that is translated",
        ),
        (of("lines", b"tree title=x first=0x0 last=0xff\nleaf\n"), &[], 1, "line 2: it has no"),
        (of("bytes", b"Device \xff\xfe @0x1\n"), &[], 1, "line 1: it is no text"),
    ] {
        let (found, line) = refused(&[&[file.as_str()], more].concat());
        assert!(found == code && line.contains(part), "{code} {part}: {found} {line}");
    }
    let device = of("ok", b"Device 0000:00:05.0 @0x1000\n");
    for more in
        [&["--root", "0x1000"][..], &["--base", "0"], &["--tables", "x"], &["--iommu", "amd"]]
    {
        let (_, line) = refused(&[&[device.as_str()], more].concat());
        assert!(line.contains(more[0]), "{line}");
    }
    let (code, line) = refused(&[&device, &file, "--iommu", "vtd"]);
    assert!(code == 2 && line.contains("another kind"), "{line}");
}

#[test]
fn files_of_debugfs_without_a_translation_are_noted_beside_the_others() {
    let folder = Folder::new("several");
    let nic = "Device 0000:00:05.0 @0x1000\nIOVA_PFN PML5E PML4E PDPE PDE PTE\n\
        0x0000000040000 |\t0x0000000000000000\t0x0000000000002003\t0x0000000140000083\n";
    let nic = folder.file("nic", nic);
    let off = folder.file("off", "DMA Remapping is not enabled on dmar1\n");
    let passed = folder.file("passed", "");
    let report = report(&[&passed, &nic, &off]);
    assert_eq!(report["domains"][0]["leaves"], json!({"1073741824": 1}));
    let note = |file: &str| json!(format!("not translated: {file}"));
    assert_eq!(report["notes"], json!([note(&passed), note(&off)]));
    let (code, line) = refused(&[&passed, &passed]);
    assert!(code == 1 && line.contains("passed is empty"), "{line}");
}

/// A file of a recorded dump.
fn recorded(name: &str) -> String {
    format!("{}/tests/dumps/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs of IOVA, memory, bytes and rights, of which those that go on are one.
fn joined(runs: impl Iterator<Item = (u64, u64, u64, String)>) -> Vec<(u64, u64, u64, String)> {
    let mut runs: Vec<_> = runs.collect();
    runs.sort();
    let mut joined: Vec<(u64, u64, u64, String)> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if (last.0 + last.2, last.1 + last.2, &last.3) == (run.0, run.1, &run.3) => {
                last.2 += run.2;
            }
            _ => joined.push(run),
        }
    }
    joined
}

fn number(word: &str) -> u64 {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
        None => word.parse().unwrap(),
    }
}

/// What a guest said that it had mapped.
fn held(name: &str) -> Vec<(u64, u64, u64, String)> {
    let text = fs::read_to_string(recorded(name)).unwrap();
    let runs = text.lines().map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let rights = words.get(3).copied().unwrap_or_default().to_owned();
        (number(words[0]), number(words[1]), number(words[2]), rights)
    });
    joined(runs)
}

/// What the kernel's events `iommu:map` and `iommu:unmap` leave mapped, page by page.
fn traced(name: &str) -> Vec<(u64, u64, u64, String)> {
    let mut pages = BTreeMap::new();
    for line in fs::read_to_string(recorded(name)).unwrap().lines() {
        let of = |key: &str| {
            let (_, rest) = line.split_once(key)?;
            rest.split(' ').next().map(number)
        };
        let (iova, bytes) = (of(" iova=").unwrap(), of(" size=").unwrap());
        for offset in (0..bytes).step_by(4096) {
            match of(" paddr=") {
                Some(paddr) => assert_eq!(pages.insert(iova + offset, paddr + offset), None),
                None => assert!(pages.remove(&(iova + offset)).is_some(), "{line}"),
            }
        }
    }
    joined(pages.into_iter().map(|(iova, paddr)| (iova, paddr, 4096, String::new())))
}

/// What a dump shows of one table.
fn shown(args: &[&str]) -> Vec<(u64, u64, u64, String)> {
    let report = report(args);
    let mappings = report["domains"][0]["mappings"].as_array().unwrap();
    joined(mappings.iter().map(|mapping| {
        let number = |key: &str| mapping[key].as_u64().unwrap();
        let rights = mapping["prot"].as_str().unwrap().to_owned();
        (number("iova"), number("paddr"), number("bytes"), rights)
    }))
}

/// The same, of a text or a dump that says by itself where its table is.
fn agrees(args: &[&str], held_by: &str) {
    let shown = shown(args);
    assert!(shown.len() > 3, "{args:?}");
    assert_eq!(shown, held(held_by), "{args:?}");
}

#[test]
fn recorded_tables_of_guests_map_what_the_guests_said_that_they_mapped() {
    for (name, root, iommu) in RECORDED {
        if name == "riscv-linux" {
            // Nobody but the kernel said what is in it.
            continue;
        }
        let core = recorded(&format!("{name}.core"));
        agrees(&[&core, "--root", root, "--iommu", iommu], &format!("{name}.held"));
    }
}

#[test]
fn what_linux_shows_in_debugfs_maps_what_the_guests_said_that_they_mapped() {
    for (name, tables, device) in [
        ("vtd-legacy", "VT-d second-stage page tables", "0000:00:05.0"),
        ("vtd-scalable", "x86-64 page tables", "0000:00:05.0"),
    ] {
        let shown = recorded(&format!("{name}.debugfs"));
        agrees(&[&shown], &format!("{name}.held"));
        let domain = &report(&[&shown])["domains"][0];
        assert_eq!((&domain["tables"], &domain["name"]), (&json!(tables), &json!(device)));
        assert_eq!(domain["leaves"], json!({"4096": 80, "2097152": 4}), "{name}");
    }
    // The text and the memory of one guest at one time.
    let (text, core) = (recorded("vtd-scalable.debugfs"), recorded("vtd-scalable.core"));
    let memory = report(&[&core, "--root", "0x6428000", "--iommu", "vtd,stage=1"]);
    let text = report(&[&text]);
    let of = |report: &Value, key: &str| report["domains"][0][key].clone();
    for key in ["root", "tables", "table_count", "leaves", "spans", "missed", "mapped_bytes"] {
        assert_eq!(of(&text, key), of(&memory, key), "{key}");
    }
}

#[test]
fn recorded_tables_map_what_the_kernel_traced() {
    let shown = |core: &str, root, iommu| {
        let shown = shown(&[&recorded(core), "--root", root, "--iommu", iommu]);
        joined(shown.into_iter().map(|run| (run.0, run.1, run.2, String::new())))
    };
    let mapped = shown("riscv-linux.core", "0x83dc3000", "riscv,bits=57");
    assert_eq!((mapped.len(), &mapped), (21, &traced("riscv-linux.trace")));
    let shown = shown("smmuv3.core", "0x434fe000", "smmuv3");
    // The first event is of a mapping that the kernel tried and took away again.
    let traced = held("smmuv3.trace").into_iter().filter(|run| run.0 != 0);
    assert_eq!(shown, traced.collect::<Vec<_>>());
}

/// The recorded tables, their roots and their formats.
const RECORDED: [(&str, &str, &str); 7] = [
    ("vtd", "0x97f000", "vtd"),
    ("vtd-scalable", "0x6428000", "vtd,stage=1"),
    ("amd", "0xa69000", "amd"),
    ("smmuv3", "0x434fe000", "smmuv3"),
    ("riscv-linux", "0x83dc3000", "riscv,bits=57"),
    ("riscv-sv39", "0x81000000", "riscv"),
    ("riscv-sv39x4", "0x81000000", "riscv,stage=2"),
];

#[test]
fn recorded_tables_as_another_format_are_said_to_be_of_the_one_that_they_are_of() {
    let named = |report: &Value| {
        let findings = report["findings"].as_array().unwrap();
        let found = findings.iter().find(|it| it["name"] == "another_format")?;
        Some(found["examples"][0].as_str().unwrap().rsplit_once("--iommu ").unwrap().1.to_owned())
    };
    for (name, root, iommu) in RECORDED {
        let core = recorded(&format!("{name}.core"));
        let as_one = |iommu| named(&report(&[&core, "--root", root, "--iommu", iommu]));
        assert_eq!(as_one(iommu), None, "{name}");
        for other in ["vtd", "amd-v2", "amd", "smmuv3", "riscv,bits=48"] {
            let is_one = other == iommu || (iommu, other) == ("vtd,stage=1", "amd-v2");
            // Both stages of RISC-V have the same entries.
            let expected = (!is_one).then(|| iommu.replace("riscv,stage=2", "riscv"));
            assert_eq!(as_one(other), expected, "{name} as {other}");
        }
    }
}

#[test]
fn recorded_tables_as_another_format_are_reported_and_end() {
    let core = recorded("vtd.core");
    for iommu in ["amd", "amd,levels=6", "smmuv3", "riscv,bits=48"] {
        let report = report(&[&core, "--root", "0x97f000", "--iommu", iommu]);
        let mapped = &report["domains"][0]["mapped_bytes"];
        let findings = report["findings"].as_array().unwrap();
        let is_wrong = |it: &Value| it["severity"] == "wrong";
        assert!(mapped == &json!(0) || findings.iter().any(is_wrong), "{iommu}: {report}");
    }
}
