//! Devices of virtio, made of a few lines: a disk, and a network card that gives back what it is
//! sent (virtio 1.3, 2.7, 5.1 and 5.2).
#![expect(clippy::cast_possible_truncation, reason = "numbers of these tests are small")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use dmaspan::io_pgtable::{Format, TableMemory};
use dmaspan::iommu::soft::SoftDevice;
use dmaspan::{Address, Iova};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::rig::Process;

pub(crate) const SECTOR: usize = 512;
const PAGE: u64 = 4096;
/// What the device writes where it may not, and what it looks for there.
const ATTACK: u8 = 0x66;
pub(crate) const SECRET: u8 = 7;

/// What a model reaches memory by; whether it does.
pub(crate) trait Dma: Send {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> bool;
    fn write(&mut self, at: u64, bytes: &[u8]) -> bool;
}

impl<F, M, A> Dma for SoftDevice<F, M, A>
where
    F: Format + 'static,
    M: TableMemory<F::Word> + 'static,
    A: Address,
    Self: Send,
{
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> bool {
        SoftDevice::read(self, &Process, Iova::new(at), bytes).is_ok()
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> bool {
        SoftDevice::write(self, &Process, Iova::new(at), bytes).is_ok()
    }
}

/// Bytes that a driver named.
#[derive(Clone, Copy, Debug)]
struct Part {
    addr: u64,
    len: u32,
    is_written: bool,
}

impl Part {
    fn has(&self, at: u64) -> bool {
        at.wrapping_sub(self.addr) < self.len.into()
    }
}

/// A queue.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    size: u16,
    descriptors: u64,
    driver: u64,
    device: u64,
    done: u16,
}

fn get<const N: usize>(dma: &mut dyn Dma, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    assert!(dma.read(at, &mut bytes), "the device cannot read {N} bytes at {at:#x}");
    bytes
}

impl Ring {
    /// The next chain that is available: its head, its parts, and tables that it is in.
    fn next(&self, dma: &mut dyn Dma) -> Option<(u16, Vec<Part>, Vec<Part>)> {
        if self.size == 0 || u16::from_le_bytes(get(dma, self.driver + 2)) == self.done {
            return None;
        }
        let slot = u64::from(self.done % self.size);
        let head = u16::from_le_bytes(get(dma, self.driver + 4 + 2 * slot));
        let (mut table, mut index) = (self.descriptors, head);
        let (mut parts, mut tables) = (Vec::new(), Vec::new());
        loop {
            let at = table + 16 * u64::from(index);
            let addr = u64::from_le_bytes(get(dma, at));
            let len = u32::from_le_bytes(get(dma, at + 8));
            let flags = u16::from_le_bytes(get(dma, at + 12));
            if flags & 4 != 0 {
                tables.push(Part { addr, len, is_written: false });
                (table, index) = (addr, 0);
                continue;
            }
            parts.push(Part { addr, len, is_written: flags & 2 != 0 });
            if flags & 1 == 0 {
                return Some((head, parts, tables));
            }
            index = u16::from_le_bytes(get(dma, at + 14));
        }
    }

    /// Gives a chain back.
    fn give_back(&mut self, dma: &mut dyn Dma, head: u16, written: u32) {
        let at = self.device + 4 + 8 * u64::from(self.done % self.size);
        let element = [u32::from(head).to_le_bytes(), written.to_le_bytes()].concat();
        self.done = self.done.wrapping_add(1);
        assert!(dma.write(at, &element) && dma.write(self.device + 2, &self.done.to_le_bytes()));
    }

    /// Whether an address shares its page with the queue.
    fn is_near(&self, at: u64) -> bool {
        let len = u64::from(self.size);
        let parts =
            [(self.descriptors, 16 * len), (self.driver, 6 + 2 * len), (self.device, 6 + 8 * len)];
        parts.iter().any(|&(start, len)| at >= start & !(PAGE - 1) && at < start + len + PAGE)
    }
}

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A disk that tries to reach what lies around the buffers that it is given.
    Disk,
    Network,
}

