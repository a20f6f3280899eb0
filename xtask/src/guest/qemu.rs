//! A machine with an IOMMU, an NVMe controller and memory that devices reach in each other.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use super::boots::Iommu;
use super::log;
use crate::hw;

/// The disk's size. Each of its 8-byte words holds [`DISK_TAG`] and its own offset.
pub(super) const DISK_BYTES: u64 = 64 << 20;
const DISK_TAG: u64 = 0xfeed_0000_0000_0000;

/// How a guest's instructions pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// As they do.
    Real,
    /// One at a time, each a nanosecond of the guest's clock: what is timed there is counted.
    Counted,
}

/// What a machine is made of.
#[derive(Clone, Debug)]
pub(super) struct Machine<'m> {
    /// What translates.
    pub(super) iommu: Iommu,
    /// The memory, as QEMU writes sizes.
    pub(super) memory: &'m str,
    /// How time passes.
    pub(super) time: Time,
    /// More arguments.
    pub(super) extra: Vec<String>,
    /// More of the kernel's command line.
    pub(super) cmdline: &'m str,
}

impl Machine<'_> {
    /// What QEMU is started with.
    pub(super) fn arguments(&self, kernel: &Path, initrd: &Path, disk: &Path) -> Vec<String> {
        let mut arguments: Vec<String> = Vec::new();
        let mut add = |words: &str| arguments.extend(words.split(' ').map(str::to_owned));
        add("-nodefaults -nographic -no-reboot -serial stdio");
        add(match self.iommu {
            Iommu::Smmu => "-M virt,iommu=smmuv3,gic-version=3 -cpu cortex-a76",
            // Without these two features kernels clear pages by what is slow to emulate.
            _ => "-M q35,kernel-irqchip=split -cpu max,-erms,-fsrm",
        });
        add(match self.time {
            Time::Real => "-accel tcg,thread=multi -smp 2",
            Time::Counted => "-accel tcg,thread=single -smp 1 -icount shift=0,sleep=off",
        });
        add(&format!("-m {}", self.memory));
        match self.iommu {
            Iommu::Intel => add("-device intel-iommu,intremap=on,caching-mode=on"),
            Iommu::Virtio => add("-device virtio-iommu-pci,addr=04"),
            Iommu::Smmu => {}
        }
        add("-device nvme,drive=disk,serial=vfnvme1,addr=05");
        add("-object memory-backend-memfd,id=peer,size=16M,share=on");
        add("-device ivshmem-plain,memdev=peer,addr=06");
        let disk = disk.display().to_string().replace(',', ",,");
        arguments.extend(["-drive".to_owned(), format!("file={disk},if=none,id=disk,format=raw")]);
        for (option, path) in [("-kernel", kernel), ("-initrd", initrd)] {
            arguments.extend([option.to_owned(), path.display().to_string()]);
        }
        arguments.extend(["-append".to_owned(), self.kernel_line()]);
        arguments.extend(self.extra.iter().cloned());
        arguments
    }

    /// The console is for the guest's program: what the kernel warns of its init says. On a busy
    /// machine the kernel's check of its timer may fail, and then it panics. Without interrupt
    /// remapping VFIO and iommufd have to be told, each, that they may be used all the same.
    fn kernel_line(&self) -> String {
        let iommu = match self.iommu {
            Iommu::Intel => "intel_iommu=on",
            Iommu::Virtio => {
                "vfio_iommu_type1.allow_unsafe_interrupts=1 iommufd.allow_unsafe_interrupts=1"
            }
            // A BAR that is smaller than a page has no other's registers in its page then, and is
            // as long as that. Of the function at 00:06.0 a case wants one that is smaller.
            Iommu::Smmu => "pci=resource_alignment=00:05.0;00:07.0;00:08.0",
        };
        // A word of a module that there is not: the kernel passes it over.
        let counted = match self.time {
            Time::Real => "",
            Time::Counted => "dmaspan.counted ",
        };
        let console = if self.iommu == Iommu::Smmu { "ttyAMA0" } else { "ttyS0" };
        let always = format!("console={console} loglevel=2 no_timer_check oops=panic panic=-1");
        format!("{always} {iommu} {counted}{}", self.cmdline).trim_end().to_owned()
    }
}

/// How long a machine is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Until the guest's init says its first line. A guest may hang before, in its firmware or
    /// before its kernel says anything, and looks from outside like one that is slow.
    pub(super) begin: Duration,
    /// Until it has ended.
    pub(super) end: Duration,
}

/// Why a machine did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// Its guest had not begun in time, or QEMU ended before it did.
    NotBegun(String),
    /// Anything else, in one line.
    Failed(String),
}

