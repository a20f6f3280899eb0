//! Open devices: their registers, configuration space, interrupts, resets, and registers that one
//! device reaches in another.

use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_drivers::Mmio;
use dmaspan_linux::vfio::{
    Backend, Bar, BusMaster, DeviceError, Error, OpenError, VfioDevice, VfioSpace,
};
use dmaspan_linux::{Memory, MemoryKind};

use super::context::{PEER, driver, in_sysfs};
use super::{BACKEND, Case, Context, Need, Outcome, Result, case, page};

/// The function with a BAR as large as is asked for, its BAR 2: QEMU's `pci-testdev`.
const LARGE: &str = "0000:00:07.0";

pub(super) const CASES: &[Case] = &[
    // A BAR is the device's registers for as long as it lives, its device dropped or not.
    case("device/registers_are_reached_until_the_bar_is_dropped", BACKEND, registers),
    // A device does no DMA after it was opened, reset or dropped.
    case("device/bus_mastering_is_off_until_it_is_switched_on", BACKEND, bus_mastering),
    // Registers outside, and those that BARs depend on, are refused.
    case("device/configuration_space_has_bounds_and_guards", BACKEND, configuration),
    // MSI-X vectors count, each in its event, until they are dropped.
    case("device/msix_interrupts_are_events", BACKEND, interrupts),
    // A reset device has its BARs and interrupts still.
    case("device/a_reset_leaves_bars_mapped", BACKEND, resets),
    // A controller writes its data into the BAR of another device, and not after that was unmapped.
    case("device/registers_are_mapped_for_another_device", PAIR, peers),
    // A BAR of gibibytes begins where its largest leaf can, and is mapped for its device.
    case("device/a_large_bar_is_mapped_by_its_largest_leaf", BACKEND, large_bar),
    // What was mapped before a device was attached is what it reaches.
    case("device/one_attached_later_reaches_what_was_mapped", PAIR, attached_later),
];

const PAIR: &[Need] = &[Need::Backend, Need::Peer];

fn open(context: &Context, bdf: &str) -> Result<(VfioSpace, VfioDevice)> {
    Ok(VfioSpace::open(context.backend, bdf.parse()?)?)
}

fn map_bar(space: &VfioSpace, bar: &Bar, offsets: Range<u64>, iova: u64) -> Result<(), Error> {
    space.map_bar(bar, offsets, Iova::new(iova), Prot::READ_WRITE)
}

/// Maps all of a BAR, and returns whether the kernel has what it takes.
fn maps_registers(space: &VfioSpace, bar: &Bar, iova: u64) -> Result<bool> {
    match (map_bar(space, bar, 0..bar.len(), iova), space) {
        // iommufd's compatibility mode does not map registers.
        (Err(Error::NoDmaBuf { .. }), VfioSpace::Ioas(_))
        | (Err(Error::NotPinnable { .. }), VfioSpace::Type1(_)) => Ok(false),
        (result, _) => Ok(result.map(|()| true)?),
    }
}

fn unmap(space: &VfioSpace, iova: u64, len: u64) -> Result<u64> {
    Ok(space.unmap(IovaRange::from_len(Iova::new(iova), len)?)?)
}

/// The registers of an NVMe controller (NVM Express 1.4, section 3.1).
mod nvme {
    pub(super) const CAP: u64 = 0x00;
    pub(super) const VS: u64 = 0x08;
    pub(super) const CC: u64 = 0x14;
    pub(super) const CSTS: u64 = 0x1c;
    pub(super) const AQA: u64 = 0x24;
    pub(super) const ASQ: u64 = 0x28;
    pub(super) const ACQ: u64 = 0x30;
    pub(super) const DOORBELL: u64 = 0x1000;
}