pub(crate) struct Model {
    kind: Kind,
    dma: Box<dyn Dma>,
    offered: u64,
    status: DeviceStatus,
    rings: [Ring; 2],
    config: [u8; 64],
    pub(crate) sectors: Vec<u8>,
    packets: VecDeque<Vec<u8>>,
    /// Where the last request had its data.
    last: Option<Part>,
    /// Bytes around buffers that the device reached, those that were a neighbour's, and those of
    /// buffers that it had given back.
    pub(crate) reached: u64,
    pub(crate) seen: u64,
    pub(crate) late: u64,
    pub(crate) requests: u64,
}

/// The first of the features of all devices, and the one that puts a device behind an IOMMU.
pub(crate) const INDIRECT: u64 = 1 << 28;
const VERSION_1: u64 = 1 << 32;
const ACCESS_PLATFORM: u64 = 1 << 33;
/// A card has an address and a status.
const MAC: u64 = 1 << 5;
const STATUS: u64 = 1 << 16;

/// A device, as its driver and its test have it.
#[derive(Clone)]
pub(crate) struct Handle(Arc<Mutex<Model>>);

impl Handle {
    pub(crate) fn new(kind: Kind, dma: impl Dma + 'static, features: u64) -> Self {
        let sectors: Vec<u8> = (0..64 * SECTOR).map(|n| (n / SECTOR + n) as u8 | 0x80).collect();
        let mut config = [0; 64];
        match kind {
            Kind::Disk => config[..8].copy_from_slice(&64u64.to_le_bytes()),
            Kind::Network => config[..8].copy_from_slice(&[2, 0, 0, 0, 0, 1, 1, 0]),
        }
        let more = if kind == Kind::Network { MAC | STATUS } else { 0 };
        let offered = VERSION_1 | ACCESS_PLATFORM | features | more;
        Self(Arc::new(Mutex::new(Model {
            kind,
            dma: Box::new(dma),
            offered,
            status: DeviceStatus::empty(),
            rings: [Ring::default(); 2],
            config,
            sectors,
            packets: VecDeque::new(),
            last: None,
            reached: 0,
            seen: 0,
            late: 0,
            requests: 0,
        })))
    }

    pub(crate) fn model(&self) -> MutexGuard<'_, Model> {
        self.0.lock().unwrap()
    }
}

impl Model {
    fn work(&mut self) {
        match self.kind {
            Kind::Disk => {
                while let Some((head, parts, tables)) = self.rings[0].next(&mut *self.dma) {
                    let written = self.request(&parts);
                    self.attack(&[&parts[..], &tables].concat());
                    self.rings[0].give_back(&mut *self.dma, head, written);
                }
            }
            Kind::Network => {
                while let Some((head, parts, _)) = self.rings[1].next(&mut *self.dma) {
                    let packet = self.gather(&parts);
                    self.packets.push_back(packet);
                    self.rings[1].give_back(&mut *self.dma, head, 0);
                }
                while let Some(packet) = self.packets.front().cloned() {
                    let Some((head, parts, _)) = self.rings[0].next(&mut *self.dma) else { break };
                    self.packets.pop_front();
                    let mut rest = &packet[..];
                    for part in parts.iter().filter(|part| part.is_written) {
                        let (now, then) = rest.split_at(rest.len().min(part.len as usize));
                        assert!(self.dma.write(part.addr, now));
                        rest = then;
                    }
                    self.rings[0].give_back(&mut *self.dma, head, packet.len() as u32);
                }
            }
        }
    }

    /// All that a chain lets the device read.
    fn gather(&mut self, parts: &[Part]) -> Vec<u8> {
        let mut all = Vec::new();
        for part in parts.iter().filter(|part| !part.is_written) {
            let mut bytes = vec![0; part.len as usize];
            assert!(self.dma.read(part.addr, &mut bytes));
            all.extend(bytes);
        }
        all
    }

