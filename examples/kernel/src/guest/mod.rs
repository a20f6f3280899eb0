//! A guest, where the kernel runs in EL2: one table of stage 2 translates for the guest's CPU and
//! for the guest's device.
//!
//! The guest runs with its own MMU off, so that its addresses are intermediate physical ones
//! (IPAs), and its device is told the same addresses. What is unmapped is gone for both.

pub(crate) mod checks;

use alloc::format;
use alloc::sync::Arc;
use core::arch::{asm, global_asm};
use core::mem::ManuallyDrop;
use core::sync::atomic::Ordering;

use dmaspan::io_pgtable::{ArmLpaeS2, ArmLpaeS2Config, BreakBeforeMake, PageTable, TableRoot};
use dmaspan::iommu::{
    Attachment, Domain, DriverOps, Event, HardwareError, Invalidation, IommuOps, Prepared, Scope,
    Target,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Promise, Prot, Span};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Ops, SmmuV3Stream, Stage};
use dmaspan_drivers::{FrameHost, MmioRegion};

use crate::Result;
use crate::checks::PAGE;
use crate::cpu;
use crate::glue::{Frames, Tables};
use crate::memory::Shared;
use crate::plant::{Plants, Tapped};

/// Where the guest's memory and its device's registers are, for guest and device.
const RAM: u64 = 0x8000_0000;
const REGISTERS: u64 = 0x1000_0000;
const LG2_RAM: u32 = 16;

// What the guest runs, from the beginning of its memory on, and how the CPU gets there and back.
global_asm!(
    ".section .text.guest,\"ax\"",
    ".balign 8",
    "guest_code:",
    "ldr x0, [x1]", // LOAD
    "hvc #0",
    "str x2, [x1]", // STORE
    "hvc #0",
    // COPY: a driver of edu, with registers at x0, which copies x3 bytes from x1 to x2.
    "mov x4, #0x40000", // edu's own memory
    "dsb sy",
    "str x1, [x0, #0x80]",
    "str x4, [x0, #0x88]",
    "mov w5, #1",
    "bl 1f",
    "str x4, [x0, #0x80]",
    "str x2, [x0, #0x88]",
    "mov w5, #3",
    "bl 1f",
    "hvc #0",
    "1: str x3, [x0, #0x90]",
    "str w5, [x0, #0x98]",
    "2: ldr w6, [x0, #0x98]",
    "tbnz w6, #0, 2b",
    "ret",
    ".balign 8",
    "guest_code_end:",
    // Runs the guest from x4 on, with x0 to x3, until it comes back by the vector of EL2.
    "guest_enter:",
    "stp x19, x20, [sp, #-96]!",
    "stp x21, x22, [sp, #16]",
    "stp x23, x24, [sp, #32]",
    "stp x25, x26, [sp, #48]",
    "stp x27, x28, [sp, #64]",
    "stp x29, x30, [sp, #80]",
    "msr elr_el2, x4",
    "mov x5, #0x3c5", // EL1 with a stack of its own, without interrupts
    "msr spsr_el2, x5",
    "eret",
    ".globl guest_exit",
    "guest_exit:",
    "ldp x21, x22, [sp, #16]",
    "ldp x23, x24, [sp, #32]",
    "ldp x25, x26, [sp, #48]",
    "ldp x27, x28, [sp, #64]",
    "ldp x29, x30, [sp, #80]",
    "ldp x19, x20, [sp], #96",
    "ret",
);

unsafe extern "C" {
    static guest_code: [u64; 0];
    static guest_code_end: [u64; 0];
    fn guest_enter(x0: u64, x1: u64, x2: u64, x3: u64, at: u64) -> u64;
}

/// What the guest can do: where its code begins.
const LOAD: u64 = RAM;
const STORE: u64 = RAM + 8;
const COPY: u64 = RAM + 16;

/// How the guest came back.
#[derive(Debug, PartialEq, Eq)]
enum Exit {
    /// By HVC, with this in `x0`.
    Done(u64),
    /// Stage 2 has no translation for this address, which it accessed.
    Refused(u64),
}

// ANCHOR: hooks
/// The hooks of a domain whose table the CPUs walk too: what they are told beside the IOMMU.
///
/// There is one guest, so that VTTBR_EL2 has its VMID. Where there are more, its VMID is loaded
/// before each of these instructions.
struct WithCpus<O> {
    iommu: O,
    leaves_out: bool,
}

impl<O> WithCpus<O> {
    fn forget(&self, what: &Invalidation<'_>) {
        /// Pages that are worth an instruction each.
        const MOST: u64 = 64;
        let Scope::Ranges(ranges) = what.scope else { return forget_all() };
        if ranges.iter().any(|range| range.len_less_one() >= MOST * PAGE) {
            return forget_all();
        }
        let pages = |range: &IovaRange| (range.start().get()..=range.last().get()).step_by(4096);
        // SAFETY: they take nothing but what is cached. Stage 2 goes first, and then what was made
        // of both stages (DDI 0487, D8, "TLB maintenance").
        unsafe { asm!("dsb ishst") };
        for page in ranges.iter().flat_map(pages) {
            // SAFETY: as above.
            unsafe { asm!("tlbi ipas2e1is, {}", in(reg) page >> 12) };
        }
        // SAFETY: as above.
        unsafe { asm!("dsb ish", "tlbi vmalle1is", "dsb ish", "isb") };
    }
}

