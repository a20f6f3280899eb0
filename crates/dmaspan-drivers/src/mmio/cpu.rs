//! The instructions by which each CPU reads and writes registers, and orders that with memory.
//!
//! On Arm and RISC-V they are assembly. The compiler may merge a volatile access with the step of
//! its pointer into one instruction, a write-back form, and hardware does not describe such an
//! access to a hypervisor that has to emulate it (DDI 0487, ESR_EL2, ISS encoding of data aborts,
//! ISV; Linux: arch/arm64/include/asm/io.h).
//!
//! A barrier that orders memory alone is not enough. On Arm a DSB waits until all accesses before
//! it are complete for every observer, those of devices included (DDI 0487, B2.3; DDI 0406,
//! A3.8.3). RISC-V's fences name input and output apart from memory (the ISA manual, "Memory
//! ordering instructions").

/// Accesses by assembly.
#[cfg(any(
    target_arch = "aarch64",
    target_arch = "arm",
    target_arch = "riscv64",
    target_arch = "riscv32"
))]
mod access {
    use core::arch::asm;

    /// Functions of assembly: a name, the type of the register, and the instruction.
    macro_rules! accesses {
        ($($load:ident, $store:ident, $word:ty, $read:literal, $write:literal;)*) => {$(
            /// Reads a register with one instruction.
            ///
            /// # Safety
            ///
            /// The register is mapped, and `at` is aligned to its size.
            #[inline(always)]
            pub(in super::super) unsafe fn $load(at: *const $word) -> $word {
                let value;
                // SAFETY: it reads the register that the caller promises, and changes no flag and
                // no stack. What else the device does then may change memory, so no option denies
                // it.
                unsafe {
                    asm!($read, at = in(reg) at, value = lateout(reg) value,
                         options(nostack, preserves_flags));
                }
                value
            }

            /// Writes a register with one instruction.
            ///
            /// # Safety
            ///
            /// The register is mapped, and `at` is aligned to its size.
            #[inline(always)]
            pub(in super::super) unsafe fn $store(at: *mut $word, value: $word) {
                // SAFETY: it writes the register that the caller promises, and changes no flag and
                // no stack.
                unsafe {
                    asm!($write, at = in(reg) at, value = in(reg) value,
                         options(nostack, preserves_flags));
                }
            }
        )*};
    }

    #[cfg(target_arch = "aarch64")]
    accesses! {
        load32, store32, u32, "ldr {value:w}, [{at}]", "str {value:w}, [{at}]";
        load64, store64, u64, "ldr {value:x}, [{at}]", "str {value:x}, [{at}]";
    }

    #[cfg(target_arch = "arm")]
    accesses! {
        load32, store32, u32, "ldr {value}, [{at}]", "str {value}, [{at}]";
    }

    #[cfg(any(target_arch = "riscv64", target_arch = "riscv32"))]
    accesses! {
        load32, store32, u32, "lw {value}, 0({at})", "sw {value}, 0({at})";
    }

    #[cfg(target_arch = "riscv64")]
    accesses! {
        load64, store64, u64, "ld {value}, 0({at})", "sd {value}, 0({at})";
    }
}

/// Volatile accesses, for CPUs whose hypervisors decode every instruction.
#[cfg(not(any(
    target_arch = "aarch64",
    target_arch = "arm",
    target_arch = "riscv64",
    target_arch = "riscv32"
)))]
mod access {
    macro_rules! accesses {
        ($($load:ident, $store:ident, $word:ty;)*) => {$(
            /// Reads a register with one access.
            ///
            /// # Safety
            ///
            /// The register is mapped, and `at` is aligned to its size.
            #[inline(always)]
            pub(in super::super) unsafe fn $load(at: *const $word) -> $word {
                // SAFETY: the caller's promise.
                unsafe { at.read_volatile() }
            }

            /// Writes a register with one access.
            ///
            /// # Safety
            ///
            /// The register is mapped, and `at` is aligned to its size.
            #[inline(always)]
            pub(in super::super) unsafe fn $store(at: *mut $word, value: $word) {
                // SAFETY: the caller's promise.
                unsafe { at.write_volatile(value) }
            }
        )*};
    }

    accesses! {
        load32, store32, u32;
    }

    #[cfg(target_pointer_width = "64")]
    accesses! {
        load64, store64, u64;
    }
}

pub(super) use access::*;

/// A barrier function for each CPU: its name, what it says on Arm, and on RISC-V.
macro_rules! barriers {
    ($($(#[$doc:meta])* $name:ident, $arm:literal, $riscv:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name() {
            #[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
            // SAFETY: a barrier changes neither memory nor registers of the CPU.
            unsafe {
                core::arch::asm!($arm, options(nostack, preserves_flags));
            }
            #[cfg(any(target_arch = "riscv64", target_arch = "riscv32"))]
            // SAFETY: a fence changes neither memory nor registers of the CPU.
            unsafe {
                core::arch::asm!($riscv, options(nostack, preserves_flags));
            }
            #[cfg(not(any(
                target_arch = "aarch64",
                target_arch = "arm",
                target_arch = "riscv64",
                target_arch = "riscv32"
            )))]
            core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
        }
    )*};
}

barriers! {
    /// Orders accesses to memory and to registers, as devices see them.
    order_all, "dsb sy", "fence iorw, iorw";
    /// Orders stores to memory and to registers, as devices see them (Linux: `wmb`).
    order_stores, "dsb st", "fence ow, ow";
}
