//! Serves a file as the disk of virtual machines.
//!
//! ```text
//! dmaspan-nvme-server SOCKET FILE
//! qemu-system-x86_64 ... -object memory-backend-memfd,id=m,size=1G,share=on \
//!     -M q35,memory-backend=m \
//!     -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"SOCKET"}}'
//! ```

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Parser;
use dmaspan_linux::client::ClientDescriptor;
use dmaspan_nvme_server::{Clients, Disk, Session, listen, raise_limit};
use dmaspan_vfio_user::{ClientDma, ClientFiles};

/// Until what a client takes is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Serves a file as an NVMe disk of a virtual machine, by vfio-user.
///
/// A client has the disk until it ends; then the next one can.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The socket to listen on.
    socket: PathBuf,
    /// The disk: its blocks are the bytes of this file.
    file: PathBuf,
    /// Commands that are done at once.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Ends with the first client.
    #[arg(long)]
    once: bool,
    /// Takes memory of any kind from clients, which are trusted not to shorten it.
    #[arg(long)]
    trust: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("dmaspan-nvme-server: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Tries until the machine has what that takes: descriptors of former clients may not be closed.
fn until<T>(what: &str, attempt: impl Fn() -> io::Result<T>) -> T {
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(error) => eprintln!("dmaspan-nvme-server: {what} has to wait: {error}"),
        }
        thread::sleep(PAUSE);
    }
}

/// What is to be said of arguments that are the wrong way round.
fn order(args: &Args) -> &'static str {
    let kind = |path: &Path| fs::metadata(path).map(|metadata| metadata.file_type());
    let is_socket = kind(&args.file).is_ok_and(|kind| kind.is_socket());
    match kind(&args.socket) {
        Ok(kind) if kind.is_file() || kind.is_block_device() => {
            "; the arguments may be the wrong way round: SOCKET comes before FILE"
        }
        _ if is_socket => "; the arguments are the wrong way round: SOCKET comes before FILE",
        _ => "",
    }
}

fn run(args: &Args) -> Result<(), String> {
    let failed = |path: &Path, error| format!("{path:?}: {error}{}", order(args));
    let disk = Disk::open(&args.file).map_err(|error| failed(&args.file, error))?;
    raise_limit();
    let files = if args.trust { ClientFiles::Any } else { ClientFiles::Sealed };
    let listener = listen(&args.socket).map_err(|error| failed(&args.socket, error))?;
    let clients = Clients::of(listener);
    println!("{} blocks of 512 bytes at {}", disk.blocks(), args.socket.display());
    loop {
        let client = until("a client", || clients.accept());
        let session = until("a session", || {
            Session::new(disk.try_clone()?, ClientDma::new(files), args.threads.into())
        });
        let (report, ended) = session.serve_beside(&client, &|| clients.look_at_waiting());
        drop(ClientDescriptor::from(OwnedFd::from(client)));
        println!("{report}");
        if let Err(why) = ended {
            eprintln!("dmaspan-nvme-server: {why}");
        }
        if args.once {
            return Ok(());
        }
    }
}
