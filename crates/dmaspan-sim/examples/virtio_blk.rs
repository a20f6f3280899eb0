//! Somebody else's driver under the sanitizer: the block driver of the crate `virtio-drivers`. It
//! knows nothing of dmaspan. It asks a `Hal` for memory and for addresses, and the `Hal` here tells
//! the sanitizer what it does, by events. So does the device, which is made of a few lines, too.
//!
//! The driver runs as it should, and then once for each of four bugs, one of the device, two of the
//! `Hal` and one of whoever uses the driver.
//!
//! ```text
//! cargo run -p dmaspan-sim --example virtio_blk
//! ```

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr::NonNull;

use dmaspan::iommu::{Invalidation, Scope, Tables};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_sim::sanitizer::Sanitizer;
use dmaspan_sim::walker::Access;
use virtio_drivers::device::blk::{BlkReq, BlkResp, SECTOR_SIZE, VirtIOBlk};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Error, Hal, PAGE_SIZE, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    Nothing,
    /// The device writes a sector once more when the driver has it back.
    WritesTwice,
    /// The device writes a byte more than it was given.
    WritesPast,
    /// The `Hal` gives buffers back without a flush.
    KeepsTranslations,
    /// A read is begun, and never completed.
    ForgetsRead,
}

/// IOVAs that the `Hal` gives to one buffer after the other.
const ROOM: u64 = 0x1_0000;

/// The platform of the driver: which IOVAs lead to which memory.
struct Machine {
    sanitizer: Sanitizer,
    bug: Bug,
    mapped: BTreeMap<u64, NonNull<[u8]>>,
    next: u64,
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// The functions of a `Hal` have no `self`.
fn machine<R>(run: impl FnOnce(&mut Machine) -> R) -> R {
    MACHINE.with_borrow_mut(|machine| run(machine.as_mut().expect("it was started")))
}

fn bytes(memory: NonNull<[u8]>) -> u64 {
    u64::try_from(memory.len()).expect("usize has 64 bits")
}

/// Of this process, whose addresses stand in for physical ones.
fn span(memory: NonNull<[u8]>) -> Span {
    let start = u64::try_from(memory.addr().get()).expect("usize has 64 bits");
    Span::new(PhysAddr::new(start), bytes(memory)).expect("it is memory")
}

fn range(iova: u64, memory: NonNull<[u8]>) -> IovaRange {
    IovaRange::from_len(Iova::new(iova), bytes(memory)).expect("it is mapped")
}

impl Machine {
    #[track_caller]
    fn map(&mut self, memory: NonNull<[u8]>, direction: BufferDirection) -> u64 {
        // The offset in a page stays the same, as behind an IOMMU.
        let offset = span(memory).paddr().get() % u64::try_from(PAGE_SIZE).expect("it fits");
        self.next += ROOM;
        let iova = self.next + offset;
        self.mapped.insert(iova, memory);
        let prot = match direction {
            BufferDirection::DriverToDevice => Prot::READ,
            BufferDirection::DeviceToDriver => Prot::WRITE,
            BufferDirection::Both => Prot::READ_WRITE,
        };
        self.sanitizer.on_map(range(iova, memory), &[span(memory)], prot);
        iova
    }

    #[track_caller]
    fn unmap(&mut self, iova: u64) {
        let memory = self.mapped.remove(&iova).expect("it is mapped");
        let iovas = range(iova, memory);
        self.sanitizer.on_unmap(iovas, Tables::Kept);
        if self.bug != Bug::KeepsTranslations {
            let scope = Scope::Ranges(&[iovas]);
            let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
            self.sanitizer.on_invalidate(&what);
        }
        self.sanitizer.on_free(span(memory));
    }

    /// An access of the device: the memory, or nothing where there is a fault.
    #[track_caller]
    fn dma(&self, iova: u64, len: u64, access: Access) -> Option<NonNull<u8>> {
        self.sanitizer.named("device").on_dma(Iova::new(iova), len, access);
        let (start, memory) = self.mapped.range(..=iova).next_back()?;
        let fits = iova - start + len <= bytes(*memory);
        let offset = usize::try_from(iova - start).ok()?;
        #[expect(unsafe_code, reason = "a device reaches memory by its address")]
        // SAFETY: it is in the memory, or right behind it where there is nothing to access.
        fits.then(|| unsafe { memory.cast::<u8>().add(offset) })
    }

