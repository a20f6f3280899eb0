//! Tables and addresses to try.

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

pub(crate) const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

pub(crate) fn arena() -> Arena {
    // Miri, which is hundreds of times slower, looks at each table that there may be.
    Arena::new(PhysAddr::new(0x4000_0000), if cfg!(miri) { 256 << 10 } else { 64 << 20 })
}

pub(crate) fn format<const G: u32>(input_bits: u32, output_bits: u32) -> ArmLpaeS1<G> {
    ArmLpaeS1::new(ArmLpaeS1Config::new(input_bits, output_bits)).unwrap()
}

pub(crate) fn walker<const G: u32>(format: &ArmLpaeS1<G>, root: PhysAddr) -> ArmLpaeS1Walker {
    let registers = format.registers(root);
    ArmLpaeS1Walker::new(registers.into()).unwrap()
}

pub(crate) fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

pub(crate) fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}
/// Instantiates generic tests for the smallest and the largest granule.
macro_rules! for_all_granules {
    ($($test:ident),* $(,)?) => {
        mod granule_4k { $(#[test] fn $test() { super::$test::<12>(); })* }
        mod granule_64k { $(#[test] fn $test() { super::$test::<16>(); })* }
    };
}
pub(crate) use for_all_granules;
