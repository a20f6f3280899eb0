//! vm-memory's accesses through a [`TableIommu`], against a walker that reads the same tables.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::io_pgtable::{
    Arena, Format, Half, PageTable, TableMemory, VtdSs, VtdSsConfig, X86_64, X86_64Config,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, iommu, lg2};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use dmaspan_sim::walker::x86_64::{X86_64WalkRegisters, X86Walker};
use dmaspan_sim::walker::{Access, Requester, Switch, Walker};
use dmaspan_vm_memory::{MOST_ENTRIES, TableIommu};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, Iommu, IommuMemory, Permissions};

const PAGE: u64 = 0x1000;

fn arena() -> Arena {
    Arena::new(PhysAddr::new(1 << 45), 64 << 20)
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

fn x86(half: Half) -> TableIommu<X86_64> {
    let format = X86_64::new(X86_64Config { half, ..X86_64Config::new(48, 52) }).unwrap();
    TableIommu::new(PageTable::new(format, arena()).unwrap()).unwrap()
}

fn guest(len: usize) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len)]).unwrap()
}

/// What vm-memory says of an access: where each part leads, one for each page.
fn pages(iommu: &impl Iommu, iova: u64, len: usize, access: Permissions) -> Option<Vec<u64>> {
    let found = iommu.translate(GuestAddress(iova), len, access).ok()?;
    let (mut pages, mut at) = (Vec::new(), iova);
    for part in found {
        let (mut to, mut left) = (part.base.0, part.length as u64);
        while left != 0 {
            pages.push(to);
            let step = left.min(PAGE - at % PAGE);
            (at, to, left) = (at.wrapping_add(step), to + step, left - step);
        }
    }
    Some(pages)
}

fn judge<F: Format + Clone, W: Walker>(format: F, walker: impl FnOnce(&F, PhysAddr) -> W, seed: u64)
where
    Arena: TableMemory<F::Word>,
{
    let tables = arena();
    let table = PageTable::new(format.clone(), tables.clone()).unwrap();
    let walker = walker(&format, table.root());
    let iommu = TableIommu::new(table).unwrap();
    let mut rng = Rng::new(seed);
    let (mut hits, mut faults, mut cut) = (0, 0, 0);
    for _ in 0..6000 {
        // Two MiB on either side of 1 GiB, where windows and large leaves begin.
        let at = (1 << 30) - (2 << 20) + rng.below(1024) * PAGE;
        let len = (1 + rng.below(4)) * if rng.below(8) == 0 { 512 * PAGE } else { PAGE };
        match rng.below(4) {
            0 => {
                let at = if len >= 512 * PAGE { at & !(512 * PAGE - 1) } else { at };
                let prot = [Prot::READ, Prot::WRITE, Prot::READ_WRITE][rng.index(3)];
                let to = GuestAddress(rng.below(64) * 512 * PAGE + at % (512 * PAGE));
                let _ = iommu.map(range(at, len), to, prot);
            }
            1 => {
                let range = range(at, len);
                let before: Vec<_> = iommu.walk(range).collect();
                let bytes: u64 = before.iter().map(|run| run.range.checked_len().unwrap()).sum();
                match iommu.unmap(range) {
                    Ok(unmapped) => assert_eq!((unmapped, iommu.walk(range).count()), (bytes, 0)),
                    Err(_) => {
                        cut += 1;
                        assert_eq!(iommu.walk(range).collect::<Vec<_>>(), before);
                    }
                }
            }
            _ => {
                let (iova, len) = (at + rng.below(PAGE), 1 + rng.index(40 << 10));
                let (access, asked) =
                    [(Access::Read, Permissions::Read), (Access::Write, Permissions::Write)]
                        [rng.index(2)];
                let last = iova + len as u64 - 1;
                let starts = (iova / PAGE..=last / PAGE).map(|page| iova.max(page * PAGE));
                let led: Option<Vec<u64>> = starts
                    .map(|at| walker.walk(&tables, Iova::new(at), access).ok())
                    .map(|found| Some(found?.paddr.get()))
                    .collect();
                match &led {
                    Some(_) => hits += 1,
                    None => faults += 1,
                }
                assert_eq!(pages(&iommu, iova, len, asked), led, "{iova:#x}+{len:#x}, {asked:?}");
            }
        }
    }
    assert!(hits > 100 && faults > 100 && cut > 10, "{hits} hits, {faults} faults, {cut} cut");
}

