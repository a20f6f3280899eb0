//! As much of an NVMe driver as it takes to read a disk. Its queues and its data are in the memory
//! of a guest, so that the controller uses the addresses that the guest has for them.

use std::error::Error;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use vfio_ioctls::VfioDevice;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::MIB;

/// `VFIO_PCI_CONFIG_REGION_INDEX`, and what switches memory and DMA on in the command register.
const CONFIG: (u32, u64, [u8; 2]) = (7, 4, [6, 0]);
const DEPTH: u16 = 16;
const PAGE: u64 = 4096;

/// A pair of queues; its commands are done one after the other.
struct Queue {
    id: u16,
    at: u64,
    done: u16,
}

/// A controller.
pub(crate) struct Nvme<'d> {
    device: &'d VfioDevice,
    stride: u64,
    admin: Queue,
    io: Queue,
    /// The bytes of a block.
    pub(crate) block: u64,
}

impl<'d> Nvme<'d> {
    /// Starts it with queues in five pages of `guest` from `at` on.
    pub(crate) fn start(
        device: &'d VfioDevice,
        guest: &GuestMemoryMmap,
        at: u64,
    ) -> Result<Self, Box<dyn Error>> {
        device.region_write(CONFIG.0, &CONFIG.2, CONFIG.1);
        let [admin, io] = [(0, at), (1, at + 2 * PAGE)].map(|(id, at)| Queue { id, at, done: 0 });
        let mut this = Self { device, stride: 0, admin, io, block: 0 };
        this.stride = 4 << (this.read(4) & 0xf);
        this.write(0x14, 0);
        this.wait_ready(0)?;
        guest.write_slice(&[0; 5 * PAGE as usize], GuestAddress(at))?;
        let last = u32::from(DEPTH - 1);
        this.write(0x24, last << 16 | last);
        for (register, page) in [(0x28, at), (0x30, at + PAGE)] {
            this.write(register, page as u32);
            this.write(register + 4, (page >> 32) as u32);
        }
        this.write(0x14, 4 << 20 | 6 << 16 | 1);
        this.wait_ready(1)?;
        let (queue, data) = (this.io.at, at + 4 * PAGE);
        this.command(guest, 0, [5, 0, queue + PAGE, 0, u64::from(last << 16 | 1), 1])?;
        this.command(guest, 0, [1, 0, queue, 0, u64::from(last << 16 | 1), 1 << 16 | 1])?;
        // Of the namespace: which of its formats is used, and the size of its blocks.
        this.command(guest, 0, [6, 1, data, 0, 0, 0])?;
        let format: u8 = guest.read_obj(GuestAddress(data + 26))?;
        let lg2: u8 = guest.read_obj(GuestAddress(data + 128 + 4 * u64::from(format & 15) + 2))?;
        this.block = 1 << lg2;
        Ok(this)
    }

    /// Reads the first MiB of the disk to `at`, and compares it: each word holds where it is.
    pub(crate) fn check(&mut self, guest: &GuestMemoryMmap, at: u64) -> Result<(), Box<dyn Error>> {
        for byte in (0..MIB).step_by(2 * PAGE as usize) {
            self.read_pages(guest, byte, at + byte)?;
        }
        for byte in (0..MIB).step_by(8) {
            let word: u64 = guest.read_obj(GuestAddress(at + byte))?;
            if word & 0xffff_ffff != byte {
                return Err(format!("at {byte:#x} of the disk is {word:#x}").into());
            }
        }
        println!("1 MiB of the disk is at {at:#x}");
        Ok(())
    }

    /// Reads two pages from `byte` of the disk on, to `at`.
    fn read_pages(
        &mut self,
        guest: &GuestMemoryMmap,
        byte: u64,
        at: u64,
    ) -> Result<(), Box<dyn Error>> {
        let blocks = 2 * PAGE / self.block;
        self.command(guest, 1, [2, 1, at, at + PAGE, byte / self.block, blocks - 1])
    }

    /// Stops it, so that it uses no memory.
    pub(crate) fn stop(self) -> Result<(), Box<dyn Error>> {
        self.write(0x14, 0);
        self.wait_ready(0)
    }

    /// Opcode, namespace, two pages, a number of 64 bits and one of 32.
    fn command(
        &mut self,
        guest: &GuestMemoryMmap,
        queue: u16,
        [opcode, namespace, page, next, low, high]: [u64; 6],
    ) -> Result<(), Box<dyn Error>> {
        let Queue { id, at, done } = if queue == 0 { &mut self.admin } else { &mut self.io };
        let (id, at, slot) = (*id, *at, *done % DEPTH);
        let phase = u32::from((*done / DEPTH).is_multiple_of(2));
        *done += 1;
        let words = [opcode | namespace << 32, 0, 0, page, next];
        // An I/O command has its block in words 10 and 11; the others have two numbers there.
        let last = if id == 0 { [low | high << 32, 0, 0] } else { [low, high, 0] };
        let bytes: Vec<u8> =
            words.iter().chain(&last).flat_map(|word| word.to_le_bytes()).collect();
        guest.write_slice(&bytes, GuestAddress(at + 64 * u64::from(slot)))?;
        fence(Ordering::SeqCst);
        let doorbell = 0x1000 + 2 * u64::from(id) * self.stride;
        let next = u32::from((slot + 1) % DEPTH);
        self.write(doorbell, next);
        let entry = GuestAddress(at + PAGE + 16 * u64::from(slot) + 12);
        let status = wait(|| {
            let word: u32 = guest.read_obj(entry)?;
            Ok((word >> 16 & 1 == phase).then_some(word >> 17))
        })?;
        fence(Ordering::SeqCst);
        self.write(doorbell + self.stride, next);
        if status == 0 { Ok(()) } else { Err(format!("status {status:#x}").into()) }
    }

    fn wait_ready(&self, ready: u32) -> Result<(), Box<dyn Error>> {
        wait(|| Ok((self.read(0x1c) & 1 == ready).then_some(())))
    }

    fn read(&self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.region_read(0, &mut bytes, register);
        u32::from_le_bytes(bytes)
    }

    fn write(&self, register: u64, value: u32) {
        self.device.region_write(0, &value.to_le_bytes(), register);
    }
}

fn wait<T>(look: impl Fn() -> Result<Option<T>, Box<dyn Error>>) -> Result<T, Box<dyn Error>> {
    let end = Instant::now() + Duration::from_secs(30);
    while Instant::now() < end {
        if let Some(found) = look()? {
            return Ok(found);
        }
    }
    Err("the controller does not answer".into())
}