impl Stopped {
    /// What happened, in one line.
    pub(super) fn why(self) -> String {
        let (Self::NotBegun(why) | Self::Failed(why)) = self;
        why
    }
}

/// How a machine ran that came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// How long it took.
    pub(super) took: Duration,
    /// CPU time that QEMU had taken when each line [`log::MARK`] was on the console.
    pub(super) marks: Vec<Duration>,
}

/// Runs a machine to its end, with its console in a file.
///
/// # Errors
///
/// [`Stopped`]; QEMU has ended then.
pub(super) fn run(
    program: &Path,
    arguments: &[String],
    console: &Path,
    limits: Limits,
) -> Result<Run, Stopped> {
    let cannot = |error: io::Error| Stopped::Failed(format!("QEMU does not start: {error}"));
    let output = File::create(console).map_err(cannot)?;
    let errors = output.try_clone().map_err(cannot)?;
    let started = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(output).stderr(errors);
    let mut child = command.spawn().map_err(cannot)?;
    let mut begun = false;
    let mut marks = Vec::new();
    let stopped = loop {
        let ended = child.try_wait();
        let said = said(console);
        begun = begun || said.begun;
        if said.marks > marks.len()
            && let Some(cpu) = cpu_time(child.id())
        {
            marks.resize(said.marks, cpu);
        }
        match ended {
            Ok(Some(status)) if !status.success() => {
                return Err(Stopped::Failed(format!("QEMU ended with {status}")));
            }
            Ok(Some(_)) if begun => return Ok(Run { took: started.elapsed(), marks }),
            Ok(Some(_)) => {
                let why = "QEMU ended before the guest's init said anything".to_owned();
                return Err(Stopped::NotBegun(why));
            }
            Ok(None) if started.elapsed() >= limits.end => {
                break Stopped::Failed(format!("it did not end within {} s", limits.end.as_secs()));
            }
            Ok(None) if !begun && started.elapsed() >= limits.begin => {
                let seconds = limits.begin.as_secs();
                break Stopped::NotBegun(format!("its init said nothing within {seconds} s"));
            }
            Ok(None) => thread::sleep(POLL),
            Err(error) => break Stopped::Failed(format!("QEMU cannot be waited for: {error}")),
        }
    };
    // It may have ended by itself meanwhile.
    let _ = child.kill();
    let _ = child.wait();
    Err(stopped)
}

/// Between two looks at a machine.
const POLL: Duration = Duration::from_millis(20);

/// What a console says so far.
#[derive(Debug, Default)]
struct Said {
    /// Whether the guest's init has said a line: firmware alone says some kilobytes.
    begun: bool,
    /// How many lines are marks.
    marks: usize,
}

fn said(console: &Path) -> Said {
    let text = fs::read(console).unwrap_or_default();
    let mut said = Said::default();
    for line in String::from_utf8_lossy(&text).lines().map(log::clean) {
        said.begun |= line.starts_with(log::MARKER);
        said.marks += usize::from(line == log::MARK);
    }
    said
}

/// CPU time that a process has taken: of its `stat` the numbers 14 and 15, in hundredths of a
/// second (proc_pid_stat(5)); the name, in brackets, is the second.
fn cpu_time(process: u32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let behind = stat.rsplit_once(')')?.1;
    let ticks: Option<Vec<u64>> =
        behind.split_whitespace().skip(11).take(2).map(|number| number.parse().ok()).collect();
    Some(Duration::from_millis(10 * ticks?.iter().sum::<u64>()))
}

/// The program: that of the tests against QEMU's IOMMUs where it is there, or any of `PATH`, or
/// else Debian's.
///
/// # Errors
///
/// Why there is none, in one line.
pub(super) fn find() -> Result<PathBuf, String> {
    let name = hw::program("x86_64");
    let path = env::var_os("PATH").unwrap_or_default();
    let others = env::split_paths(&path).map(|folder| folder.join(&name));
    match hw::found() {
        Some(folder) => Ok(folder.join(name)),
        None => match others.into_iter().find(|program| program.is_file()) {
            Some(program) => Ok(program),
            None => Ok(hw::ready()?.join(name)),
        },
    }
}

/// What QEMU says where it ends by an assertion because its server is gone.
pub(super) const ABORT: &str = "error_setv: Assertion";

/// Whether it has said so on a console.
pub(super) fn has_aborted(console: &Path) -> bool {
    let text = fs::read(console).unwrap_or_default();
    String::from_utf8_lossy(&text).contains(ABORT)
}

/// What keeps QEMU from outliving this process, where it can: from version 10.2 on it ends with its
/// parent.
pub(super) fn leash(program: &Path) -> &'static [&'static str] {
    let help = Command::new(program).args(["-run-with", "help"]).stdin(Stdio::null()).output();
    let can =
        help.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains(EXIT_WITH_PARENT));
    if can { &["-run-with", "exit-with-parent=on"] } else { &[] }
}

