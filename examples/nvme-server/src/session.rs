//! The requests of a client, one after the other.

use std::fmt;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::Errno;
use dmaspan_linux::client::{ClientDescriptor, ClientDescriptors, EventError};
use dmaspan_vfio_user::ClientDma;
use vfio_user::{DmaMapFlags, DmaUnmapFlags};

use crate::bytes::{put, u16_at, u32_at, u64_at};
use crate::config::{CONFIG_BYTES, Config};
use crate::controller::{BAR_BYTES, Busy, Controller, Counts, VECTORS};
use crate::disk::Disk;
use crate::memory::GuestMemory;
use crate::wire::{self, MAX_DATA, MAX_FDS, Message, WireError};

/// How long an unmap, a reset or the end of bus mastering waits for commands: less than QEMU waits
/// for an answer, 5 s.
const BOUND: Duration = Duration::from_secs(4);
/// How long a client may take to read an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Numbers of regions and of kinds of interrupts (`linux/vfio.h`), and how many there are.
const BAR0: u32 = 0;
const CONFIG: u32 = 7;
const REGIONS: u32 = 9;
const MSI_X: u32 = 2;
const INTERRUPTS: u32 = 5;
/// `VFIO_DMA_UNMAP_FLAG_ALL`.
const UNMAP_ALL: u32 = 1 << 1;
/// Of `VFIO_DEVICE_SET_IRQS`: no data, booleans, eventfds; and what is done to them.
const DATA_NONE: u32 = 1;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_TRIGGER: u32 = 1 << 5;

/// Too many open files.
const EMFILE: Errno = Errno::from_raw(24);

/// What happened in a session.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Requests that the client sent.
    pub requests: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// The first of those, and why.
    pub first_refusal: Option<String>,
    /// The most regions that the client had at once.
    pub most_regions: usize,
    /// Unmaps that were answered.
    pub unmaps: u64,
    /// The longest time that one of them took.
    pub longest_unmap: Duration,
    /// Commands of the guest.
    pub counts: Counts,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, refused, most_regions, unmaps, longest_unmap, counts, .. } = self;
        write!(
            f,
            "{requests} requests, {refused} refused; {most_regions} regions at most; {unmaps} \
             unmaps, the longest {} us; {} commands, {} failed",
            longest_unmap.as_micros(),
            counts.commands,
            counts.failed
        )?;
        match &self.first_refusal {
            Some(refusal) => write!(f, "; refused first: {refusal}"),
            None => Ok(()),
        }
    }
}

/// A client's device: its registers, its memory, and the controller.
#[derive(Debug)]
pub struct Session {
    controller: Controller,
    dma: Arc<GuestMemory>,
    fds: ClientDescriptors,
    config: Config,
    report: Report,
}

/// The reason why a request was refused.
#[derive(Debug)]
struct Refused {
    errno: Errno,
    why: String,
}

impl From<Busy> for Refused {
    fn from(Busy: Busy) -> Self {
        refused(Errno::EBUSY, "a command does not end")
    }
}

fn refused(errno: Errno, why: impl Into<String>) -> Refused {
    Refused { errno, why: why.into() }
}

type Answer = Result<Vec<u8>, Refused>;

impl Session {
    /// A session of a new client, whose memory will be in `dma` and whose guest gets `disk`, with
    /// up to `threads` commands at once.
    ///
    /// # Errors
    ///
    /// Of a thread that cannot be started.
    pub fn new(disk: Disk, dma: impl Into<GuestMemory>, threads: usize) -> std::io::Result<Self> {
        let dma = Arc::new(dma.into());
        let controller = Controller::new(Arc::clone(&dma), disk, threads)?;
        let (fds, config, report) =
            (ClientDescriptors::default(), Config::new(), Report::default());
        Ok(Self { controller, dma, fds, config, report })
    }

    /// Answers a client until it ends, and forgets its memory. The socket is shut down then; it is
    /// closed as a [`ClientDescriptor`], since descriptors may lie in it that were not received.
    ///
    /// # Errors
    ///
    /// [`WireError`], with the report.
    pub fn serve(self, socket: &UnixStream) -> (Report, Result<(), WireError>) {
        self.serve_beside(socket, &|| ())
    }

    /// The same; `idle` is called every few seconds in which the client sends nothing.
    ///
    /// # Errors
    ///
    /// As of [`serve`](Self::serve).
    pub fn serve_beside(
        mut self,
        socket: &UnixStream,
        idle: &dyn Fn(),
    ) -> (Report, Result<(), WireError>) {
        let ended = self.answer_all(socket, idle);
        let _ = socket.shutdown(Shutdown::Both);
        // The client is gone, and nobody is told how that ends.
        let _ = self.controller.reset(BOUND);
        let _ = self.dma.unmap(DmaUnmapFlags::UNMAP_ALL, 0, 0, BOUND);
        self.report.counts = self.controller.counts();
        (self.report, ended)
    }

