//! A machine with an IOMMU, an NVMe controller and memory that devices reach in each other.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use super::boots::Iommu;
use crate::hw;

/// The disk's size. Each of its 8-byte words holds [`DISK_TAG`] and its own offset.
const DISK_BYTES: u64 = 64 << 20;
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
        add("-M q35,kernel-irqchip=split -nodefaults -nographic -no-reboot -serial stdio");
        // Without these two features kernels clear pages by what is slow to emulate.
        add("-cpu max,-erms,-fsrm");
        add(match self.time {
            Time::Real => "-accel tcg,thread=multi -smp 2",
            Time::Counted => "-accel tcg,thread=single -smp 1 -icount shift=0,sleep=off",
        });
        add(&format!("-m {}", self.memory));
        add(match self.iommu {
            Iommu::Intel => "-device intel-iommu,intremap=on,caching-mode=on",
            Iommu::Virtio => "-device virtio-iommu-pci,addr=04",
        });
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
        };
        // A word of a module that there is not: the kernel passes it over.
        let counted = match self.time {
            Time::Real => "",
            Time::Counted => "dmaspan.counted ",
        };
        let always = "console=ttyS0 loglevel=2 no_timer_check oops=panic panic=-1";
        format!("{always} {iommu} {counted}{}", self.cmdline).trim_end().to_owned()
    }
}

/// Runs a machine to its end, with its console in a file, and returns how long it took.
///
/// # Errors
///
/// Why it did not start, or that it took too long, in one line.
pub(super) fn run(
    program: &Path,
    arguments: &[String],
    console: &Path,
    limit: Duration,
) -> Result<Duration, String> {
    let cannot = |error: io::Error| format!("QEMU does not start: {error}");
    let output = File::create(console).map_err(cannot)?;
    let errors = output.try_clone().map_err(cannot)?;
    let started = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(output).stderr(errors);
    let mut child = command.spawn().map_err(cannot)?;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(started.elapsed()),
            Ok(Some(status)) => return Err(format!("QEMU ended with {status}")),
            Ok(None) if started.elapsed() < limit => thread::sleep(Duration::from_millis(20)),
            other => {
                // It may have ended by itself meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return Err(match other {
                    Err(error) => format!("QEMU cannot be waited for: {error}"),
                    Ok(_) => format!("it did not end within {} s", limit.as_secs()),
                });
            }
        }
    }
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

    #[test]
    fn what_does_not_end_is_killed_and_what_fails_is_said() {
        let console = env::temp_dir().join(format!("dmaspan-console-{}", std::process::id()));
        let run = |program: &str, argument: &str| {
            let limit = Duration::from_millis(100);
            run(Path::new(program), &[argument.to_owned()], &console, limit)
        };
        assert!(run("sleep", "60").unwrap_err().contains("within"));
        assert!(run("false", "").unwrap_err().contains("exit status: 1"));
        assert!(run("no-such-program-at-all", "").unwrap_err().contains("does not start"));
        assert!(run("true", "").is_ok());
        fs::remove_file(&console).unwrap();
    }
}
