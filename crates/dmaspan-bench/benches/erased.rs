//! A map and an unmap of one buffer in instructions, typed and erased, as callgrind counts them.
//!
//! `cargo bench -p dmaspan-bench --bench erased` runs itself under valgrind, and with `-- --check`
//! it fails where the erased form costs more than its limit. A driver has a ring, with two places
//! that map and two that unmap, or one loop with a map and an unmap, into which a typed map is
//! inlined; it is strict, lazy, or without an IOMMU. What the erased form is compared with is the
//! same driver:
//!
//! - `natural`: typed by what it maps, a `RawMemory`, without a pool;
//! - `called`: the same, but its maps and unmaps are calls, which nothing is inlined into: what any
//!   form costs that finds the code to run by a pointer;
//! - `any memory`: typed, but for its memory, an `AnyMemory`, without a pool;
//! - `any pool`: typed, but for its memory and its pool, an `AnyPool`.
#![expect(unsafe_code, reason = "there is no hardware, and no memory is touched")]

use std::env;
use std::hint::black_box;
use std::marker::PhantomData;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;

use dmaspan::dma::{
    AnyMemory, AnyPool, BouncePool, Device, DeviceConfig, Direct, DmaConfig, DmaDomain, DmaMemory,
    Error, Flush, Mapping, NoPool, Piece, RawMemory, Refused, Translation, UnmapFailed, Unmapped,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, DmaAddr, PhysAddr, Platform, Span};

/// Hardware that does nothing.
struct Nothing;

// SAFETY: no device uses the domain.
unsafe impl IommuOps for Nothing {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        black_box(what);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        8
    }
}

/// One thread; the clock stands still.
struct OneThread;