    fn answer_all(&mut self, socket: &UnixStream, idle: &dyn Fn()) -> Result<(), WireError> {
        socket.set_read_timeout(Some(BOUND))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        while let Some(message) = wire::receive(socket, &self.fds, idle)? {
            if let Some(answer) = self.answer(message) {
                wire::reply(socket, &answer)?;
            }
        }
        Ok(())
    }

    /// Does what a message asks for, and returns the bytes of the answer, if it is to have one.
    pub fn answer(&mut self, mut message: Message) -> Option<Vec<u8>> {
        // It would be an answer to a request, of which there are none.
        if !message.is_request() {
            return None;
        }
        self.report.requests += 1;
        let fds = std::mem::take(&mut message.fds);
        let done = match message.is_short_of_fds {
            true => Err(refused(EMFILE, "descriptors were lost: raise RLIMIT_NOFILE")),
            false => self.execute(&message, fds),
        };
        self.report.most_regions = self.report.most_regions.max(self.dma.regions());
        let done = done.map_err(|Refused { errno, why }| {
            self.report.refused += 1;
            let first = &mut self.report.first_refusal;
            first.get_or_insert_with(|| format!("command {}: {why}", message.command));
            errno
        });
        message.is_answered().then(|| message.answer(&done))
    }

    /// What becomes of descriptors that no request takes waits for nobody: they are dropped.
    fn execute(&mut self, message: &Message, fds: Vec<ClientDescriptor>) -> Answer {
        let body = message.body.as_slice();
        let done = match message.command {
            1 => version(body),
            2 => self.map(body, fds),
            3 => self.unmap(body),
            4 => info(body),
            5 => region_info(body),
            7 => interrupt_info(body),
            8 => self.set_interrupts(body, fds),
            9 => self.read(body),
            10 => self.write(body),
            13 => Some(self.reset().map(|()| Vec::new()).map_err(Refused::from)),
            _ => Some(Err(refused(Errno::EOPNOTSUPP, "this server does not know it"))),
        };
        let short = || refused(Errno::EINVAL, format!("{} bytes are too few", body.len()));
        done.ok_or_else(short)?
    }

    fn map(&self, body: &[u8], mut fds: Vec<ClientDescriptor>) -> Option<Answer> {
        let (flags, offset) = (u32_at(body, 4)?, u64_at(body, 8)?);
        let (address, size) = (u64_at(body, 16)?, u64_at(body, 24)?);
        if fds.len() > 1 {
            return Some(Err(refused(Errno::EINVAL, "a region has one file at most")));
        }
        let flags = DmaMapFlags::from_bits_retain(flags);
        let file = fds.pop().and_then(ClientDescriptor::into_memory);
        let mapped = self.dma.map(flags, offset, address, size, file);
        Some(match mapped {
            Ok(()) => Ok(Vec::new()),
            Err(error) => Err(refused(error.errno(), error.to_string())),
        })
    }

    /// Takes memory back, and answers when no command uses it any more. Commands do not wait for
    /// this thread, unless memory that they need is away: they give up earlier than this.
    fn unmap(&mut self, body: &[u8]) -> Option<Answer> {
        let (flags, address, size) = (u32_at(body, 4)?, u64_at(body, 8)?, u64_at(body, 16)?);
        let all = match flags {
            0 => DmaUnmapFlags::empty(),
            UNMAP_ALL => DmaUnmapFlags::UNMAP_ALL,
            _ => return Some(Err(refused(Errno::EINVAL, format!("unmap with flags {flags:#x}")))),
        };
        let begun = Instant::now();
        if let Err(error) = self.dma.unmap(all, address, size, BOUND) {
            return Some(Err(refused(error.errno(), error.to_string())));
        }
        self.report.unmaps += 1;
        self.report.longest_unmap = self.report.longest_unmap.max(begun.elapsed());
        Some(Ok(body.get(..24)?.to_vec()))
    }

    fn set_interrupts(&self, body: &[u8], fds: Vec<ClientDescriptor>) -> Option<Answer> {
        let (flags, index) = (u32_at(body, 4)?, u32_at(body, 8)?);
        let (start, count) = (u32_at(body, 12)?, u32_at(body, 16)?);
        let end = start.checked_add(count).filter(|end| *end <= u32::from(VECTORS));
        if index != MSI_X || end.is_none() || flags & ACTION_TRIGGER == 0 {
            let why = format!("interrupts {start}, {count} of them, of kind {index}");
            return Some(Err(refused(Errno::EINVAL, why)));
        }
        let (start, count) = (usize::try_from(start).ok()?, usize::try_from(count).ok()?);
        let eventfds = match flags & !ACTION_TRIGGER {
            DATA_NONE if count == 0 => {
                let none = (0..VECTORS).map(|_| None).collect();
                self.controller.set_vectors(0, none);
                return Some(Ok(Vec::new()));
            }
            DATA_EVENTFD if fds.is_empty() => (0..count).map(|_| None).collect(),
            DATA_EVENTFD if fds.len() == count => {
                match fds.into_iter().map(|fd| fd.into_event().map(Some)).collect() {
                    Ok(eventfds) => eventfds,
                    Err(error) => {
                        let error: EventError = error;
                        return Some(Err(refused(error.errno(), error.to_string())));
                    }
                }
            }
            _ => {
                let why = format!("interrupts with flags {flags:#x}, {} files", fds.len());
                return Some(Err(refused(Errno::EINVAL, why)));
            }
        };
        self.controller.set_vectors(start, eventfds);
        Some(Ok(Vec::new()))
    }

