//! The fuzz targets: the first byte chooses a format and its configuration, or a kind of table; the
//! others are what is done, or the table.

use std::num::NonZeroU64;
use std::ops::ControlFlow;

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2,
    ArmLpaeS2Config, ArmV7s, ArmV7sConfig, ArmV7sVariant, DirtyTracking, ForeignMemory,
    ForeignPiece, Format, Half, Riscv, RiscvConfig, RiscvMode, RiscvStage, VtdSs, VtdSsConfig,
    X86_64, X86_64Config, read_foreign,
};
use dmaspan::{PhysAddr, lg2};
use dmaspan_drivers::firmware::{DmaRequester, IommuMap};
use dmaspan_sim::fuzz::{self, Bits};
use dmaspan_sim::mock::MockFormat;

/// Operations on a page table, beside an interval map.
///
/// # Panics
///
/// Where the two disagree, or a table leaks.
pub fn operations(bytes: &[u8]) {
    with(bytes, Target::Operations);
}

/// Operations on tables made of any words.
///
/// # Panics
///
/// Where an operation does, or a table is lost.
pub fn hostile(bytes: &[u8]) {
    with(bytes, Target::Hostile);
}

/// Tables that somebody else made: any bytes are memory, and what they hold is read as each format.
///
/// # Panics
///
/// Where the reader does, reads more tables than there are words, or says what cannot be.
pub fn foreign(bytes: &[u8]) {
    with(bytes, Target::Foreign);
}

/// Memory of any bytes, over and over again: so every address is there.
struct Wrapped<'a>(&'a [u8]);

impl ForeignMemory for Wrapped<'_> {
    fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
        let Some(len) = NonZeroU64::new(self.0.len() as u64) else { return false };
        let start = usize::try_from((paddr.get() >> 6 << 3) % len);
        let (mut start, mut rest) = (start.expect("it is an index of the bytes"), bytes);
        while !rest.is_empty() {
            let from = &self.0[start..];
            let (now, later) = rest.split_at_mut(from.len().min(rest.len()));
            now.copy_from_slice(&from[..now.len()]);
            (start, rest) = (0, later);
        }
        true
    }
}

