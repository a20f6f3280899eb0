//! The harness itself: machines of all architectures, without an IOMMU.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use dmaspan::PhysAddr;
use dmaspan_drivers::Mmio as _;
use dmaspan_qemu::{Arch, Edu, Machine, Pci, PciError, Qemu, TestDev, Version, ready};
use dmaspan_sim::bus::Bus as _;

/// What takes so long does not end.
const HANGS: Duration = Duration::from_secs(300);

fn kind(arch: Arch) -> &'static str {
    if arch == Arch::X86_64 { "q35" } else { "virt" }
}

#[test]
fn devices_write_and_read_the_memory_of_each_machine() {
    for arch in [Arch::Aarch64, Arch::Riscv64, Arch::X86_64] {
        let Some(qemu) = ready(arch) else { return };
        let machine = Machine::builder(qemu, kind(arch))
            .device("iommu-testdev,addr=2")
            .device("edu,addr=3,dma_mask=0xffffffffffffffff")
            .start()
            .unwrap();
        let pci = Pci::new(&machine);
        let mut writer = TestDev::new(&pci, 2).unwrap();
        let mut copier = Edu::new(&pci, 3).unwrap();
        let [from, to] = [0, 1].map(|_| machine.ram().allocate(4096).unwrap());
        writer.write(from.paddr().get(), from.paddr(), 8).unwrap();
        assert_eq!((from.word(0), from.word(1)), (0x1234_5678_1234_5678, 0));
        let text = b"what a device reads";
        machine.ram().write(from.paddr().wrapping_add(13), text).unwrap();
        copier.read(from.paddr().get() + 13, text.len() as u64);
        copier.write(to.paddr().get() + 5, text.len() as u64);
        let mut read = [0; 19];
        machine.ram().read(to.paddr().wrapping_add(5), &mut read).unwrap();
        assert_eq!(&read, text, "{arch:?}");
        assert!(!machine.is_gone());
    }
}

#[test]
fn a_slot_without_the_device_says_what_is_there() {
    let Some(qemu) = ready(Arch::Aarch64) else { return };
    let machine = Machine::builder(qemu, "virt").device("edu,addr=3").start().unwrap();
    let pci = Pci::new(&machine);
    let other = PciError::Other { slot: 3, id: 0x11e8_1234, expected: 0x0005_1b36 };
    assert_eq!(TestDev::new(&pci, 3).unwrap_err(), other);
    assert_eq!(TestDev::new(&pci, 4).unwrap_err(), PciError::Empty { slot: 4 });
    assert_eq!(pci.enable(3, 1).unwrap_err(), PciError::NoBar { slot: 3, bar: 1 });
}

#[test]
fn a_machine_that_does_not_start_says_why() {
    let Some(qemu) = ready(Arch::X86_64) else { return };
    let error = Machine::builder(qemu, "q35").device("no-such-device").start().unwrap_err();
    assert!(error.to_string().contains("no-such-device' is not a valid device model"), "{error}");
}

#[test]
fn a_machine_that_has_ended_reads_all_ones() {
    let Some(qemu) = ready(Arch::Riscv64) else { return };
    let machine = Machine::builder(qemu, "virt").start().unwrap();
    // The device that ends a machine (sifive_test): "pass".
    machine.mmio(0x10_0000).write32(0, 0x5555);
    let registers = machine.mmio(0x1000_0000);
    for _ in 0..1000 {
        registers.read32(0);
    }
    assert!(machine.is_gone());
    assert_eq!((registers.read32(0), registers.read64(0)), (u32::MAX, u64::MAX));
}

#[test]
fn memory_is_handed_out_once_and_comes_back() {
    let Some(qemu) = ready(Arch::Aarch64) else { return };
    let machine = Machine::builder(qemu, "virt").ram(32 << 20).start().unwrap();
    let ram = machine.ram();
    let first = ram.allocate(5000).unwrap();
    assert_eq!(first.paddr().get() % 8192, 0);
    assert_eq!(first.words().len(), 1024);
    let at = first.paddr();
    first.set_word(0, 7);
    drop(first);
    let again = ram.allocate(8192).unwrap();
    assert_eq!((again.paddr(), again.word(0)), (at, 0));
    assert!(ram.allocate(64 << 20).is_err());
    assert!(ram.arena(32 << 20).is_err());
    assert!(ram.words_at(PhysAddr::new(0), 8).is_empty());
    let end = ram.base().wrapping_add(ram.bytes());
    assert!(ram.words_at(end, 8).is_empty());
    assert!(ram.words_at(PhysAddr::new(u64::MAX - 7), 16).is_empty());
}

