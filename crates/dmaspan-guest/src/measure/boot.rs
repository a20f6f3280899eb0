//! The requests that a VM's boot makes of VFIO, made again of this kernel.
//!
//! `boot.txt` has the requests of a QEMU whose VM has a device with a BAR of 32 GiB, one after the
//! other, and says how they were recorded. QEMU maps the VM's memory for the device, and
//! the registers of the device itself; firmware and kernel of the VM move and switch them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::{Bar, VfioSpace};
use dmaspan_linux::{Memory, MemoryKind};

use super::{LARGE, Result, figure};
use crate::cases::Context;

const RECORD: &str = include_str!("boot.txt");

/// What a request maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// The VM's memory.
    Ram,
    /// Its firmware, and what is shown of other ROMs.
    Rom,
    /// A BAR of the device.
    Bar(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Map { at: u64, len: u64, what: What, offset: u64 },
    Unmap { at: u64, len: u64 },
}

impl Request {
    /// Reads `map AT LEN WHAT OFFSET` or `unmap AT LEN`, numbers as hexadecimal digits.
    fn parse(line: &str) -> Option<Self> {
        let number = |text| u64::from_str_radix(text, 16).ok();
        let words: Vec<&str> = line.split_whitespace().collect();
        Some(match words.as_slice() {
            ["map", at, len, what, offset] => {
                let what = match *what {
                    "ram" => What::Ram,
                    "rom" => What::Rom,
                    bar => What::Bar(bar.strip_prefix("bar")?.parse().ok()?),
                };
                Self::Map { at: number(at)?, len: number(len)?, what, offset: number(offset)? }
            }
            ["unmap", at, len] => Self::Unmap { at: number(at)?, len: number(len)? },
            _ => return None,
        })
    }

    /// The end of what it maps in a part of the VM.
    fn end_in(&self, of: What) -> u64 {
        match *self {
            Self::Map { what, offset, len, .. } if what == of => offset + len,
            _ => 0,
        }
    }
}

fn requests() -> Result<Vec<Request>> {
    let lines = RECORD.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| Request::parse(line).ok_or_else(|| format!("`{line}` is no request").into()))
        .collect()
}

/// The parts of the VM.
struct Vm {
    ram: Arc<Memory>,
    rom: Arc<Memory>,
    bars: Vec<Bar>,
}

impl Vm {
    fn ask(&self, space: &VfioSpace, request: Request) -> Result {
        match request {
            Request::Map { at, len, what: What::Bar(index), offset } => {
                let bar = self.bars.iter().find(|bar| bar.index() == index);
                let bar = bar.ok_or("the device has no such BAR")?;
                space.map_bar(bar, offset..offset + len, Iova::new(at), Prot::READ_WRITE)?;
            }
            Request::Map { at, len, what, offset } => {
                let memory = if what == What::Ram { &self.ram } else { &self.rom };
                let user = memory.sub_range(offset, len)?;
                space.map(memory, user, Iova::new(at), Prot::READ_WRITE)?;
            }
            Request::Unmap { at, len } => {
                let unmapped = space.unmap(IovaRange::from_len(Iova::new(at), len)?)?;
                if unmapped != len {
                    return Err(format!("at {at:#x} {unmapped:#x} bytes of {len:#x} were").into());
                }
            }
        }
        Ok(())
    }
}

/// Makes all requests, one after the other.
pub(super) fn measure() -> Result {
    let requests = requests()?;
    let context = Context { device: LARGE.to_owned(), ..Context::default() };
    let (space, device) = context.open()?;
    let len = |of| requests.iter().map(|request| request.end_in(of)).max().unwrap_or(0);
    let ram = Memory::new(MemoryKind::Thp, len(What::Ram))?;
    ram.populate()?;
    let rom = Memory::new(MemoryKind::Base, len(What::Rom))?;
    let mapped_bars = [0, 2].into_iter().filter(|&index| len(What::Bar(index)) > 0);
    let bars = mapped_bars.map(|index| Ok(device.bar(index)?)).collect::<Result<_>>()?;
    let vm = Vm { ram: Arc::new(ram), rom: Arc::new(rom), bars };
    let large = len(What::Bar(2));
    let [mut bar_maps, mut bar_unmaps, mut others] = [Duration::ZERO; 3];
    let mut counts = [0.0; 2];
    for &request in &requests {
        let begin = Instant::now();
        vm.ask(&space, request)?;
        let took = begin.elapsed();
        let (sum, count) = match request {
            Request::Map { len, .. } if len == large => (&mut bar_maps, &mut counts[0]),
            Request::Unmap { len, .. } if len == large => (&mut bar_unmaps, &mut counts[0]),
            _ => (&mut others, &mut counts[1]),
        };
        *sum += took;
        *count += 1.0;
    }
    figure("requests about the large BAR", counts[0], "");
    figure("other requests", counts[1], "");
    figure("maps of the large BAR", bar_maps.as_secs_f64(), "s");
    figure("unmaps of the large BAR", bar_unmaps.as_secs_f64(), "s");
    figure("all other requests", others.as_secs_f64(), "s");
    figure("all of the boot", (bar_maps + bar_unmaps + others).as_secs_f64(), "s");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_maps_what_is_not_mapped_and_unmaps_what_is() {
        let mut mapped: Vec<(u64, u64)> = Vec::new();
        for request in requests().unwrap() {
            match request {
                Request::Map { at, len, .. } => {
                    let free =
                        mapped.iter().all(|&(other, its)| at + len <= other || other + its <= at);
                    assert!(free, "{request:x?}");
                    mapped.push((at, len));
                }
                Request::Unmap { at, len } => {
                    let place = mapped.iter().position(|one| *one == (at, len));
                    mapped.swap_remove(place.unwrap_or_else(|| panic!("{request:x?}")));
                }
            }
        }
    }

    #[test]
    fn a_bar_of_32_gib_is_among_what_is_mapped() {
        let all = requests().unwrap();
        assert!(all.iter().any(|request| request.end_in(What::Bar(2)) == 32 << 30));
        assert_eq!(Request::parse("map 0 1000 tape 0"), None);
        assert_eq!(Request::parse("unmap 0"), None);
    }
}
