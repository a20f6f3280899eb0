//! Behind each IOMMU, by its driver: all memory is within the copier's reach.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, Trust};
use dmaspan::iommu::FaultAccess;
use dmaspan::{Direction, Iova, IovaRange};
use dmaspan_qemu::{Edu, Machine, Pci};
use dmaspan_sim::rng::Rng;

use crate::edu::rig::{EDU, END, PoolOf, RAM, SLOT, WINDOW, Window, memory, pool, read, write};
use crate::iommus::{self, Behind, DomainOf, Iommu};

/// Granules of all domains here divide it.
const GRANULE: u64 = 0x1_0000;

struct Setup<I: Iommu> {
    edu: Edu,
    behind: Behind<I>,
    pool: PoolOf,
    high: Window,
    rng: Rng,
    machine: Machine,
}

impl<I: Iommu> Setup<I> {
    fn new() -> Option<Self> {
        let machine = iommus::machine::<I>(|builder| builder.ram(RAM).device(EDU))?;
        let pci = Pci::new(&machine);
        let behind = Behind::new(&pci, SLOT);
        let edu = Edu::new(&pci, SLOT).unwrap();
        let upper = Arc::new(machine.ram().reserve(END).unwrap());
        assert!(upper.paddr().get() >= END);
        let mut rng = Rng::new(29);
        let bytes = (0..WINDOW).map(|_| rng.next().to_le_bytes()[0]).collect();
        let high = Window::new(&machine, &upper, 0x12_0000, bytes);
        let pool = pool(machine.ram());
        Some(Self { edu, behind, pool, high, rng, machine })
    }

    fn device(&self, trust: Trust) -> Device<DomainOf<I>, PoolOf> {
        let (domain, pool) = (Arc::clone(&self.behind.domain), Arc::clone(&self.pool));
        Device::new(domain, pool, DeviceConfig { trust, ..DeviceConfig::bits(28) }).unwrap()
    }

    /// Nothing is bounced, though it could be.
    fn copies(&mut self) {
        let device = self.device(Trust::Trusted);
        let mut held = Vec::new();
        for _ in 0..50 {
            let len = 1 + self.rng.below(4096);
            let [from, to] = [0, 1].map(|_| self.rng.below(WINDOW - len + 1));
            for seen in [
                read(&mut self.edu, &device, self.high.part(from, len)),
                write(&mut self.edu, &device, self.high.part(to, len), len),
            ] {
                assert!(!seen.bounced && seen.addr.get() + len <= END, "{seen:?}");
            }
            let read = self.high.expected(from, len).to_vec();
            self.high.expected(to, len).copy_from_slice(&read);
            self.high.check();
            // What is mapped meanwhile is elsewhere.
            let part = memory(self.high.part(from, len));
            held.push(device.map_single(part, Direction::ToDevice).unwrap());
        }
        assert!(held.iter().all(|mapping| mapping.addr().get() + mapping.len() <= END));
        held.into_iter().for_each(|mapping| drop(device.unmap(mapping).unwrap()));
        self.behind.no_faults();
        assert_eq!(self.pool.stats().high_water, 0);
    }

    /// What is mapped no more, and what a detached copier is told, it does not reach.
    fn keeps_out(&mut self) {
        let device = self.device(Trust::Trusted);
        // Some hardware names the page alone.
        let (part, len) = (self.high.part(0x1000, 0x200), 0x200);
        let gone = read(&mut self.edu, &device, part).addr;
        self.behind.no_faults();
        let first = Iova::new(gone.get());
        let range = IovaRange::new(first, first.wrapping_add(len - 1)).unwrap();
        self.edu.write(gone.get(), len);
        self.behind.faulted(FaultAccess::Write, range);
        self.edu.read(gone.get(), len);
        self.behind.faulted(FaultAccess::Read, range);
        self.high.check();

        let mapping = device.map_single(memory(part), Direction::FromDevice).unwrap();
        self.behind.attachment.detach().unwrap();
        self.edu.write(mapping.addr().get(), len);
        self.high.check();
        drop(device.unmap(mapping).unwrap());
        assert!(!self.machine.is_gone());
    }

    /// A whole granule of memory, filled with a byte.
    fn granule(&self, byte: u8) -> Window {
        let buffer = Arc::new(self.machine.ram().allocate(GRANULE).unwrap());
        let bytes = vec![byte; usize::try_from(GRANULE).unwrap()];
        Window::new(&self.machine, &buffer, 0, bytes)
    }

    /// A copier that is not trusted reaches no more than it was given of the granules around.
    fn untrusted(&mut self) {
        let device = self.device(Trust::Untrusted);
        let (at, len) = (0x1100, 0x300);
        let part = self.high.part(at, len);
        let mapping = device.map_single(memory(part), Direction::Bidirectional).unwrap();
        assert!(mapping.is_bounced() && mapping.addr().get() + len <= END);
        let lead = mapping.addr().get() & 0xfff;
        let page = mapping.addr().get() - lead;

        // It reads all of the page, where there is nothing but its buffer. The granule that it
        // writes to tell so is used itself.
        let mut told = self.granule(0xa5);
        let whole = device.map_single(memory(told.span), Direction::FromDevice).unwrap();
        assert!(!whole.is_bounced());
        self.edu.read(page, 0x1000);
        self.edu.write(whole.addr().get(), 0x1000);
        drop(device.unmap(whole).unwrap());
        told.expected(0, 0x1000).fill(0);
        told.expected(lead, len).copy_from_slice(self.high.expected(at, len));
        told.check();

        // It writes all of the page, and nothing but its buffer changes.
        let sevens = self.granule(7);
        let whole = device.map_single(memory(sevens.span), Direction::ToDevice).unwrap();
        self.edu.read(whole.addr().get(), 0x1000);
        self.edu.write(page, 0x1000);
        drop(device.unmap(whole).unwrap());
        drop(device.unmap(mapping).unwrap());
        self.high.expected(at, len).fill(7);
        self.high.check();
        self.behind.no_faults();
        assert_eq!(self.pool.stats().used, 0);
    }
}

macro_rules! behind {
    ($($name:ident is $iommu:ident,)*) => {$(
        mod $name {
            use super::*;

            fn with(test: impl FnOnce(&mut Setup<iommus::$iommu>)) {
                if let Some(mut setup) = Setup::new() {
                    test(&mut setup);
                }
            }

            #[test]
            fn addresses_of_28_bits_are_mapped_and_nothing_is_bounced() {
                with(Setup::copies);
            }

            #[test]
            fn what_is_not_mapped_is_not_reached() {
                with(Setup::keeps_out);
            }

            #[test]
            fn a_copier_that_is_not_trusted_reaches_its_bytes_alone() {
                with(Setup::untrusted);
            }
        }
    )*};
}

behind! {
    smmu_v3_stage_1 is SmmuV3Stage1,
    smmu_v3_stage_2 is SmmuV3Stage2,
    vtd_legacy is VtdLegacy,
    vtd_scalable_first_stage is VtdFirstStage,
    vtd_scalable_second_stage is VtdSecondStage,
    amd_vi is AmdVi,
    riscv_first_stage is RiscvFirst,
    riscv_second_stage is RiscvSecond,
}
