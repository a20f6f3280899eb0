//! A file that a controller has its blocks in.

use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan_sim::rng::Rng;

/// A file with random bytes, which is removed on drop.
pub(crate) struct Disk {
    path: PathBuf,
}

impl Disk {
    pub(crate) fn new(bytes: usize) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dmaspan-nvme-{}-{number}.img", process::id());
        let disk = Self { path: std::env::temp_dir().join(name) };
        fs::write(&disk.path, Rng::new(number.into()).bytes(bytes)).unwrap();
        disk
    }

    /// The argument behind `-drive`. What is written need not outlive the host.
    pub(crate) fn drive(&self) -> String {
        format!("if=none,id=disk,format=raw,cache=unsafe,file={}", self.path.display())
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // What is left is in the folder for that.
        drop(fs::remove_file(&self.path));
    }
}
