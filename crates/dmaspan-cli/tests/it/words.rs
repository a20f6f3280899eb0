//! The program's words, and the stream that they go to, in circumstances that are not the usual
//! ones.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use dmaspan_linux::MemoryKind;
use serde_json::Value;

use crate::turn::turn;

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");

/// Runs a line of a shell, in which `"$0"` is the program.
fn shell(line: &str) -> Output {
    Command::new("sh").args(["-c", line, DMASPAN]).output().unwrap()
}

fn run(args: &[&str]) -> Output {
    Command::new(DMASPAN).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A map that is quick, of memory that an ordinary user may pin.
const MAP: [&str; 6] = ["map", "64K", "--memory", "base", "--runs", "1"];

#[test]
fn output_that_is_lost_is_a_failure_that_is_said() {
    for args in ["--help", "--version", "map --help", "map 64K --memory base --runs 1"] {
        for (to, why) in [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
        {
            let output = shell(&format!("\"$0\" {args} {to}"));
            let error = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{args} {to}: {error}");
            assert!(error.starts_with("error: the report cannot be written: "), "{error}");
            assert!(error.contains(why), "{error}");
            // Nobody can be told, and the exit code says it.
            assert_eq!(shell(&format!("\"$0\" {args} {to} 2>&-")).status.code(), Some(1));
        }
        assert_eq!(shell(&format!("\"$0\" {args} >/dev/null")).status.code(), Some(0));
        let both = File::options().read(true).write(true).open("/dev/null").unwrap();
        let output = Command::new(DMASPAN).args(args.split(' ')).stdout(both).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}

#[test]
fn a_locale_without_utf_8_gets_ascii_and_the_same_columns() {
    let machine = ["devices", "--all"];
    let bench = ["bench", "io-pgtable", "--quick", "--format-name", "vtd"];
    for args in [&MAP[..], &machine, &bench, &["--help"], &["map", "--help"]] {
        for format in ["table", "json"] {
            if args.contains(&"--help") && format == "json" {
                continue;
            }
            let mut command = Command::new(DMASPAN);
            command.args(args).env("LC_ALL", "C");
            if !args.contains(&"--help") {
                command.args(["--format", format]);
            }
            let output = command.output().unwrap();
            let (text, error) = (stdout(&output), stderr(&output));
            assert!(text.is_ascii() && error.is_ascii(), "{args:?}: {text}{error}");
            if format == "json" && output.status.success() {
                serde_json::from_str::<Value>(&text).unwrap();
            }
        }
    }
    // LC_ALL is before the others, and one that is empty is none.
    let last = |line: &str| stdout(&shell(&format!("{line} \"$0\" {}", MAP.join(" "))));
    assert!(last("LC_ALL=C.UTF-8 LANG=C").contains("✓ nothing translates"));
    assert!(last("LC_ALL= LC_CTYPE=POSIX LANG=C.UTF-8").contains("+ nothing translates"));
    assert!(last("LC_ALL= LC_CTYPE= LANG=").contains("✓ nothing translates"));
}

#[test]
fn a_function_that_is_named_twice_is_listed_once() {
    let all = run(&["devices", "--all", "--format", "json"]);
    let Ok(all) = serde_json::from_slice::<Value>(&all.stdout) else {
        return eprintln!("SKIP: {}", stderr(&all));
    };
    let Some(bdf) = all["devices"][0]["bdf"].as_str() else {
        return eprintln!("SKIP: there is no PCI function");
    };
    let twice = run(&["devices", bdf, bdf, "--format", "json"]);
    let twice: Value = serde_json::from_slice(&twice.stdout).unwrap();
    assert_eq!(twice["devices"].as_array().unwrap().len(), 1, "{twice}");
}

#[test]
fn sizes_are_read_as_kubernetes_writes_them_and_one_byte_is_one() {
    let output = run(&["map", "64Ki", "--memory", "base", "--runs", "1", "--format", "json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["size_bytes"], 64 << 10);
    let output = run(&["map", "1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).starts_with("error: 1 byte is not a multiple"), "{}", stderr(&output));
}

/// Runs a line of a shell as an ordinary user whom no other run had: the kernel counts locked
/// memory of a ring by user, and gives it back some time after the ring's process has ended.
/// `None` where that is not permitted.
fn as_another_user(line: &str) -> Option<Output> {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = process::id().wrapping_mul(4).wrapping_add(RUNS.fetch_add(1, Relaxed));
    // Within what a user namespace usually maps, and beyond the users of a usual machine.
    let user = 10_000 + run % 50_000;
    let mut command = Command::new("sh");
    let output = command.args(["-c", line, DMASPAN]).uid(user).gid(user).output();
    output.inspect_err(|error| eprintln!("SKIP: cannot become another user: {error}")).ok()
}

#[test]
fn a_low_limit_of_locked_memory_chooses_what_fits_or_says_what_does_not_once() {
    // Half of it is left to others.
    let limit = 64.max((2 * MemoryKind::Base.page_size()) >> 10);
    let line = format!("ulimit -l {limit}; \"$0\" map --runs 1");
    let Some(all) = as_another_user(&line) else { return };
    let text = stderr(&all);
    assert_eq!(all.status.code(), Some(2), "{text}");
    let huge = MemoryKind::Thp.page_size().max(2 << 20);
    let advice = format!("`ulimit -l {}`", huge >> 9);
    let only = format!("may pin only {limit} KiB");
    assert!(text.contains(&only) && text.contains(&advice), "{text}");
    let line = format!("ulimit -l {limit}; \"$0\" map --memory base --runs 1 --format json");
    let base = as_another_user(&line).unwrap();
    assert_eq!(base.status.code(), Some(0), "{}", stderr(&base));
    let report: Value = serde_json::from_slice(&base.stdout).unwrap();
    assert_eq!(report["size_bytes"], limit << 9);
    // Two kinds, each refused for the same limit, in one file.
    let size = huge.max(4 << 20) >> 20;
    let map = format!("map {size}M --memory base,thp,memfd --runs 1 2>&1");
    let both = as_another_user(&format!("ulimit -l {limit}; \"$0\" {map}")).unwrap();
    assert_eq!(both.status.code(), Some(1));
    let text = stdout(&both).split_whitespace().collect::<Vec<_>>().join(" ");
    // What the machine is like comes first.
    let (_, text) = text.split_once("of each kind of memory").unwrap();
    assert_eq!(text.matches("RLIMIT_MEMLOCK").count(), 1, "{text}");
    assert_eq!(text.matches("is too low for this kind, too: see base").count(), 2, "{text}");
    assert_eq!(text.matches("nothing was mapped").count(), 1, "{text}");
}

#[test]
fn what_keeps_the_kernels_count_from_being_read_is_named() {
    // Enough for what maps, and not for a file more.
    let mut named = false;
    for files in 4..16 {
        let map = MAP.join(" ");
        let output = shell(&format!("exec 2>&1; ulimit -n {files}; exec \"$0\" {map}"));
        let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        // Files that this process inherited are open in that one, too: then it may not even start.
        if text.contains("error while loading shared libraries") {
            continue;
        }
        assert!(!text.contains("does not tell"), "{files}: {text}");
        let is_said = ["EMFILE", "Too many open files"].iter().any(|name| text.contains(name));
        assert!(is_said || output.status.success(), "{files}: {text}");
        named |= is_said;
    }
    assert!(named);
}

#[test]
fn a_machine_without_proc_is_told_so() {
    let map = MAP.join(" ");
    let line = format!("mount -t tmpfs none /proc && \"$0\" {map} 2>&1");
    let output = Command::new("unshare").args(["-m", "sh", "-c", &line, DMASPAN]).output();
    let text = output.map(|output| stdout(&output)).unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if text.is_empty() || text.contains("permission denied") || text.contains("not permitted") {
        return eprintln!("SKIP: /proc cannot be hidden here: {text}");
    }
    assert!(text.contains("procfs is not mounted at /proc"), "{text}");
    assert!(!text.contains("does not tell"), "{text}");
}

/// A memory cgroup of version 1 with a limit, and nobody in it. `None` where there can be none.
struct Confined(String);

impl Confined {
    fn new(bytes: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let line = own.lines().find(|line| line.split(':').nth(1) == Some("memory"))?;
        let own = Path::new("/sys/fs/cgroup/memory")
            .join(line.split(':').nth(2)?.trim_start_matches('/'));
        let path = own.join(format!("dmaspan-{}", process::id()));
        fs::create_dir(&path).ok()?;
        let cgroup = Self(path.to_str()?.to_owned());
        fs::write(path.join("memory.limit_in_bytes"), bytes.to_string()).ok()?;
        Some(cgroup)
    }

    fn run(&self, args: &str) -> Output {
        shell(&format!("echo $$ > {}/cgroup.procs && exec \"$0\" {args}", self.0))
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_limit_of_a_cgroup_of_version_1_is_kept_and_said() {
    let _turn = turn();
    let Some(cgroup) = Confined::new(200 << 20) else {
        return eprintln!("SKIP: there is no memory cgroup of version 1, or none can be made");
    };
    let much = cgroup.run("map 1G --memory base --runs 1");
    let text = stderr(&much);
    assert_eq!(much.status.code(), Some(2), "{text}");
    assert!(text.contains("within the limits of this process's memory cgroup"), "{text}");
    let less = cgroup.run("map --memory base,thp --runs 1 --format json");
    assert_eq!(less.status.code(), Some(0), "{}", stderr(&less));
    let report: Value = serde_json::from_slice(&less.stdout).unwrap();
    assert!(report["size_bytes"].as_u64().unwrap() < 200 << 20, "{report}");
    assert!(stderr(&less).contains("memory cgroup"), "{}", stderr(&less));
}

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The number of the process that another one started.
fn child_of(pid: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

#[test]
fn hugetlb_pages_of_a_run_that_was_killed_with_its_holder_are_said_and_given_back() {
    let _turn = turn();
    let before = fs::read_to_string(POOL).unwrap_or_default();
    let args = ["map", "64M", "--memory", "hugetlb", "--runs", "1000"];
    let mut child = Command::new(DMASPAN)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while fs::read_to_string(POOL).unwrap_or_default() == before {
        if child.try_wait().unwrap().is_some() {
            return eprintln!("SKIP: the number of hugetlb pages is not raised here");
        }
        thread::sleep(Duration::from_millis(1));
    }
    let record = |pid: u32| Path::new("/run").join(format!("dmaspan-hugetlb-2048kB.{pid}"));
    let Some(holder) = child_of(child.id()) else {
        child.kill().unwrap();
        child.wait().unwrap();
        return eprintln!("SKIP: the kernel does not say who the holder is");
    };
    while fs::read_to_string(record(holder)).map_or(true, |text| text.is_empty()) {
        assert_eq!(child.try_wait().unwrap(), None, "no record was written");
        thread::sleep(Duration::from_millis(1));
    }
    let killed = Command::new("kill").args(["-9", &holder.to_string()]).status().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(killed.success());
    let next = || stderr(&run(&[&MAP[..], &["--format", "json"]].concat()));
    // Its files are closed, and its lock ended, before it is a zombie.
    let lives = || {
        let stat = fs::read_to_string(format!("/proc/{holder}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    while lives() {
        thread::sleep(Duration::from_millis(1));
    }
    let said = next();
    let note = said.lines().find(|line| line.contains("still set aside"));
    let note = note.unwrap_or_else(|| panic!("{said}"));
    let command = note.split('`').nth(1).unwrap();
    assert!(shell(command).status.success(), "{note}");
    // Pages that the kernel has not let go of yet count as surplus ones, and go with their memory.
    while fs::read_to_string(POOL).unwrap() != before {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(!record(holder).exists());
    assert!(!next().contains("still set aside"));
}