#[test]
fn every_translation_is_the_one_that_hardware_would_find_in_the_tables() {
    for seed in 0..4 {
        judge(
            VtdSs::new(VtdSsConfig::new(48, 52)).unwrap(),
            |format, root| {
                let [entry, _] = format.registers(root).pasid_entry;
                VtdSsWalker::new(VtdSsWalkRegisters {
                    ssptptr: entry & !lg2::mask(12),
                    aw: u8::try_from(entry >> 2 & 0b111).unwrap(),
                    ssade: Switch::Off,
                    host_lg2: 52,
                    sslps: 0b11,
                    snoop_control: Switch::Off,
                })
                .unwrap()
            },
            seed,
        );
        judge(
            X86_64::new(X86_64Config::new(48, 52)).unwrap(),
            |format, root| {
                X86Walker::new(X86_64WalkRegisters {
                    root: format.registers(root).pasid_entry & !lg2::mask(12),
                    levels: 4,
                    physical_lg2: 52,
                    encryption_mask: 0,
                    pat: X86_64WalkRegisters::PAT_AT_RESET,
                    nxe: Switch::Off,
                    wp: Switch::On,
                    pages_1g: Switch::On,
                    updates: Switch::Off,
                    requester: Requester::User,
                })
                .unwrap()
            },
            seed,
        );
    }
}

/// Stops a device, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nothing_is_written_through_a_mapping_once_its_unmap_has_returned() {
    let iommu = x86(Half::Lower);
    let memory = IommuMemory::new(guest(1 << 20), iommu.clone(), true, ());
    let (at, stop) = (1 << 30, AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut word = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                word += 1;
                let _ = memory.write_obj(word, GuestAddress(at + 8 * (word % 512)));
            }
        });
        let _stop = Stop(&stop);
        for round in 0..2000 {
            let page = round % 2 * PAGE;
            iommu.map(range(at, PAGE), GuestAddress(page), Prot::READ_WRITE).unwrap();
            thread::yield_now();
            assert_eq!(iommu.unmap(range(at, PAGE)).unwrap(), PAGE);
            let read = || {
                let mut bytes = [0; 4096];
                memory.get_backend().read_slice(&mut bytes, GuestAddress(page)).unwrap();
                bytes
            };
            let before = read();
            thread::yield_now();
            assert_eq!(read(), before, "in round {round}");
        }
    });
    // The device was there: what is mapped now it writes.
    iommu.map(range(at, PAGE), GuestAddress(0), Prot::READ_WRITE).unwrap();
    memory.write_obj(7_u64, GuestAddress(at)).unwrap();
    assert_eq!(memory.get_backend().read_obj::<u64>(GuestAddress(0)).unwrap(), 7);
}

#[test]
fn an_unmap_returns_after_the_access_that_is_under_way() {
    let iommu = x86(Half::Lower);
    iommu.map(range(0, PAGE), GuestAddress(0), Prot::READ).unwrap();
    let access = iommu.translate(GuestAddress(0), 8, Permissions::Read).unwrap();
    thread::scope(|scope| {
        let unmap = scope.spawn(|| iommu.unmap(range(0, PAGE)).unwrap());
        // From when on the table has it no more, the unmap waits for the access alone.
        while iommu.walk(range(0, PAGE)).count() != 0 {
            thread::yield_now();
        }
        for _ in 0..100 {
            assert!(!unmap.is_finished());
            thread::yield_now();
        }
        // A thread in the middle of an access begins another while the unmap waits, and is told.
        assert!(iommu.translate(GuestAddress(8), 8, Permissions::Read).is_err());
        drop(access);
        assert_eq!(unmap.join().unwrap(), PAGE);
    });
    assert!(iommu.translate(GuestAddress(0), 8, Permissions::Read).is_err());
}