// ANCHOR_END: hooks
/// Makes all CPUs forget what they know of guests, whatever their VMIDs are.
fn forget_all() {
    // SAFETY: it takes nothing but what is cached.
    unsafe { asm!("dsb ishst", "tlbi alle1is", "dsb ish", "isb") };
}

// SAFETY: the IOMMU's hooks are asked last and their answer is given, so that what they promise
// holds. The same for CPUs: DSB orders the stores to the tables before TLBI and waits for its end,
// on all CPUs of the inner shareable domain; after `detach` no CPU walks the tables, since stage 2
// has no table.
unsafe impl<O: IommuOps> IommuOps for WithCpus<O> {
    type Address = O::Address;

    fn begin(
        &self,
        promise: Promise<'_>,
        root: &TableRoot,
    ) -> core::result::Result<(), HardwareError> {
        self.iommu.begin(promise, root)
    }

    fn invalidate(&self, what: &Invalidation<'_>) -> core::result::Result<(), HardwareError> {
        if !self.leaves_out {
            self.forget(what);
        }
        self.iommu.invalidate(what)
    }

    fn sync_map(&self, range: IovaRange) -> core::result::Result<(), HardwareError> {
        // SAFETY: it orders what was stored.
        unsafe { asm!("dsb ishst", "isb") };
        self.iommu.sync_map(range)
    }

    fn detach(&self) -> core::result::Result<(), HardwareError> {
        stage_2(cpu::HOST, 0, 0);
        self.iommu.detach()
    }

    fn observe(&self, event: &Event<'_>) {
        self.iommu.observe(event);
    }

    fn max_ranges(&self) -> usize {
        self.iommu.max_ranges()
    }
}

// SAFETY: as above; streams are given the driver's own hooks.
unsafe impl<O: DriverOps> DriverOps for WithCpus<O> {
    type Driver = O::Driver;

    fn driver(&self) -> &O::Driver {
        self.iommu.driver()
    }
}

/// Gives this CPU a table for what runs below EL2, or none.
fn stage_2(control: u64, table: u64, shape: u64) {
    // SAFETY: nothing runs below EL2 now, and the kernel is translated by other registers.
    unsafe {
        asm!(
            "msr vtcr_el2, {shape}",
            "msr vttbr_el2, {table}",
            "msr hcr_el2, {control}",
            "isb",
            shape = in(reg) shape,
            table = in(reg) table,
            control = in(reg) control,
        );
    }
    forget_all();
}

type Host = FrameHost<Frames>;
type Ops = WithCpus<Tapped<SmmuV3Ops<MmioRegion, Host>>>;
type GuestDomain = Domain<ArmLpaeS2<12>, Tables, Ops>;
type Stream = SmmuV3Stream<GuestDomain, MmioRegion, Host>;

/// A guest, its memory, and its device.
struct Guest {
    device: Attachment<Stream>,
    domain: Arc<GuestDomain>,
    /// Kept for ever, unless hardware has forgotten it.
    memory: ManuallyDrop<Shared>,
}

impl Guest {
    /// HCR_EL2: E2H and RW as the kernel has them, stage 2 (VM), memory that is cached though the
    /// guest's MMU is off (DC), and no calls of firmware by the guest (TSC).
    const CONTROL: u64 = cpu::HOST & !(1 << 27) | 1 | 1 << 12 | 1 << 19;
    /// The VMID of the CPUs. The SMMU's is its driver's choice.
    const VMID: u64 = 1;

    /// A guest with memory and a device, which are at their IPAs from here on for both.
    fn new(
        smmu: &Arc<SmmuV3<MmioRegion, Host>>,
        (tables, plants): (&Tables, &Plants),
        stream: Stream,
        registers: (u64, u64),
    ) -> Result<Self> {
        // What SMMU and CPU both have.
        let config = smmu.stage2_config(12)?;
        let bits = config.output_bits.min(physical_bits());
        let config = ArmLpaeS2Config {
            input_bits: bits,
            output_bits: bits,
            break_before_make: BreakBeforeMake::Needed,
            ..config
        };
        let leaves_out = Plants { invalidation: plants.guest_device, ..Plants::default() };
        let iommu = Tapped::new(smmu.ops(Stage::Second, OnFault::Terminate)?, &leaves_out);
        let ops = WithCpus { iommu, leaves_out: plants.guest_cpus };
        let table = PageTable::new(ArmLpaeS2::<12>::new(config)?, Arc::clone(tables))?;
        let domain = Arc::new(Domain::new(table, ops)?);
        let memory = ManuallyDrop::new(Shared::new(tables, LG2_RAM)?);
        let device = Attachment::new(stream).map_err(|refused| refused.error)?;
        let guest = Self { device, domain, memory };
        guest.map(RAM, guest.memory.span(), Prot::READ_WRITE | Prot::CACHE)?;
        let registers = Span::new(PhysAddr::new(registers.0), registers.1)?;
        guest.map(REGISTERS, registers, Prot::READ_WRITE | Prot::MMIO | Prot::NOEXEC)?;
        guest.load_code();
        let domain = Arc::clone(&guest.domain);
        guest.device.attach(Target::Paging(Prepared::new(domain)))?;
        let walked = guest.domain.format().registers(guest.domain.root());
        stage_2(Self::CONTROL, walked.vttbr | Self::VMID << 48, walked.vtcr);
        let off = 0x30d0_0800_u64; // SCTLR_EL1 with its MMU off
        // SAFETY: they are the guest's SCTLR_EL1 and VBAR_EL1, by their names from EL2; at 0 it has
        // nothing, so that its own traps end in one to EL2.
        unsafe { asm!("msr s3_5_c1_c0_0, {}", "msr s3_5_c12_c0_0, xzr", "isb", in(reg) off) };
        Ok(guest)
    }