fn read<F: Format>(format: &F, bytes: &[u8]) {
    let geometry = format.geometry();
    // Each word leads to one table at most, and each table is read once a level.
    let most = (bytes.len() + 2) * 8 * (geometry.top_level as usize + 1);
    let (mut tables, mut next) = (0, Some(geometry.aperture.start()));
    let read = read_foreign(format, PhysAddr::new(0), &Wrapped(bytes), &mut |piece| {
        match piece {
            ForeignPiece::Table { level, .. } => {
                tables += 1;
                assert!(tables <= most && level <= geometry.top_level);
            }
            ForeignPiece::Leaves { range, lg2, .. } => {
                assert!(geometry.aperture.covers(range));
                assert!(next.is_some_and(|next| next <= range.start()), "in the order of IOVAs");
                assert!(lg2::is_aligned(range.start().get(), lg2));
                next = range.last().checked_add(1);
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    assert_eq!(read.is_err(), bytes.is_empty());
}

/// Tables of firmware, whose length and sum are made right where they are of ACPI.
///
/// # Panics
///
/// Where a reader does, or says what cannot be.
pub fn firmware(bytes: &[u8]) {
    let (number, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let mut table = bytes.to_vec();
    let signature = [None, Some(b"DMAR"), Some(b"IVRS"), Some(b"IORT"), Some(b"RIMT")];
    if let (Some(signature), 36..) = (signature[usize::from(number % 5)], table.len()) {
        let length = u32::try_from(table.len()).expect("fuzzers give no gigabytes");
        table[..4].copy_from_slice(signature);
        table[4..8].copy_from_slice(&length.to_le_bytes());
        table[9] = 0;
        table[9] = table.iter().fold(0u8, |sum, &byte| sum.wrapping_sub(byte));
    }
    let buses = |_, id: u16| Some(id.to_be_bytes()[0]..=id.to_be_bytes()[1]);
    let map = match number % 5 {
        0 => IommuMap::device_tree(&table),
        1 => IommuMap::dmar(&table, buses),
        2 => IommuMap::ivrs(&table),
        3 => IommuMap::iort(&table),
        _ => IommuMap::rimt(&table),
    };
    let Ok(map) = map else { return };
    for id in [0, 0x10, 0x100, 0xffff] {
        let requester = DmaRequester::Pci { segment: 0, id };
        assert!(map.streams(requester).all(|found| found.unit < map.units().len()));
        assert!(map.reserved(requester).all(|memory| memory.first <= memory.last));
    }
}

/// What is done with a format.
enum Target {
    Operations,
    Hostile,
    Foreign,
}

/// What is done, by these bytes.
struct Body<'a> {
    target: Target,
    bytes: &'a [u8],
}

impl Body<'_> {
    fn run<F: Format<Word: Bits>>(&self, format: F) {
        match self.target {
            Target::Operations => fuzz::operations(format, self.bytes),
            Target::Hostile => fuzz::hostile(format, self.bytes),
            Target::Foreign => read(&format, self.bytes),
        }
    }
}

const DIRTY: DirtyTracking = DirtyTracking::Hardware;
const WIDTHS: [u32; 4] = [32, 48, 39, 44];

/// How many formats and configurations there are.
pub const FORMATS: u8 = 27;

/// Does it with the format whose number is the first byte, whatever that is.
fn with(bytes: &[u8], target: Target) {
    let (number, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let (number, body) = (number % FORMATS, Body { target, bytes });
    match number {
        0..4 => body.run(arm_s1::<12>(number)),
        4..6 => body.run(arm_s1::<14>(number)),
        6..8 => body.run(arm_s1::<16>(number)),
        8 => body.run(arm_s2::<12>()),
        9 => body.run(arm_s2::<14>()),
        10 => body.run(arm_s2::<16>()),
        11 => body.run(ArmLpae32S1::new(ArmLpaeS1Config::new(32, 40)).unwrap()),
        12 => body.run(ArmLpae32S2::new(ArmLpaeS2Config::new(32, 40)).unwrap()),
        13 => body.run(ArmV7s::new(ArmV7sConfig::new(32, 32)).unwrap()),
        14 => body.run(
            ArmV7s::new(ArmV7sConfig {
                variant: ArmV7sVariant::MediaTek,
                ..ArmV7sConfig::new(34, 35)
            })
            .unwrap(),
        ),
        15 => {
            body.run(VtdSs::new(VtdSsConfig { dirty: DIRTY, ..VtdSsConfig::new(48, 52) }).unwrap())
        }
        16 => body.run(VtdSs::new(VtdSsConfig::new(39, 39)).unwrap()),
        17 => body
            .run(X86_64::new(X86_64Config { dirty: DIRTY, ..X86_64Config::new(48, 52) }).unwrap()),
        18 => body.run(X86_64::new(X86_64Config::new(57, 52)).unwrap()),
        19 => body.run(AmdV1::new(AmdV1Config::new(48, 48)).unwrap()),
        20 => body.run(
            AmdV1::new(AmdV1Config { first_levels: 1, dirty: DIRTY, ..AmdV1Config::new(64, 52) })
                .unwrap(),
        ),
        21 => body.run(riscv(RiscvMode::Sv39, RiscvStage::First(Half::Lower))),
        22 => body.run(riscv(RiscvMode::Sv48, RiscvStage::First(Half::Upper))),
        23 => body.run(riscv(RiscvMode::Sv57, RiscvStage::First(Half::Lower))),
        24 => body.run(riscv(RiscvMode::Sv39, RiscvStage::Second)),
        25 => body.run(Riscv::new(RiscvConfig::new(RiscvMode::Sv48, 44)).unwrap()),
        _ => body.run(MockFormat::new(36, DIRTY).unwrap()),
    }
}

/// Arm's stage 1 of several widths, the later ones with groups; some in the upper half.
fn arm_s1<const G: u32>(number: u8) -> ArmLpaeS1<G> {
    let bits = WIDTHS[usize::from(number % 4)];
    let groups = ArmLpaeS1::<G>::PAGE_SIZES & lg2::mask(40) | ArmLpaeS1::<G>::CONTIGUOUS_SIZES;
    let page_sizes = (!number.is_multiple_of(2)).then_some(groups);
    let half = if bits == 44 { Half::Upper } else { Half::Lower };
    let config = ArmLpaeS1Config { page_sizes, half, ..ArmLpaeS1Config::new(bits, 48) };
    ArmLpaeS1::new(config).unwrap()
}

/// Arm's stage 2, whose roots are several tables.
fn arm_s2<const G: u32>() -> ArmLpaeS2<G> {
    ArmLpaeS2::new(ArmLpaeS2Config { dirty: DIRTY, ..ArmLpaeS2Config::new(40, 40) }).unwrap()
}

/// RISC-V with Svnapot.
fn riscv(mode: RiscvMode, stage: RiscvStage) -> Riscv {
    let page_sizes = Some(Riscv::PAGE_SIZES & lg2::mask(31) | Riscv::NAPOT_SIZES);
    let config = RiscvConfig { stage, page_sizes, dirty: DIRTY, ..RiscvConfig::new(mode, 56) };
    Riscv::new(config).unwrap()
}
