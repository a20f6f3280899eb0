//! A device of software behind an IOMMU of software: it copies a buffer, as a DMA engine does, and
//! faults on what was unmapped.
//!
//! With two arguments it does accesses of one kind and prints nothing, so that they can be counted:
//! what 200000 take more than 100000 is that of 100000.
//!
//! ```sh
//! cargo build --release -p dmaspan --example device_model
//! valgrind --tool=callgrind target/release/examples/device_model hits 100000
//! valgrind --tool=callgrind target/release/examples/device_model hits 200000
//! ```
//!
//! The kinds are `hits` in one span, `others` in any of 32 spans, and `misses`, each a walk for a
//! span of 512 pages. The loop around an access takes 14 instructions of each.

#![expect(unsafe_code, reason = "it says that nobody else maps there, and who has the memory")]

// ANCHOR: head
use std::env;
use std::error::Error;
use std::hint::black_box;
use std::sync::Mutex;

use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::iommu::soft::{AccessFailed, Bus, BusError, SoftDevice, SoftIommu};
use dmaspan::iommu::{Domain, FaultAccess};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};

type Engine = SoftDevice<X86_64, Arena>;
// ANCHOR_END: head

// ANCHOR: ram
/// The machine's memory, from address 0 on.
struct Ram(Mutex<Vec<u8>>);

impl Ram {
    fn with<F: FnOnce(&mut [u8])>(&self, at: PhysAddr, len: usize, f: F) -> Result<(), BusError> {
        let nobody = BusError::Nobody { paddr: at };
        let start = usize::try_from(at.get()).map_err(|_| nobody)?;
        let mut bytes = self.0.lock().map_err(|_| nobody)?;
        f(bytes.get_mut(start..).and_then(|bytes| bytes.get_mut(..len)).ok_or(nobody)?);
        Ok(())
    }
}

impl Bus for Ram {
    fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.with(at, buf.len(), |bytes| buf.copy_from_slice(bytes))
    }

    fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.with(at, buf.len(), |bytes| bytes.copy_from_slice(buf))
    }
}
// ANCHOR_END: ram

// ANCHOR: device
/// Copies `len` bytes, as a DMA engine does that was given two addresses.
fn copy(engine: &mut Engine, ram: &Ram, from: u64, to: u64, len: usize) -> Copied {
    let mut buf = vec![0; len];
    engine.read(ram, Iova::new(from), &mut buf)?;
    engine.write(ram, Iova::new(to), &buf)
}

type Copied = Result<(), AccessFailed<BusError>>;
// ANCHOR_END: device

/// Lets the engine do accesses of one kind.
fn count(kind: &str, times: usize) -> Result<(), Box<dyn Error>> {
    let tables = Arena::new(PhysAddr::new(1 << 40), 1 << 20);
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 48))?, tables)?;
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu.clone())?;
    let mut engine = iommu.device(1);
    // 32 spans of 512 pages, none of which is aligned to more than a page.
    for n in 0..32 {
        let span = Span::new(PhysAddr::new((n << 23) + 0x5000), 2 << 20)?;
        // SAFETY: nobody else maps there, and the engine touches no memory.
        unsafe { domain.map_spans(Iova::new(n << 22), &[span], Prot::READ_WRITE) }?;
    }
    engine.set_places(if kind == "misses" { 1 } else { 32 })?;
    let range = |n: u64| {
        let place = if kind == "hits" { 7 } else { n * 5 % 32 };
        IovaRange::from_len(Iova::new((place << 22) + (n << 13)), 64)
    };
    let ranges = (0..32).map(range).collect::<Result<Vec<_>, _>>()?;
    for range in (0..times).filter_map(|n| ranges.get(n % 32).copied()) {
        let nothing = |span: Span| {
            black_box(span);
            Ok::<_, BusError>(())
        };
        engine.access(range, FaultAccess::Read, nothing)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    if let (Some(kind), Some(times)) = (args.next(), args.next()) {
        return count(&kind, times.parse()?);
    }
    // ANCHOR: main
    let tables = Arena::new(PhysAddr::new(1 << 40), 1 << 20);
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 48))?, tables)?;
    let iommu = SoftIommu::over(&table).waiting_by(|tries| {
        std::thread::yield_now();
        tries < 1 << 20
    });
    let domain = Domain::new(table, iommu.clone())?;
    let mut engine = iommu.device(7);

    // Two pages and one elsewhere to read, and three to write.
    let ram = Ram(Mutex::new((0..0x10000u32).map(|n| n.to_le_bytes()[1]).collect()));
    let span = |start, len| Span::new(PhysAddr::new(start), len);
    let (source, target) =
        ([span(0x2000, 0x2000)?, span(0x8000, 0x1000)?], [span(0xa000, 0x3000)?]);
    // SAFETY: nobody else maps there, and the memory is behind its lock.
    unsafe { domain.map_spans(Iova::new(0x10_0000), &source, Prot::READ) }?;
    // SAFETY: as above.
    unsafe { domain.map_spans(Iova::new(0x20_0000), &target, Prot::READ_WRITE) }?;
    copy(&mut engine, &ram, 0x10_0f00, 0x20_0000, 0x2000)?;
    println!("copied 0x2000 bytes by {} walks, and keeps", engine.misses());
    for run in engine.cached() {
        println!("  {} at {} for {:?}", run.range, run.paddr, run.prot);
    }
    let written = ram.with(PhysAddr::new(0xa000), 0x2000, |bytes| {
        println!("  bytes {:#x} to {:#x}", bytes[0], bytes[bytes.len() - 1]);
    });
    written?;

    let refused = copy(&mut engine, &ram, 0x20_0000, 0x10_0000, 16);
    println!("{}", refused.err().ok_or("it may not write there")?);
    let mut room = SpanBuf::room::<4>();
    let all = IovaRange::from_len(Iova::new(0x10_0000), 0x3000)?;
    // SAFETY: nobody else works on the domain.
    let unsynced = unsafe { domain.unmap(all, &mut SpanBuf::new(&mut room)) }?;
    let (_synced, _) = unsynced.sync()?; // no access is under way any more
    let gone = copy(&mut engine, &ram, 0x10_0000, 0x20_0000, 16);
    println!("{}", gone.err().ok_or("it was unmapped")?);
    // ANCHOR_END: main
    Ok(())
}
