//! QEMU's `q35`, a PC: entry by PVH, address map, traps, console, clock, and the second CPU.

use core::arch::{asm, global_asm};
use core::ffi::CStr;
use core::hint;
use core::ptr::with_exposed_provenance;

use crate::firmware::{Firmware, MemoryRange};

// PVH (Xen: docs/misc/pvh.pandoc) starts the first CPU in flat mode of 32 bits, with the start
// information at EBX. The first 4 GiB are mapped one to one, from 2 GiB on without caches: there
// are registers, and no RAM. The first CPU copies `trampoline` to `TRAMPOLINE`, where the second
// one begins in mode of 16 bits, and goes to long mode at once (AMD 24593, 14.6 and 15.27).
global_asm!(
    ".section .note.Xen,\"a\",@note",
    ".align 4",
    ".long 4, 8, 18", // XEN_ELFNOTE_PHYS32_ENTRY
    ".asciz \"Xen\"",
    ".quad _start",
    ".section .text.boot,\"ax\"",
    ".code32",
    ".globl _start",
    "_start:",
    "cli",
    "cld",
    "mov esi, ebx",
    "mov edi, offset __bss",
    "mov ecx, offset __bss_end",
    "sub ecx, edi",
    "xor eax, eax",
    "rep stosb",
    "mov eax, offset {tables} + 0x1003",
    "mov [{tables}], eax",
    "mov eax, offset {tables} + 0x2003",
    "mov edi, offset {tables} + 0x1000",
    "mov ecx, 4",
    "2: mov [edi], eax",
    "add eax, 0x1000",
    "add edi, 8",
    "loop 2b",
    "mov eax, 0x83", // 2 MiB, to be written
    "mov edi, offset {tables} + 0x2000",
    "mov ecx, 2048",
    "3: mov [edi], eax",
    "add eax, 0x200000",
    "jns 4f",
    "or eax, 0x18", // without caches
    "4: add edi, 8",
    "loop 3b",
    "mov eax, offset {tables}",
    "mov cr3, eax",
    "mov eax, cr4",
    "or eax, 0x20", // PAE
    "mov cr4, eax",
    "mov ecx, 0xc0000080", // EFER
    "rdmsr",
    "or eax, 0x100", // LME
    "wrmsr",
    "mov eax, cr0",
    "or eax, 0x80000000", // PG
    "mov cr0, eax",
    "lgdt [9f]",
    ".byte 0xea", // a far jump
    ".long 5f",
    ".word 8",
    ".code64",
    "5: xor eax, eax",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "mov esp, offset __stack",
    "mov edi, esi",
    "call {first}",
    ".align 8",
    "8: .quad 0, 0x00af9a000000ffff",
    "9: .word 15",
    ".long 8b",
    ".code16",
    ".balign 8",
    ".globl trampoline",
    "trampoline:",
    "jmp 6f",
    ".balign 8",
    ".word 15", // at TRAMPOLINE + 8
    ".long 8b",
    "6: cli",
    "xor ax, ax",
    "mov ds, ax",
    "mov eax, offset {tables}",
    "mov cr3, eax",
    "mov eax, cr4",
    "or eax, 0x20",
    "mov cr4, eax",
    "mov ecx, 0xc0000080",
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "lgdt [0x8008]",
    "mov eax, cr0",
    "or eax, 0x80000001", // PG and PE
    "mov cr0, eax",
    ".byte 0x66, 0xea",
    ".long 7f",
    ".word 8",
    ".globl trampoline_end",
    "trampoline_end:",
    ".code64",
    "7: xor eax, eax",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "mov esp, offset __second_stack",
    "call {other}",
    ".globl trap_entry",
    "trap_entry:",
    "mov rdi, [rsp]",
    "mov rsi, [rsp + 8]",
    "mov rdx, cr2",
    "and rsp, -16",
    "call {trap}",
    tables = sym TABLES,
    first = sym first,
    other = sym other,
    trap = sym trap,
);

unsafe extern "C" {
    fn trampoline();
    fn trampoline_end();
    fn trap_entry();
    static __end: u8;
    static __stack: u8;
}

/// Where a CPU begins that is started, in the first MiB; the GDT's place is in it at 8.
const TRAMPOLINE: usize = 0x8000;

#[repr(C, align(4096))]
struct PageTables([u64; 6 * 512]);

static mut TABLES: PageTables = PageTables([0; 6 * 512]);

/// How many CPUs there are.
pub(crate) const COUNT: usize = 2;
/// As far as the address map has RAM.
pub(crate) const RAM_END: u64 = 0x8000_0000;

/// What PVH passes (Xen: public/arch-x86/hvm/start_info.h).
#[repr(C)]
struct StartInfo {
    magic: u32,
    version: u32,
    _flags_and_modules: [u32; 4],
    command_line: u64,
    rsdp: u64,
    memory_map: u64,
    memory_ranges: u32,
    _reserved: u32,
}

