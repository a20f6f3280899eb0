//! Tables read out of a copy of memory, as somebody else may have made them.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::ControlFlow;

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, Arena, ArmLpae32S1, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmLpaeS2Config,
    ArmV7s, ArmV7sConfig, ForeignError, ForeignFault, ForeignMemory, ForeignPiece, Format, Half,
    LeafCensus, MappedRun, PageTable, Riscv, RiscvConfig, RiscvMode, RiscvStage, VtdSs,
    VtdSsConfig, Word, X86_64, X86_64Config, read_foreign,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, lg2};

/// The tables of an arena as bytes.
struct Tables<'a, W>(&'a Arena, PhantomData<W>);

impl<W: Word> ForeignMemory for Tables<'_, W> {
    fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
        let size = 1 << W::LG2_BYTES;
        bytes.chunks_mut(size).zip(0..).all(|(bytes, at)| {
            let word = self.0.load::<W>(paddr.wrapping_add(at * size as u64));
            word.map(|word| bytes.copy_from_slice(&word.bits().to_le_bytes()[..size])).is_ok()
        })
    }
}

/// Words at addresses; pages that have none do not exist.
#[derive(Default)]
struct Words(BTreeMap<u64, u64>);

impl Words {
    fn table(mut self, at: u64, words: &[(u64, u64)]) -> Self {
        self.0.extend((0..512).map(|index| (at + 8 * index, 0)));
        self.0.extend(words.iter().map(|&(index, word)| (at + 8 * index, word)));
        self
    }
}

impl ForeignMemory for Words {
    fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
        bytes.chunks_mut(8).zip(0..).all(|(bytes, at)| {
            let word = self.0.get(&(paddr.get() + 8 * at));
            word.map(|word| bytes.copy_from_slice(&word.to_le_bytes())).is_some()
        })
    }
}

fn pieces<F: Format>(
    format: &F,
    root: u64,
    memory: &dyn ForeignMemory,
) -> Result<Vec<ForeignPiece>, ForeignError> {
    let mut pieces = Vec::new();
    read_foreign(format, PhysAddr::new(root), memory, &mut |piece| {
        pieces.push(piece);
        ControlFlow::Continue(())
    })?;
    Ok(pieces)
}

/// The faults, each with the first address of its range.
fn faults(pieces: &[ForeignPiece]) -> Vec<(u64, ForeignFault)> {
    let faults = pieces.iter().filter_map(|piece| match *piece {
        ForeignPiece::Fault { range, fault, .. } => Some((range.start().get(), fault)),
        _ => None,
    });
    faults.collect()
}

/// The leaves: IOVA, address, bytes and log2 of a leaf's.
fn leaves(pieces: &[ForeignPiece]) -> Vec<(u64, u64, u64, u32)> {
    let leaves = pieces.iter().filter_map(|piece| match *piece {
        ForeignPiece::Leaves { range, paddr, lg2, .. } => {
            Some((range.start().get(), paddr.get(), range.len_less_one() + 1, lg2))
        }
        _ => None,
    });
    leaves.collect()
}

fn joins(run: &MappedRun, range: IovaRange, paddr: PhysAddr, prot: Prot) -> bool {
    let offset = range.start().get().wrapping_sub(run.range.start().get());
    run.range.last().checked_add(1) == Some(range.start())
        && run.paddr.checked_add(offset) == Some(paddr)
        && run.prot == prot
}

