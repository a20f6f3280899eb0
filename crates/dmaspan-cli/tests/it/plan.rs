//! `dmaspan plan` and `dmaspan doctor`, run as their users run them.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");

fn run(args: &[&str]) -> Output {
    Command::new(DMASPAN).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn layouts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/layouts")
}

fn layout(name: &str) -> String {
    layouts().join(name).to_str().unwrap().to_owned()
}

/// A file in the folder of temporary ones, which goes with this.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::write(&path, text).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn has_at_most_80_columns(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
        assert!(!line.contains('\x1b') && line.trim_end() == line, "{line}");
    }
}

#[test]
fn every_example_is_planned_in_80_columns_and_fits_unless_it_says_otherwise() {
    let mut count = 0;
    for entry in fs::read_dir(layouts()).unwrap().map(Result::unwrap) {
        let (path, source) = (entry.path(), fs::read_to_string(entry.path()).unwrap());
        let path = path.to_str().unwrap();
        let fails = source.starts_with("# Would fail");
        let output = run(&["plan", "--layout", path]);
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(i32::from(fails)), "{path}: {out}");
        has_at_most_80_columns(&out.replace(path, "x"));
        assert_eq!(out.lines().last().unwrap().starts_with('✗'), fails, "{out}");
        for kind in ["vtd,bits=39", "amd", "smmuv3,granule=64k", "riscv,bits=57"] {
            let output = run(&["plan", "--layout", path, "--iommu", kind]);
            assert!(matches!(output.status.code(), Some(0 | 1)), "{path} {kind}");
            has_at_most_80_columns(&text(&output.stdout).replace(path, "x"));
        }
        count += 1;
    }
    assert!(count >= 9);
}

#[test]
fn the_json_has_names_and_units_that_scripts_use() {
    let output = run(&["plan", "--layout", &layout("laptop-39-bits.toml"), "--format", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["verdict"], "fails");
    assert_eq!(report["iommu"]["address_bits"], 39);
    assert_eq!(report["maps"][0]["leaves"]["4096"], 524_288);
    assert_eq!(report["maps"][0]["best"]["1073741824"], 2);
    assert_eq!(report["mappings"]["left"], 65_535);
    assert_eq!(report["locked"]["bytes"], 8_u64 << 30);
    let names: Vec<&str> = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["outside-apertures", "memlock", "small-pages"]);
    assert!(report["findings"][1]["mends"][0]["action"].as_str().unwrap().contains("ulimit -l"));
}