    fn map(&self, at: u64, span: Span, prot: Prot) -> Result<()> {
        // SAFETY: 1. Nobody else maps for the guest. 2. Memory is the guest's until it is unmapped,
        // and `end` has synced that or it is kept for ever; it is reached by atomics alone.
        unsafe { self.domain.map_spans(Iova::new(at), &[span], prot) }
            .map_err(|failed| failed.error)?;
        Ok(())
    }

    /// Takes something away, from the CPU and the device: both have forgotten it.
    fn unmap(&self, at: u64, len: u64) -> Result<()> {
        let range = IovaRange::from_len(Iova::new(at), len)?;
        // SAFETY: nobody else maps for the guest.
        let unmapped = unsafe { self.domain.remove(range) }?;
        let (_synced, _rest) = unmapped.sync().map_err(|failed| failed.error)?;
        Ok(())
    }

    /// Copies the code to where the guest begins.
    fn load_code(&self) {
        let start = &raw const guest_code;
        let words = ((&raw const guest_code_end).addr() - start.addr()) / 8;
        for (n, word) in self.memory.words().iter().enumerate().take(words) {
            // SAFETY: it is code of this program, of as many words.
            let code = unsafe { start.cast::<u64>().wrapping_add(n).read() };
            word.store(code, Ordering::Relaxed);
            // SAFETY: it writes the word back, to where instructions are fetched from.
            unsafe { asm!("dc cvau, {}", in(reg) word) };
        }
        // SAFETY: it takes instructions that are cached, and waits.
        unsafe { asm!("dsb ish", "ic ialluis", "dsb ish", "isb") };
    }

    /// Runs it from `at` on, until it ends.
    fn run(&self, at: u64, [x0, x1, x2, x3]: [u64; 4]) -> Result<Exit> {
        // SAFETY: it reaches what stage 2 gives it, and is the code above, which keeps to registers
        // that a function may change; it comes back by HVC, or by what it was refused.
        let x0 = unsafe { guest_enter(x0, x1, x2, x3, at) };
        let (syndrome, address, page): (u64, u64, u64);
        // SAFETY: it reads registers.
        unsafe {
            asm!(
                "mrs {}, esr_el2", "mrs {}, far_el2", "mrs {}, hpfar_el2",
                out(reg) syndrome, out(reg) address, out(reg) page,
            );
        }
        // The class of the exception, and of a data abort its kind: a translation fault of any
        // level (DDI 0487, D24, ESR_EL2).
        match (syndrome >> 26 & 0x3f, syndrome & 0x3c) {
            (0x16, _) => Ok(Exit::Done(x0)),
            (0x24, 0b00_0100) => Ok(Exit::Refused(page >> 4 << 12 | address & (PAGE - 1))),
            _ => Err(format!("the guest ended by a trap: syndrome {syndrome:#x}").into()),
        }
    }

    /// Takes all of it back.
    fn end(mut self) -> Result<Shared> {
        self.device.detach()?;
        self.unmap(RAM, self.memory.span().len())?;
        stage_2(cpu::HOST, 0, 0);
        // SAFETY: it is not used any more.
        Ok(unsafe { ManuallyDrop::take(&mut self.memory) })
    }
}

/// How many bits physical addresses of this CPU have (ID_AA64MMFR0_EL1.PARange).
fn physical_bits() -> u32 {
    let features: u64;
    // SAFETY: it reads a register.
    unsafe { asm!("mrs {}, id_aa64mmfr0_el1", out(reg) features, options(nomem, nostack)) };
    [32, 36, 40, 42, 44, 48].get((features & 0xf) as usize).copied().unwrap_or(48)
}

/// Where the CPU says that an access of the guest would go.
fn translated(at: u64) -> Option<u64> {
    let result: u64;
    // SAFETY: it asks the MMU, which answers in PAR_EL1.
    unsafe { asm!("at s12e1r, {}", "isb", "mrs {}, par_el1", in(reg) at, out(reg) result) };
    (result & 1 == 0).then_some(result & 0x000f_ffff_ffff_f000 | at & (PAGE - 1))
}