fn registers(context: &Context) -> Result {
    let (space, device) = open(context, &context.device)?;
    let bar = device.bar(0)?;
    let version = bar.read32(nvme::VS);
    check!(version >= 0x1_0000 && version != u32::MAX);
    check!(bar.read64(nvme::CAP) & 0xffff != 0);
    check!(bar.read64(nvme::CAP) & 0xffff_ffff, u64::from(bar.read32(nvme::CAP)));
    bar.write32(nvme::AQA, 0x1f_001f);
    check!(bar.read32(nvme::AQA), 0x1f_001f);
    for outside in [bar.len(), bar.len() - 2, 1, u64::MAX - 3] {
        check!(bar.read32(outside), u32::MAX);
        bar.write32(outside, 0);
    }
    let (first, second) = (bar.as_ptr(0, bar.len())?, bar.as_ptr(nvme::VS, 4)?);
    check!(second.addr().get() - first.addr().get(), 8);
    for (offset, len) in [(0, 0), (bar.len(), 1), (bar.len() - 4, 8), (u64::MAX, 2)] {
        check!(matches!(bar.as_ptr(offset, len), Err(Error::OutsideBar { .. })));
    }
    let low = u64::from(device.config().read32(0x10)? & !0xf);
    check!(bar.bus_address()? & u64::from(u32::MAX), low);
    check!(leaf_aligned(&bar)?);
    let bdf = device.bdf();
    for index in [1, 6, u32::MAX] {
        check!(device.bar(index).err(), Some(DeviceError::NoBar { bdf, index }));
    }
    let again = device.bar(0)?;
    again.write32(nvme::AQA, 0x3_0003);
    check!(bar.read32(nvme::AQA), 0x3_0003);
    drop((device, space, again));
    check!(bar.read32(nvme::VS), version);
    check!(bar.read32(nvme::AQA), 0x3_0003);
    drop(bar);
    // It was closed with the last of its parts, and can be opened again.
    let (_space, device) = open(context, &context.device)?;
    check!(device.bar(0)?.read32(nvme::VS), version);
    Ok(Outcome::Passed)
}

/// Whether the process has a BAR at a multiple of the largest leaf of the CPU that fits.
fn leaf_aligned(bar: &Bar) -> Result<bool> {
    let leaf =
        [1 << 30, MemoryKind::Thp.page_size(), page()].into_iter().find(|&leaf| leaf <= bar.len());
    let maps = fs::read_to_string("/proc/self/maps")?;
    let found = maps.lines().filter(|line| line.contains("vfio")).find_map(|line| {
        let (start, rest) = line.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (hex(start)?, hex(rest.split_once(' ')?.0)?);
        (end - start == bar.len()).then_some(start)
    });
    let start = found.ok_or_else(|| format!("{bar:?} is not in {maps}"))?;
    Ok(leaf.is_some_and(|leaf| start % leaf == 0))
}

/// The command register and its bits.
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 2;
const BUS_MASTER: u16 = 4;

fn bus_mastering(context: &Context) -> Result {
    let (_space, device) = open(context, &context.device)?;
    let bits = |device: &VfioDevice| -> Result<u16> {
        Ok(device.config().read16(COMMAND)? & (MEMORY_SPACE | BUS_MASTER))
    };
    check!(bits(&device)?, MEMORY_SPACE);
    device.set_bus_master(BusMaster::On)?;
    check!(bits(&device)?, MEMORY_SPACE | BUS_MASTER);
    device.set_bus_master(BusMaster::Off)?;
    check!(bits(&device)?, MEMORY_SPACE);
    device.set_bus_master(BusMaster::On)?;
    device.reset()?;
    check!(bits(&device)?, MEMORY_SPACE);
    device.set_bus_master(BusMaster::On)?;
    let bar = device.bar(0)?;
    drop(device);
    // The kernel's copy: the device stays open for the BAR.
    let config = fs::read(in_sysfs(&context.device).join("config"))?;
    check!(config.get(4).is_some_and(|byte| byte & 4 == 0));
    check!(bar.read32(nvme::VS) != u32::MAX);
    Ok(Outcome::Passed)
}

/// Capabilities (PCI Code and ID Assignment, section 2).
const POWER_MANAGEMENT: u8 = 0x01;
const MSIX: u8 = 0x11;

