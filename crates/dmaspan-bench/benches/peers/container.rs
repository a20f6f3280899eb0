//! The container, as `xtask/peers/bench/container.c` has Linux's: the same requests of VFIO type1,
//! byte for byte, memory and pins.
//!
//! Beside the times, `peers FORMAT same` prints what each kind of memory is mapped to.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::account::Counting;
use dmaspan::container::type1::{Client, Type1, uapi};
use dmaspan::io_pgtable::{
    ArmLpaeS1, ArmLpaeS1Config, Format, PageTable, TableMemory, VtdSs, VtdSsConfig,
};
use dmaspan::iommu::Domain;
use dmaspan::{Account, Container, Iova, PhysAddr};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use dmaspan_sim::walker::{Access, NotATable, Switch, TableWords, Walker};

use super::dma::Hardware;
use super::memory::{List, Memory};
use super::pins::{Cost, Lie, SimulatedPins, USER, User};
use super::slab;
use super::{ROUNDS, SZ_1G, SZ_2M, SZ_4K, SZ_64K};
use super::{is_wanted, measure, one_then_the_other};

const IOVA: u64 = 0x40_0000_0000;
/// What a process may lock, more than it has.
const LIMIT: u64 = 1 << 40;
const PAGE_SIZES: Option<u64> = Some(SZ_4K | SZ_2M | SZ_1G);
const SZ_16M: u64 = 16 << 20;
const SZ_256M: u64 = 256 << 20;

/// What is mapped.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// Of a mapping.
    bytes: u64,
    /// log2 of the pages of a folio.
    order: u32,
    lie: Lie,
    /// Mappings that are made before the first is unmapped.
    held: u64,
}

const fn case(name: &'static str, bytes: u64, order: u32, lie: Lie, held: u64) -> Case {
    Case { name, bytes, order, lie, held }
}

/// Each is measured with cheap pins and with dear ones.
const CASES: [Case; 12] = [
    case("4k", SZ_4K, 0, Lie::Scattered, 1024),
    case("64k_base", SZ_64K, 0, Lie::Scattered, 256),
    case("64k_folio", SZ_64K, 4, Lie::Scattered, 256),
    case("16m_base", SZ_16M, 0, Lie::Scattered, 4),
    case("16m_run", SZ_16M, 0, Lie::Neighbours, 4),
    case("256m_base", SZ_256M, 0, Lie::Scattered, 1),
    case("256m_run", SZ_256M, 0, Lie::Neighbours, 1),
    case("256m_thp", SZ_256M, 9, Lie::Scattered, 1),
    case("1g_hugetlb", SZ_1G, 18, Lie::Scattered, 1),
    case("1g_bar_by_1g", SZ_1G, 18, Lie::Registers, 1),
    case("1g_bar_by_2m", SZ_1G, 9, Lie::Registers, 1),
    case("1g_bar_by_4k", SZ_1G, 0, Lie::Registers, 1),
];
const COSTS: [(&str, Cost); 2] =
    [("cheap", Cost { call: 100, page: 4 }), ("dear", Cost { call: 1000, page: 200 })];

/// Over Arm's tables.
pub(crate) fn run_lpae(tables: &'static Memory, wanted: &[String]) {
    let config = ArmLpaeS1Config { page_sizes: PAGE_SIZES, ..ArmLpaeS1Config::new(48, 48) };
    let format = || ArmLpaeS1::<12>::new(config).expect("a valid configuration");
    let walker = |root| {
        let registers = format().registers(root).into();
        ArmLpaeS1Walker::new(registers).expect("registers of a table")
    };
    Bench { format, walker, tables, wanted }.run();
}

/// Over VT-d's.
pub(crate) fn run_vtd_ss(tables: &'static Memory, wanted: &[String]) {
    let config = VtdSsConfig { page_sizes: PAGE_SIZES, ..VtdSsConfig::new(48, 52) };
    let format = || VtdSs::new(config).expect("a valid configuration");
    let walker = |root: PhysAddr| {
        let registers = VtdSsWalkRegisters {
            ssptptr: root.get(),
            aw: 2,
            ssade: Switch::Off,
            host_lg2: 52,
            sslps: 3,
            snoop_control: Switch::Off,
        };
        VtdSsWalker::new(registers).expect("registers of a table")
    };
    Bench { format, walker, tables, wanted }.run();
}

struct Bench<'c, N, W> {
    format: N,
    walker: W,
    tables: &'static Memory,
    wanted: &'c [String],
}

/// A process with a container.
struct Process<W> {
    container: Container<SimulatedPins, parking_lot::RawMutex>,
    account: Arc<Account>,
    user: Arc<User>,
    walker: W,
}

