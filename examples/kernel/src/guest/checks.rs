//! A guest is tried: what its CPU and its device reach, and what they must not reach.

use alloc::format;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use dmaspan::iommu::Port as _;
use dmaspan::{Iova, PhysAddr};

use super::{COPY, Exit, Guest, LOAD, RAM, REGISTERS, STORE, Stream, translated};
use crate::Result;
use crate::checks::{Kernel, Loud, PAGE};
use crate::edu;
use crate::iommu::Iommu;
use crate::memory::Shared;

/// Runs a guest with the second edu of the machine, which nobody else drives.
pub(crate) fn run(kernel: &mut Kernel) -> Result<()> {
    let mut all = kernel.functions.iter().filter(|one| one.is(edu::ID.0, edu::ID.1)).skip(1);
    let function = all.next().ok_or("the machine has no edu for a guest")?.clone();
    let (found, regions) = kernel.requester(&function)?;
    let Iommu::SmmuV3(smmu) = &kernel.iommus[found.unit] else {
        return Err("the kernel runs guests behind an SMMUv3 alone".into());
    };
    let stream: Stream = smmu.stream(found.stream, regions)?;
    stream.faults().set(Some(Arc::new(Loud(EDU))));
    let hooks = (&kernel.memory.tables, &kernel.plants);
    let guest = Guest::new(smmu, hooks, stream, function.bars[0])?;
    kernel.pci.allow_dma(&function);
    let (len, root) = (guest.memory.span().len() >> 10, guest.domain.root());
    println!(
        "guest: {len} KiB at {RAM:#x} and {function} at {REGISTERS:#x}, stream {:#x}, by the table \
         at {root}",
        found.stream
    );
    guest.try_translations(function.bars[0].0)?;
    guest.try_memory()?;
    guest.try_device()?;
    kernel.expect_no_faults(EDU)?;
    let secret = Shared::new(&kernel.memory.tables, 12)?;
    let paddr = secret.span().paddr().get();
    guest.try_refused(kernel, paddr, &secret.words()[0], "a page of the kernel")?;
    // Both have used this page, so that both have it cached.
    let at = RAM + COPIED * PAGE;
    guest.unmap(at, PAGE)?;
    guest.try_refused(kernel, at, guest.word(COPIED), "a page that was unmapped")?;
    guest.expect(LOAD, [0, RAM + SOURCE * PAGE, 0, 0], Exit::Done(VALUE))?;
    drop(guest.end()?);
    println!("guest: its memory is the kernel's again");
    Ok(())
}

/// How the guest's device is called.
const EDU: &str = "guest's edu";
/// Pages of the guest: what its device copies, and where to.
const SOURCE: u64 = 3;
const COPIED: u64 = 4;
/// What is in the first word of that.
const VALUE: u64 = 0x1234_5678_9abc_def0;

impl Guest {
    fn expect(&self, at: u64, registers: [u64; 4], expected: Exit) -> Result<()> {
        match self.run(at, registers)? {
            exit if exit == expected => Ok(()),
            exit => Err(format!("the guest ended as {exit:?}, not as {expected:?}").into()),
        }
    }

    /// The first word of a page of its memory, as the kernel sees it.
    fn word(&self, page: u64) -> &AtomicU64 {
        &self.memory.words()[(page * PAGE / 8) as usize]
    }

    /// The CPU's walks end where those of the table end.
    fn try_translations(&self, registers: u64) -> Result<()> {
        let pages = self.memory.span().len() / PAGE;
        let memory = self.memory.span().paddr().get();
        let mapped = (0..pages).map(|page| (RAM + page * PAGE, memory + page * PAGE));
        for (at, paddr) in mapped.chain([(REGISTERS, registers)]) {
            let by_table = self.domain.iova_to_phys(Iova::new(at)).map(PhysAddr::get);
            if translated(at) != Some(paddr) || by_table != Some(paddr) {
                return Err(format!("{at:#x} of the guest does not lead to {paddr:#x}").into());
            }
        }
        match [RAM - PAGE, RAM + pages * PAGE, memory].map(translated) {
            [None, None, None] => {}
            _ => return Err("the CPU translates what is not mapped for the guest".into()),
        }
        println!("guest: its CPU translates {pages} pages and registers as the table does");
        Ok(())
    }

    /// What it stores is in the kernel's frames, and the other way round.
    fn try_memory(&self) -> Result<()> {
        self.expect(STORE, [0, RAM + PAGE, VALUE, 0], Exit::Done(0))?;
        if self.word(1).load(Ordering::Relaxed) != VALUE {
            return Err("what the guest stored is not in its frame".into());
        }
        self.word(2).store(!VALUE, Ordering::Relaxed);
        self.expect(LOAD, [0, RAM + 2 * PAGE, 0, 0], Exit::Done(!VALUE))
    }

    /// It drives its device by its own addresses.
    fn try_device(&self) -> Result<()> {
        let value = |n: u64| VALUE + n;
        let page = |at: u64| self.memory.words().iter().skip((at * PAGE / 8) as usize);
        (0..PAGE / 8)
            .zip(page(SOURCE))
            .for_each(|(n, word)| word.store(value(n), Ordering::Relaxed));
        let (from, to) = (RAM + SOURCE * PAGE, RAM + COPIED * PAGE);
        self.expect(COPY, [REGISTERS, from, to, PAGE], Exit::Done(REGISTERS))?;
        let mut words = (0..PAGE / 8).zip(page(COPIED));
        if words.any(|(n, word)| word.load(Ordering::Relaxed) != value(n)) {
            return Err("the guest's edu did not copy a page of the guest".into());
        }
        self.expect(LOAD, [0, to, 0, 0], Exit::Done(VALUE))?;
        println!("guest: its edu copied a page at the guest's addresses, as the guest told it");
        Ok(())
    }

    /// Neither it nor its device reaches what is behind an address.
    fn try_refused(&self, kernel: &Kernel, at: u64, word: &AtomicU64, what: &str) -> Result<()> {
        word.store(7, Ordering::Relaxed);
        for (code, how) in [(LOAD, "read"), (STORE, "write")] {
            match self.run(code, [0, at, 0, 0])? {
                Exit::Refused(address) if address == at => println!(
                    "fault: guest: the CPU was refused to {how} {at:#x}, because nothing is mapped \
                     there"
                ),
                exit => return Err(format!("the guest reached {what}: {exit:x?}").into()),
            }
        }
        let copy =
            |at| self.expect(COPY, [REGISTERS, RAM + SOURCE * PAGE, at, 4], Exit::Done(REGISTERS));
        kernel.expect_refused(EDU, copy, (at, word), what)
    }
}
