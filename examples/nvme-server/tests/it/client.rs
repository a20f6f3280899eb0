//! The client's end of a socket, which writes messages byte by byte.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use dmaspan_nvme_server::{Disk, GuestMemory, Report, Session, WireError};
use dmaspan_vfio_user::ClientDma;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::judge::Judge;

pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const RESET: u16 = 13;
/// A request that is not answered.
pub(crate) const POSTED: u32 = 0x10;

/// A file in memory that cannot shrink.
pub(crate) fn memfd(len: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("guest", flags).unwrap());
    file.set_len(len).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

pub(crate) struct Client {
    pub(crate) socket: UnixStream,
    judge: Arc<Judge>,
    serving: JoinHandle<(Report, Result<(), WireError>)>,
    next: u16,
}

impl Client {
    /// A client whose server has the file as its disk.
    pub(crate) fn new(disk: &File, threads: usize) -> Self {
        let (socket, served) = UnixStream::pair().unwrap();
        let disk = Disk::new(disk.try_clone().unwrap()).unwrap();
        let judge = Arc::new(Judge::new());
        let memory = GuestMemory::from(ClientDma::default()).observed(judge.clone());
        let session = Session::new(disk, memory, threads).unwrap();
        Self { socket, judge, serving: thread::spawn(move || session.serve(&served)), next: 1 }
    }

    /// Sends a request and returns its number.
    pub(crate) fn send(
        &mut self,
        command: u16,
        flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> u16 {
        self.next = self.next.wrapping_add(1);
        let mut bytes = Vec::new();
        bytes.extend(self.next.to_le_bytes());
        bytes.extend(command.to_le_bytes());
        bytes.extend(u32::try_from(16 + body.len()).unwrap().to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let data = [IoSlice::new(&bytes)];
        let sent = sendmsg(&self.socket, &data, &mut control, SendFlags::NOSIGNAL).unwrap();
        self.socket.write_all(&bytes[sent..]).unwrap();
        self.next
    }

    /// The answer to a request, or its errno.
    pub(crate) fn answer(&mut self, id: u16) -> Result<Vec<u8>, u32> {
        let mut header = [0; 16];
        self.socket.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(word(0) & 0xffff, u32::from(id));
        let mut body = vec![0; word(4) as usize - 16];
        self.socket.read_exact(&mut body).unwrap();
        match word(8) {
            1 => Ok(body),
            0x21 => {
                assert!(body.is_empty() && word(12) != 0);
                Err(word(12))
            }
            flags => panic!("an answer with flags {flags:#x}"),
        }
    }

    pub(crate) fn ask(&mut self, command: u16, body: &[u8]) -> Result<Vec<u8>, u32> {
        let id = self.send(command, 0, body, &[]);
        self.answer(id)
    }

    /// DMA_MAP; the number of the request.
    pub(crate) fn map(
        &mut self,
        address: u64,
        len: u64,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> u16 {
        let mut body = Vec::new();
        body.extend(32_u32.to_le_bytes());
        body.extend(3_u32.to_le_bytes());
        for word in [file.map_or(0, |(_, offset)| offset), address, len] {
            body.extend(word.to_le_bytes());
        }
        let fds: Vec<_> = file.into_iter().map(|(fd, _)| fd).collect();
        self.send(DMA_MAP, 0, &body, &fds)
    }

    /// DMA_UNMAP; the number of the request.
    pub(crate) fn unmap(&mut self, address: u64, len: u64) -> u16 {
        let mut body = Vec::new();
        body.extend(24_u32.to_le_bytes());
        body.extend(0_u32.to_le_bytes());
        body.extend(address.to_le_bytes());
        body.extend(len.to_le_bytes());
        self.send(DMA_UNMAP, 0, &body, &[])
    }

    pub(crate) fn read(&mut self, region: u32, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        let answer = self.ask(REGION_READ, &access(region, offset, len))?;
        Ok(answer[16..].to_vec())
    }

    pub(crate) fn register(&mut self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(0, offset, 4).unwrap().try_into().unwrap())
    }

    /// Writes a register without an answer, as guests do.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        let mut body = access(0, offset, u32::try_from(data.len()).unwrap());
        body.extend(data);
        self.send(REGION_WRITE, POSTED, &body, &[]);
    }

    /// Writes configuration space.
    pub(crate) fn configure(&mut self, offset: u64, data: &[u8]) {
        let mut body = access(7, offset, u32::try_from(data.len()).unwrap());
        body.extend(data);
        self.ask(REGION_WRITE, &body).unwrap();
    }

    /// Ends, and returns what the server says.
    pub(crate) fn end(self) -> (Report, Result<(), WireError>) {
        self.socket.shutdown(Shutdown::Both).unwrap();
        let ended = self.serving.join().unwrap();
        let (_, errors) = self.judge.verdict();
        assert_eq!(errors, Vec::<String>::new());
        ended
    }

    /// Writes these bytes and nothing more, and returns what the server says.
    pub(crate) fn end_with(mut self, bytes: &[u8]) -> (Report, Result<(), WireError>) {
        self.socket.write_all(bytes).unwrap();
        self.socket.shutdown(Shutdown::Write).unwrap();
        let mut answers = Vec::new();
        // The server may be gone before it has read all.
        let _ = self.socket.read_to_end(&mut answers);
        self.serving.join().unwrap()
    }
}

pub(crate) fn access(region: u32, offset: u64, len: u32) -> Vec<u8> {
    let mut body = offset.to_le_bytes().to_vec();
    body.extend(region.to_le_bytes());
    body.extend(len.to_le_bytes());
    body
}
