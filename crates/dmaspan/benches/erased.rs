//! A map and an unmap of one buffer in instructions, typed and erased, as callgrind counts them.
//!
//! `cargo bench -p dmaspan --bench erased` runs itself under valgrind.
#![expect(unsafe_code, reason = "there is no hardware, and no memory is touched")]

use std::env;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;

use dmaspan::dma::{
    AnyMemory, BouncePool, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush,
    Mapping, NoPool, Piece, RawMemory, Translation,
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

/// A driver maps a buffer when it submits it and unmaps it when it is complete, by way of its ring.
struct Ring<T: Translation, B: BouncePool> {
    device: Device<T, B>,
    slots: Vec<Option<Mapping<T, B>>>,
}

impl<T: Translation, B: BouncePool> Ring<T, B> {
    #[inline(never)]
    fn submit(&mut self, slot: usize, memory: T::Memory) -> Result<DmaAddr, Error> {
        let mapping = self.device.map_single(memory, Direction::Bidirectional)?;
        let addr = mapping.addr();
        self.slots[slot] = Some(mapping);
        Ok(addr)
    }

    #[inline(never)]
    fn complete(&mut self, slot: usize) -> Result<(), Error> {
        if let Some(mapping) = self.slots[slot].take() {
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
    let slots = (0..16).map(|_| None).collect();
    let mut ring = Ring { device, slots };
    for n in 0..count {
        let slot = usize::try_from(n % 16).unwrap();
        black_box(ring.submit(slot, memory()).unwrap());
        ring.complete(slot).unwrap();
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
        "raw" => pairs(Device::new(domain(flush), NoPool, config).unwrap(), page, count),
        _ => panic!("no form {form}"),
    }
}

const FORMS: [&str; 3] = ["raw", "typed", "erased"];
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
            println!("{flush:>6} {form:>8} {pair:8.1}");
        }
    }
}
