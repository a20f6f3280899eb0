//! The kernel's trials: all devices at work, and the accesses that must be refused.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::Write as _;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dmaspan::dma::{Device, DeviceConfig, Trust, Unmapped};
use dmaspan::iommu::{
    FaultHandler, FaultReport, FaultResponse, RegionKind, ReservedRegion, ReservedRegions,
};
use dmaspan::platform::Flag;
use dmaspan::{Direction, Iova, IovaRange, Prot};
use dmaspan_drivers::Handled;
use dmaspan_drivers::firmware::{DmaRequester, IommuMap, RequesterStream};
use dmaspan_virtio_drivers::{BehindIommu, Hal, VirtioUsage};
use lock_api::Mutex;
use virtio_drivers::transport::pci::PciTransport;

use crate::disk::DiskHal;
use crate::edu::{self, Edu};
use crate::firmware::{Firmware, Machine};
use crate::glue::{Memory, Tables, virtio};
use crate::iommu::{Found, Iommu};
use crate::memory::{Shared, registers};
use crate::net::NetHal;
use crate::pci::{Function, Pci};
use crate::plant::Plants;
use crate::testdev::{self, TestDevice};
use crate::{HEAP, Result, WORK, cpu, disk, net, nvme};

/// Pairs of a map and an unmap that a CPU makes while commands of a disk are in flight, before it
/// looks for their ends.
const STEP: u64 = 1000;
/// Bytes for what shares its page with others, and is bounced.
const SLOTS: u64 = 1 << 20;
/// Echoes that are answered.
const ECHOES: u32 = 3;
pub(crate) const PAGE: u64 = 4096;

const VIRTIO: u16 = 0x1af4;
const NETWORK: u16 = 0x1041;
const BLOCK: u16 = 0x1042;
/// A controller of NVMe, by class.
const NVME: (u8, u8, u8) = (1, 8, 2);

pub(crate) struct Kernel {
    pub(crate) memory: Memory,
    pub(crate) plants: Plants,
    pub(crate) iommus: Vec<Iommu>,
    map: IommuMap,
    pub(crate) pci: Pci,
    pub(crate) functions: Vec<Function>,
    /// What keeps devices attached.
    streams: Vec<Box<dyn Send + Sync>>,
}

/// Says in words what a device was refused.
pub(crate) struct Loud(pub(crate) &'static str);

impl FaultHandler for Loud {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        println!("fault: {}: {report}", self.0);
        FaultResponse::Terminate
    }
}

pub(crate) fn run(firmware: &Firmware) -> Result<()> {
    let machine = firmware.machine();
    let Machine { ecam, window, address_bits, iommus } =
        machine.map_err(|why| format!("firmware is refused, no device is let at memory: {why}"))?;
    let mut pci = Pci::new(ecam, window);
    let functions = pci.functions()?;
    functions.iter().for_each(|function| println!("PCI: {function}, DMA off"));
    let map = match iommus.and_then(|map| match map.units() {
        [] => Err("it names no IOMMU".into()),
        _ => Ok(map),
    }) {
        Ok(map) => map,
        Err(why) => return Err(without_dma(&functions, &why.to_string())),
    };
    let plants = Plants::of(&firmware.options());
    let memory = Memory::new(SLOTS)?;
    let (iommus, streams) = (Vec::new(), Vec::new());
    let mut kernel = Kernel { memory, plants, iommus, map, pci, functions, streams };
    kernel.start_iommus(address_bits)?;
    kernel.work()
}

/// A kernel that does not know what a device would reach lets none at memory. Shows that none is.
fn without_dma(functions: &[Function], why: &str) -> Box<dyn core::error::Error> {
    let show = || {
        let Some(function) = functions.iter().find(|function| function.is(edu::ID.0, edu::ID.1))
        else {
            return Err("there is no edu".into());
        };
        let page = Shared::new(&Memory::new(SLOTS)?.tables, 12)?;
        page.words()[0].store(7, Ordering::Relaxed);
        Edu(registers(function.bars[0].0, function.bars[0].1))
            .write(page.span().paddr().get(), PAGE)?;
        match page.words()[0].load(Ordering::Relaxed) {
            7 => Ok("edu was told to write, and memory is as it was"),
            _ => Err("edu wrote to memory".into()),
        }
    };
    let shown: Result<&str> = show();
    let shown = shown.unwrap_or_else(|why| {
        println!("DMA: {why}");
        "that was not shown"
    });
    format!("firmware is refused, no device is let at memory, {shown}: {why}").into()
}