const EXIT_WITH_PARENT: &str = "exit-with-parent";

/// Writes the disk that each boot has a copy of, where it is not there.
///
/// # Errors
///
/// Why it cannot be written.
pub(super) fn write_disk(path: &Path) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|there| there.len() == DISK_BYTES) {
        return Ok(());
    }
    let new = path.with_extension("new");
    let mut file = io::BufWriter::new(File::create(&new)?);
    for offset in (0..DISK_BYTES).step_by(8) {
        file.write_all(&(DISK_TAG | offset).to_le_bytes())?;
    }
    file.flush()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn arguments(iommu: Iommu, time: Time) -> String {
        let extra = vec!["-device".to_owned(), "x".to_owned()];
        let machine = Machine { iommu, memory: "2G", time, extra, cmdline: "a=b" };
        machine.arguments(Path::new("/k"), Path::new("/i"), Path::new("/d,e")).join(" ")
    }

    #[test]
    fn a_machine_is_what_its_boot_says() {
        let intel = arguments(Iommu::Intel, Time::Real);
        assert!(intel.contains("-m 2G -device intel-iommu,"), "{intel}");
        assert!(intel.contains(" -drive file=/d,,e,if=none,"));
        assert!(intel.contains(" intel_iommu=on a=b -device x"));
        let counted = arguments(Iommu::Virtio, Time::Counted);
        assert!(counted.contains("-smp 1 -icount shift=0,sleep=off"), "{counted}");
        assert!(counted.contains(" dmaspan.counted a=b ") && !intel.contains("counted"));
        assert!(counted.contains("virtio-iommu-pci") && !counted.contains("intel"));
        assert_eq!(counted.matches(".allow_unsafe_interrupts=1").count(), 2, "{counted}");
    }

    /// What came of a shell script in QEMU's place.
    fn ran(script: &str, begin: Duration, end: Duration) -> Result<Run, Stopped> {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let run_of = RUNS.fetch_add(1, Ordering::Relaxed);
        let console =
            env::temp_dir().join(format!("dmaspan-console-{}-{run_of}", std::process::id()));
        let arguments = ["-c".to_owned(), script.to_owned()];
        let ran = run(Path::new("sh"), &arguments, &console, Limits { begin, end });
        fs::remove_file(console).unwrap();
        ran
    }

    const SOON: Duration = Duration::from_millis(100);
    const LATE: Duration = Duration::from_secs(3600);

    #[test]
    fn a_guest_that_does_not_begin_is_told_from_one_that_does_not_end() {
        let hung = ran("echo SeaBIOS; exec sleep 4000", SOON, LATE);
        assert_eq!(hung, Err(Stopped::NotBegun("its init said nothing within 0 s".to_owned())));
        let gone = ran("echo SeaBIOS", LATE, LATE);
        assert!(matches!(gone, Err(Stopped::NotBegun(why)) if why.contains("QEMU ended before")));
        let slow = ran("echo 'guest: kernel 6'; exec sleep 4000", LATE, 10 * SOON);
        assert_eq!(slow, Err(Stopped::Failed("it did not end within 1 s".to_owned())));
        assert!(ran("printf '\\033[0mguest: kernel 6\\n'", LATE, LATE).is_ok());
    }

    #[test]
    fn a_guest_that_has_begun_has_all_its_time() {
        let script = "echo 'guest: kernel 6'; sleep 0.3; echo 'guest: end'";
        assert!(ran(script, SOON, LATE).is_ok_and(|run| run.took >= 3 * SOON));
    }

    #[test]
    fn a_mark_has_the_cpu_time_until_then() {
        let work = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
        let script = format!("echo 'guest: mark'; {work}; echo 'guest: mark'; sleep 0.3");
        let marks = ran(&script, LATE, LATE).unwrap().marks;
        assert!(matches!(marks[..], [first, second] if first < second), "{marks:?}");
    }

    #[test]
    fn a_machine_that_fails_says_how() {
        let failed = |script| ran(script, LATE, LATE).unwrap_err();
        assert_eq!(failed("exit 1"), Stopped::Failed("QEMU ended with exit status: 1".to_owned()));
        let console = env::temp_dir().join(format!("dmaspan-console-{}", std::process::id()));
        let limits = Limits { begin: LATE, end: LATE };
        let none = run(Path::new("no-such-program-at-all"), &[], &console, limits).unwrap_err();
        assert!(none.why().contains("does not start"));
        fs::remove_file(&console).unwrap();
    }
}
