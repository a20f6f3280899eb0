//! Plans of processes that run: in a container, on a terminal, and with much scattered memory.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Lines, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use dmaspan::PhysAddr;
use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
use serde_json::Value;

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");

/// A process that goes with this, and what it prints.
struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Other {
    fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Ok(Self { child, lines })
    }

    /// The first line of its output of which `wanted` makes something.
    fn said<T>(&mut self, wanted: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.lines.by_ref().map_while(Result::ok).find_map(|line| wanted(&line))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn plan(arguments: &[&str]) -> Output {
    Command::new(DMASPAN).arg("plan").args(arguments).output().unwrap()
}

/// Says that a test cannot be run here.
fn skip(why: &str) {
    let _ = io::stderr().write_all(format!("SKIP: {why}\n").as_bytes());
}

/// The first private memory of a process that it may write, as an argument of `--region`.
fn writable(pid: &str) -> String {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.contains(" rw-p ")).unwrap();
    line.split(' ').next().unwrap().to_owned()
}

#[test]
fn a_process_in_a_container_is_planned_by_its_number_here_and_found_by_the_one_inside() {
    // A number that no process here has, where there are as many.
    let script = "echo 4000000 > /proc/sys/kernel/ns_last_pid; sleep 600 & echo inside $!; wait";
    let arguments = ["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script];
    let Ok(mut container) = Other::start(Command::new("unshare").args(arguments)) else {
        return skip("there is no unshare");
    };
    let number = |line: &str| line.strip_prefix("inside ")?.parse::<u32>().ok();
    let Some(inside) = container.said(number) else {
        return skip("this process may make no PID namespace");
    };
    if fs::exists(format!("/proc/{inside}")).unwrap() {
        return skip("the namespace has no number of its own choice");
    }
    let inside = inside.to_string();
    let output = plan(&["--pid", &inside]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    let told = format!(" has the number {inside} in a container");
    let before = error.trim_end().strip_suffix(&told).expect(&error);
    let outer = before.rsplit(' ').next().unwrap();
    let output = plan(&["--pid", outer, "--region", &writable(outer)]);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains(&format!("process {outer}, mapped by")));
}

#[test]
fn a_process_outside_of_the_container_is_an_error_that_says_so() {
    let this = std::process::id().to_string();
    let arguments = ["--pid", "--fork", "--mount-proc", DMASPAN, "plan", "--pid", &this];
    let Ok(output) = Command::new("unshare").args(arguments).output() else {
        return skip("there is no unshare");
    };
    let error = text(&output.stderr);
    if error.contains("unshare:") {
        return skip(error.trim());
    }
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(&format!("there is no process {this}: it has ended")), "{error}");
    assert!(error.contains("`pgrep -f NAME` on the host"), "{error}");
}

/// What a command prints on a terminal, by script(1).
fn on_terminal(command: &str, environment: (&str, &str)) -> Option<String> {
    let (name, value) = environment;
    let mut script = Command::new("script");
    script.args(["-q", "-e", "-c", command, "/dev/null"]).stdin(Stdio::null());
    script.env("TERM", "xterm").env_remove("NO_COLOR").env(name, value);
    Some(text(&script.output().ok()?.stdout))
}

#[test]
fn colours_are_for_terminals_that_do_not_say_otherwise() {
    let layout = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/layouts/laptop-39-bits.toml");
    let command = format!("{DMASPAN} plan --layout {layout}");
    let Some(coloured) = on_terminal(&command, ("LANG", "C.UTF-8")) else {
        return skip("there is no script(1)");
    };
    assert!(coloured.contains("\x1b[31m✗\x1b[0m mapping would fail"), "{coloured}");
    let plain = on_terminal(&command, ("NO_COLOR", "1")).unwrap();
    assert!(plain.contains("✗ mapping would fail") && !plain.contains('\x1b'), "{plain}");
}

const CHILD: &str = "DMASPAN_TEST_SCATTERED";
const NAME: &str =
    "process::scattered_base_pages_cost_by_span_and_page_and_the_terminal_shows_how_far_it_is";
/// So much real memory there is, which the process has mapped as often as is asked for.
const REAL: u64 = 16 << 20;

/// In the child: a file in memory, mapped many times over. Each page of each mapping is in memory
/// and has an entry in the pagemap, as if all of it were memory of its own.
fn have_memory(times: u64) {
    let first = Memory::new(MemoryKind::Memfd, REAL).unwrap();
    let all: Vec<Memory> = (0..times)
        .map(|_| {
            let fd: OwnedFd = first.file().unwrap().0.try_clone_to_owned().unwrap();
            let again = Memory::from_file(fd, 0, REAL).unwrap();
            again.populate().unwrap();
            again
        })
        .collect();
    println!("\nready");
    let _ = io::stdin().read(&mut [0]);
    drop((all, first));
}