impl Kernel {
    fn start_iommus(&mut self, address_bits: u32) -> Result<()> {
        for unit in self.map.units() {
            let (kind, mut base, mut capability) = (unit.kind, unit.base, None);
            if let Some((_, id)) = unit.pci {
                let is_it = |function: &&Function| function.id() == id;
                let function = self.functions.iter().find(is_it).ok_or("an IOMMU is not on PCI")?;
                if base == 0 {
                    base = function.bars[0].0;
                }
                // The secure device, of AMD's (48882, 3.2), with what is at 0x10.
                capability = self.pci.capability(function, 0xf, 0x10);
                self.pci.allow_dma(function);
            }
            let used = HEAP.lock().stats_alloc_actual();
            let found = Found { kind, base, address_bits, capability };
            let iommu = Iommu::start(found, &self.memory)?;
            let takes = (HEAP.lock().stats_alloc_actual() - used) >> 10;
            println!(
                "IOMMU: {iommu}, registers at {base:#x}, of {takes} KiB; all streams are blocked"
            );
            self.iommus.push(iommu);
        }
        Ok(())
    }

    fn find(&self, name: &str, is_it: impl Fn(&Function) -> bool) -> Result<Function> {
        let found = self.functions.iter().find(|function| is_it(function));
        Ok(found.ok_or_else(|| format!("the machine has no {name}"))?.clone())
    }

    /// The IOMMU and the stream of a device, and what is reserved for it.
    pub(crate) fn requester(
        &self,
        function: &Function,
    ) -> Result<(RequesterStream, ReservedRegions)> {
        let requester = DmaRequester::Pci { segment: 0, id: function.id() };
        let none = || format!("no IOMMU serves {function}: it is not driven");
        let found = self.map.streams(requester).next().ok_or_else(none)?;
        let mut regions = ReservedRegions::new();
        for memory in self.map.reserved(requester) {
            let range = IovaRange::new(Iova::new(memory.first), Iova::new(memory.last));
            let range = range.ok_or("memory that is reserved ends before it begins")?;
            // One that is to be mapped one to one, which nobody does here, is refused below.
            let kind = memory.paddr.map_or(RegionKind::Reserved, |_| RegionKind::Direct);
            regions.insert(ReservedRegion { range, kind, prot: Prot::READ_WRITE })?;
        }
        Ok((found, regions))
    }