impl Platform for OneThread {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

type Dma<H> = DmaDomain<ArmLpaeS1<12>, Arena, Nothing, OneThread, H>;

fn domain<H: DmaMemory>(flush: Flush) -> Arc<Dma<H>> {
    let arena = Arena::new(PhysAddr::new(1 << 40), 64 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, arena).unwrap();
    let domain = Domain::new(table, Nothing).unwrap();
    Arc::new(DmaDomain::new(domain, DmaConfig { flush, ..DmaConfig::new(1) }, OneThread).unwrap())
}

/// A page of a driver.
fn page() -> RawMemory {
    let span = Span::new(PhysAddr::new(0x1000_0000), 4096).unwrap();
    // SAFETY: nobody touches the memory.
    unsafe { RawMemory::new(Piece::memory(span)) }
}

/// How a driver calls its device.
trait Calls<T: Translation, B: BouncePool> {
    fn map(
        device: &Device<T, B>,
        memory: T::Memory,
        direction: Direction,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>>;

    fn unmap(
        device: &Device<T, B>,
        mapping: Mapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>>;
}

/// As drivers do.
struct Plainly;

impl<T: Translation, B: BouncePool> Calls<T, B> for Plainly {
    #[inline(always)]
    fn map(
        device: &Device<T, B>,
        memory: T::Memory,
        direction: Direction,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        device.map_single(memory, direction)
    }

    #[inline(always)]
    fn unmap(
        device: &Device<T, B>,
        mapping: Mapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        device.unmap(mapping)
    }
}

/// By functions that are not inlined.
struct Called;

impl<T: Translation, B: BouncePool> Calls<T, B> for Called {
    #[inline(never)]
    fn map(
        device: &Device<T, B>,
        memory: T::Memory,
        direction: Direction,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        device.map_single(memory, direction)
    }

    #[inline(never)]
    fn unmap(
        device: &Device<T, B>,
        mapping: Mapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        device.unmap(mapping)
    }
}

/// A driver maps a buffer when it submits it and unmaps it when it is complete, by way of a ring,
/// and does so in two places: for what it receives and for what it sends.
struct Driver<T: Translation, B: BouncePool, C> {
    calls: PhantomData<C>,
    device: Device<T, B>,
    rx: Vec<Option<Mapping<T, B>>>,
    tx: Vec<Option<Mapping<T, B>>>,
}

impl<T: Translation, B: BouncePool, C: Calls<T, B>> Driver<T, B, C> {
    #[inline(never)]
    fn post(&mut self, slot: usize, memory: T::Memory) -> Result<DmaAddr, Error> {
        let mapping = C::map(&self.device, memory, Direction::FromDevice)?;
        let addr = mapping.addr();
        self.rx[slot] = Some(mapping);
        Ok(addr)
    }

    #[inline(never)]
    fn receive(&mut self, slot: usize) -> Result<(), Error> {
        if let Some(mapping) = self.rx[slot].take() {
            drop(C::unmap(&self.device, mapping)?);
        }
        Ok(())
    }

    #[inline(never)]
    fn send(&mut self, slot: usize, memory: T::Memory) -> Result<DmaAddr, Error> {
        let mapping = C::map(&self.device, memory, Direction::ToDevice)?;
        let addr = mapping.addr();
        self.tx[slot] = Some(mapping);
        Ok(addr)
    }

    #[inline(never)]
    fn sent(&mut self, slot: usize) -> Result<(), Error> {
        if let Some(mapping) = self.tx[slot].take() {
            drop(C::unmap(&self.device, mapping)?);
        }
        Ok(())
    }
}

fn pairs<T, B, C>(_: C, device: Device<T, B>, memory: impl Fn() -> T::Memory, count: u64)
where
    T: Translation,
    B: BouncePool,
    C: Calls<T, B>,
{
    let ring = || (0..16).map(|_| None).collect();
    let calls = PhantomData::<C>;
    let mut driver = Driver { calls, device, rx: ring(), tx: ring() };
    for n in 0..count / 2 {
        let slot = usize::try_from(n % 16).unwrap();
        black_box(driver.post(slot, memory()).unwrap());
        black_box(driver.send(slot, memory()).unwrap());
        driver.receive(slot).unwrap();
        driver.sent(slot).unwrap();
    }
}

/// A driver that maps and unmaps in one place.
fn one_place<T, B, C>(_: C, device: Device<T, B>, memory: impl Fn() -> T::Memory, count: u64)
where
    T: Translation,
    B: BouncePool,
    C: Calls<T, B>,
{
    for _ in 0..count {
        let mapping = C::map(&device, memory(), Direction::Bidirectional).unwrap();
        black_box(mapping.addr());
        drop(black_box(C::unmap(&device, mapping).unwrap()));
    }
}

/// What there is of a driver.
#[derive(Clone, Copy)]
struct Case<'a> {
    driver: &'a str,
    form: &'a str,
    count: u64,
}

impl Case<'_> {
    fn drive<T, B>(self, device: Result<Device<T, B>, Error>, memory: impl Fn() -> T::Memory)
    where
        T: Translation,
        B: BouncePool,
    {
        let device = device.unwrap();
        match (self.driver, self.form) {
            ("ring", "called") => pairs(Called, device, memory, self.count),
            ("loop", "called") => one_place(Called, device, memory, self.count),
            ("ring", _) => pairs(Plainly, device, memory, self.count),
            ("loop", _) => one_place(Plainly, device, memory, self.count),
            (other, _) => panic!("no driver {other}"),
        }
    }

    fn run(self, how: &str) {
        match how {
            "strict" => self.translated(Flush::Strict),
            "lazy" => self.translated(Flush::Lazy),
            "direct" => self.direct(),
            other => panic!("no translation {other}"),
        }
    }

    fn translated(self, flush: Flush) {
        let (config, any) = (DeviceConfig::bits(48), || AnyMemory::from(page()));
        match self.form {
            "natural" | "called" => self.drive(Device::new(domain(flush), NoPool, config), page),
            "any memory" => self.drive(Device::new(domain(flush), NoPool, config), any),
            "any pool" => {
                self.drive(Device::new(domain(flush), AnyPool::from(NoPool), config), any);
            }
            "erased" => self.drive(Device::erased(domain(flush), NoPool, config), any),
            other => panic!("no form {other}"),
        }
    }

