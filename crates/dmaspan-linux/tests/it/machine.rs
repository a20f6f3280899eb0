//! The description of another process is the one that this process gives of itself.

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use dmaspan::pin::PinError;
use dmaspan::{PhysAddr, Span, UserAddr, UserRange};
use dmaspan_linux::hugetlb::HugetlbReservation;
use dmaspan_linux::machine::{MachineFiles, ProcessChoice};
use dmaspan_linux::pagemap::{FrameSource, Lookup};
use dmaspan_linux::plan::forecast::Backing;
use dmaspan_linux::{Memory, MemoryKind};

use crate::turn::turn;

const NAME: &str = "machine::the_spans_of_another_process_are_those_that_it_finds_itself";
const CHILD: &str = "DMASPAN_TEST_CHILD";
const LEN: u64 = 32 << 20;

/// In the child: memory of each kind, and a line for each with its kind, start and spans. It waits
/// until its input ends.
fn child() {
    let source = FrameSource::<PhysAddr>::new();
    let kinds = [MemoryKind::Base, MemoryKind::Thp, MemoryKind::Memfd, MemoryKind::MemfdHugetlb2M];
    let mut kept = Vec::new();
    let mut out = io::stdout().lock();
    for kind in kinds {
        let reserved = HugetlbReservation::for_memory(kind, LEN);
        let Ok(memory) = Memory::new(kind, LEN) else {
            writeln!(out, "\nnone {kind}").unwrap();
            continue;
        };
        memory.populate().unwrap();
        let mut spans = Vec::<Span<PhysAddr>>::new();
        let looked = source.as_ref().map(|source| {
            source.frames(&memory, memory.user_range(), Lookup::EveryPage, &mut spans)
        });
        let start = memory.user_range().start().get();
        match looked {
            Ok(Ok(_)) => {
                write!(out, "\nspans {kind} {start:x}").unwrap();
                for span in spans {
                    write!(out, " {:x}+{:x}", span.start().get(), span.len()).unwrap();
                }
                writeln!(out).unwrap();
            }
            Ok(Err(PinError::Failed(error))) => panic!("{error}"),
            Ok(Err(error)) => panic!("{error:?}"),
            Err(_) => writeln!(out, "\nhidden {kind} {start:x}").unwrap(),
        }
        kept.push((memory, reserved));
    }
    writeln!(out, "\ndone").unwrap();
    out.flush().unwrap();
    drop(out);
    let _ = io::stdin().read(&mut [0]);
}

/// What the process `pid` has from `start` on, compared with a line of the child.
fn compare(pid: u32, kind: &str, start: u64, said: &[&str]) {
    let range = UserRange::from_len(UserAddr::new(start), LEN).unwrap();
    let machine = MachineFiles::new();
    let choice = ProcessChoice::Ranges(vec![range]);
    let mut seen = 0;
    let memory = machine.memory_of(pid, &choice, &mut |now, _| seen = now).unwrap();
    let sum: u64 = memory.regions.iter().map(|region| region.len()).sum();
    assert_eq!(sum, LEN, "{kind}");
    let resident: u64 = memory.regions.iter().map(|region| region.resident).sum();
    assert_eq!(resident, LEN, "{kind}");
    let backing = memory.regions[0].backing;
    let expected: &[Backing] = match kind {
        "base" => &[Backing::Base],
        "thp" => &[Backing::Thp, Backing::Base],
        "memfd" => &[Backing::Memfd],
        _ => &[Backing::Hugetlb],
    };
    assert!(expected.contains(&backing), "{kind}: {backing}");
    if said.is_empty() {
        assert!(memory.no_frames.is_some());
        return;
    }
    let spans = memory.regions.iter().flat_map(|region| region.spans.clone().unwrap());
    let text: Vec<String> =
        spans.map(|span| format!("{:x}+{:x}", span.start().get(), span.len())).collect();
    assert_eq!(text, said, "{kind}");
    assert!(seen > 0 && seen <= LEN);
    // What looks like a guest's memory is found without being named.
    let large = machine.memory_of(pid, &ProcessChoice::Large, &mut |_, _| {}).unwrap();
    let is_taken = large.regions.iter().any(|region| region.user.contains(range.start()));
    assert!(is_taken, "{kind}: {:?}", large.ranges);
}

#[test]
fn the_spans_of_another_process_are_those_that_it_finds_itself() {
    if env::var_os(CHILD).is_some() {
        return child();
    }
    let _turn = turn();
    let mut other = Command::new(env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = other.id();
    let mut compared = 0;
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines().map(Result::unwrap);
    for line in lines.by_ref() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["done"] => break,
            ["none", kind] => eprintln!("SKIP: no {kind} memory here"),
            ["spans" | "hidden", kind, start, ref said @ ..] => {
                compare(pid, kind, u64::from_str_radix(start, 16).unwrap(), said);
                compared += 1;
            }
            _ => {}
        }
    }
    drop(other.stdin.take());
    lines.for_each(drop);
    assert!(other.wait().unwrap().success());
    assert!(compared >= 3);
    // The process has ended.
    let gone = MachineFiles::new().memory_of(pid, &ProcessChoice::Large, &mut |_, _| {});
    assert!(gone.is_err());
}
