//! Registers by the numbers of the manual, tables written by hand.
//!
//! The SMMU has 16 banks and 16 pages of 4 KiB: global space 0 at 0, global space 1 at 0x1000, bank
//! n at 0x1_0000 + n * 0x1000. The tables are 4K ones of three levels at 0x1000, 0x2000 and 0x3000;
//! others have theirs elsewhere.

use dmaspan::{Iova, PhysAddr};

use super::*;
use crate::walker::{Fault, FaultKind, TableImage};

mod faults;
mod formats;
mod hostile;
mod identification;
mod invalidations;
mod routes;

type TestSmmu = Smmu<TableImage>;

// Global space 0.
const CR0: u64 = 0x0;
const GFAR: u64 = 0x40;
const GFSR: u64 = 0x48;
const GFSYNR0: u64 = 0x50;
const GFSYNR1: u64 = 0x54;
const TLBIVMID: u64 = 0x64;
const TLBIALLNSNH: u64 = 0x68;
const GSYNC: u64 = 0x70;
const GSTATUS: u64 = 0x74;

/// USFCFG, GFIE, GFRE; clients are not bypassed.
const ENABLED: u32 = 1 << 10 | 1 << 2 | 1 << 1;

// A context bank.
const SCTLR: u64 = 0x0;
const RESUME: u64 = 0x8;
const TCR2: u64 = 0x10;
const TTBR0: u64 = 0x20;
const TTBR1: u64 = 0x28;
const TCR: u64 = 0x30;
const CONTEXTIDR: u64 = 0x34;
const MAIR0: u64 = 0x38;
const MAIR1: u64 = 0x3c;
const FSR: u64 = 0x58;
const FAR: u64 = 0x60;
const FSYNR0: u64 = 0x68;
const IPAFAR: u64 = 0x70;
const TLBIVA: u64 = 0x600;
const TLBIVAA: u64 = 0x608;
const TLBIASID: u64 = 0x610;
const TLBIALL: u64 = 0x618;
const TLBIVAL: u64 = 0x620;
const TLBIIPAS2: u64 = 0x630;
const TLBIIPAS2L: u64 = 0x638;
const SYNC: u64 = 0x7f0;
const STATUS: u64 = 0x7f4;

/// M, CFRE and CFIE.
const ON: u32 = 0x61;
/// A page of stage 1: AF, inner shareable, AP\[1\], AttrIndx 1, nG.
const PAGE: u64 = 0xf47;
/// The same, with AP\[2\].
const READ_ONLY: u64 = 0xfc7;
/// A page of stage 2: AF, inner shareable, S2AP read and write, write-back.
const PAGE2: u64 = 0x7ff;

fn cb(bank: u64, offset: u64) -> u64 {
    0x1_0000 + bank * 0x1000 + offset
}

fn cbar(bank: u64) -> u64 {
    0x1000 + bank * 4
}

fn cba2r(bank: u64) -> u64 {
    0x1800 + bank * 4
}

fn tables(image: &TableImage, at: u64) {
    for table in [at, at + 0x1000, at + 0x2000] {
        image.add_table(PhysAddr::new(table), 512);
    }
    set(image, at, at + 0x1000 + 3);
    set(image, at + 0x1000, at + 0x2000 + 3);
}

fn set(image: &TableImage, at: u64, word: u64) {
    image.set(PhysAddr::new(at), word).unwrap();
}

/// An SMMU that has three tables at 0x1000, and the first four pages mapped to 0x10_0000 and on.
fn smmu_with(config: SmmuConfig) -> TestSmmu {
    let image = TableImage::new();
    tables(&image, 0x1000);
    for page in 0..4 {
        set(&image, 0x3000 + page * 8, (0x10_0000 + page * 0x1000) | PAGE);
    }
    let smmu = Smmu::new(config, image).unwrap();
    smmu.write32(CR0, ENABLED);
    smmu
}

fn smmu() -> TestSmmu {
    smmu_with(SmmuConfig::default())
}

/// Sends a stream to a bank by the group of the same number.
fn stream(smmu: &TestSmmu, stream: u32, bank: u32) {
    let group = u64::from(stream) * 4;
    smmu.write32(0xc00 + group, bank);
    smmu.write32(0x800 + group, 1 << 31 | stream);
}

/// Stage 1 of AArch64 with 4K pages and 39 bits (T0SZ 25, EPD1), 48 bits of output, 16-bit ASIDs.
fn stage1(smmu: &TestSmmu, bank: u64, vmid: u32, asid: u64, root: u64) {
    smmu.write32(cba2r(bank), 1);
    smmu.write32(cbar(bank), 1 << 16 | vmid);
    smmu.write32(cb(bank, TCR2), 7 << 15 | 1 << 4 | 5);
    smmu.write32(cb(bank, TCR), 1 << 23 | 25);
    smmu.write64(cb(bank, TTBR0), asid << 48 | root);
    smmu.write32(cb(bank, MAIR0), 0xff00);
    smmu.write32(cb(bank, SCTLR), ON);
}

/// Stage 2 of AArch64 with 4K pages and 39 bits from level 1 (SL0 1), PASize 48 bits.
fn stage2(smmu: &TestSmmu, bank: u64, vmid: u32, root: u64) {
    smmu.write32(cba2r(bank), 1);
    smmu.write32(cbar(bank), vmid);
    smmu.write32(cb(bank, TCR), 1 << 31 | 5 << 16 | 1 << 6 | 25);
    smmu.write64(cb(bank, TTBR0), root);
    smmu.write32(cb(bank, SCTLR), ON);
}

/// Stream 1 in bank 0, VMID 0, ASID 5, with the tables at 0x1000.
fn attached() -> TestSmmu {
    let smmu = smmu();
    stage1(&smmu, 0, 0, 5, 0x1000);
    stream(&smmu, 1, 0);
    smmu
}

fn paddr(smmu: &TestSmmu, stream: u16, iova: u64, access: Access) -> Result<u64, Why> {
    let hit = smmu.access(stream, Iova::new(iova), access);
    hit.map(|hit| hit.paddr.get()).map_err(|refused| refused.why)
}

fn read(smmu: &TestSmmu, iova: u64) -> Result<u64, FaultKind> {
    match paddr(smmu, 1, iova, Access::Read) {
        Ok(paddr) => Ok(paddr),
        Err(Why::Context { fault, .. }) => Err(fault.kind),
        Err(why) => panic!("{why:?}"),
    }
}

/// Reads, and clears the fault so that the next access is looked at.
fn read_once(smmu: &TestSmmu, iova: u64) -> Result<u64, FaultKind> {
    let outcome = read(smmu, iova);
    smmu.write32(cb(0, FSR), u32::MAX);
    outcome
}

/// A sync of bank 0, polled.
fn sync(smmu: &TestSmmu) {
    smmu.write32(cb(0, SYNC), 0);
    assert!((0..10).any(|_| smmu.read32(cb(0, STATUS)) == 0));
}