#[test]
fn advice_that_is_followed_makes_the_layout_fit() {
    let source = fs::read_to_string(layouts().join("laptop-39-bits.toml")).unwrap();
    let mended = source
        .replace("at = \"1T\"", "at = \"0x400000000\"")
        .replace("memlock = \"8M\"", "memlock = \"8G\"")
        .replace("\"base\"", "\"hugetlb\"")
        .replace("6.12", "6.18");
    let file = TempFile::new("mended", &mended);
    let output = run(&["plan", "--layout", file.path()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("✓ it fits"));
}

#[test]
fn wrong_usage_and_bad_layouts_are_one_line_with_the_line_of_the_file() {
    let bad = TempFile::new("bad", "[[region]]\nsize = \"1G\"\nsise = 4\n");
    let good = layout("q35-4g.toml");
    for (args, part) in [
        (&["plan"][..], "--layout <FILE>"),
        (&["plan", "--layout", bad.path()], ", line 3: unknown field `sise`"),
        (&["plan", "--layout", "/nowhere"], "/nowhere cannot be read"),
        (&["plan", "--layout", &good, "--pid", "1"], "cannot be used with"),
        (&["plan", "--layout", &good, "--iommu", "kvm"], "take vtd, amd, smmuv3 or riscv"),
        (&["plan", "--layout", &good, "--iommu", "vtd,bits=12"], "32 to 57 address bits, not 12"),
        (&["plan", "--layout", &good, "--iommu", "vtd,bits="], "bits= is no number"),
        (&["plan", "--layout", &good, "--iommu", "amd,granule=16k"], "no granule of 16 KiB"),
        (&["plan", "--layout", &good, "--iommu", "amd,speed=2"], "no option of an IOMMU"),
        (&["plan", "--layout", &good, "--device", "5"], "5"),
        (&["plan", "--layout", &good, "--device", "ffff:1f:1f.7"], "there is no PCI function"),
        (&["plan", "--layout", &good, "--kernel", "new"], "write it like 6.18"),
        (&["plan", "--layout", &good, "--interface", "kvm"], "take type1 or iommufd"),
        (&["plan", "--layout", &good, "--region", "0-1"], "cannot be used with"),
        (&["plan", "--pid", "4294967295"], "there is no process 4294967295"),
        (&["plan", "--pid", "-1"], "-1"),
        (&["plan", "--pid", "1", "--region", "7f00"], "START-END in hexadecimal"),
        (&["plan", "--pid", "1", "--region", "9000-8000"], "START-END in hexadecimal"),
        (&["doctor", "--format", "xml"], "table, json"),
    ] {
        let output = run(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{args:?}: {error}");
        assert!(error.contains(part), "{args:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn metrics_are_written_whole_and_each_has_its_type() {
    let file = TempFile::new("metrics.prom", "old\n");
    let path = layout("q35-4g.toml");
    let args = ["plan", "--layout", &path, "--format", "prometheus", "--output", file.path()];
    let output = run(&args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(output.stdout.is_empty());
    let metrics = fs::read_to_string(&file.0).unwrap();
    let mut last = String::new();
    for line in metrics.lines() {
        match line.strip_prefix("# TYPE ") {
            Some(typed) => last = typed.strip_suffix(" gauge").unwrap().to_owned(),
            None if line.starts_with("# HELP ") || line == "# EOF" => {}
            None => {
                let (name, rest) = line.split_once('{').unwrap();
                assert_eq!(name, last);
                let (labels, value) = rest.rsplit_once("} ").unwrap();
                assert!(labels.contains("source=\""), "{line}");
                value.parse::<f64>().unwrap();
            }
        }
    }
    for part in ["dmaspan_plan_verdict{", "dmaspan_plan_leaves{", "size_bytes=\"2097152\""] {
        assert!(metrics.contains(part), "{part}: {metrics}");
    }
    let output = run(&["plan", "--layout", &path, "--output", "/nowhere/x.prom"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/nowhere/x.prom cannot be written"));
}

#[test]
fn a_command_line_of_qemu_is_planned_and_what_it_ignores_is_listed() {
    let line = "qemu-system-x86_64 -M q35 -m 8G -cpu host -device vfio-pci,host=01:00.0 \
                -object memory-backend-memfd,id=ram,size=8G,hugetlb=on -smp 4";
    let file = TempFile::new("qemu", line);
    let args = ["plan", "--qemu-cmdline", file.path(), "--kernel", "6.18", "--memlock", "4G"];
    let output = run(&args);
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{out}{}", text(&output.stderr));
    has_at_most_80_columns(&out);
    let words = out.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["`-cpu host`, `-smp 4`", "8 GiB would be locked", "01:00.0 are left out"] {
        assert!(words.contains(part), "{part}: {out}");
    }
    let missing = run(&["plan", "--qemu-cmdline", "/nowhere"]);
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn an_error_that_quotes_a_line_break_is_one_line() {
    let file = TempFile::new("broken", "qemu-system-x86_64 -m '8\n\u{1b}[31mG'");
    let output = run(&["plan", "--qemu-cmdline", file.path()]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains(r"8\n\u{1b}[31mG"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn a_report_has_no_control_characters_of_what_it_names() {
    let line = "qemu-system-x86_64 -m 1G -name '\u{1b}[31m' -M pc,memory-backend=\u{1b}[31m \
                -object memory-backend-ram,id=\u{1b}[31m,size=1G";
    let file = TempFile::new("control", line);
    for format in ["table", "json", "html", "prometheus"] {
        let output = run(&["plan", "--qemu-cmdline", file.path(), "--format", format]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(!text(&output.stdout).contains('\u{1b}'), "{}", text(&output.stdout));
    }
}

#[test]
fn regions_that_overlap_are_an_error_with_the_lines_of_both() {
    let source = "[[region]]\nname = \"a\"\nat = 0\nsize = \"2G\"\n\n\
                  [[region]]\nname = \"b\"\nat = \"1G\"\nsize = \"2G\"\n";
    let file = TempFile::new("overlap", source);
    let output = run(&["plan", "--layout", file.path()]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    let what = ", line 6: b at 0x40000000..=0xbfffffff and a of line 1 at 0x0..=0x7fffffff overlap";
    assert!(error.contains(what), "{error}");
}

#[test]
fn a_page_has_the_verdict_the_findings_and_what_mends_them() {
    let output = run(&["plan", "--layout", &layout("laptop-39-bits.toml"), "--format", "html"]);
    assert_eq!(output.status.code(), Some(1));
    let page = text(&output.stdout);
    for part in [
        "<!DOCTYPE html>",
        "mapping would fail, for 2 reasons",
        "<code>ulimit -l 8388608</code>",
        "reserved for interrupts (MSI)",
        "low RAM",
        "class=\"reserved\"",
        "class=\"refused\"",
        "would not be mapped: outside of what the IOMMU translates",
        "the IOMMU translates nothing above 0x7fffffffff",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn the_page_draws_bars_and_reserved_ranges_where_they_are() {
    let bar = "\n[[bar]]\nname = \"BAR 2\"\nat = \"64G\"\nsize = \"256M\"\n";
    let source = fs::read_to_string(layout("q35-4g.toml")).unwrap() + bar;
    let file = TempFile::new("bars", &source);
    let page = text(&run(&["plan", "--layout", file.path(), "--format", "html"]).stdout);
    let (_, space) = page.split_once("<h2>Address space</h2>").unwrap();
    let (space, _) = space.split_once("</section>").unwrap();
    let places: Vec<usize> =
        ["reserved for interrupts (MSI)", "0x100000000..=", "BAR 2", "class=\"other\""]
            .into_iter()
            .map(|part| space.find(part).unwrap_or_else(|| panic!("{part} is not in {space}")))
            .collect();
    assert!(places.is_sorted(), "{places:?}");
    assert!(!space.contains("refused"), "{space}");
}

#[test]
fn a_process_is_planned_with_what_was_taken_and_what_was_left_out() {
    let mut other = Command::new("sleep").arg("3600").stdout(Stdio::null()).spawn().unwrap();
    let pid = other.id().to_string();
    let none = run(&["plan", "--pid", &pid]);
    let heap = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let heap = heap.lines().find(|line| line.contains(" rw-p ")).map(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        range.to_owned()
    });
    let named = run(&["plan", "--pid", &pid, "--region", &heap.unwrap()]);
    let by_name = run(&["plan", "--pid", &pid, "--name", "no such file"]);
    other.kill().unwrap();
    other.wait().unwrap();
    let error = text(&none.stderr);
    assert_eq!(none.status.code(), Some(2), "{error}");
    assert!(error.contains("no memory that looks like a guest's"), "{error}");
    assert!(text(&by_name.stderr).contains("no memory of a file named `no such file`"));
    let out = text(&named.stdout);
    assert!(matches!(named.status.code(), Some(0 | 1)), "{out}{}", text(&named.stderr));
    has_at_most_80_columns(&out);
    for part in ["taken as memory for devices: 1 ranges", "left out as not asked for", "assumed"] {
        assert!(out.contains(part), "{part}: {out}");
    }
}

#[test]
fn a_process_that_has_ended_and_waits_for_its_parent_is_an_error_that_says_so() {
    let mut other = Command::new(DMASPAN).arg("--version").stdout(Stdio::null()).spawn().unwrap();
    let pid = other.id().to_string();
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !state().contains(") Z ") {
        std::thread::yield_now();
    }
    let output = run(&["plan", "--pid", &pid]);
    other.wait().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("has no memory: it has ended"), "{error}");
}

#[test]
fn a_process_of_another_user_is_an_error_that_says_what_to_do() {
    let mut command = Command::new(DMASPAN);
    let output = command.args(["plan", "--pid", "1"]).uid(65534).gid(65534).output();
    let Ok(output) = output else { return eprintln!("SKIP: cannot become another user") };
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("runs as another user or in a container"), "{error}");
}

#[test]
fn the_doctor_has_a_line_for_each_thing_and_a_command_where_it_is_wrong() {
    let output = run(&["doctor"]);
    let out = text(&output.stdout);
    has_at_most_80_columns(&out);
    let is_wrong = out.lines().any(|line| line.starts_with('✗'));
    assert_eq!(output.status.code(), Some(i32::from(is_wrong)), "{out}");
    let report = run(&["doctor", "--format", "json"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    for check in report["checks"].as_array().unwrap() {
        assert_eq!(check["right"].as_bool().unwrap(), check["change"].is_null(), "{check}");
    }
}
