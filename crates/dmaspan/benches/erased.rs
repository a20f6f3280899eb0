//! A map and an unmap of one buffer in instructions, typed and erased, as callgrind counts them.
//!
//! `cargo bench -p dmaspan --bench erased` runs itself under valgrind.
#![expect(unsafe_code, reason = "there is no hardware, and no memory is touched")]

use std::env;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;

use dmaspan::dma::{
    AnyMemory, AnyPool, BouncePool, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error,
    Flush, Mapping, NoPool, Piece, RawMemory, Translation,
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

/// A driver maps a buffer when it submits it and unmaps it when it is complete, by way of a ring,
/// and does so in two places: for what it receives and for what it sends.
struct Driver<T: Translation, B: BouncePool> {
    device: Device<T, B>,
    rx: Vec<Option<Mapping<T, B>>>,
    tx: Vec<Option<Mapping<T, B>>>,
}

impl<T: Translation, B: BouncePool> Driver<T, B> {
    #[inline(never)]
    fn post(&mut self, slot: usize, memory: T::Memory) -> Result<DmaAddr, Error> {
        let mapping = self.device.map_single(memory, Direction::FromDevice)?;
        let addr = mapping.addr();
        self.rx[slot] = Some(mapping);
        Ok(addr)
    }

    #[inline(never)]
    fn receive(&mut self, slot: usize) -> Result<(), Error> {
        if let Some(mapping) = self.rx[slot].take() {
            drop(self.device.unmap(mapping)?);
        }
        Ok(())
    }

    #[inline(never)]
    fn send(&mut self, slot: usize, memory: T::Memory) -> Result<DmaAddr, Error> {
        let mapping = self.device.map_single(memory, Direction::ToDevice)?;
        let addr = mapping.addr();
        self.tx[slot] = Some(mapping);
        Ok(addr)
    }

    #[inline(never)]
    fn sent(&mut self, slot: usize) -> Result<(), Error> {
        if let Some(mapping) = self.tx[slot].take() {
            drop(self.device.unmap(mapping)?);
        }
        Ok(())
    }
}

fn pairs<T, B>(device: Device<T, B>, memory: impl Fn() -> T::Memory, count: u64)
where
    T: Translation,
    B: BouncePool,
{
    let ring = || (0..16).map(|_| None).collect();
    let mut driver = Driver { device, rx: ring(), tx: ring() };
    for n in 0..count / 2 {
        let slot = usize::try_from(n % 16).unwrap();
        black_box(driver.post(slot, memory()).unwrap());
        black_box(driver.send(slot, memory()).unwrap());
        driver.receive(slot).unwrap();
        driver.sent(slot).unwrap();
    }
}

fn run(form: &str, flush: Flush, count: u64) {
    let config = DeviceConfig::bits(48);
    match form {
        "typed" => {
            let device = Device::new(domain(flush), NoPool, config).unwrap();
            pairs(device, || AnyMemory::from(page()), count);
        }
        "erased" => {
            let device = Device::erased(domain(flush), NoPool, config).unwrap();
            pairs(device, || page().into(), count);
        }
        "same pool" => {
            let device = Device::new(domain(flush), AnyPool::from(NoPool), config).unwrap();
            pairs(device, || AnyMemory::from(page()), count);
        }
        "raw" => pairs(Device::new(domain(flush), NoPool, config).unwrap(), page, count),
        _ => panic!("no form {form}"),
    }
}

const FORMS: [&str; 4] = ["raw", "typed", "same pool", "erased"];
const COUNT: u64 = 4096;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [form, flush, count] = &args[..] {
        let flush = if flush == "lazy" { Flush::Lazy } else { Flush::Strict };
        return run(form, flush, count.parse().unwrap());
    }
    println!("a mapping has {} bytes", size_of::<Mapping>());
    for flush in ["strict", "lazy"] {
        for form in FORMS {
            let count = |count: u64| {
                let out = Command::new("valgrind")
                    .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
                    .arg(env::current_exe().unwrap())
                    .args([form, flush, &count.to_string()])
                    .output()
                    .unwrap();
                let text = String::from_utf8_lossy(&out.stderr);
                let at = text.rfind("Collected :").expect("valgrind counts");
                text[at + 11..].split_whitespace().next().unwrap().parse::<u64>().unwrap()
            };
            let pair = (count(2 * COUNT) - count(COUNT)) as f64 / COUNT as f64;
            println!("{flush:>6} {form:>9} {pair:8.1}");
        }
    }
}