/// Memory of all leaf sizes, single and torn, is read as the table itself lists it.
fn reads_what_was_mapped<F: Format>(format: F) {
    let arena = Arena::new(PhysAddr::new(0x4000_0000), 8 << 20);
    let mut table = PageTable::new(format, arena.clone()).unwrap();
    let geometry = *table.geometry();
    let (start, page) = (geometry.aperture.start().get(), lg2::size(F::GRANULE_LG2));
    let sizes = (0..64).map(lg2::size).filter(|size| geometry.page_sizes & size != 0);
    let sizes: Vec<u64> = sizes.filter(|&size| size <= 1 << 30).collect();
    let mut iova = start;
    for (&size, prot) in sizes.iter().zip([Prot::READ_WRITE, Prot::READ].into_iter().cycle()) {
        // One leaf of this size, two single pages behind it, and a page of other memory.
        iova = (iova | (size - 1)) + 1;
        let spans = [(size, size + 2 * page), (5 * page, page)]
            .map(|(paddr, len)| Span::new(PhysAddr::new(paddr), len).unwrap());
        table.whole().map_spans(Iova::new(iova), &spans, prot).unwrap();
        iova += size + 4 * page;
    }
    let (root, memory) = (table.root().get(), Tables::<F::Word>(&arena, PhantomData));
    let pieces = pieces(table.format(), root, &memory).unwrap();
    assert_eq!(faults(&pieces), []);

    let mut runs = Vec::<MappedRun>::new();
    let mut counts = BTreeMap::new();
    let mut tables = 0;
    for piece in &pieces {
        match *piece {
            ForeignPiece::Table { .. } => tables += 1,
            ForeignPiece::Leaves { range, paddr, lg2, prot, .. } => {
                *counts.entry(lg2).or_insert(0) += (range.len_less_one() + 1) >> lg2;
                match runs.last_mut().filter(|run| joins(run, range, paddr, prot)) {
                    Some(run) => run.range = run.range.join(range).unwrap(),
                    None => runs.push(MappedRun { range, paddr, prot }),
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(runs, table.walk(geometry.aperture).collect::<Vec<_>>());
    let census: LeafCensus = table.census(geometry.aperture);
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), census.sizes().collect::<Vec<_>>());
    assert_eq!(tables, arena.tables());
}

#[test]
fn all_formats_are_read_as_their_tables_list_themselves() {
    let arm = |half| ArmLpaeS1Config { half, ..ArmLpaeS1Config::new(48, 48) };
    fn groups<const G: u32>(config: ArmLpaeS1Config) -> ArmLpaeS1<G> {
        let singles = ArmLpaeS1::<G>::PAGE_SIZES & lg2::mask(42);
        let page_sizes = Some(singles | ArmLpaeS1::<G>::CONTIGUOUS_SIZES);
        ArmLpaeS1::new(ArmLpaeS1Config { page_sizes, ..config }).unwrap()
    }
    reads_what_was_mapped(groups::<12>(arm(Half::Lower)));
    reads_what_was_mapped(groups::<12>(arm(Half::Upper)));
    reads_what_was_mapped(groups::<14>(arm(Half::Lower)));
    reads_what_was_mapped(groups::<16>(arm(Half::Lower)));
    reads_what_was_mapped(ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(39, 48)).unwrap());
    reads_what_was_mapped(ArmLpaeS2::<12>::new(ArmLpaeS2Config::new(40, 40)).unwrap());
    reads_what_was_mapped(ArmLpaeS2::<14>::new(ArmLpaeS2Config::new(40, 40)).unwrap());
    reads_what_was_mapped(ArmLpaeS2::<16>::new(ArmLpaeS2Config::new(48, 48)).unwrap());
    reads_what_was_mapped(ArmLpae32S1::new(ArmLpaeS1Config::new(32, 40)).unwrap());
    reads_what_was_mapped(ArmV7s::new(ArmV7sConfig::new(32, 32)).unwrap());
    for bits in [39, 48, 57] {
        reads_what_was_mapped(VtdSs::new(VtdSsConfig::new(bits, 52)).unwrap());
    }
    for half in [Half::Lower, Half::Upper] {
        let config = X86_64Config { half, ..X86_64Config::new(48, 52) };
        reads_what_was_mapped(X86_64::new(config).unwrap());
    }
    reads_what_was_mapped(X86_64::new(X86_64Config::new(57, 52)).unwrap());
    for levels in [4, 6] {
        let config = AmdV1Config { first_levels: levels, ..AmdV1Config::new(64, 52) };
        reads_what_was_mapped(AmdV1::new(config).unwrap());
    }
    for mode in [RiscvMode::Sv39, RiscvMode::Sv48, RiscvMode::Sv57] {
        for stage in
            [RiscvStage::First(Half::Lower), RiscvStage::First(Half::Upper), RiscvStage::Second]
        {
            let sizes = Riscv::PAGE_SIZES & lg2::mask(31) | Riscv::NAPOT_SIZES;
            let page_sizes = Some(sizes);
            let config = RiscvConfig { stage, page_sizes, ..RiscvConfig::new(mode, 56) };
            reads_what_was_mapped(Riscv::new(config).unwrap());
        }
    }
}

fn vtd() -> VtdSs {
    VtdSs::new(VtdSsConfig::new(39, 52)).unwrap()
}

/// A second-stage link or leaf that permits everything.
const ALL: u64 = 0b11;
/// The same as a large leaf.
const LARGE: u64 = 0b1000_0011;

#[test]
fn a_tree_that_leads_back_to_itself_ends() {
    let root = 0x1000;
    let memory = Words::default()
        .table(root, &[(0, root | ALL), (1, 0x2000 | ALL), (2, 0x4000_0000 | LARGE)])
        .table(0x2000, &[(7, root | ALL), (8, 0x20_0000 | LARGE)]);
    let pieces = pieces(&vtd(), root, &memory).unwrap();
    let paddr = PhysAddr::new(root);
    let (looped, second) = (ForeignFault::Loop { paddr }, (1 << 30) + (7 << 21));
    assert_eq!(faults(&pieces), [(0, looped), (second, looped)]);
    let gigabyte = 1 << 30;
    assert_eq!(
        leaves(&pieces),
        [(gigabyte + (8 << 21), 0x20_0000, 2 << 20, 21), (2 * gigabyte, 0x4000_0000, gigabyte, 30)]
    );
}

#[test]
fn many_links_to_one_table_are_read_once() {
    let root = 0x1000;
    let all = |to: u64| (0..512).map(|index| (index, to | ALL)).collect::<Vec<_>>();
    let pages: Vec<_> = (0..512).map(|index| (index, (0x10_0000 + (index << 12)) | ALL)).collect();
    let memory = Words::default()
        .table(root, &all(0x2000))
        .table(0x2000, &all(0x3000))
        .table(0x3000, &pages);
    // 2^27 leaves, of three tables.
    let pieces = pieces(&vtd(), root, &memory).unwrap();
    assert_eq!(leaves(&pieces), [(0, 0x10_0000, 2 << 20, 12)]);
    let faults = faults(&pieces);
    assert_eq!(faults.len(), 511 + 511);
    assert_eq!(faults[0], (2 << 20, ForeignFault::Again { paddr: PhysAddr::new(0x3000) }));
    assert_eq!(faults[511], (1 << 30, ForeignFault::Again { paddr: PhysAddr::new(0x2000) }));
}

#[test]
fn a_table_at_two_levels_is_read_at_both_and_reported() {
    let memory = Words::default()
        .table(0x1000, &[(0, 0x2000 | ALL), (1, 0x3000 | ALL)])
        .table(0x2000, &[(0, 0x3000 | ALL)])
        .table(0x3000, &[(1, 0x20_0000 | LARGE)]);
    let pieces = pieces(&vtd(), 0x1000, &memory).unwrap();
    let paddr = PhysAddr::new(0x3000);
    assert_eq!(faults(&pieces), [(1 << 30, ForeignFault::OtherLevel { paddr, other: 0 })]);
    let second = (1 << 30) + (2 << 20);
    assert_eq!(leaves(&pieces), [(0x1000, 0x20_0000, 4096, 12), (second, 0x20_0000, 2 << 20, 21)]);
}

#[test]
fn what_leads_out_of_the_memory_or_is_no_entry_is_reported_with_its_table() {
    let memory = Words::default().table(
        0x1000,
        &[(3, 0x7000 | ALL), (5, 0xdead_0000), (6, 0xdead_0000), (8, 0x4000_0000 | LARGE)],
    );
    let pieces = pieces(&vtd(), 0x1000, &memory).unwrap();
    let missing = ForeignFault::Missing { paddr: PhysAddr::new(0x7000) };
    let invalid = ForeignFault::Invalid { entries: 2 };
    assert_eq!(faults(&pieces), [(3 << 30, missing), (5 << 30, invalid)]);
    let of = |piece: &&ForeignPiece| matches!(piece, ForeignPiece::Fault { .. });
    let ForeignPiece::Fault { level, table, word, .. } = *pieces.iter().find(of).unwrap() else {
        panic!()
    };
    assert_eq!((level, table, word), (2, PhysAddr::new(0x1000), 0x7000 | ALL));
    assert_eq!(leaves(&pieces), [(8 << 30, 0x4000_0000, 1 << 30, 30)]);
}

#[test]
fn entries_beyond_the_aperture_are_reported_and_not_followed() {
    // The upper half of 48 bits, of which these tables translate the lower.
    let memory = Words::default().table(0x1000, &[(256, 0x1001), (257, 0x1001), (511, 0x1001)]);
    let format = X86_64::new(X86_64Config::new(48, 52)).unwrap();
    let found = pieces(&format, 0x1000, &memory).unwrap();
    let outside = |entries| (0, ForeignFault::OutsideAperture { entries });
    assert_eq!(faults(&found), [outside(2), outside(1)]);
    // Six levels have more entries than there are addresses.
    let config = AmdV1Config { first_levels: 6, ..AmdV1Config::new(64, 52) };
    let memory = Words::default().table(0x1000, &[(127, u64::MAX), (128, u64::MAX)]);
    let found = pieces(&AmdV1::new(config).unwrap(), 0x1000, &memory).unwrap();
    assert_eq!(faults(&found), [(127 << 57, ForeignFault::Invalid { entries: 1 }), outside(1)]);
}

#[test]
fn a_group_of_which_entries_differ_is_read_entry_by_entry() {
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(39, 48)).unwrap();
    const PAGE: u64 = 1 << 52 | 0x443;
    let group = |paddr: u64, count: u64| {
        (0..count).map(move |index| (index, (paddr + (index << 12)) | PAGE))
    };
    let torn: Vec<_> = group(0x10_0000, 16).filter(|(index, _)| *index != 3).collect();
    let whole: Vec<_> = group(0x20_0000, 16).map(|(index, word)| (index + 16, word)).collect();
    let memory = Words::default()
        .table(0x1000, &[(0, 0x2003)])
        .table(0x2000, &[(0, 0x3003)])
        .table(0x3000, &[torn, whole].concat());
    let found = pieces(&format, 0x1000, &memory).unwrap();
    assert!(faults(&found).iter().all(|(_, fault)| *fault == ForeignFault::TornGroup { lg2: 16 }));
    assert_eq!(faults(&found).len(), 15);
    let bytes =
        |lg2| leaves(&found).iter().filter(|leaf| leaf.3 == lg2).map(|leaf| leaf.2).sum::<u64>();
    assert_eq!((bytes(12), bytes(16)), (15 << 12, 1 << 16));
    assert!(leaves(&found).contains(&(0x1_0000, 0x20_0000, 1 << 16, 16)));
}