fn configuration(context: &Context) -> Result {
    let (_space, device) = open(context, &context.device)?;
    let config = device.config();
    let mut ids = [0; 2];
    for (id, name) in ids.iter_mut().zip(["vendor", "device"]) {
        let text = fs::read_to_string(in_sysfs(&context.device).join(name))?;
        *id = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16)?;
    }
    check!(config.read32(0)?, ids[0] | ids[1] << 16);
    check!(u32::from(config.read16(2)?), ids[1]);
    check!(config.len() == 256 || config.len() == 4096);
    let last = config.len() - 4;
    config.read32(last)?;
    for (offset, result) in [
        (last + 4, config.read8(last + 4).err()),
        (last + 2, config.read32(last + 2).err()),
        (3, config.read16(3).err()),
        (u64::MAX, config.write8(u64::MAX, 0).err()),
    ] {
        let (bdf, len) = (device.bdf(), config.len());
        check!(result, Some(DeviceError::NoRegister { bdf, offset, len }));
    }
    // The interrupt line is the driver's to use.
    config.write8(0x3c, 0x5a)?;
    check!(config.read8(0x3c)?, 0x5a);
    check!(config.capability(MSIX)?.is_some());
    check!(config.capability(0x7f)?, None);
    let mut guarded = vec![config.write16(4, 0), config.write32(4, 0), config.write8(5, 0)];
    if let Some(power) = config.capability(POWER_MANAGEMENT)? {
        guarded.extend([config.write16(power + 4, 3), config.write32(power + 4, 3)]);
    }
    for result in guarded {
        check!(matches!(result, Err(DeviceError::Guarded { .. })));
    }
    check!(device.bar(0)?.read32(nvme::VS) != u32::MAX);
    Ok(Outcome::Passed)
}

/// After so long nothing comes any more, on the busiest machine.
const LONG: Duration = Duration::from_secs(120);
const PATIENCE: Option<Duration> = Some(LONG);

fn interrupts(context: &Context) -> Result {
    let (_space, device) = open(context, &context.device)?;
    let capability = device.config().capability(MSIX)?.ok_or("it has no MSI-X")?;
    let control = || device.config().read16(capability + 2);
    let has = device.msix_vectors()?;
    check!(has, u32::from(control()? & 0x7ff) + 1);
    let bdf = device.bdf();
    for asked in [0, has + 1, u32::MAX] {
        let refused = DeviceError::NoVectors { bdf, asked, has };
        check!(device.enable_msix(asked).err(), Some(refused));
    }
    for count in [2, has, 1] {
        let msix = device.enable_msix(count)?;
        check!(control()? & 0x8000 != 0);
        check!(device.enable_msix(1).err(), Some(DeviceError::MsixIsOn { bdf }));
        let last = msix.events().last().ok_or("there are no events")?;
        check!(last.try_read()?, 0);
        msix.signal(count - 1)?;
        msix.signal(count - 1)?;
        check!(last.wait(PATIENCE)?, 2);
        check!(last.wait(Some(Duration::from_millis(5)))?, 0);
        if let [first, _, ..] = msix.events() {
            msix.signal(0)?;
            check!((first.try_read()?, last.try_read()?), (1, 0));
        }
        check!(matches!(msix.signal(count), Err(DeviceError::NoVectors { .. })));
        drop(msix);
        check!(control()? & 0x8000, 0);
    }
    // It outlives the device, and is switched off behind it.
    let msix = device.enable_msix(1)?;
    drop(device);
    msix.signal(0)?;
    Ok(Outcome::Passed)
}

fn resets(context: &Context) -> Result {
    let (space, device) = open(context, &context.device)?;
    let bar = device.bar(0)?;
    let version = bar.read32(nvme::VS);
    let is_mapped = maps_registers(&space, &bar, REGISTERS)?;
    let msix = device.enable_msix(1)?;
    // Enabled with queues that nobody uses, and no access to memory.
    bar.write32(nvme::AQA, 0xf_000f);
    bar.write32(nvme::CC, 6 << 16 | 4 << 20 | 1);
    until(|| bar.read32(nvme::CSTS) & 1 == 1)?;
    device.reset()?;
    until(|| bar.read32(nvme::CSTS) & 1 == 0)?;
    check!(bar.read32(nvme::VS), version);
    check!(device.bar(0)?.read32(nvme::VS), version);
    msix.signal(0)?;
    check!(msix.events().first().map(|event| event.wait(PATIENCE)), Some(Ok(1)));
    if is_mapped {
        // Whether or not others reach the registers still, it is unmapped whole, and mapped anew.
        check!(unmap(&space, REGISTERS, bar.len())?, bar.len());
        check!(maps_registers(&space, &bar, REGISTERS)?);
        check!(unmap(&space, REGISTERS, bar.len())?, bar.len());
    }
    Ok(Outcome::Passed)
}