#[test]
fn the_iotlb_forgets_before_it_has_more_entries_than_it_may() {
    let iommu = x86(Half::Lower);
    let count = MOST_ENTRIES as u64 + 1000;
    let at = |page: u64| page * PAGE;
    for page in 0..count {
        // Backwards, so that no two join.
        let to = GuestAddress(at(count - page));
        iommu.map(range(at(page), PAGE), to, Prot::READ).unwrap();
    }
    for page in (0..count).chain((0..count).step_by(997)) {
        let found = pages(&iommu, at(page) + 5, 1, Permissions::Read);
        assert_eq!(found, Some(vec![at(count - page) + 5]));
    }
}

#[test]
fn accesses_at_the_edges_of_the_addresses_are_refused_in_words() {
    let lower = x86(Half::Lower);
    lower.map(range(0, PAGE), GuestAddress(0), Prot::READ).unwrap();
    let refused = |iova, len, access| {
        lower.translate(GuestAddress(iova), len, access).map(drop).unwrap_err().to_string()
    };
    assert!(refused(0, 8, Permissions::Write).ends_with("a part is not mapped for this access"));
    assert!(refused(PAGE - 1, 2, Permissions::Read).ends_with("a part is not mapped"));
    assert!(refused(1 << 50, 1, Permissions::Read).ends_with("it leaves the IOMMU's aperture"));
    assert!(refused(u64::MAX, 2, Permissions::Read).ends_with("it ends beyond 2^64 - 1"));
    assert!(refused(8, usize::MAX, Permissions::Read).ends_with("it ends beyond 2^64 - 1"));
    assert_eq!(pages(&lower, 0, 0, Permissions::Read), Some(vec![]));
    assert_eq!(pages(&lower, 0, 8, Permissions::No), Some(vec![0]));
    // The last page of all has a last byte that vm-memory cannot name.
    let upper = x86(Half::Upper);
    let last = u64::MAX - (PAGE - 1);
    upper.map(range(last, PAGE), GuestAddress(0x5000), Prot::READ).unwrap();
    assert_eq!(pages(&upper, last, 4095, Permissions::Read), Some(vec![0x5000]));
    assert!(upper.translate(GuestAddress(last), 4096, Permissions::Read).is_err());
    assert_eq!(upper.unmap(range(last, PAGE)).unwrap(), PAGE);
    assert!(upper.translate(GuestAddress(last), 1, Permissions::Read).is_err());
}

#[test]
fn what_cannot_be_mapped_or_unmapped_changes_nothing() {
    let iommu = x86(Half::Lower);
    let block = 2 << 20;
    iommu.map(range(block, block), GuestAddress(0), Prot::READ_WRITE).unwrap();
    let whole = || iommu.walk(range(0, 8 * block)).map(|run| run.range).collect::<Vec<_>>();
    let occupied = iommu.map(range(0, 2 * block), GuestAddress(0), Prot::READ).unwrap_err();
    assert!(matches!(occupied, iommu::Error::Table(_)), "{occupied}");
    for cut in [range(block, PAGE), range(2 * block - PAGE, 2 * PAGE), range(0, block + PAGE)] {
        let error = iommu.unmap(cut).unwrap_err().to_string();
        assert!(error.contains("inside the leaf"), "{error}");
    }
    for odd in [range(5, PAGE), range(0, 5), range(1 << 50, PAGE)] {
        iommu.unmap(odd).unwrap_err();
        iommu.map(odd, GuestAddress(0), Prot::READ).unwrap_err();
    }
    iommu.map(range(0, PAGE), GuestAddress(1), Prot::READ).unwrap_err();
    iommu.map(range(0, PAGE), GuestAddress(u64::MAX), Prot::READ).unwrap_err();
    iommu.map(range(0, PAGE), GuestAddress(0), Prot::empty()).unwrap_err();
    assert_eq!(whole(), [range(block, block)]);
    assert_eq!(iommu.unmap(range(0, 8 * block)).unwrap(), block);
    assert_eq!(whole(), []);
}