    fn read(&self, body: &[u8]) -> Option<Answer> {
        let Access { region, offset, count } = access(body)?;
        let mut answer = body.get(..16)?.to_vec();
        match region {
            BAR0 if in_bar(offset, count) => {
                let mut data = vec![0; count];
                self.controller.read(offset, &mut data);
                answer.extend(data);
            }
            CONFIG => match self.config.read(offset, count) {
                Some(data) => answer.extend(data),
                None => return Some(Err(outside(region, offset, count))),
            },
            _ => return Some(Err(outside(region, offset, count))),
        }
        Some(Ok(answer))
    }

    fn write(&mut self, body: &[u8]) -> Option<Answer> {
        let Access { region, offset, count } = access(body)?;
        let (head, data) = body.split_at_checked(16)?;
        if data.len() != count {
            let why = format!("{} bytes to write, of {count}", data.len());
            return Some(Err(refused(Errno::EINVAL, why)));
        }
        match region {
            BAR0 if in_bar(offset, count) => self.controller.write(offset, data),
            CONFIG => {
                let done = match self.config.write(offset, data) {
                    Some(false) => self.controller.set_mastering(self.config.mastering(), BOUND),
                    Some(true) => self.reset(),
                    None => return Some(Err(outside(region, offset, count))),
                };
                return Some(done.map(|()| head.to_vec()).map_err(Refused::from));
            }
            _ => return Some(Err(outside(region, offset, count))),
        }
        Some(Ok(head.to_vec()))
    }

    fn reset(&mut self) -> Result<(), Busy> {
        self.config = Config::new();
        self.controller.reset(BOUND)
    }
}

/// VERSION: this end's version is 0.1 or what is older of the client.
fn version(body: &[u8]) -> Option<Answer> {
    let (major, minor) = (u16_at(body, 0)?, u16_at(body, 2)?);
    if major != 0 {
        let why = format!("version {major}.{minor}, and this is 0.1");
        return Some(Err(refused(Errno::EINVAL, why)));
    }
    let mut answer = body.get(..2)?.to_vec();
    answer.extend(minor.min(1).to_le_bytes());
    let capabilities = format!(
        "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\"max_data_xfer_size\":{MAX_DATA},\
         \"max_dma_maps\":{},\"pgsizes\":4096}}}}\0",
        ClientDma::MOST
    );
    answer.extend(capabilities.into_bytes());
    Some(Ok(answer))
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn info(body: &[u8]) -> Option<Answer> {
    u32_at(body, 0)?;
    // A PCI function that can be reset.
    Some(Ok(words(&[16, 1 | 2, REGIONS, INTERRUPTS])))
}

fn region_info(body: &[u8]) -> Option<Answer> {
    let index = u32_at(body, 8)?;
    // Readable and writable.
    let (flags, len) = match index {
        BAR0 => (3, BAR_BYTES),
        CONFIG => (3, u64::try_from(CONFIG_BYTES).unwrap_or_default()),
        _ => (0, 0),
    };
    if index >= REGIONS {
        return Some(Err(refused(Errno::EINVAL, format!("there is no region {index}"))));
    }
    let mut answer = words(&[32, flags, index, 0, 0, 0, 0, 0]);
    put(&mut answer, 16, &len.to_le_bytes());
    Some(Ok(answer))
}

fn interrupt_info(body: &[u8]) -> Option<Answer> {
    let index = u32_at(body, 8)?;
    if index >= INTERRUPTS {
        return Some(Err(refused(Errno::EINVAL, format!("there are no interrupts {index}"))));
    }
    // By eventfds, all set at once.
    let (flags, count) = if index == MSI_X { (1 | 8, u32::from(VECTORS)) } else { (0, 0) };
    Some(Ok(words(&[16, flags, index, count])))
}

/// The part of a region that is read or written.
struct Access {
    region: u32,
    offset: u64,
    count: usize,
}

fn access(body: &[u8]) -> Option<Access> {
    let (offset, region) = (u64_at(body, 0)?, u32_at(body, 8)?);
    Some(Access { region, offset, count: usize::try_from(u32_at(body, 12)?).ok()? })
}

fn in_bar(offset: u64, count: usize) -> bool {
    let end = u64::try_from(count).ok().and_then(|count| offset.checked_add(count));
    end.is_some_and(|end| end <= BAR_BYTES)
}

fn outside(region: u32, offset: u64, count: usize) -> Refused {
    let why = format!("region {region} has not {count} bytes at {offset:#x}");
    refused(Errno::EINVAL, why)
}
