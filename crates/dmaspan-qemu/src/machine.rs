//! A [`Machine`] is a QEMU whose CPU is the test.

use std::fmt::{self, Write as _};
use std::io;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dmaspan::PhysAddr;
use dmaspan_drivers::Mmio;
use parking_lot::Mutex;

use crate::find::{Arch, Qemu};
use crate::ram::Ram;
use crate::wire::Wire;

/// How long QEMU has for an answer where nothing else is said: it waits for nobody, but the system
/// may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why a machine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Its RAM could not be had.
    #[error("no memory of {bytes} bytes for the machine's RAM: {source}")]
    Ram {
        /// Its size.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// QEMU did not start, or ended at once.
    #[error("{command}: {source}")]
    Qemu {
        /// What was started.
        command: String,
        /// What it said.
        source: io::Error,
    },
}

/// A machine to be started.
#[derive(Clone, Debug)]
#[must_use = "nothing is started before `start`"]
pub struct Builder {
    qemu: Qemu,
    machine: String,
    ram: u64,
    args: Vec<String>,
    patience: Duration,
}

impl Builder {
    /// With so long for each answer, where nothing is said a minute. A QEMU that does not answer
    /// within it is taken for one that has ended.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// With as many bytes of RAM: whole MiB, and 64 MiB where nothing is said.
    pub fn ram(mut self, bytes: u64) -> Self {
        self.ram = bytes;
        self
    }

    /// With a device, as behind `-device`.
    pub fn device(self, device: &str) -> Self {
        self.arg("-device").arg(device)
    }

    /// With one more argument of QEMU.
    pub fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }

    /// Starts it, and waits until it answers.
    ///
    /// # Errors
    ///
    /// [`StartError`], with what QEMU said.
    pub fn start(self) -> Result<Machine, StartError> {
        let Self { qemu, machine, ram: bytes, args, patience } = self;
        let ram = Ram::new(ram_base(qemu.arch), bytes)
            .map_err(|source| StartError::Ram { bytes, source })?;
        let memory = ram.path();
        let mut command = Command::new(&qemu.path);
        command
            .args(["-accel", "qtest", "-qtest", "stdio", "-qtest-log", "none"])
            .args(["-run-with", "exit-with-parent=on"])
            .args(["-display", "none", "-nodefaults", "-M"])
            .arg(format!("{machine},memory-backend=ram"))
            .args(["-m", &format!("{}M", bytes >> 20), "-object"])
            .arg(format!("memory-backend-file,id=ram,share=on,size={bytes},mem-path={memory}"))
            .args(&args);
        let failed = |source| {
            let command = format!("{} -M {machine} {}", qemu.path.display(), args.join(" "));
            StartError::Qemu { command, source }
        };
        let mut wire = Wire::new(command, patience).map_err(failed)?;
        wire.command("endianness").map_err(failed)?;
        let shared = Shared { wire: Mutex::new(wire), gone: AtomicBool::new(false), ram };
        Ok(Machine { arch: qemu.arch, shared: Arc::new(shared) })
    }
}

/// Where the RAM of the machines `virt` and `q35` begins.
fn ram_base(arch: Arch) -> PhysAddr {
    match arch {
        Arch::Aarch64 => PhysAddr::new(0x4000_0000),
        Arch::Riscv64 => PhysAddr::new(0x8000_0000),
        Arch::X86_64 => PhysAddr::new(0),
    }
}

/// A machine of QEMU that runs no guest. Clones are the same machine, which ends with the last.
///
/// An access to a machine that has ended does not fail: it reads all ones, as a bus answers where
/// nobody is, and [`is_gone`](Self::is_gone) says so.
#[derive(Clone)]
pub struct Machine {
    arch: Arch,
    shared: Arc<Shared>,
}

struct Shared {
    wire: Mutex<Wire>,
    gone: AtomicBool,
    ram: Ram,
}