/// What callgrind counts of a plan: instructions, and what was printed.
fn counted(arguments: &[&str]) -> (u64, Output) {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null", DMASPAN, "plan"]);
    let output = valgrind.args(arguments).output().unwrap();
    let said = text(&output.stderr);
    let count = said.lines().find_map(|line| line.split_once("Collected : "));
    let count = count.expect(&said).1.trim().parse().unwrap();
    (count, output)
}

fn has_valgrind() -> bool {
    let version = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

#[test]
fn scattered_base_pages_cost_by_span_and_page_and_the_terminal_shows_how_far_it_is() {
    if let Ok(times) = env::var(CHILD) {
        return have_memory(times.parse().unwrap());
    }
    if let Err(why) = LinuxPinner::<PhysAddr>::new() {
        return skip(&why.to_string());
    }
    if !has_valgrind() {
        return skip("there is no valgrind, which counts instructions");
    }
    // `DMASPAN_TEST_MIB=16384` measures as much.
    let most: u64 = env::var("DMASPAN_TEST_MIB").map_or(64, |mib| mib.parse().unwrap());
    let mut by_part = Vec::new();
    for mib in [most / 4, most] {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", NAME, "--nocapture"]).env(CHILD, ((mib << 20) / REAL).to_string());
        let mut other = Other::start(&mut command).unwrap();
        other.said(|line| (line == "ready").then_some(())).expect("the child ended");
        let pid = other.child.id().to_string();
        let arguments = ["--pid", &pid, "--iommu", "vtd", "--format", "json"];
        let (instructions, output) = counted(&arguments);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        // The first mapping is one more.
        assert_eq!(report["locked"]["bytes"], (mib << 20) + REAL);
        let maps = report["maps"].as_array().unwrap();
        let spans: u64 = maps.iter().map(|map| map["spans"][1].as_u64().unwrap()).sum();
        println!("{mib} MiB: {spans} spans, {instructions} instructions");
        // The kernel tells frames of base pages by the page.
        by_part.push((instructions, spans + (mib << 20) / MemoryKind::Base.page_size()));
        let command = format!("{DMASPAN} plan --pid {pid} --iommu vtd");
        match on_terminal(&command, ("LANG", "C.UTF-8")) {
            Some(shown) => assert!(
                shown.contains(&format!("looking up the frames of process {pid}")),
                "{shown}"
            ),
            None => skip("there is no script(1)"),
        }
        // A pipe is no terminal.
        assert!(!text(&output.stderr).contains("looking up"));
    }
    let [(few, few_parts), (many, many_parts)] = by_part[..] else { panic!("{by_part:?}") };
    println!("{} instructions for each span and page", many / many_parts);
    // How scattered the memory is, is luck. Four times as much costs four times as much, and not
    // the square of it.
    assert!(many / many_parts <= 2 * (few / few_parts), "{by_part:?}");
}

#[test]
fn a_tebibyte_on_paper_costs_the_instructions_and_the_memory_of_a_gibibyte() {
    if !has_valgrind() {
        return skip("there is no valgrind, which counts instructions");
    }
    let layout = |name: &str| format!("{}/../../docs/layouts/{name}", env!("CARGO_MANIFEST_DIR"));
    let allocated = |path: &str| {
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=memcheck", DMASPAN, "plan", "--layout", path]);
        let said = text(&valgrind.output().unwrap().stderr);
        let usage = said.split_once("total heap usage: ").expect(&said).1;
        let bytes = usage.split_once(" frees, ").unwrap().1.split(' ').next().unwrap();
        bytes.replace(',', "").parse::<u64>().unwrap()
    };
    let cost = |name: &str| {
        let path = layout(name);
        let (instructions, output) = counted(&["--layout", &path]);
        assert!(output.status.success());
        let bytes = allocated(&path);
        println!("{name}: {instructions} instructions, {bytes} bytes allocated");
        (instructions, bytes)
    };
    let (small, large) = (cost("ram-1g.toml"), cost("ram-1t.toml"));
    // The numbers that are printed are longer.
    assert!(large.0 < small.0 + small.0 / 20, "{small:?} {large:?}");
    assert!(large.1 < small.1 + small.1 / 20, "{small:?} {large:?}");
}
