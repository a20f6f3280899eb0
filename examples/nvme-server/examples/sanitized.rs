//! The server, with a sanitizer that judges what it does with its clients' memory:
//!
//! ```text
//! sanitized SOCKET FILE
//! ```
//!
//! Of each client it prints the report, how often memory was used, and what was wrong about it.

#[path = "../tests/it/judge.rs"]
mod judge;

use std::env::args_os;
use std::error::Error;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use dmaspan_linux::client::ClientDescriptor;
use dmaspan_nvme_server::{Disk, GuestMemory, Session, listen, raise_limit};
use dmaspan_vfio_user::ClientDma;
use judge::Judge;

const THREADS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = args_os().skip(1).map(PathBuf::from);
    let (Some(socket), Some(file)) = (arguments.next(), arguments.next()) else {
        return Err("usage: sanitized SOCKET FILE".into());
    };
    let disk = Disk::open(&file)?;
    raise_limit();
    let listener = listen(&socket)?;
    println!("{} blocks of 512 bytes at {}", disk.blocks(), socket.display());
    loop {
        let judge = Arc::new(Judge::new());
        let memory = GuestMemory::from(ClientDma::default()).observed(judge.clone());
        let (client, _) = listener.accept()?;
        let (report, ended) = Session::new(disk.try_clone()?, memory, THREADS)?.serve(&client);
        drop(ClientDescriptor::from(OwnedFd::from(client)));
        let (uses, errors) = judge.verdict();
        errors.iter().for_each(|error| println!("{error}"));
        println!("sanitizer: {uses} uses, {} errors", errors.len());
        println!("{report}");
        if let Err(why) = ended {
            eprintln!("sanitized: {why}");
        }
    }
}