    /// Gives a device a domain of its own, and lets it at that.
    fn attach(&mut self, function: &Function, bits: u32, name: &'static str) -> Result<Device> {
        let (found, regions) = self.requester(function)?;
        let wrong = self.plants.stream && name == "edu";
        let stream = found.stream ^ u32::from(wrong);
        let config =
            DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(bits).named(name) };
        let faults = Arc::new(Loud(name));
        let iommu = &self.iommus[found.unit];
        let used = HEAP.lock().stats_alloc_actual();
        let rest = (&self.memory, &self.plants);
        let (device, kept) = iommu.attach(stream, regions, config, faults, rest)?;
        self.streams.push(kept);
        self.pci.allow_dma(function);
        let takes = (HEAP.lock().stats_alloc_actual() - used) >> 10;
        println!(
            "{name}: {function} has a domain of its own, of {takes} KiB, as stream {stream:#x}"
        );
        Ok(device)
    }

    /// A device of virtio, whose driver reaches memory through a `Hal`.
    fn virtio<H: Hal>(
        &mut self,
        device: u16,
        name: &'static str,
        hand_over: impl FnOnce(Device) -> bool,
    ) -> Result<BehindIommu<PciTransport>> {
        let function = self.find(name, |function| function.is(VIRTIO, device))?;
        let device = self.attach(&function, 64, name)?;
        if !hand_over(device) {
            return Err(format!("{name} has a driver already").into());
        }
        let transport = PciTransport::new::<H, _>(&mut self.pci.root, function.place)?;
        Ok(BehindIommu::new(transport).map_err(|_| format!("{name} bypasses the IOMMU"))?)
    }

    fn faults(&self) -> Result<Handled> {
        let mut all = Handled::default();
        for iommu in &self.iommus {
            loop {
                let now = iommu.handle_faults()?;
                all.reported += now.reported;
                all.unclaimed += now.unclaimed;
                if !now.more {
                    break;
                }
            }
        }
        Ok(all)
    }

    /// Nothing was refused.
    pub(crate) fn expect_no_faults(&self, who: &str) -> Result<()> {
        match self.faults()? {
            Handled { reported: 0, unclaimed: 0, .. } => Ok(()),
            Handled { reported, unclaimed, .. } => Err(format!(
                "{who} did what it may, and the IOMMU refused {reported} of its accesses and \
                 {unclaimed} of streams that nobody has"
            )
            .into()),
        }
    }

    /// What may be done, and what must be refused first: the rest goes on after that.
    fn work(&mut self) -> Result<()> {
        self.try_edu()?;
        self.try_testdev()?;
        self.read_disks()?;
        let hand_over = |device| NetHal::attach(virtio(device)).is_ok();
        let transport = self.virtio::<NetHal>(NETWORK, "virtio-net", hand_over)?;
        net::answer(transport, ECHOES)?;
        self.expect_no_faults("the network card")?;
        #[cfg(target_arch = "aarch64")]
        if cpu::is_hypervisor() {
            crate::guest::checks::run(self)?;
        }
        for (name, usage) in [("virtio-blk", DiskHal::usage()), ("virtio-net", NetHal::usage())] {
            let VirtioUsage { buffers, queues, refused } = usage;
            println!("{name}: {buffers} buffers and {queues} queues are left, {refused} refused");
            if queues + refused != 0 {
                return Err(format!("{name} leaks, or was refused").into());
            }
        }
        Ok(())
    }

    /// Reads both disks, while both CPUs map and unmap for one of them.
    fn read_disks(&mut self) -> Result<()> {
        let hand_over = |device| DiskHal::attach(virtio(device)).is_ok();
        let transport = self.virtio::<DiskHal>(BLOCK, "virtio-blk", hand_over)?;
        let mut one = disk::Disk::new(transport)?;
        let function = self.find("NVMe disk", |function| function.class() == NVME)?;
        let device = Arc::new(self.attach(&function, 64, "nvme")?);
        let mut other =
            nvme::Disk::new(function.bars[0], Arc::clone(&device), &self.memory.tables)?;

        let pairs = Arc::new(Pairs::new(device, &self.memory.tables)?);
        cpu::start_second()?;
        let others = Arc::clone(&pairs);
        *WORK.lock() = Some(Box::new(move || others.run()));
        println!("virtio-blk: sha256 {}", hex(&one.hash()?));
        let mut mine = 0;
        let hash = other.hash(|| {
            mine += STEP;
            (0..STEP).try_for_each(|_| pairs.one(0))
        });
        println!("nvme: sha256 {}", hex(&hash?));
        println!("pairs: {mine} and {} of a map and an unmap on two CPUs", pairs.end()?);
        self.expect_no_faults("a disk")?;
        other.shut_down()
    }

    /// Has edu do what it may, and then what it may not.
    fn try_edu(&mut self) -> Result<()> {
        let function = self.find("edu", |function| function.is(edu::ID.0, edu::ID.1))?;
        let device = self.attach(&function, edu::BITS, "edu")?;
        let edu = Edu(registers(function.bars[0].0, function.bars[0].1));
        let (from, to) =
            (Shared::new(&self.memory.tables, 12)?, Shared::new(&self.memory.tables, 13)?);
        let value = |n: usize| 0x1234_0000_5678_0000 + n as u64;
        for (n, word) in from.words().iter().enumerate() {
            word.store(value(n), Ordering::Relaxed);
        }
        let source = device.map_single(from.memory(), Direction::ToDevice);
        let source = source.map_err(|refused| refused.error)?;
        edu.read(source.addr().get(), PAGE)?;
        self.expect_no_faults("edu")?;

        let mapping = device.map_single(to.head(PAGE)?, Direction::FromDevice);
        let mapping = mapping.map_err(|refused| refused.error)?;
        let addr = mapping.addr().get();
        edu.start_write(addr + if self.plants.limits { PAGE / 2 } else { 0 }, PAGE);
        if !self.plants.early {
            edu.wait()?;
        }
        let _memory = device.unmap(mapping).map_err(|failed| failed.error)?;
        edu.wait()?;
        let (page, neighbour) = to.words().split_at(PAGE as usize / 8);
        if neighbour.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
            return Err("edu wrote to the neighbour of its page".into());
        }
        self.expect_no_faults("edu")?;
        let mut words = page.iter().enumerate();
        if words.any(|(n, word)| word.load(Ordering::Relaxed) != value(n)) {
            return Err("edu's copy is wrong".into());
        }
        println!("edu: read and wrote a page that was mapped for it");

        page[0].store(7, Ordering::Relaxed);
        let write = |addr| edu.write(addr, 4);
        self.expect_refused("edu", write, (addr, &page[0]), "a page that was unmapped")?;
        let secret = Shared::new(&self.memory.tables, 12)?;
        secret.words()[0].store(7, Ordering::Relaxed);
        let addr = secret.span().paddr().get();
        self.expect_refused("edu", write, (addr, &secret.words()[0]), "a page of the kernel")?;
        let _memory = device.unmap(source).map_err(|failed| failed.error)?;
        Ok(())
    }

    /// The same with another device, whose addresses have more bits than its driver says.
    fn try_testdev(&mut self) -> Result<()> {
        let is_it = |function: &Function| function.is(testdev::ID.0, testdev::ID.1);
        let function = self.find("iommu-testdev", is_it)?;
        let device = self.attach(&function, testdev::BITS, "testdev")?;
        let testdev = TestDevice(registers(function.bars[0].0, function.bars[0].1));
        let page = Shared::new(&self.memory.tables, 12)?;
        let (word, paddr) = (&page.words()[0], page.span().paddr().get());
        let mapping = device.map_single(page.memory(), Direction::FromDevice);
        let mapping = mapping.map_err(|refused| refused.error)?;
        let addr = mapping.addr().get();
        if addr >> testdev::BITS != 0 {
            return Err("testdev was given an address that it does not have".into());
        }
        if self.plants.mask {
            testdev.write(addr | 1 << testdev::BITS, paddr, PAGE as u32);
            self.expect_no_faults("testdev")?;
        }
        testdev.expect_written(addr, paddr, PAGE as u32)?;
        self.expect_no_faults("testdev")?;
        if word.load(Ordering::Relaxed) == 0 {
            return Err("testdev's pattern is not there".into());
        }
        println!("testdev: wrote a page that was mapped for it");
        let _memory = device.unmap(mapping).map_err(|failed| failed.error)?;
        word.store(7, Ordering::Relaxed);
        let write = |addr| {
            testdev.write(addr, paddr, 4);
            Ok(())
        };
        self.expect_refused("testdev", write, (addr, word), "a page that was unmapped")
    }

    /// Tells a device to write where it may not.
    pub(crate) fn expect_refused(
        &self,
        name: &str,
        write: impl Fn(u64) -> Result<()>,
        (addr, word): (u64, &AtomicU64),
        what: &str,
    ) -> Result<()> {
        write(addr)?;
        let refused = self.faults()?.reported;
        if word.load(Ordering::Relaxed) != 7 {
            return Err(format!("{name} wrote to {what}").into());
        }
        if refused == 0 {
            return Err(format!("{name} did not write to {what}, and nobody was told why").into());
        }
        println!("{name}: was refused to write to {what}");
        Ok(())
    }
}