impl Machine {
    /// A machine of that kind (as behind `-M`), with no devices but its own.
    pub fn builder(qemu: Qemu, machine: &str) -> Builder {
        let mut args = Vec::new();
        if qemu.arch == Arch::Riscv64 {
            args.extend(["-bios", "none"].map(str::to_owned));
        }
        Builder { qemu, machine: machine.to_owned(), ram: 64 << 20, args, patience: PATIENCE }
    }

    /// Its processor.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Its memory.
    pub fn ram(&self) -> &Ram {
        &self.shared.ram
    }

    /// Registers, or anything else that answers to physical addresses, from `base` on.
    pub fn mmio(&self, base: u64) -> QtestMmio {
        QtestMmio { machine: self.clone(), base }
    }

    /// Lets virtual time pass; timers and what runs in the background go on.
    pub fn clock_step(&self, nanoseconds: u64) {
        self.send(&format!("clock_step {nanoseconds}"));
    }

    /// Reads an I/O port of 32 bits.
    pub fn port_in(&self, port: u16) -> u32 {
        low_half(self.number(&format!("inl {port:#x}")))
    }

    /// Writes an I/O port of 32 bits.
    pub fn port_out(&self, port: u16, value: u32) {
        self.send(&format!("outl {port:#x} {value:#x}"));
    }

    /// Whether QEMU has ended or stopped answering.
    pub fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Relaxed)
    }

    /// How many commands QEMU was sent: one for each access to a register.
    pub fn commands(&self) -> u64 {
        self.shared.wire.lock().commands
    }

    fn send(&self, command: &str) {
        let result = self.shared.wire.lock().command(command).map(drop);
        self.note(result);
    }

    fn number(&self, command: &str) -> u64 {
        let result = self.shared.wire.lock().number(command);
        self.note(result).unwrap_or(u64::MAX)
    }

    fn note<T>(&self, result: io::Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                if !self.shared.gone.swap(true, Ordering::Relaxed) {
                    eprintln!("{error}");
                }
                None
            }
        }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("arch", &self.arch)
            .field("gone", &self.is_gone())
            .field("ram", self.ram())
            .finish_non_exhaustive()
    }
}

/// Registers of a [`Machine`].
#[derive(Clone, Debug)]
pub struct QtestMmio {
    machine: Machine,
    base: u64,
}

impl QtestMmio {
    fn at(&self, offset: u64) -> u64 {
        self.base.wrapping_add(offset)
    }

    /// Writes registers of 32 bits one after the other, then reads two, of which it returns the
    /// second, as one message: each that waits for its answer costs as much as all of them.
    pub(crate) fn write_then_read(&self, writes: &[(u64, u32)], reads: [u64; 2]) -> u32 {
        let mut commands = String::new();
        for &(offset, value) in writes {
            // Writing to a string does not fail.
            let _ = writeln!(commands, "writel {:#x} {value:#x}", self.at(offset));
        }
        let [first, second] = reads.map(|offset| self.at(offset));
        let _ = write!(commands, "readl {first:#x}\nreadl {second:#x}");
        low_half(self.machine.number(&commands))
    }

    /// Writes registers of 64 bits one after the other, then lets virtual time pass.
    pub(crate) fn write_then_step(&self, writes: &[(u64, u64)], nanoseconds: u64) {
        let mut commands = String::new();
        for &(offset, value) in writes {
            let _ = writeln!(commands, "writeq {:#x} {value:#x}", self.at(offset));
        }
        let _ = write!(commands, "clock_step {nanoseconds}");
        self.machine.send(&commands);
    }
}

impl Mmio for QtestMmio {
    fn read32(&self, offset: u64) -> u32 {
        low_half(self.machine.number(&format!("readl {:#x}", self.at(offset))))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.machine.send(&format!("writel {:#x} {value:#x}", self.at(offset)));
    }

    fn read64(&self, offset: u64) -> u64 {
        self.machine.number(&format!("readq {:#x}", self.at(offset)))
    }

    fn write64(&self, offset: u64, value: u64) {
        self.machine.send(&format!("writeq {:#x} {value:#x}", self.at(offset)));
    }
}

fn low_half(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}