#[test]
fn a_root_that_cannot_be_is_an_error() {
    let memory = Words::default().table(0x1000, &[]);
    let root = PhysAddr::new(0x1008);
    let error = pieces(&vtd(), root.get(), &memory).unwrap_err();
    assert_eq!(error, ForeignError::Misaligned { root, alignment: 4096 });
    assert_eq!(
        error.to_string(),
        "the root at 0x1008 is not at a multiple of 0x1000 bytes, as the format's are"
    );
    let root = PhysAddr::new(0x2000);
    let error = pieces(&vtd(), root.get(), &memory).unwrap_err();
    assert_eq!(error, ForeignError::NoRoot { root, bytes: 4096 });
    // Half of a root of two pages.
    let format = ArmLpaeS2::<12>::new(ArmLpaeS2Config::new(40, 40)).unwrap();
    let root = PhysAddr::new(0);
    let memory = Words::default().table(0, &[]);
    let error = pieces(&format, 0, &memory).unwrap_err();
    assert_eq!(error, ForeignError::NoRoot { root, bytes: 8192 });
}

#[test]
fn a_visit_that_breaks_ends_the_reading() {
    let memory = Words::default().table(0x1000, &[(0, 0x4000_0000 | LARGE), (1, LARGE)]);
    let mut visited = 0;
    read_foreign(&vtd(), PhysAddr::new(0x1000), &memory, &mut |_| {
        visited += 1;
        if visited == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert_eq!(visited, 2);
}