    /// Reads or writes sectors; how many bytes were written to memory.
    fn request(&mut self, parts: &[Part]) -> u32 {
        self.requests += 1;
        // What it had before is not its any more, unless it was given the same again.
        let is_given = |last: &Part| parts.iter().any(|part| part.has(last.addr));
        if let Some(last) = self.last.take().filter(|last| !is_given(last)) {
            self.late += u64::from(self.dma.write(last.addr, &[ATTACK]));
        }
        let (header, rest) = parts.split_first().unwrap();
        let (answer, data) = rest.split_last().unwrap();
        let kind = u32::from_le_bytes(get(&mut *self.dma, header.addr));
        let mut at = u64::from_le_bytes(get(&mut *self.dma, header.addr + 8)) as usize * SECTOR;
        let mut written = 1;
        for part in data {
            let place = at..at + part.len as usize;
            at = place.end;
            match kind {
                0 => assert!(self.dma.write(part.addr, &self.sectors[place])),
                1 => assert!(self.dma.read(part.addr, &mut self.sectors[place])),
                other => panic!("a request of kind {other}"),
            }
            written += if kind == 0 { part.len } else { 0 };
        }
        self.last = data.first().copied();
        assert!(self.dma.write(answer.addr, &[0]));
        written
    }

    /// Reads and writes all that it reaches around what it was given, but for its queues.
    fn attack(&mut self, given: &[Part]) {
        for part in given {
            let around =
                part.addr.saturating_sub(2 * PAGE)..part.addr + u64::from(part.len) + 2 * PAGE;
            // Not at every byte, but often on each page.
            for at in around.step_by(29) {
                let is_its = given.iter().any(|part| part.has(at));
                if is_its || self.rings.iter().any(|ring| ring.is_near(at)) {
                    continue;
                }
                let mut byte = [0];
                if self.dma.read(at, &mut byte) {
                    self.reached += 1;
                    self.seen += u64::from(byte[0] == SECRET);
                }
                self.dma.write(at, &[ATTACK]);
            }
        }
    }
}

impl Transport for Handle {
    fn device_type(&self) -> DeviceType {
        match self.model().kind {
            Kind::Disk => DeviceType::Block,
            Kind::Network => DeviceType::Network,
        }
    }

    fn read_device_features(&mut self) -> u64 {
        self.model().offered
    }

    fn write_driver_features(&mut self, driver_features: u64) {
        assert!(driver_features & ACCESS_PLATFORM != 0, "the driver bypasses the IOMMU");
    }

    fn max_queue_size(&mut self, _: u16) -> u32 {
        64
    }

    fn notify(&mut self, _: u16) {
        self.model().work();
    }

    fn get_status(&self) -> DeviceStatus {
        self.model().status
    }

    fn set_status(&mut self, status: DeviceStatus) {
        self.model().status = status;
    }

    fn set_guest_page_size(&mut self, _: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(&mut self, queue: u16, size: u32, descriptors: u64, driver: u64, device: u64) {
        let ring = Ring { size: size as u16, descriptors, driver, device, done: 0 };
        self.model().rings[usize::from(queue)] = ring;
    }

    fn queue_unset(&mut self, queue: u16) {
        self.model().rings[usize::from(queue)] = Ring::default();
    }

    fn queue_used(&mut self, queue: u16) -> bool {
        self.model().rings[usize::from(queue)].size != 0
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        0
    }

    fn read_config_space<V: FromBytes + IntoBytes>(
        &self,
        offset: usize,
    ) -> virtio_drivers::Result<V> {
        let config = self.model().config;
        let (value, _) = V::read_from_prefix(&config[offset..]).expect("it is in there");
        Ok(value)
    }

    fn write_config_space<V: IntoBytes + Immutable>(
        &mut self,
        _: usize,
        _: V,
    ) -> virtio_drivers::Result<()> {
        Ok(())
    }
}
