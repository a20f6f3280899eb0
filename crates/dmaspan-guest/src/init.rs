//! The first process of a guest.
//!
//! It says, each in a line of its own:
//!
//! | line | when |
//! |---|---|
//! | `guest: kernel RELEASE up SECONDS` | the file systems are mounted and the modules loaded |
//! | `guest: run LINE` | before a line of the list |
//! | `guest: rc N LINE` | after it; 128 and the signal that ended it, 127 where it does not start |
//! | `guest: log <LEVEL>[SECONDS] TEXT` | for each warning or error in the kernel's log |
//! | `guest: taint MASK` | at the end: what the kernel says of itself |
//! | `guest: error WHAT` | init itself failed, and the list ended |
//! | `guest: end` | the last line |

use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::panic;
use std::path::Path;
use std::process::{self, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use rustix::mount::{MountFlags, mount};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::system::{RebootCommand, finit_module, reboot};
use rustix::termios::tcdrain;
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use crate::commands::Command;
use crate::kmsg::Log;

type Failure = Box<dyn Error>;

/// The name of what is mounted, where, and its type.
const MOUNTS: [(&str, &str, &str); 6] = [
    ("devtmpfs", "/dev", "devtmpfs"),
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("debugfs", "/sys/kernel/debug", "debugfs"),
    ("tmpfs", "/tmp", "tmpfs"),
    ("tmpfs", "/dev/shm", "tmpfs"),
];

const MODULES: &str = "/modules";
const COMMANDS: &str = "/guest/commands";
/// The code of a program that does not start.
const NOT_STARTED: i32 = 127;
/// The gravest level that is no warning.
const NOTICE: u8 = 5;

/// Runs the list and powers off, whatever happens.
pub(crate) fn run() -> ExitCode {
    match panic::catch_unwind(work) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => println!("guest: error {error}"),
        Err(_) => println!("guest: error init panicked"),
    }
    println!("guest: end");
    // The kernel sends what its serial port holds by interrupts, and a machine that powers off
    // takes along what it still holds. A reader would then miss the last line.
    let _ = io::stdout().flush();
    let _ = tcdrain(io::stdout());
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        println!("guest: error the machine does not power off: {error}");
    }
    // The kernel panics when its first process ends, which ends the guest, too.
    ExitCode::FAILURE
}

fn work() -> Result<(), Failure> {
    mount_all()?;
    load_modules()?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let uptime = fs::read_to_string("/proc/uptime")?;
    let seconds = uptime.split_whitespace().next().unwrap_or_default();
    // Firmware leaves its last line without an end.
    println!("\nguest: kernel {} up {seconds}", release.trim());
    let mut log = Log::open()?;
    say_log(&mut log);
    let commands = fs::read_to_string(COMMANDS);
    for line in commands.map_err(|error| format!("{COMMANDS}: {error}"))?.lines() {
        let line = line.trim();
        let Some(command) = Command::parse(line)? else { continue };
        println!("guest: run {line}");
        let code = execute(&command).map_err(|error| format!("{line}: {error}"));
        say_log(&mut log);
        println!("guest: rc {} {line}", code?);
    }
    let tainted = fs::read_to_string("/proc/sys/kernel/tainted")?;
    println!("guest: taint {}", tainted.trim());
    Ok(())
}

fn mount_all() -> Result<(), Failure> {
    for (name, place, kind) in MOUNTS {
        // Of a kernel without debugfs the folder cannot be made.
        if fs::create_dir_all(place).is_err() && kind == "debugfs" {
            continue;
        }
        match mount(name, place, kind, MountFlags::empty(), None) {
            Err(rustix::io::Errno::NODEV | rustix::io::Errno::NOENT) if kind == "debugfs" => {}
            other => other.map_err(|error| format!("{place} cannot be mounted: {error}"))?,
        }
    }
    Ok(())
}

/// Loads what `order` lists: a name and its parameters in each line.
fn load_modules() -> Result<(), Failure> {
    let order = match fs::read_to_string(Path::new(MODULES).join("order")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        order => order?,
    };
    for line in order.lines() {
        let (name, parameters) = line.split_once(' ').unwrap_or((line, ""));
        let file = File::open(Path::new(MODULES).join(format!("{name}.ko")))?;
        finit_module(file, &CString::new(parameters)?, 0)
            .map_err(|error| format!("the module {name} cannot be loaded: {error}"))?;
    }
    Ok(())
}

/// Does what a line asks for and returns its code.
fn execute(command: &Command) -> Result<i32, Failure> {
    match command {
        Command::Settle(seconds) => thread::sleep(Duration::from_secs(*seconds)),
        Command::Bind(bdf) => bind(bdf)?,
        Command::Hugepages(count) => {
            let place = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
            fs::write(place, count.to_string())?;
            let there = fs::read_to_string(place)?;
            if there.trim() != count.to_string() {
                return Err(format!("the kernel set {} pages aside", there.trim()).into());
            }
        }
        Command::LimitMemlock(limit) => {
            setrlimit(Resource::Memlock, Rlimit { current: *limit, maximum: *limit })?;
        }
        Command::DropIpcLock => {
            for capability in [CapabilitySet::IPC_LOCK, CapabilitySet::SYS_RESOURCE] {
                remove_capability_from_bounding_set(capability)?;
            }
        }
        Command::Run { program, arguments } => {
            return run_program(program, arguments);
        }
    }
    Ok(0)
}

/// Runs a program, with its output and errors on the console in the order in which it wrote them,
/// and a line's end behind them. For the program this is no terminal: it prints as into a file.
fn run_program(program: &str, arguments: &[&str]) -> Result<i32, Failure> {
    let (mut output, end) = io::pipe()?;
    let mut command = process::Command::new(program);
    command.args(arguments).env("PATH", "/bin").stdin(Stdio::null());
    command.stdout(end.try_clone()?).stderr(end);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            println!("{program} does not start: {error}");
            return Ok(NOT_STARTED);
        }
    };
    // It holds the ends for writing, and the last one is closed when it ends.
    drop(command);
    let mut buffer = [0; 4096];
    let mut last = b'\n';
    loop {
        let length = output.read(&mut buffer)?;
        let Some(bytes) = buffer.get(..length).filter(|bytes| !bytes.is_empty()) else { break };
        last = bytes.last().copied().unwrap_or(last);
        io::stdout().write_all(bytes)?;
    }
    if last != b'\n' {
        println!();
    }
    Ok(code(child.wait()?))
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// Takes a function from its driver and gives it to vfio-pci.
fn bind(bdf: &str) -> Result<(), Failure> {
    let device = Path::new("/sys/bus/pci/devices").join(bdf);
    fs::write(device.join("driver_override"), "vfio-pci")?;
    let driver = device.join("driver");
    if driver.exists() {
        fs::write(driver.join("unbind"), bdf)?;
    }
    fs::write("/sys/bus/pci/drivers_probe", bdf)?;
    let bound = fs::read_link(driver).map_err(|_| format!("no driver took {bdf}"))?;
    if bound.file_name().is_none_or(|name| name != "vfio-pci") {
        return Err(format!("{} took {bdf}", bound.display()).into());
    }
    Ok(())
}

/// Says what the kernel warned of since the last time.
fn say_log(log: &mut Log) {
    for record in log.new_records().into_iter().filter(|record| record.level < NOTICE) {
        let (seconds, micros) = (record.micros / 1_000_000, record.micros % 1_000_000);
        println!("guest: log <{}>[{seconds}.{micros:06}] {}", record.level, record.text);
    }
}
