//! The cost of mapping the registers of a device by VFIO type1: by the leaves of the CPU's tables
//! from Linux 6.15 on, where the process has them at an address that leaves fit.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};

use super::raw::{RawDevice, RawSpace};
use super::{LARGE, Result, figure, microseconds};
use crate::cases::Context;

const AT: u64 = 1 << 40;
const PAGE: u64 = 4 << 10;

/// Maps the BAR of a device once where its largest leaf fits, by this project's library, and once
/// at a page that is at no multiple of a leaf, by plain requests: the library has no such BARs.
/// Neither was touched before.
pub(super) fn measure() -> Result {
    let context = Context { device: LARGE.to_owned(), ..Context::default() };
    let (space, device) = context.open()?;
    let bar = device.bar(2)?;
    let (len, mib) = (bar.len(), bar.len() >> 20);
    let begin = Instant::now();
    space.map_bar(&bar, 0..len, Iova::new(AT), Prot::READ_WRITE)?;
    let map = begin.elapsed();
    let begin = Instant::now();
    let unmapped = space.unmap(IovaRange::from_len(Iova::new(AT), len)?)?;
    say(mib, "a leaf", len, [map, begin.elapsed()], unmapped)?;
    drop((bar, device, space));

    let space = RawSpace::open(LARGE)?;
    let device = space.device(LARGE)?;
    let registers = RawDevice::map_bar(device.as_fd(), 2, PAGE)?;
    let begin = Instant::now();
    space.map(registers.start(), registers.len(), AT)?;
    let map = begin.elapsed();
    let begin = Instant::now();
    let unmapped = space.unmap(AT, registers.len())?;
    say(mib, "4K alone", len, [map, begin.elapsed()], unmapped)
}

fn say(mib: u64, at: &str, len: u64, took: [Duration; 2], unmapped: u64) -> Result {
    if unmapped != len {
        return Err(format!("{unmapped} bytes of {len} were mapped").into());
    }
    for (what, took) in ["map", "unmap"].into_iter().zip(took) {
        figure(
            &format!("{what} of {mib} MiB of registers at a multiple of {at}"),
            microseconds(took),
            "µs",
        );
    }
    Ok(())
}
