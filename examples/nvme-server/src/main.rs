//! Serves a file as the disk of virtual machines.
//!
//! ```text
//! dmaspan-nvme-server SOCKET FILE
//! qemu-system-x86_64 ... -object memory-backend-memfd,id=m,size=1G,share=on \
//!     -M q35,memory-backend=m \
//!     -device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"SOCKET"}}'
//! ```

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use dmaspan_nvme_server::{Disk, Session};
use dmaspan_vfio_user::{ClientDma, ClientFiles};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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

fn run(args: &Args) -> Result<(), String> {
    let disk = Disk::open(&args.file).map_err(|error| format!("{:?}: {error}", args.file))?;
    raise_limit();
    let files = if args.trust { ClientFiles::Any } else { ClientFiles::Sealed };
    let listener = listen(&args.socket).map_err(|error| format!("{:?}: {error}", args.socket))?;
    println!("{} blocks of 512 bytes at {}", disk.blocks(), args.socket.display());
    loop {
        let (client, _) = listener.accept().map_err(|error| format!("a client: {error}"))?;
        let disk = disk.try_clone().map_err(|error| format!("the disk: {error}"))?;
        let session = Session::new(disk, ClientDma::new(files), args.threads.into());
        let session = session.map_err(|error| format!("threads: {error}"))?;
        let (report, ended) = session.serve(&client);
        println!("{report}");
        if let Err(why) = ended {
            eprintln!("dmaspan-nvme-server: {why}");
        }
        if args.once {
            return Ok(());
        }
    }
}

/// Listens on a socket; one that nobody listens on any more is replaced.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let left = UnixStream::connect(path);
            if left.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                std::fs::remove_file(path)?;
            }
            UnixListener::bind(path)
        }
        listener => listener,
    }
}

/// Raises the limit of open files as far as it goes: each region of a client has one.
fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    // With a lower limit the client is told where it is reached.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
