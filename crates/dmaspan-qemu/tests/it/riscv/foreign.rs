//! The tables that the driver builds, read out of the machine's memory as a dump of it is.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use dmaspan::io_pgtable::{
    ForeignMemory, ForeignPiece, Format as _, MappedRun, Riscv, RiscvMode, read_foreign,
};
use dmaspan::{PhysAddr, Prot};
use dmaspan_drivers::riscv::RiscvIommuConfig;
use dmaspan_qemu::{Machine, TestDev};

use crate::riscv::rig::{FIRST, Kind, MODES, Rig, SECOND, WRITERS, map, map_span, paging};

/// Names a folder for the memory of the machines, a file each: what `dmaspan inspect` reads.
const DUMPS: &str = "DMASPAN_DUMPS";

/// The RAM of a machine, as the machine has it.
struct Memory<'m>(&'m Machine);

impl ForeignMemory for Memory<'_> {
    fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
        let words = self.0.ram().words_at(paddr, bytes.len() as u64);
        for (to, word) in bytes.chunks_mut(8).zip(words) {
            to.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
        }
        !words.is_empty()
    }
}

/// What a tree translates, as maximal runs.
fn read(format: &Riscv, root: PhysAddr, machine: &Machine) -> Vec<MappedRun> {
    let mut runs: Vec<MappedRun> = Vec::new();
    read_foreign(format, root, &Memory(machine), &mut |piece| {
        match piece {
            ForeignPiece::Leaves { range, paddr, prot, .. } => match runs.last_mut() {
                Some(run)
                    if run.range.last().checked_add(1) == Some(range.start())
                        && run.paddr.checked_add(run.range.len_less_one() + 1) == Some(paddr)
                        && run.prot == prot =>
                {
                    run.range = run.range.join(range).unwrap();
                }
                _ => runs.push(MappedRun { range, paddr, prot }),
            },
            ForeignPiece::Table { .. } => {}
            fault => panic!("{fault:?}"),
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    runs
}

#[test]
fn what_the_driver_mapped_is_read_from_the_memory_of_the_machine() {
    for (mode, stage) in MODES.into_iter().flat_map(|mode| [FIRST, SECOND].map(|it| (mode, it))) {
        let Some(rig) = Rig::start(Kind::Platform, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let config = rig.iommu.config_of(stage, mode).unwrap();
        let domain = rig.domain_of(config);
        stream.attach(paging(&domain)).unwrap();
        // 2 MiB and some pages, another page, one that is read alone, and registers.
        let buffers = [rig.buffer(2 << 20), rig.buffer(0x3000), rig.buffer(0x1000)];
        map(&domain, 0x4000_0000, &buffers[0], Prot::READ_WRITE);
        map(&domain, 0x1000, &buffers[1], Prot::READ_WRITE);
        map(&domain, 0x12_3456_7000, &buffers[2], Prot::READ);
        map_span(&domain, 0x8000_1000, buffers[0].span(), Prot::READ_WRITE);
        device.write(0x1000, buffers[1].paddr(), 8).unwrap();
        assert_eq!(buffers[1].word(0), u64::from(TestDev::WRITTEN) * 0x1_0000_0001);
        assert_eq!(rig.faults(&heard), []);

        let format = Riscv::new(config).unwrap();
        let runs = read(&format, domain.root(), &rig.machine);
        assert_eq!(runs.len(), 4, "{mode:?} {stage:?}");
        assert_eq!(runs, domain.walk(format.geometry().aperture).collect::<Vec<_>>());
        if let (Some(folder), RiscvMode::Sv39) = (std::env::var_os(DUMPS), mode) {
            let words = rig.machine.ram().words().iter();
            let bytes: Vec<u8> = words.flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
            let name = if stage == FIRST { "riscv-sv39.mem" } else { "riscv-sv39x4.mem" };
            fs::write(PathBuf::from(folder).join(name), bytes).unwrap();
            println!("{name}: base {}, root {}", rig.machine.ram().base(), domain.root());
            runs.iter().for_each(|run| println!("{} {} {:?}", run.range, run.paddr, run.prot));
        }
    }
}