    fn direct(self) {
        let (config, any) = (DeviceConfig::bits(48), || AnyMemory::from(page()));
        match self.form {
            "natural" | "called" => self.drive(Device::new(direct(), NoPool, config), page),
            "any memory" => self.drive(Device::new(direct(), NoPool, config), any),
            "any pool" => self.drive(Device::new(direct(), AnyPool::from(NoPool), config), any),
            "erased" => self.drive(Device::erased(direct(), NoPool, config), any),
            other => panic!("no form {other}"),
        }
    }
}

fn direct<H: DmaMemory>() -> Arc<Direct<H, OneThread>> {
    Arc::new(Direct::new(Span::new(PhysAddr::new(0), 1 << 40).unwrap(), OneThread))
}

const COUNT: u64 = 4096;

/// What the erased form may take, and what it may cost more than the typed ones, in the order of
/// [`FORMS`]: what it does, and some five instructions. A typed form that takes fewer makes a
/// difference larger and nothing dearer, which the first limit shows.
///
/// Beyond the natural form it has calls, and with each the registers that it saves and the mapping
/// that it copies to where the driver keeps it: that is what `called` has, too. It looks at what
/// kind of memory it has, keeps that in memory and not in registers while hooks run, since it may
/// have to be leaked, and looks again when it is dropped. Its mappings are 24 bytes longer, for the
/// slots of any pool. A direct ring typed with any pool has no call at all.
const LIMITS: [(&str, &str, f64, [f64; 4]); 6] = [
    ("ring", "strict", 969.0, [71.0, 54.0, 47.0, 16.0]),
    ("ring", "lazy", 1051.0, [79.0, 61.0, 45.0, 16.0]),
    ("ring", "direct", 245.0, [143.0, 67.0, 111.0, 71.0]),
    ("loop", "strict", 867.0, [116.0, 37.0, 112.0, 91.0]),
    ("loop", "lazy", 949.0, [123.0, 44.0, 108.0, 91.0]),
    ("loop", "direct", 148.0, [129.0, 52.0, 115.0, 65.0]),
];

const FORMS: [&str; 5] = ["natural", "called", "any memory", "any pool", "erased"];

/// How many instructions a pair takes.
fn count(driver: &str, how: &str, form: &str) -> f64 {
    let count = |count: u64| {
        let out = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(env::current_exe().unwrap())
            .args([driver, how, form, &count.to_string()])
            .output()
            .expect("valgrind is installed");
        let text = String::from_utf8_lossy(&out.stderr);
        let at = text.rfind("Collected :").expect("valgrind counts");
        text[at + 11..].split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    (count(2 * COUNT) - count(COUNT)) as f64 / COUNT as f64
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [driver, how, form, count] = &args[..] {
        Case { driver, form, count: count.parse().unwrap() }.run(how);
        return ExitCode::SUCCESS;
    }
    let is_check = args.iter().any(|arg| arg == "--check");
    println!("instructions of a map and an unmap, and what the erased form costs more");
    let mut result = ExitCode::SUCCESS;
    for (driver, how, most, limits) in LIMITS {
        // At once: nothing that runs beside them changes a count.
        let [natural, called, memory, pool, erased] = thread::scope(|scope| {
            let counts = FORMS.map(|form| scope.spawn(move || count(driver, how, form)));
            counts.map(|count| count.join().expect("valgrind counts"))
        });
        print!("{driver} {how:>6}: erased {erased:.0}");
        if is_check && erased > most {
            print!(" (the limit is {most:.0})");
            result = ExitCode::FAILURE;
        }
        for ((form, typed), limit) in FORMS.iter().zip([natural, called, memory, pool]).zip(limits)
        {
            let more = erased - typed;
            print!("; {form} {typed:.0}, {more:+.0}");
            if is_check && more > limit {
                print!(" (the limit is {limit:+.0})");
                result = ExitCode::FAILURE;
            }
        }
        println!();
    }
    result
}
