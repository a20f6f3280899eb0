//! A server of a virtual disk, as vfio-user has them: the client sends files with its memory, and
//! the disk reads and writes there.
//!
//! The disk holds what a request names, over as many regions as it lies in; blocks go from the
//! file to the client's memory without a copy; a queue is held for long; `DMA_UNMAP` is answered
//! when the last holder is gone, while other requests are served; memory without a file is reached
//! by asking the client. The files are memfds, and the messages go over a channel instead of a
//! socket.
//!
//! Glue: 31 lines; unsafe: 0 blocks, 0 impls.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dmaspan::regbuf::RemoteMemory;
use dmaspan::{Errno, Iova, Prot};
use dmaspan_linux::client::{self, ClientMemory, ClientRegions};
use dmaspan_linux::{Memory, MemoryKind};

const MIB: u64 = 1 << 20;
/// Where the client has its memory.
const RAM: u64 = 0x4000_0000;
/// Where it has memory of which it sends no file.
const ROM: u64 = RAM + 2 * MIB;

enum Request {
    DmaMap {
        file: Option<(OwnedFd, u64)>,
        address: u64,
        size: u64,
        access: Prot,
    },
    DmaUnmap {
        address: u64,
        size: u64,
    },
    /// Reads the disk.
    Read {
        disk_offset: u64,
        address: u64,
        size: u64,
    },
    /// The device keeps a queue here until it is told otherwise.
    Queue(Option<u64>),
}

type Answer = Result<u64, String>;
type Message = (Request, Sender<Answer>);

// ANCHOR: glue
struct Server {
    regions: ClientRegions,
    disk: File,
    queue: Option<ClientMemory>,
}

impl Server {
    fn map(&self, request: Request) -> Result<u64, Box<dyn Error>> {
        let Request::DmaMap { file, address, size, access } = request else { return Ok(0) };
        let at = Iova::new(address);
        let region = match file {
            Some((fd, offset)) => {
                let memory = client::map_file(fd, offset, size, access)?;
                self.regions.insert(at, access, memory)?
            }
            None => self.regions.insert_remote(at, size, access, Arc::new(Asked::default()))?,
        };
        Ok(region.len())
    }

    /// Answers when nothing holds the memory any more, and serves others until then.
    fn unmap(&self, at: u64, len: u64, answer: Sender<Answer>) -> Result<(), Box<dyn Error>> {
        let unmapping = self.regions.unmap(Iova::new(at), len)?;
        thread::spawn(move || {
            let gone = client::wait(unmapping, Duration::from_secs(60));
            answer.send(gone.map_err(|error| error.to_string()))
        });
        Ok(())
    }

    fn read(&self, disk_offset: u64, address: u64, len: u64) -> Result<u64, Box<dyn Error>> {
        let held = self.regions.hold(Iova::new(address), len, Prot::WRITE)?;
        Ok(client::read_file(&held, 0..len, &self.disk, disk_offset)?)
    }
}
// ANCHOR_END: glue

impl Server {
    fn serve(mut self, requests: &Receiver<Message>) {
        for (request, answer) in requests {
            let done = match request {
                Request::DmaMap { .. } => self.map(request),
                Request::DmaUnmap { address, size } => {
                    match self.unmap(address, size, answer.clone()) {
                        Ok(()) => continue,
                        Err(error) => Err(error),
                    }
                }
                Request::Read { disk_offset, address, size } => {
                    self.read(disk_offset, address, size)
                }
                Request::Queue(at) => self.set_queue(at),
            };
            let _ = answer.send(done.map_err(|error| error.to_string()));
        }
    }

    fn set_queue(&mut self, at: Option<u64>) -> Result<u64, Box<dyn Error>> {
        // Whatever was done to the memory meanwhile: it is the device's until here.
        if let Some(queue) = self.queue.take() {
            queue.write(0, b"the queue is empty")?;
        }
        let hold = |at| self.regions.hold(Iova::new(at), 0x1000, Prot::READ_WRITE);
        self.queue = at.map(hold).transpose()?;
        Ok(0)
    }
}

/// Memory of the client that is reached by messages, which are a lock here.
#[derive(Default)]
struct Asked(Mutex<Vec<u8>>);

impl RemoteMemory for Asked {
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::EACCES)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        println!("the client is asked to write {} bytes at {offset:#x}", bytes.len());
        self.0.lock().map_err(|_| Errno::EIO)?.extend(bytes);
        Ok(())
    }
}

/// The client's end.
struct Client(Sender<Message>);

impl Client {
    fn send(&self, request: Request) -> Result<Receiver<Answer>, Box<dyn Error>> {
        let (answer, answered) = mpsc::channel();
        self.0.send((request, answer)).map_err(|_| "the server is gone")?;
        Ok(answered)
    }

    fn ask(&self, request: Request) -> Result<u64, Box<dyn Error>> {
        Ok(self.send(request)?.recv()??)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let contents: Vec<u8> = (0..16 << 10).map(|n: u32| ((n * 7) >> 4) as u8).collect();
    let path = std::env::temp_dir().join(format!("dmaspan-disk-{}", std::process::id()));
    File::create_new(&path)?.write_all(&contents)?;
    let disk = File::open(&path)?;
    std::fs::remove_file(&path)?;
    let (requests, queue) = mpsc::channel();
    let server = Server { regions: ClientRegions::new(), disk, queue: None };
    let server = thread::spawn(move || server.serve(&queue));
    let client = Client(requests);

    // Two files side by side, and memory without one.
    let access = Prot::READ_WRITE;
    let ram = [0, 1].map(|_| Memory::new(MemoryKind::Memfd, MIB));
    let ram = ram.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (address, memory) in [RAM, RAM + MIB].into_iter().zip(&ram) {
        let (fd, offset) = memory.file().ok_or("a memfd has a file")?;
        let file = Some((fd.try_clone_to_owned()?, offset));
        client.ask(Request::DmaMap { file, address, size: MIB, access })?;
    }
    client.ask(Request::DmaMap { file: None, address: ROM, size: MIB, access: Prot::WRITE })?;

    // A read over both files, and one that ends where there is none.
    let read = |address| Request::Read { disk_offset: 0x1000, address, size: 0x2000 };
    println!("read {:#x} bytes", client.ask(read(RAM + MIB - 0x1800))?);
    let mut bytes = vec![0; 0x2000];
    let (first, second) = bytes.split_at_mut(0x1800);
    ram[0].read(MIB - 0x1800, first)?;
    ram[1].read(0, second)?;
    println!("they are the disk's: {}", bytes == contents[0x1000..0x3000]);
    println!("read {:#x} bytes", client.ask(read(ROM - 0x1000))?);
    println!("refused: {}", client.ask(read(ROM + MIB - 0x1000)).unwrap_err());

    // The device has its queue in memory that the client takes back.
    client.ask(Request::Queue(Some(RAM)))?;
    let cut = client.ask(Request::DmaUnmap { address: RAM, size: 0x1000 });
    println!("refused: {}", cut.unwrap_err());
    let unmapped = client.send(Request::DmaUnmap { address: RAM, size: MIB })?;
    println!("refused: {}", client.ask(read(RAM)).unwrap_err());
    println!("answered: {}", unmapped.try_recv() != Err(TryRecvError::Empty));
    client.ask(Request::Queue(None))?;
    println!("answered: {:#x} bytes", unmapped.recv()??);
    let mut word = [0; 18];
    ram[0].read(0, &mut word)?;
    println!("the client finds: {}", str::from_utf8(&word)?);
    drop(client);
    server.join().map_err(|_| "the server panicked")?;
    Ok(())
}
