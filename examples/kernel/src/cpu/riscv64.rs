//! QEMU's `virt` with CPUs of RISC-V, in machine mode: entry, traps, console, clock, and the second
//! CPU.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicUsize, Ordering};

// The machine starts all CPUs at `_start`, with their number in `a0` and the device tree in `a1`.
// The second one waits until the first one sets `STARTED`. Addresses are physical.
global_asm!(
    ".section .text.boot,\"ax\"",
    ".globl _start",
    "_start:",
    "li t0, 0x2000", // FS, which compiled code uses
    "csrs mstatus, t0",
    "la t0, 9f",
    "csrw mtvec, t0",
    "bnez a0, 3f",
    "la sp, __stack",
    "la t1, __bss",
    "la t2, __bss_end",
    "1: bgeu t1, t2, 2f",
    "sd zero, 0(t1)",
    "addi t1, t1, 8",
    "j 1b",
    "2: tail {first}",
    "3: la t0, {started}",
    "4: lw t1, 0(t0)",
    "beqz t1, 4b",
    "fence rw, rw",
    "la sp, __second_stack",
    "tail {other}",
    // Nothing is to trap.
    ".balign 4",
    "9: csrr a0, mcause",
    "csrr a1, mepc",
    "csrr a2, mtval",
    "tail {trap}",
    first = sym first,
    other = sym other,
    trap = sym trap,
    started = sym STARTED,
);

unsafe extern "C" {
    static __end: u8;
}

/// How many CPUs there are.
pub(crate) const COUNT: usize = 2;
/// As far as there may be RAM.
pub(crate) const RAM_END: u64 = 1 << 40;
/// Of the clock, in the machine's device tree.
const HERTZ: u64 = 10_000_000;

/// Whether the second CPU is to begin. It looks before memory is cleared, so that this is data.
#[unsafe(link_section = ".data")]
static STARTED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn first(_: usize, tree: usize) -> ! {
    crate::first(crate::firmware::Firmware::at(tree))
}

extern "C" fn other() -> ! {
    crate::second()
}

extern "C" fn trap(cause: u64, at: u64, value: u64) -> ! {
    panic!("a trap at {at:#x}: cause {cause:#x}, value {value:#x}")
}

/// The first address behind the program and its stacks.
pub(crate) fn program_end() -> usize {
    (&raw const __end).addr()
}

/// The number of this CPU.
pub(crate) fn number() -> usize {
    let hart: usize;
    // SAFETY: it reads a register.
    unsafe { asm!("csrr {}, mhartid", out(reg) hart, options(nomem, nostack)) };
    hart
}

/// Nanoseconds since the machine was started.
pub(crate) fn nanoseconds() -> u64 {
    let ticks: u64;
    // SAFETY: it reads a register.
    unsafe { asm!("rdtime {}", out(reg) ticks, options(nomem, nostack)) };
    ticks * (1_000_000_000 / HERTZ)
}

/// Starts the second CPU.
pub(crate) fn start_second() -> Result<(), &'static str> {
    STARTED.store(1, Ordering::Release);
    Ok(())
}

/// Switches the machine off.
pub(crate) fn off() -> ! {
    const TEST_DEVICE: *mut u32 = 0x10_0000 as *mut u32;
    // SAFETY: this register of the machine ends it.
    unsafe { TEST_DEVICE.write_volatile(0x5555) };
    loop {
        core::hint::spin_loop();
    }
}

/// Prints a byte.
pub(crate) fn print(byte: u8) {
    // SAFETY: the data register of the 16550 of the machine.
    unsafe { (0x1000_0000 as *mut u8).write_volatile(byte) };
}