    #[track_caller]
    fn read<const N: usize>(&self, iova: u64) -> [u8; N] {
        let mut buf = [0; N];
        if let Some(memory) = self.dma(iova, N as u64, Access::Read) {
            #[expect(unsafe_code, reason = "a device reaches memory by its address")]
            // SAFETY: the driver lets the device read so many bytes, and waits.
            unsafe {
                memory.copy_to_nonoverlapping(NonNull::from(&mut buf).cast(), N)
            };
        }
        buf
    }

    #[track_caller]
    fn write(&self, iova: u64, buf: &[u8]) {
        if let Some(memory) = self.dma(iova, buf.len() as u64, Access::Write) {
            #[expect(unsafe_code, reason = "a device reaches memory by its address")]
            // SAFETY: the driver lets the device write so many bytes, and waits.
            unsafe {
                memory.copy_from_nonoverlapping(NonNull::from(buf).cast(), buf.len())
            };
        }
    }
}

struct Checked;

#[expect(unsafe_code, reason = "the promise of a `Hal`")]
// SAFETY: memory is zeroed, aligned to pages, and nobody else's until it is given back.
unsafe impl Hal for Checked {
    fn dma_alloc(pages: usize, direction: BufferDirection) -> (u64, NonNull<u8>) {
        let layout = layout(pages);
        // SAFETY: it has a size.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("there is memory");
        let slice = NonNull::slice_from_raw_parts(memory, layout.size());
        (machine(|machine| machine.map(slice, direction)), memory)
    }

    unsafe fn dma_dealloc(paddr: u64, vaddr: NonNull<u8>, pages: usize) -> i32 {
        machine(|machine| machine.unmap(paddr));
        // SAFETY: it is of `dma_alloc`, as the driver promises.
        unsafe { dealloc(vaddr.as_ptr(), layout(pages)) };
        0
    }

    unsafe fn mmio_phys_to_virt(_paddr: u64, _size: usize) -> NonNull<u8> {
        unreachable!("there are no registers")
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> u64 {
        machine(|machine| machine.map(buffer, direction))
    }

    unsafe fn unshare(paddr: u64, _buffer: NonNull<[u8]>, _direction: BufferDirection) {
        machine(|machine| machine.unmap(paddr));
    }
}

fn layout(pages: usize) -> Layout {
    Layout::from_size_align(pages * PAGE_SIZE, PAGE_SIZE).expect("it is no more than there is")
}

/// The device: a disk of which each sector is full of its own number.
#[derive(Default)]
struct Disk {
    status: DeviceStatus,
    /// The addresses of descriptors, of what is available, and of what was used.
    queue: [u64; 3],
    size: u16,
    done: u16,
    last: Option<(u64, u8)>,
}

impl Disk {
    /// Does what is available.
    fn work(&mut self, machine: &Machine) {
        let [_, available, used] = self.queue;
        if let Some((data, byte)) = self.last.filter(|_| machine.bug == Bug::WritesTwice) {
            machine.write(data, &[byte; SECTOR_SIZE]);
        }
        while self.done != u16::from_le_bytes(machine.read(available + 2)) {
            let slot = u64::from(self.done % self.size);
            let head = u16::from_le_bytes(machine.read(available + 4 + 2 * slot));
            let written = self.request(machine, head);
            let element = [u32::from(head).to_le_bytes(), written.to_le_bytes()];
            machine.write(used + 4 + 8 * slot, element.as_flattened());
            self.done = self.done.wrapping_add(1);
            machine.write(used + 2, &self.done.to_le_bytes());
        }
    }

    /// Reads a sector; the number of bytes written. The descriptors are the request, the data and
    /// the answer.
    fn request(&mut self, machine: &Machine, head: u16) -> u32 {
        let (request, data) = self.descriptor(machine, head);
        let (data, status) = self.descriptor(machine, data);
        let (status, _) = self.descriptor(machine, status);
        let [sector, ..] = machine.read::<8>(request + 8);
        let len = SECTOR_SIZE + usize::from(machine.bug == Bug::WritesPast);
        machine.write(data, &vec![sector; len]);
        machine.write(status, &[0]);
        self.last = Some((data, sector));
        513
    }

    /// The address of a descriptor, and the number of the next one.
    fn descriptor(&self, machine: &Machine, number: u16) -> (u64, u16) {
        let at = self.queue[0] + 16 * u64::from(number);
        let next = u16::from_le_bytes(machine.read(at + 14));
        (u64::from_le_bytes(machine.read(at)), next)
    }
}

impl Transport for Disk {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn read_device_features(&mut self) -> u64 {
        // VIRTIO_F_VERSION_1.
        1 << 32
    }

    fn write_driver_features(&mut self, _driver_features: u64) {}

    fn max_queue_size(&mut self, _queue: u16) -> u32 {
        16
    }