fn until(condition: impl Fn() -> bool) -> Result<()> {
    let begin = Instant::now();
    while !condition() {
        if begin.elapsed() > LONG {
            return Err("the controller does not answer".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Where the queues are, and the registers of the other device.
const QUEUES: u64 = 0x1_0000_0000;
const REGISTERS: u64 = 0x1_4000_0000;

/// An NVMe controller with nothing but its first queues.
struct Controller {
    bar: Bar,
    memory: Arc<Memory>,
    tail: u32,
}

impl Controller {
    fn start(space: &VfioSpace, device: &VfioDevice) -> Result<Self> {
        let bar = device.bar(0)?;
        let memory = Arc::new(Memory::new(MemoryKind::Base, 2 * page())?);
        space.map(&memory, memory.user_range(), Iova::new(QUEUES), Prot::READ_WRITE)?;
        bar.write32(nvme::CC, 0);
        until(|| bar.read32(nvme::CSTS) & 1 == 0)?;
        bar.write32(nvme::AQA, 0xf_000f);
        bar.write64(nvme::ASQ, QUEUES);
        bar.write64(nvme::ACQ, QUEUES + page());
        device.set_bus_master(BusMaster::On)?;
        bar.write32(nvme::CC, 6 << 16 | 4 << 20 | 1);
        until(|| bar.read32(nvme::CSTS) & 1 == 1)?;
        Ok(Self { bar, memory, tail: 0 })
    }

    /// Has the controller write what it says of itself, 4 KiB, to an IOVA.
    fn identify(&mut self, iova: u64) -> Result<()> {
        let mut words = [0; 8];
        (words[0], words[3], words[5]) = (6 | u64::from(self.tail) << 16, iova, 1);
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        self.memory.write(u64::from(self.tail) * 64, &bytes)?;
        let completion = page() + u64::from(self.tail) * 16 + 12;
        self.tail += 1;
        self.bar.write32(nvme::DOORBELL, self.tail);
        until(|| {
            let mut status = [0; 4];
            self.memory.read(completion, &mut status).is_ok() && status[2] & 1 == 1
        })
    }
}

/// How the serial number begins that the controller says, at byte 4.
const SERIAL: [u8; 4] = *b"vfnv";

fn peers(context: &Context) -> Result {
    let (space, device) = open(context, &context.device)?;
    let peer = space.attach(PEER.parse()?)?;
    let bar = peer.bar(2)?;
    check!(leaf_aligned(&bar)?);
    let len = bar.len();
    // A BAR that is smaller than a page is mapped for the process and for nobody else, if at all:
    // with pages of 16K it may share one.
    match peer.bar(0) {
        Ok(small) => {
            let read = [256, 8].map(|at| small.read32(at) == u32::MAX);
            check!((small.len(), read), (256, [true, false]));
            let result = map_bar(&space, &small, 0..256, REGISTERS);
            check!(matches!(result, Err(Error::Misaligned { .. })));
        }
        Err(DeviceError::NotMappable { .. }) => check!(page() > 4096),
        Err(error) => return Err(error.into()),
    }
    let bdf = peer.bdf();
    check!(peer.reset(), Err(DeviceError::NoReset { bdf }));
    if !maps_registers(&space, &bar, REGISTERS)? {
        return no_registers(context);
    }
    let backwards = Range { start: 2 * page(), end: page() };
    for refused in [0..0, len - page()..len + page(), len..len + page(), backwards, 0..u64::MAX] {
        let result = map_bar(&space, &bar, refused, REGISTERS + len);
        check!(matches!(result, Err(Error::OutsideBar { .. })));
    }
    let misaligned = map_bar(&space, &bar, 8..page() + 8, REGISTERS + len);
    check!(matches!(misaligned, Err(Error::Misaligned { .. })));
    let overlap = map_bar(&space, &bar, 0..page(), REGISTERS + len - page());
    check!(matches!(overlap, Err(Error::Overlap { .. })));
    check!(space.requests().maps, 1);
    if let VfioSpace::Ioas(ioas) = &space
        && let Err(error) = ioas.reattach(&device)
    {
        check!(matches!(error, OpenError::BarMapped { .. }), true);
        println!("{error}");
    }
    let msix = device.enable_msix(1)?;
    let mut controller = Controller::start(&space, &device)?;
    let at = len - 2 * page();
    bar.write64(at, 0);
    controller.identify(REGISTERS + at)?;
    check!(bar.read32(at + 4).to_le_bytes(), SERIAL);
    check!(msix.events().first().map(|event| event.wait(PATIENCE)), Some(Ok(1)));
    check!(unmap(&space, REGISTERS, len)?, len);
    bar.write64(at, 0);
    // The command ends, and the data go nowhere.
    controller.identify(REGISTERS + at)?;
    check!(bar.read32(at + 4), 0);
    // A part, elsewhere, whose device and BAR are held by the mapping alone.
    map_bar(&space, &bar, at..len, REGISTERS)?;
    let other = peer.bar(2)?;
    drop((peer, bar));
    controller.identify(REGISTERS + page())?;
    check!(other.read32(at + page() + 4).to_le_bytes(), SERIAL);
    drop(other);
    controller.identify(REGISTERS)?;
    device.set_bus_master(BusMaster::Off)?;
    Ok(Outcome::Passed)
}

fn attached_later(context: &Context) -> Result {
    let (space, peer) = open(context, PEER)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 2 << 20)?);
    space.map(&memory, memory.user_range(), Iova::new(REGISTERS), Prot::READ_WRITE)?;
    let mut serial = [0; 4];
    // Twice: the device leaves the space and comes back, and the other one goes.
    for (at, peer) in [(0x1_0000, None), (0x2_3000, Some(peer))] {
        let device = space.attach(context.device.parse()?)?;
        let mut controller = Controller::start(&space, &device)?;
        drop(peer);
        controller.identify(REGISTERS + at)?;
        memory.read(at + 4, &mut serial)?;
        check!(serial, SERIAL);
        check!(unmap(&space, QUEUES, 2 * page())?, 2 * page());
    }
    check!(space.unmap_all()?, 2 << 20);
    Ok(Outcome::Passed)
}

/// What it means that registers are not mapped: type 1 always maps them.
fn no_registers(context: &Context) -> Result {
    match context.backend {
        Backend::Vfio => Err("type 1 does not map registers".into()),
        Backend::Iommufd => Ok(Outcome::Skipped("the kernel gives out no dma-buf".to_owned())),
        Backend::Compat | Backend::NoIommu => {
            Ok(Outcome::Skipped("iommufd maps no registers here".to_owned()))
        }
    }
}

fn large_bar(context: &Context) -> Result {
    if driver(LARGE).as_deref() != Some("vfio-pci") {
        return Ok(Outcome::Skipped(format!("{LARGE} is not bound to vfio-pci")));
    }
    let (space, device) = open(context, LARGE)?;
    let bdf = device.bdf();
    check!(device.bar(1).err(), Some(DeviceError::IoPorts { bdf, index: 1 }));
    let begin = Instant::now();
    let bar = device.bar(2)?;
    check!(leaf_aligned(&bar)?);
    let opened = begin.elapsed();
    let len = bar.len();
    // There is nothing behind it; it is reached all the same.
    bar.write32(len - 4, 1);
    bar.read32(len - 4);
    check!(bar.read32(len), u32::MAX);
    let begin = Instant::now();
    if !maps_registers(&space, &bar, REGISTERS)? {
        return no_registers(context);
    }
    let mapped = begin.elapsed();
    let begin = Instant::now();
    check!(unmap(&space, REGISTERS, len)?, len);
    let unmapped = begin.elapsed();
    println!(
        "a BAR of {} MiB: had in {opened:?}, mapped in {mapped:?}, unmapped in {unmapped:?}",
        len >> 20
    );
    Ok(Outcome::Passed)
}
