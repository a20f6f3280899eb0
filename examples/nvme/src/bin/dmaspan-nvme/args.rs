//! The command line of `dmaspan-nvme`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use dmaspan_linux::vfio::Backend;
use dmaspan_linux::{Bdf, MemoryKind};

/// Identifies, reads and measures an NVMe controller by VFIO, with dmaspan's example driver.
///
/// The controller must be bound to vfio-pci.
#[derive(Debug, Parser)]
#[command(name = "dmaspan-nvme", version, arg_required_else_help = true)]
pub(crate) struct Line {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print what the controller and its first namespace report.
    Identify(IdentifyArgs),
    /// Read blocks of the disk.
    Read(ReadArgs),
    /// Measure random I/O, and check every transfer.
    #[command(long_about = BENCH_ABOUT)]
    Bench(BenchArgs),
}

const BENCH_ABOUT: &str = "\
Measure random I/O, and check every transfer.

The bench reads all blocks of --span in order first. Then it reads random blocks
of the span, --depth of them at once, into one registered buffer that is mapped
once. It compares the first and the last 8 bytes of each with what the block had
before. With --write it writes blocks instead, and reads all of them back
afterwards.

With --hand-written it runs two others in turn, with PRPs written by hand for
one fixed mapping: the same driver, where an I/O imports, describes and holds
nothing; and a bare loop that copies finished commands into the queue and checks
nothing. It prints the medians of the ratios of all turns.
An I/O allocates nothing: the bench counts allocations from the first I/O on.";

/// The controller.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// The PCI function, such as 0000:00:05.0.
    pub(crate) bdf: Bdf,
    /// The kernel's interface: vfio, iommufd or compat; noiommu for a controller without an IOMMU.
    #[arg(long, default_value_t = Backend::Vfio)]
    pub(crate) backend: Backend,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// For programs.
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct IdentifyArgs {
    #[command(flatten)]
    pub(crate) target: Target,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct ReadArgs {
    #[command(flatten)]
    pub(crate) target: Target,
    /// The first block to read.
    #[arg(long, default_value_t = 0)]
    pub(crate) lba: u64,
    /// How many blocks to read.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) blocks: u64,
    /// The file to write the blocks to; without it, standard output.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) target: Target,
    /// The bytes of an I/O: a power of two, such as 4k.
    #[arg(long, default_value = "4k", value_parser = block_size)]
    pub(crate) block: u64,
    /// How many I/Os to have in flight.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1023))]
    pub(crate) depth: u16,
    /// How many I/Os each side does.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: u64,
    /// How many seconds each side runs, instead of a count.
    #[arg(long, conflicts_with = "count", value_parser = seconds)]
    pub(crate) seconds: Option<Duration>,
    /// How many turns the sides take. Many short turns are fair on a machine that is also busy
    /// otherwise.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) turns: u64,
    /// How many bytes to use, from the start of the disk on.
    #[arg(long, default_value = "32m", value_parser = size)]
    pub(crate) span: u64,
    /// The kind of memory to use: thp, base, hugetlb, hugetlb-1g, memfd or memfd-hugetlb.
    #[arg(long, default_value_t = MemoryKind::Thp)]
    pub(crate) memory: MemoryKind,
    /// Compare with the driver with PRPs written by hand, and with a bare loop.
    #[arg(long)]
    pub(crate) hand_written: bool,
    /// Write blocks instead of reading them; this destroys what the disk has there.
    #[arg(long, requires = "yes_destroy_data")]
    pub(crate) write: bool,
    /// Confirm that the data on the disk may be lost.
    #[arg(long)]
    pub(crate) yes_destroy_data: bool,
    /// How the result is printed.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

impl BenchArgs {
    /// Whether it can be done.
    ///
    /// # Errors
    ///
    /// Why not.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self.target.backend {
            Backend::NoIommu if self.hand_written => Err(
                "--hand-written is for one contiguous mapping, which an IOMMU makes: leave it out",
            ),
            _ => Ok(()),
        }
    }
}

/// A number of bytes, with K, M or G for powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let (number, lg2) = match text.as_bytes().last().map(u8::to_ascii_lowercase) {
        Some(b'k') => (&text[..text.len() - 1], 10),
        Some(b'm') => (&text[..text.len() - 1], 20),
        Some(b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: Option<u64> = number.parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(1 << lg2));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| "a size is a number like 4096, 4k or 1m".into())
}

/// The bytes of an I/O.
fn block_size(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    if bytes.is_power_of_two() && (512..=1 << 20).contains(&bytes) {
        return Ok(bytes);
    }
    Err("the bytes of an I/O are a power of two from 512 to 1m".into())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<u64> = text.parse().ok().filter(|&seconds| seconds > 0);
    seconds.map(Duration::from_secs).ok_or_else(|| "take 1 second or more".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Line::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_and_nonsense_is_not() {
        assert_eq!(size("4k"), Ok(4096));
        assert_eq!(size("3M"), Ok(3 << 20));
        assert_eq!(block_size("512"), Ok(512));
        for text in ["", "k", "0", "-1", "4q", "99999999999g"] {
            assert!(size(text).is_err(), "{text}");
        }
        for text in ["256", "3k", "2m"] {
            assert!(block_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn prps_are_written_by_hand_only_behind_an_iommu() {
        for (backend, is_refused) in [("iommufd", false), ("noiommu", true)] {
            let words =
                ["dmaspan-nvme", "bench", "00:05.0", "--hand-written", "--backend", backend];
            let Command::Bench(args) = Line::try_parse_from(words).unwrap().command else {
                panic!("another command")
            };
            assert_eq!(args.check().is_err(), is_refused, "{backend}");
        }
    }

    #[test]
    fn data_is_destroyed_only_on_demand() {
        let line = ["dmaspan-nvme", "bench", "0000:00:05.0", "--write"];
        assert!(Line::try_parse_from(line).is_err());
        let more = line.into_iter().chain(["--yes-destroy-data"]);
        assert!(Line::try_parse_from(more).is_ok());
    }
}
