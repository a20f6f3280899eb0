//! Tables to try, and ways to look at them.

use dmaspan::io_pgtable::{
    Arena, ArmLpaeS1, ArmLpaeS1Config, Error, Format, MapUndone, PageTable, Retired, TableMemory,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

pub(crate) const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

/// Instantiates generic tests for the three granules.
macro_rules! for_all_granules {
    ($($test:ident),* $(,)?) => {
        mod granule_4k { $(#[test] fn $test() { super::$test::<12>(); })* }
        mod granule_16k { $(#[test] fn $test() { super::$test::<14>(); })* }
        mod granule_64k { $(#[test] fn $test() { super::$test::<16>(); })* }
    };
}
pub(crate) use for_all_granules;

pub(crate) type Table<const G: u32> = PageTable<ArmLpaeS1<G>, Arena>;

pub(crate) fn arena() -> Arena {
    // Miri, which is hundreds of times slower, looks at each table that there may be.
    Arena::new(PhysAddr::new(0x4000_0000), if cfg!(miri) { 256 << 10 } else { 64 << 20 })
}

pub(crate) fn format<const G: u32>(input_bits: u32, output_bits: u32) -> ArmLpaeS1<G> {
    ArmLpaeS1::new(ArmLpaeS1Config::new(input_bits, output_bits)).unwrap()
}

pub(crate) fn table<const G: u32>() -> Table<G> {
    PageTable::new(format(48, 48), arena()).unwrap()
}

pub(crate) fn walker<const G: u32>(format: &ArmLpaeS1<G>, root: PhysAddr) -> ArmLpaeS1Walker {
    ArmLpaeS1Walker::new(format.registers(root).into()).unwrap()
}

pub(crate) fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

pub(crate) fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

/// Frees what was retired from a table that no hardware walks.
pub(crate) fn free<F: Format, M: TableMemory<F::Word>>(
    table: &PageTable<F, M>,
    retired: Retired<M::List>,
) {
    // SAFETY: no hardware walks the tables of these tests.
    unsafe { table.free(retired) }
}

/// Maps, and frees what a failure retired.
pub(crate) fn map<F: Format, M: TableMemory<F::Word>>(
    table: &mut PageTable<F, M>,
    iova: u64,
    spans: &[Span],
    prot: Prot,
) -> Result<(), Error> {
    let result = table.whole().map_spans(Iova::new(iova), spans, prot);
    result.map_err(|MapUndone { error, retired }| {
        free(table, retired);
        error
    })
}

/// Unmaps through a buffer of `ROOM` spans, batch after batch, and returns all spans.
pub(crate) fn unmap_by<const ROOM: usize, F: Format, M: TableMemory<F::Word>>(
    table: &mut PageTable<F, M>,
    range: IovaRange,
) -> Result<Vec<Span>, Error> {
    let mut room = SpanBuf::room::<ROOM>();
    let mut buf = SpanBuf::new(&mut room);
    let mut spans = Vec::new();
    let mut unmapped = table.whole().unmap(range, &mut buf)?;
    loop {
        for &span in buf.spans() {
            dmaspan::pin::SpanSink::push(&mut spans, span, dmaspan::pin::Kind::Memory).unwrap();
        }
        buf.clear();
        free(table, unmapped.retired);
        match unmapped.rest {
            Some(rest) => unmapped = table.whole().resume(rest, &mut buf),
            None => return Ok(spans),
        }
    }
}

pub(crate) fn unmap<F: Format, M: TableMemory<F::Word>>(
    table: &mut PageTable<F, M>,
    range: IovaRange,
) -> Result<Vec<Span>, Error> {
    unmap_by::<64, F, M>(table, range)
}

/// All that a table says: its maximal runs and its leaves by size.
pub(crate) fn contents<F: Format, M: TableMemory<F::Word>>(
    table: &mut PageTable<F, M>,
) -> (Vec<dmaspan::io_pgtable::MappedRun>, Vec<(u32, u64)>) {
    let whole = table.whole();
    let runs = whole.walk(whole.range()).collect();
    (runs, whole.census(whole.range()).sizes().collect())
}