/// Maps and unmaps for a device that is busy, on any CPU.
struct Pairs {
    device: Arc<Device>,
    /// A frame for each CPU.
    frames: [Shared; cpu::COUNT],
    made: AtomicU64,
    ends: AtomicBool,
    ended: Mutex<Flag, Option<core::result::Result<(), String>>>,
}

impl Pairs {
    fn new(device: Arc<Device>, tables: &Tables) -> Result<Self> {
        let frames = [Shared::new(tables, 12)?, Shared::new(tables, 14)?];
        let ended = Mutex::new(None);
        Ok(Self { device, frames, made: AtomicU64::new(0), ends: AtomicBool::new(false), ended })
    }

    /// A pair.
    fn one(&self, cpu: usize) -> Result<()> {
        let mapping = self.device.map_single(self.frames[cpu].memory(), Direction::Bidirectional);
        let mapping = mapping.map_err(|refused| refused.error)?;
        match self.device.unmap(mapping).map_err(|failed| failed.error)? {
            Unmapped::Released(_) => Ok(()),
            other => Err(format!("an unmap was not over when it returned: {other:?}").into()),
        }
    }

    /// On the second CPU: pairs until the end.
    fn run(&self) {
        let mut result = Ok(());
        while result.is_ok() && !self.ends.load(Ordering::Acquire) {
            result = self.one(1).map_err(|error| error.to_string());
            self.made.fetch_add(1, Ordering::Relaxed);
        }
        *self.ended.lock() = Some(result);
    }

    /// Ends the work of the second CPU, and says how many pairs it made.
    fn end(&self) -> Result<u64> {
        self.ends.store(true, Ordering::Release);
        loop {
            if let Some(result) = self.ended.lock().take() {
                result?;
                return Ok(self.made.load(Ordering::Relaxed));
            }
            core::hint::spin_loop();
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // A string takes all.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
