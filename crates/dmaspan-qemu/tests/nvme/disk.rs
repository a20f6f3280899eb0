//! A file that a controller has its blocks in.

use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// SplitMix64: every seed gives a different, fixed sequence.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(count).collect()
    }
}

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
        fs::write(&disk.path, Rng(number.into()).bytes(bytes)).unwrap();
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
