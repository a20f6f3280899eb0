//! QEMU's `virt` with a CPU of Arm: entry, address map, traps, console, clock, and the second CPU.

use core::arch::{asm, global_asm};

// The machine starts the first CPU at `_start`, without an MMU, in EL1 or, where it has that, in
// EL2. The first one starts the second, at `second`. In EL2 the names of EL1's registers are made
// those of EL2's own (HCR_EL2.E2H, of FEAT_VHE), so that the rest is the same.
global_asm!(
    ".section .text.boot,\"ax\"",
    ".globl _start",
    "_start:",
    "adrp x1, __bss",
    "adrp x2, __bss_end",
    "1: cmp x1, x2",
    "b.hs 2f",
    "stp xzr, xzr, [x1], #16",
    "b 1b",
    "2: adrp x1, __stack",
    "adrp x2, {first}",
    "add x2, x2, :lo12:{first}",
    "b 3f",
    ".globl second",
    "second:",
    "adrp x1, __second_stack",
    "adrp x2, {other}",
    "add x2, x2, :lo12:{other}",
    "3: mov sp, x1",
    "mov x19, x2",
    "mrs x1, CurrentEL",
    "tbz x1, #3, 4f",
    "ldr x1, ={host}",
    "msr hcr_el2, x1",
    "isb",
    "4: mov x1, #(3 << 20)", // FP and SIMD, which compiled code uses
    "msr cpacr_el1, x1",
    "adrp x1, traps",
    "msr vbar_el1, x1",
    "isb",
    "bl {translate}",
    "br x19",
    // Nothing is to trap, and each entry says what did; but a guest ends by the ninth.
    ".macro trapped count",
    ".rept \\count",
    ".balign 128",
    "mrs x0, esr_el1",
    "mrs x1, elr_el1",
    "mrs x2, far_el1",
    "b {trap}",
    ".endr",
    ".endm",
    ".balign 4096",
    "traps:",
    "trapped 8",
    ".balign 128",
    "b guest_exit",
    "trapped 7",
    host = const HOST,
    first = sym first,
    other = sym other,
    translate = sym translate,
    trap = sym trap,
);

unsafe extern "C" {
    fn second();
    static __end: u8;
}

/// The device tree, where the machine puts it for a kernel that is an ELF file (QEMU:
/// docs/system/arm/virt.rst).
const TREE: usize = 0x4000_0000;
/// HCR_EL2 of a kernel in EL2: E2H, TGE, and RW for what runs below.
pub(crate) const HOST: u64 = 1 << 34 | 1 << 27 | 1 << 31;
/// How many CPUs there are.
pub(crate) const COUNT: usize = 2;
/// As far as the address map has RAM.
pub(crate) const RAM_END: u64 = 0x8000_0000;

extern "C" fn first() -> ! {
    crate::first(crate::firmware::Firmware::at(TREE))
}

extern "C" fn other() -> ! {
    crate::second()
}

extern "C" fn trap(syndrome: u64, at: u64, address: u64) -> ! {
    panic!("a trap at {at:#x}: syndrome {syndrome:#x}, address {address:#x}")
}

#[repr(align(4096))]
struct Table(#[expect(dead_code, reason = "hardware reads it")] [u64; 512]);

/// Blocks of 1 GiB, one to one: RAM in the second, and registers in all others.
static ADDRESS_MAP: Table = {
    const REGISTERS: u64 = 1 | 1 << 2 | 1 << 10 | 3 << 53; // attribute 1, AF, PXN, UXN
    const RAM: u64 = 1 | 3 << 8 | 1 << 10; // attribute 0, inner shareable, AF
    let mut table = [0; 512];
    let mut at = 0;
    while at < 512 {
        table[at] = (at as u64) << 30 | if at == 1 { RAM } else { REGISTERS };
        at += 1;
    }
    Table(table)
};

extern "C" fn translate() {
    // SAFETY: everything stays at its address; RAM is cached from here on, and was not written
    // through a cache before.
    unsafe {
        asm!(
            "msr mair_el1, {mair}",
            "msr tcr_el1, {tcr}",
            "msr ttbr0_el1, {table}",
            "dsb sy",
            "isb",
            "tlbi vmalle1",
            "dsb sy",
            "isb",
            "mrs {control}, sctlr_el1",
            "orr {control}, {control}, #1", // MMU
            "orr {control}, {control}, #4", // data caches
            "orr {control}, {control}, #(1 << 12)", // instruction caches
            "msr sctlr_el1, {control}",
            "isb",
            mair = in(reg) 0x04ff_u64, // 0: write-back; 1: Device-nGnRE
            tcr = in(reg) 25_u64 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2 << 32, // 39 bits
            table = in(reg) &raw const ADDRESS_MAP,
            control = out(reg) _,
        );
    }
}

/// The first address behind the program and its stacks.
pub(crate) fn program_end() -> usize {
    (&raw const __end).addr()
}

/// The number of this CPU.
pub(crate) fn number() -> usize {
    let affinity: usize;
    // SAFETY: it reads a register.
    unsafe { asm!("mrs {}, mpidr_el1", out(reg) affinity, options(nomem, nostack)) };
    affinity & 0xff
}

/// Nanoseconds since the machine was started.
pub(crate) fn nanoseconds() -> u64 {
    let (ticks, hertz): (u64, u64);
    // SAFETY: it reads the generic timer.
    unsafe {
        asm!("isb", "mrs {}, cntvct_el0", "mrs {}, cntfrq_el0", out(reg) ticks, out(reg) hertz);
    }
    u64::try_from(u128::from(ticks) * 1_000_000_000 / u128::from(hertz)).unwrap_or(u64::MAX)
}

/// Whether this is EL2, below which a guest can run.
pub(crate) fn is_hypervisor() -> bool {
    let level: u64;
    // SAFETY: it reads a register.
    unsafe { asm!("mrs {}, CurrentEL", out(reg) level, options(nomem, nostack)) };
    level >> 2 == 2
}

/// Calls the firmware (PSCI, DEN 0022), which is a level above.
fn firmware(function: u64, arguments: [u64; 3]) -> i64 {
    let [one, two, three] = arguments;
    let answer: i64;
    // SAFETY: the functions below start a CPU, or end all.
    unsafe {
        asm!(
            "cbnz {above}, 2f",
            "hvc #0",
            "b 3f",
            "2: smc #0",
            "3:",
            above = in(reg) u64::from(is_hypervisor()),
            inlateout("x0") function => answer,
            inlateout("x1") one => _, inlateout("x2") two => _, inlateout("x3") three => _,
        );
    }
    answer
}

/// Starts the second CPU.
pub(crate) fn start_second() -> Result<(), &'static str> {
    const CPU_ON: u64 = 0xc400_0003;
    let entry: unsafe extern "C" fn() = second;
    match firmware(CPU_ON, [1, entry as usize as u64, 0]) {
        0 => Ok(()),
        _ => Err("PSCI does not start the second CPU"),
    }
}

/// Switches the machine off.
pub(crate) fn off() -> ! {
    const SYSTEM_OFF: u64 = 0x8400_0008;
    firmware(SYSTEM_OFF, [0; 3]);
    loop {
        core::hint::spin_loop();
    }
}

/// Prints a byte.
pub(crate) fn print(byte: u8) {
    // SAFETY: the data register of the PL011 of the machine.
    unsafe { (0x0900_0000 as *mut u32).write_volatile(byte.into()) };
}
