//! A server that is killed, and what is left on its disk for the next one.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::load::until_it_goes;
use super::{
    MODEL, PATIENCE, Result, check_file_system, function, make_file_system, names, partition, shell,
};

/// Files that are there when the server is killed.
const BEFORE: u64 = 24;
/// How long nothing is asked of the disk while its server is killed.
const QUIET: Duration = Duration::from_secs(3);
const MOUNTED: &str = "/mnt";
/// Where an ext4 says what who mounts it has to know, and the bit for a journal that has to be
/// replayed (Documentation/filesystems/ext4/super.rst: `s_feature_incompat`, `INCOMPAT_RECOVER`).
const INCOMPATIBLE: u64 = 0x400 + 0x60;
const RECOVER: u32 = 4;

/// Has the server killed when it has read all that was sent to it. What is asked of the disk then
/// ends with an error, and the driver gives the controller up.
pub(super) fn killed() -> Result {
    with_file_system(|| {
        write_files()?;
        // The machine waits for the answer to this, and sends one message after the other.
        fs::read(function()?.join("config"))?;
        println!("guest: server kill");
        thread::sleep(QUIET);
        let begun = Instant::now();
        until_it_goes(|_| match write_file(BEFORE) {
            Ok(()) => Err("a disk without a server takes what is written".into()),
            Err(error) => {
                println!("{error}, {:.1} s later", begun.elapsed().as_secs_f64());
                Ok(())
            }
        })
    })
}

/// Has the server killed amid reads, writes and flushes. QEMU may end then; where it does not, all
/// of them end with an error, and the driver gives the controller up.
pub(super) fn killed_busy() -> Result {
    with_file_system(|| {
        until_it_goes(|load| {
            load.wait(500)?;
            write_files()?;
            println!("guest: server kill");
            let killed = Instant::now();
            for number in BEFORE.. {
                if write_file(number).is_err() {
                    return Ok(());
                }
                println!("guest: flushed {number}");
                if killed.elapsed() > PATIENCE {
                    break;
                }
            }
            Err("a disk without a server takes all that is written".into())
        })
    })
}

/// Makes a file system whose disk goes, and waits until the driver has given the controller up.
fn with_file_system(work: impl FnOnce() -> Result) -> Result {
    let (controller, _) = names(MODEL)?;
    let place = make_file_system()?;
    shell(&format!("mkdir -p {MOUNTED}; mount -t ext4 {place} {MOUNTED}"))?;
    work()?;
    let (begun, place) = (Instant::now(), Path::new("/sys/class/nvme").join(controller));
    while fs::read_to_string(place.join("state")).is_ok_and(|state| state.trim() != "dead") {
        if begun.elapsed() > PATIENCE {
            return Err("the driver does not give the controller up".into());
        }
        thread::sleep(Duration::from_millis(100));
    }
    // Nothing of it is waited for.
    shell(&format!("umount -l {MOUNTED}; sync"))?;
    Ok(())
}

/// Writes and flushes files.
fn write_files() -> Result {
    for number in 0..BEFORE {
        write_file(number).map_err(|error| format!("file {number}: {error}"))?;
        println!("guest: flushed {number}");
    }
    Ok(())
}

/// Finds a consistent file system on the disk of a server that was killed, with all files up to a
/// number, which were flushed.
pub(super) fn again(flushed: u64) -> Result {
    let place = partition(2)?;
    let mut incompatible = [0; 4];
    File::open(&place)?.read_exact_at(&mut incompatible, INCOMPATIBLE)?;
    if u32::from_le_bytes(incompatible) & RECOVER == 0 {
        return Err("the journal has nothing to replay: nobody used the file system".into());
    }
    let place = place.display().to_string();
    // The kernel replays the journal.
    shell(&format!("mkdir -p {MOUNTED}; mount -t ext4 {place} {MOUNTED}"))?;
    for number in 0..=flushed {
        let mut there = Vec::new();
        File::open(name(number))?.read_to_end(&mut there)?;
        if there != content(number) {
            return Err(format!("file {number} has not what was flushed").into());
        }
    }
    write_file(flushed + 1000)?;
    shell(&format!("umount {MOUNTED}"))?;
    check_file_system(&place)?;
    println!("{} files that were flushed are there", flushed + 1);
    Ok(())
}

/// Writes a file and its name, and has both flushed.
fn write_file(number: u64) -> io::Result<()> {
    let mut file = File::create(name(number))?;
    file.write_all(&content(number))?;
    file.sync_all()?;
    File::open(MOUNTED)?.sync_all()
}

fn name(number: u64) -> PathBuf {
    Path::new(MOUNTED).join(format!("file{number}"))
}

/// Bytes that each number has of its own, some kilobytes.
fn content(number: u64) -> Vec<u8> {
    let words = 1000 + 517 * (number % 16);
    (0..words).flat_map(|word| (word ^ number << 32 ^ 0x5a5a_5a5a).to_le_bytes()).collect()
}
