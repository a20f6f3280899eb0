//! A small operating system whose devices reach what they were given, and nothing else.
//!
//! It finds memory, PCI and the IOMMU, blocks every device, and gives each that it drives a domain
//! of its own. Disks and a network card are driven by drivers that others wrote, while the second
//! CPU maps and unmaps. A device that is told to write where it may not is refused, and the rest
//! goes on. `cargo xtask kernel` builds it, runs it in QEMU and checks what it prints.
//!
//! | file | what |
//! |---|---|
//! | `glue.rs`, `iommu.rs` | what a kernel gives dmaspan, to be copied |
//! | `cpu/` | a machine: entry, address map, console, clock, the second CPU |
//! | `firmware/`, `pci.rs` | what there is |
//! | `memory.rs` | registers, and frames that the kernel's own drivers share with devices |
//! | `disk.rs`, `nvme.rs`, `net.rs`, `edu.rs`, `testdev.rs` | devices |
//! | `guest/` | a guest whose CPU and device have one table, where the kernel runs in EL2 |
//! | `checks.rs`, `plant.rs` | what is tried, and what is done wrong on purpose |

#![no_std]
#![no_main]

extern crate alloc;

/// Prints a line.
macro_rules! println {
    ($($text:tt)*) => { $crate::print(format_args!($($text)*)) };
}

mod checks;
#[cfg_attr(target_arch = "aarch64", path = "cpu/aarch64.rs")]
#[cfg_attr(target_arch = "riscv64", path = "cpu/riscv64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "cpu/x86_64.rs")]
mod cpu;
mod disk;
mod edu;
mod firmware;
mod glue;
#[cfg(target_arch = "aarch64")]
mod guest;
mod iommu;
mod memory;
mod net;
mod nvme;
mod pci;
mod plant;
mod testdev;

use alloc::boxed::Box;
use core::error::Error;
use core::fmt::{self, Write as _};
use core::panic::PanicInfo;

use buddy_system_allocator::LockedHeap;
use dmaspan::platform::Flag;
use firmware::Firmware;
use lock_api::Mutex;

type Result<T> = core::result::Result<T, Box<dyn Error>>;

/// How much of a disk is read.
const DISK_BYTES: u64 = 16 << 20;

#[global_allocator]
static HEAP: LockedHeap<33> = LockedHeap::new();

/// What the second CPU is to do.
static WORK: Mutex<Flag, Option<Box<dyn FnOnce() + Send>>> =
    Mutex::const_new(<Flag as lock_api::RawMutex>::INIT, None);

/// The first CPU begins here, with what its machine has.
fn first<E: fmt::Display>(firmware: core::result::Result<Firmware, E>) -> ! {
    let ended = match firmware {
        Ok(firmware) => begin(firmware),
        Err(why) => {
            // There is no heap for an error.
            println!("FAIL: firmware is refused, no device is let at memory: {why}");
            cpu::off()
        }
    };
    match ended {
        Ok(()) => println!("PASS"),
        Err(why) => println!("FAIL: {why}"),
    }
    cpu::off()
}

/// The second CPU waits here for work.
fn second() -> ! {
    loop {
        let work = WORK.lock().take();
        work.map_or_else(core::hint::spin_loop, |work| work());
    }
}

fn begin(firmware: Firmware) -> Result<()> {
    let start = cpu::program_end() as u64;
    let Some(memory) = firmware.memory(start) else {
        println!("FAIL: firmware names no memory behind the program");
        cpu::off()
    };
    let end = memory.end.min(cpu::RAM_END);
    // SAFETY: it is memory, and the program and firmware's tables are not in it.
    unsafe { HEAP.lock().add_to_heap(start as usize, end as usize) };
    println!("memory: {:#x} to {:#x}, the kernel's from {start:#x}", memory.start, memory.end);
    checks::run(&firmware)
}

struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(cpu::print);
        Ok(())
    }
}

fn print(text: fmt::Arguments<'_>) {
    static CONSOLE: Mutex<Flag, Console> =
        Mutex::const_new(<Flag as lock_api::RawMutex>::INIT, Console);
    // It cannot fail.
    let _ = writeln!(CONSOLE.lock(), "{text}");
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    // The CPU that panics may hold the lock of the console.
    let _ = writeln!(Console, "FAIL: {info}");
    cpu::off()
}