/// A program that passes for QEMU: a script, in a folder that goes with it.
struct Impostor(PathBuf);

impl Impostor {
    fn new(name: &str, script: &str) -> Self {
        let folder = env::temp_dir().join(format!("dmaspan {name} {}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("qemu");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    fn qemu(&self) -> Qemu {
        let version = Version { major: 11, minor: 1 };
        Qemu { arch: Arch::X86_64, path: self.0.join("qemu"), version }
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_machine_that_does_not_answer_has_ended() {
    let hangs = Impostor::new("hangs", "read line; echo OK; exec sleep 1000");
    // The patience is the same for the start, which takes as long as it takes.
    let mut patience = Duration::from_millis(300);
    let machine = loop {
        match Machine::builder(hangs.qemu(), "q35").patience(patience).start() {
            Ok(machine) => break machine,
            Err(_) => patience *= 2,
        }
        assert!(patience < HANGS);
    };
    let begin = Instant::now();
    assert_eq!(machine.mmio(0).read32(0), u32::MAX);
    assert!(begin.elapsed() >= patience && machine.is_gone());
    // It is not waited for again: that would be a thousand times the patience.
    let begin = Instant::now();
    for _ in 0..1000 {
        assert_eq!(machine.mmio(0).read64(0), u64::MAX);
    }
    drop(machine);
    assert!(begin.elapsed() < 1000 * patience);
}

#[test]
fn what_answers_never_or_nonsense_does_not_start() {
    let start_within = |patience, name, script| {
        let impostor = Impostor::new(name, script);
        let builder = Machine::builder(impostor.qemu(), "q35");
        builder.patience(patience).start().unwrap_err().to_string()
    };
    let start = |name, script| start_within(HANGS, name, script);
    let in_vain = |name, script| start_within(Duration::from_millis(300), name, script);
    let silent = in_vain("silent", "exec sleep 1000");
    assert!(silent.contains("did not answer \"endianness\" within 300ms"), "{silent}");
    let half = in_vain("half", "printf O; exec sleep 1000");
    assert!(half.contains("did not answer"), "{half}");
    let talks = in_vain("talks", "exec yes IRQ raise");
    assert!(talks.contains("did not answer"), "{talks}");
    let deaf = start("deaf", "exec <&- >&-; exec sleep 1000");
    assert!(deaf.contains("and still runs"), "{deaf}");
    let rude = start("rude", "read line; echo FAIL; exec sleep 1000");
    assert!(rude.contains("with \"FAIL\""), "{rude}");
    let ends = start("ends", "echo no accelerator >&2; exit 3");
    assert!(ends.contains("exit status: 3") && ends.contains("no accelerator"), "{ends}");
}

/// The thread that started it may be gone: QEMU is another's.
#[test]
fn a_machine_outlives_the_thread_that_started_it() {
    let Some(qemu) = ready(Arch::Aarch64) else { return };
    let started = thread::spawn(|| Machine::builder(qemu, "virt").start().unwrap());
    let machine = started.join().unwrap();
    thread::sleep(Duration::from_millis(100));
    machine.clock_step(1);
    assert!(!machine.is_gone());
}

/// A process that is ended at once, as by a signal, leaves no QEMU behind.
#[test]
fn a_machine_ends_with_its_process() {
    const CHILD: &str = "DMASPAN_TEST_ENDS";
    let Some(qemu) = ready(Arch::Riscv64) else { return };
    if let Some(note) = env::var_os(CHILD) {
        let ram = 64 << 20;
        let machine = Machine::builder(qemu, "virt").ram(ram).start().unwrap();
        fs::write(note, children().join(" ")).unwrap();
        machine.clock_step(1);
        process::abort();
    }
    let note = env::temp_dir().join(format!("dmaspan-ends-{}", process::id()));
    let name = "machine::a_machine_ends_with_its_process";
    let mut again = process::Command::new(env::current_exe().unwrap());
    let status = again.args([name, "--exact"]).env(CHILD, &note).output().unwrap().status;
    assert!(!status.success());
    let left = fs::read_to_string(&note).unwrap();
    fs::remove_file(&note).unwrap();
    assert!(!left.is_empty());
    let end = Instant::now() + HANGS;
    while left.split(' ').any(|pid| Path::new("/proc").join(pid).join("exe").exists()) {
        assert!(Instant::now() < end, "QEMU still runs");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that this one started (proc_pid_task_children(5)).
fn children() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let children = tasks.map(|task| fs::read_to_string(task.join("children")).unwrap_or_default());
    children
        .flat_map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}