impl<F: Format, N: Fn() -> F, W: Walker, R: Fn(PhysAddr) -> W> Bench<'_, N, R>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    fn run(&self) {
        slab::begin();
        for case in CASES {
            if matches!(self.wanted, [same] if same == "same") {
                self.print_same(case);
                continue;
            }
            for (name, cost) in COSTS {
                let name = format!("{}_{name}", case.name);
                if is_wanted(self.wanted, &name) {
                    self.bench(&name, case, cost);
                }
            }
        }
    }

    fn process(&self, case: Case, cost: Cost) -> Process<W> {
        let table = PageTable::new((self.format)(), self.tables).expect("room for the root");
        let walker = (self.walker)(table.root());
        let domain = Domain::new(table, Hardware::new()).expect("an empty table");
        // As Linux counts: memory that is mapped twice is charged twice.
        let account = Account::with_counting(LIMIT, Counting::Mappings);
        let user = Arc::new(User::new(case.held * case.bytes, case.order, case.lie, cost));
        let container = Container::with_domain(SimulatedPins::Locked, domain, Arc::clone(&account));
        Process { container, account, user, walker }
    }

    fn bench(&self, name: &str, case: Case, cost: Cost) {
        let process = self.process(case, cost);
        measure(name, ["map", "unmap", "pair"], (2, ROUNDS), case.held, || {
            let [map, unmap] = one_then_the_other(
                || (0..case.held).for_each(|nth| process.map(case, nth)),
                || (0..case.held).for_each(|nth| process.unmap(case, nth)),
            );
            [map, unmap, map + unmap]
        });
        process.check_empty();
    }

    fn print_same(&self, case: Case) {
        let process = self.process(case, COSTS[0].1);
        (0..case.held).for_each(|nth| process.map(case, nth));
        process.print_leads(case, "mapped");
        (0..case.held).for_each(|nth| process.unmap(case, nth));
        process.print_leads(case, "unmapped");
        process.check_empty();
    }
}

impl<W: Walker> Process<W> {
    #[inline(always)]
    fn request(&self, number: u32, bytes: &mut [u8]) {
        let client = Client::new(&self.user, &self.account);
        let answer = Type1::new(&self.container).ioctl(&client, number, bytes);
        assert_eq!(answer, Ok(0), "the request {number:#x}");
    }

    /// `struct vfio_iommu_type1_dma_map`.
    #[inline(always)]
    fn map(&self, case: Case, nth: u64) {
        let flags = uapi::VFIO_DMA_MAP_FLAG_READ | uapi::VFIO_DMA_MAP_FLAG_WRITE;
        let mut request = [0; 32];
        put(&mut request, 0, 32 | u64::from(flags) << 32);
        put(&mut request, 8, USER + nth * case.bytes);
        put(&mut request, 16, IOVA + nth * case.bytes);
        put(&mut request, 24, case.bytes);
        self.request(uapi::VFIO_IOMMU_MAP_DMA, &mut request);
    }

    /// `struct vfio_iommu_type1_dma_unmap`.
    #[inline(always)]
    fn unmap(&self, case: Case, nth: u64) {
        let mut request = [0; 24];
        put(&mut request, 0, 24);
        put(&mut request, 8, IOVA + nth * case.bytes);
        put(&mut request, 16, case.bytes);
        self.request(uapi::VFIO_IOMMU_UNMAP_DMA, &mut request);
        assert_eq!(request[16..], case.bytes.to_ne_bytes(), "what was unmapped");
    }

    /// How many pages of a mapping lead somewhere, and a sum over where, in order, as hardware
    /// finds it that writes.
    fn print_leads(&self, case: Case, when: &str) {
        let (mut pages, mut sum) = (0, 0u64);
        for at in (0..case.held * case.bytes).step_by(4096) {
            let iova = Iova::new(IOVA + at + 0x123);
            let found = self.walker.walk(&Words, iova, Access::Write);
            let paddr = found.map_or(0, |translated| translated.paddr.get());
            pages += u64::from(paddr != 0);
            sum = (sum ^ paddr).wrapping_mul(0x100_0000_01b3);
        }
        println!(
            "{} {when}: {pages} pages lead to {sum:016x}, {} pins, {} pages locked",
            case.name,
            self.user.pins(),
            self.account.used() / SZ_4K,
        );
    }

    fn check_empty(&self) {
        let left = (self.user.pins(), self.account.used(), self.container.mappings());
        assert_eq!(left, (0, 0, 0), "pins, bytes charged and mappings are left");
    }
}

/// A number of a request.
#[inline(always)]
fn put(request: &mut [u8], at: usize, number: u64) {
    request[at..at + 8].copy_from_slice(&number.to_ne_bytes());
}

/// The tables, as hardware reads them: pointers are physical addresses.
struct Words;

impl TableWords for Words {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        let address = usize::try_from(paddr.get()).map_err(|_| NotATable::Outside { paddr })?;
        let word: *const AtomicU64 = ptr::with_exposed_provenance(address);
        // SAFETY: a root and what its links lead to are tables, which nobody frees meanwhile.
        let word = unsafe { &*word };
        Ok(u64::from_le(word.load(Ordering::Relaxed)))
    }
}