extern "C" fn first(info: usize) -> ! {
    load_traps();
    // SAFETY: PVH passes its address, and nobody writes it.
    let info = unsafe { &*with_exposed_provenance::<StartInfo>(info) };
    assert!(info.magic == 0x336e_c578 && info.version >= 1, "not started by PVH");
    let ranges = with_exposed_provenance::<MemoryRange>(info.memory_map as usize);
    // SAFETY: as above; the ranges are there, in RAM that the kernel's heap is not in.
    let ranges = unsafe { core::slice::from_raw_parts(ranges, info.memory_ranges as usize) };
    let line = match info.command_line {
        0 => c"",
        // SAFETY: as above, and it ends with a zero.
        at => unsafe { CStr::from_ptr(with_exposed_provenance(at as usize)) },
    };
    let line = line.to_str().unwrap_or_default();
    crate::first(Ok::<_, &str>(Firmware::new(info.rsdp as usize, ranges, line)))
}

extern "C" fn other() -> ! {
    load_traps();
    crate::second()
}

extern "C" fn trap(code: u64, at: u64, address: u64) -> ! {
    panic!("a trap: {code:#x} {at:#x}, address {address:#x}")
}

/// Has all exceptions say what trapped: nothing is to.
fn load_traps() {
    static GATES: lock_api::Mutex<dmaspan::platform::Flag, [[u64; 2]; 32]> =
        lock_api::Mutex::const_new(
            <dmaspan::platform::Flag as lock_api::RawMutex>::INIT,
            [[0; 2]; 32],
        );
    let entry: unsafe extern "C" fn() = trap_entry;
    let at = entry as usize as u64;
    let gate = [at & 0xffff | 8 << 16 | 0x8e00 << 32 | (at >> 16 & 0xffff) << 48, at >> 32];
    let mut gates = GATES.lock();
    gates.fill(gate);
    let start = gates.as_ptr().addr();
    let register = [0x1ff_u16, start as u16, (start >> 16) as u16, 0, 0];
    // SAFETY: the gates are static, and lead to code.
    unsafe { asm!("lidt [{}]", in(reg) &raw const register) };
}

/// The first address behind the program and its stacks.
pub(crate) fn program_end() -> usize {
    (&raw const __end).addr()
}

/// The number of this CPU: each has a stack.
pub(crate) fn number() -> usize {
    let stack: usize;
    // SAFETY: it reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) stack, options(nomem, nostack)) };
    usize::from(stack > (&raw const __stack).addr())
}

/// A register of this machine.
fn read(at: usize) -> u64 {
    // SAFETY: those of the event timer, below, are mapped without caches.
    unsafe { with_exposed_provenance::<u64>(at).read_volatile() }
}

fn write32(at: usize, value: u32) {
    // SAFETY: those of the event timer and of the interrupt controller, below, are mapped without
    // caches, and change no memory.
    unsafe { core::ptr::with_exposed_provenance_mut::<u32>(at).write_volatile(value) };
}

/// The high precision event timer, where a PC has it, its registers, and the first bit, which lets
/// it count.
const TIMER: usize = 0xfed0_0000;
const CONFIGURATION: usize = TIMER + 0x10;
const COUNTER: usize = TIMER + 0xf0;

/// Nanoseconds since the clock was looked at first.
pub(crate) fn nanoseconds() -> u64 {
    if read(CONFIGURATION) & 1 == 0 {
        write32(CONFIGURATION, 1);
    }
    let femtoseconds = read(TIMER) >> 32;
    u64::try_from(u128::from(read(COUNTER)) * u128::from(femtoseconds) / 1_000_000).unwrap_or(0)
}

/// Starts the second CPU: INIT, and then twice where to begin (AMD 24593, 16.5).
pub(crate) fn start_second() -> Result<(), &'static str> {
    const COMMAND: usize = 0xfee0_0300;
    const TARGET: usize = 0xfee0_0310;
    let (begin, end): (unsafe extern "C" fn(), unsafe extern "C" fn()) =
        (trampoline, trampoline_end);
    let len = end as usize - begin as usize;
    let from = with_exposed_provenance::<u8>(begin as usize);
    let to = core::ptr::with_exposed_provenance_mut::<u8>(TRAMPOLINE);
    // SAFETY: there is RAM, which the heap is not in and nobody uses.
    unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
    for command in [0x4500, 0x4600 | TRAMPOLINE as u32 >> 12, 0x4600 | TRAMPOLINE as u32 >> 12] {
        write32(TARGET, 1 << 24);
        write32(COMMAND, command);
        let began = nanoseconds();
        while nanoseconds() - began < 10_000_000 {
            hint::spin_loop();
        }
    }
    Ok(())
}

/// Switches the machine off.
pub(crate) fn off() -> ! {
    // SAFETY: PM1a_CNT of ICH9, where QEMU's firmware has it: soft off.
    unsafe { asm!("out dx, ax", in("dx") 0x604_u16, in("ax") 0x2000_u16) };
    loop {
        hint::spin_loop();
    }
}

/// Prints a byte.
pub(crate) fn print(byte: u8) {
    // SAFETY: QEMU's 16550 takes a byte at any time.
    unsafe { asm!("out dx, al", in("dx") 0x3f8_u16, in("al") byte, options(nomem, nostack)) };
}