    fn notify(&mut self, _queue: u16) {
        machine(|machine| self.work(machine));
    }

    fn get_status(&self) -> DeviceStatus {
        self.status
    }

    fn set_status(&mut self, status: DeviceStatus) {
        self.status = status;
    }

    fn set_guest_page_size(&mut self, _guest_page_size: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(&mut self, _queue: u16, size: u32, table: u64, available: u64, used: u64) {
        self.queue = [table, available, used];
        self.size = u16::try_from(size).expect("it is no more than the most");
    }

    fn queue_unset(&mut self, _queue: u16) {
        self.queue = [0; 3];
    }

    fn queue_used(&mut self, _queue: u16) -> bool {
        self.queue[0] != 0
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        0
    }

    fn read_config_space<T: FromBytes + IntoBytes>(&self, offset: usize) -> Result<T> {
        // The capacity comes first.
        let config = 64u64.to_le_bytes();
        let field = config.get(offset..).ok_or(Error::ConfigSpaceTooSmall)?;
        T::read_from_prefix(field).map(|(field, _)| field).map_err(|_| Error::ConfigSpaceTooSmall)
    }

    fn write_config_space<T: IntoBytes + Immutable>(&mut self, _at: usize, _value: T) -> Result {
        Err(Error::Unsupported)
    }
}

/// In one page, so that what lies behind the first one is mapped, too.
#[repr(align(4096))]
struct Sectors([[u8; SECTOR_SIZE]; 2]);

/// Reads two sectors with a bug; gives what was read and the sanitizer.
fn run(bug: Bug) -> Result<([u8; 2], Sanitizer)> {
    let sanitizer = Sanitizer::default();
    let hal = sanitizer.named("hal");
    let started = Machine { sanitizer: hal, bug, mapped: BTreeMap::new(), next: 0 };
    MACHINE.set(Some(started));
    let mut disk = VirtIOBlk::<Checked, Disk>::new(Disk::default())?;
    let mut sectors = Sectors([[0; SECTOR_SIZE]; 2]);
    if bug == Bug::ForgetsRead {
        forget_read(&mut disk)?;
    } else {
        for (number, sector) in sectors.0.iter_mut().enumerate() {
            disk.read_blocks(7 + number, sector)?;
        }
    }
    drop(disk);
    sanitizer.finish();
    Ok((sectors.0.map(|sector| sector[SECTOR_SIZE - 1]), sanitizer))
}

fn forget_read(disk: &mut VirtIOBlk<Checked, Disk>) -> Result {
    let buffers: &mut (BlkReq, [u8; SECTOR_SIZE], BlkResp) =
        Box::leak(Box::new((BlkReq::default(), [0; SECTOR_SIZE], BlkResp::default())));
    let (request, sector, response) = buffers;
    #[expect(unsafe_code, reason = "the device has them until the request is completed")]
    // SAFETY: nobody else ever uses them.
    let _token = unsafe { disk.read_blocks_nb(7, request, sector, response) }?;
    Ok(())
}

const BUGS: [Bug; 5] =
    [Bug::Nothing, Bug::WritesTwice, Bug::WritesPast, Bug::KeepsTranslations, Bug::ForgetsRead];

fn main() -> Result {
    for bug in BUGS {
        let (_, sanitizer) = run(bug)?;
        println!("== {bug:?}\n{sanitizer}\n");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The titles of what was found, each once.
    fn titles(sanitizer: &Sanitizer) -> Vec<String> {
        let report = sanitizer.to_string();
        let mut titles: Vec<_> = report
            .lines()
            .filter(|line| line.starts_with("ERROR: ") || line.starts_with("ADVICE: "))
            .map(str::to_owned)
            .collect();
        titles.dedup();
        titles
    }

    #[test]
    fn a_driver_that_is_not_ours_is_right_and_each_bug_around_it_is_found() {
        let expected: [&[&str]; 5] = [
            &[],
            &["ERROR: use after flush"],
            &["ERROR: DMA beside a buffer"],
            &["ERROR: late flush"],
            &["ERROR: leak"],
        ];
        for (bug, expected) in BUGS.into_iter().zip(expected) {
            let (read, sanitizer) = run(bug).unwrap();
            assert_eq!(titles(&sanitizer), expected, "{bug:?}\n{sanitizer}");
            assert!(bug != Bug::Nothing || read == [7, 8]);
            for record in sanitizer.findings().iter().flat_map(|finding| &finding.history) {
                assert_eq!(record.origin.location.file(), file!(), "{record}");
            }
        }
    }
}
