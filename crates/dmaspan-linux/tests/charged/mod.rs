//! The kernel's charge for pins by io_uring, for tests that count them.

use std::fs;
use std::sync::{Arc, OnceLock};

use dmaspan::pin::Pinner;
use dmaspan::{HostAddr, Prot};
use dmaspan_linux::{LinuxPinner, Memory, MemoryKind, PinMethod, PinnerOptions};

/// A line of `/proc/self/status`, without its name.
fn line(name: &str) -> String {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().to_owned()
}

/// A size that `/proc/self/status` gives in KiB, in bytes.
pub(crate) fn status(name: &str) -> u64 {
    line(name).trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// The part of `bytes` pinned by io_uring that the kernel adds to `VmPin`: all of it, or nothing
/// where the process has `CAP_IPC_LOCK` and the kernel is one that charges no pins to such (Linux
/// 7.2).
pub(crate) fn charged(bytes: u64) -> u64 {
    static CHARGES: OnceLock<bool> = OnceLock::new();
    let charges = CHARGES.get_or_init(|| {
        let before = status("VmPin");
        let options =
            PinnerOptions { method: Some(PinMethod::IoUring), ..PinnerOptions::default() };
        let pinner = LinuxPinner::<HostAddr>::with(options).unwrap();
        let len = MemoryKind::Base.page_size();
        let page = Arc::new(Memory::new(MemoryKind::Base, len).unwrap());
        let pin = pinner.pin(&page, page.user_range(), Prot::READ_WRITE, &mut Vec::new()).unwrap();
        let charges = status("VmPin") - before == len;
        pinner.give_back(pin);
        let capabilities = u64::from_str_radix(&line("CapEff"), 16).unwrap();
        assert!(charges || capabilities >> 14 & 1 == 1, "nothing counts what is pinned");
        charges
    });
    if *charges { bytes } else { 0 }
}
