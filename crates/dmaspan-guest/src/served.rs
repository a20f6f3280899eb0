//! A disk of a vfio-user server, under Linux's own driver of NVMe.
//!
//! Each step is said as a case is. A line more is for the program that started the guest:
//!
//! | line | what it asks for |
//! |---|---|
//! | `guest: sha256 HASH LENGTH OFFSET` | that bytes of the server's file hash to this at the end |
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// What the server calls itself.
const MODEL: &str = "dmaspan vfio-user";
const SECTOR: u64 = 512;
/// The partitions, in sectors: random bytes, a file system, and blocks that are read and written.
const PARTITIONS: [(u32, u32); 3] = [(2048, 256 << 11), (526_336, 64 << 11), (657_408, 64 << 11)];
const RANDOM_BYTES: u64 = 256 << 20;
/// Random reads and writes, by so many threads, each with one at a time.
const OPERATIONS: usize = 20_000;
const DEPTH: usize = 32;
const BLOCK: usize = 4096;
const BLOCKS: usize = (64 << 20) / BLOCK;
/// What is in the blocks, from one step to the next.
const NOTES: &str = "/tmp/served";
/// How long the kernel may take to bring a controller.
const PATIENCE: Duration = Duration::from_secs(180);

/// Does the steps of these names; `None` where one has no such name.
pub(crate) fn run(names: &[&str]) -> Option<ExitCode> {
    let steps: Vec<fn() -> Result> = names.iter().map(|name| step(name)).collect::<Option<_>>()?;
    let mut failed = false;
    for (name, step) in names.iter().zip(steps) {
        match step() {
            Ok(()) => println!("guest: PASS served/{name}"),
            Err(error) => {
                println!("guest: FAIL served/{name}: {error}");
                failed = true;
            }
        }
    }
    Some(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn step(name: &str) -> Option<fn() -> Result> {
    Some(match name {
        "write" => || write(RANDOM_BYTES),
        "part" => || write(RANDOM_BYTES / 8),
        "random" => random,
        "files" => files,
        "reset" => reset,
        _ => return None,
    })
}

/// The controller's name and the namespace's.
fn names() -> Result<(String, String)> {
    let begun = Instant::now();
    loop {
        for entry in fs::read_dir("/sys/class/nvme")? {
            let controller = entry?.file_name().to_string_lossy().into_owned();
            let place = Path::new("/sys/class/nvme").join(&controller);
            let model = fs::read_to_string(place.join("model")).unwrap_or_default();
            let namespace = format!("{controller}n1");
            if model.trim() == MODEL && Path::new("/dev").join(&namespace).exists() {
                return Ok((controller, namespace));
            }
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("no controller is a `{MODEL}` with a namespace").into());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// The place of a partition, from 1 on.
fn partition(number: u32) -> Result<PathBuf> {
    Ok(Path::new("/dev").join(format!("{}p{number}", names()?.1)))
}

/// The file of a PCI function.
fn function() -> Result<PathBuf> {
    Ok(fs::canonicalize(format!("/sys/class/nvme/{}/device", names()?.0))?)
}

/// What a script of the shell prints.
fn shell(script: &str) -> Result<String> {
    let output = Command::new("/bin/sh").args(["-e", "-c", script]).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}: {text}{errors}", output.status).replace('\n', "; ").into())
}

fn direct(path: &Path) -> Result<File> {
    let flags = i32::try_from(OFlags::DIRECT.bits())?;
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?)
}

/// Partitions the disk, and writes random bytes to the first partition.
fn write(len: u64) -> Result {
    let (_, namespace) = names()?;
    let disk = Path::new("/dev").join(&namespace);
    let mut table = [0; 512];
    for (index, (start, count)) in PARTITIONS.into_iter().enumerate() {
        let entry = table.get_mut(446 + 16 * index..).ok_or("a table of three")?;
        let values = [0x83_u32.to_le_bytes(), start.to_le_bytes(), count.to_le_bytes()];
        for (byte, value) in entry.iter_mut().skip(4).zip(values.as_flattened()) {
            *byte = *value;
        }
    }
    let [.., low, high] = &mut table;
    (*low, *high) = (0x55, 0xaa);
    OpenOptions::new().write(true).open(&disk)?.write_all_at(&table, 0)?;
    shell(&format!("sync; blockdev --rereadpt {}", disk.display()))?;
    let first = partition(1)?;
    let begun = Instant::now();
    while !partition(3)?.exists() {
        if begun.elapsed() > PATIENCE {
            return Err("the kernel found no three partitions".into());
        }
        thread::sleep(Duration::from_millis(50));
    }
    let place = first.display();
    let hash = |script: &str| -> Result<String> {
        let said = shell(script)?;
        Ok(said.split_whitespace().next().ok_or("sha256sum says nothing")?.to_owned())
    };
    let written = hash(&format!("head -c {len} /dev/urandom | tee {place} | sha256sum"))?;
    shell("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    let read = hash(&format!("head -c {len} {place} | sha256sum"))?;
    if read != written {
        return Err(format!("{written} was written and {read} read").into());
    }
    let offset = u64::from(PARTITIONS[0].0) * SECTOR;
    println!("guest: sha256 {written} {len} {offset}");
    Ok(())
}

/// The bytes of a block that was written for the `turn`th time; those of turn 0 are not looked at.
fn fill(bytes: &mut [u8], block: usize, turn: u8) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let [low, middle, high, ..] = block.to_le_bytes();
        let [at, above, ..] = index.to_le_bytes();
        word.copy_from_slice(&[low, middle, high, turn, at, above, 0x5a, turn ^ at]);
    }
}

/// So many bytes that begin with a page.
fn page(memory: &mut [u8]) -> Result<&mut [u8]> {
    let lead = memory.as_ptr().align_offset(BLOCK);
    let page = memory.get_mut(lead..).and_then(|memory| memory.get_mut(..BLOCK));
    page.ok_or_else(|| "no page begins in the memory".into())
}

/// Reads a block and compares it.
fn verify(disk: &File, page: &mut [u8], block: usize, turn: u8) -> Result {
    let mut expected = vec![0; BLOCK];
    fill(&mut expected, block, turn);
    disk.read_exact_at(page, u64::try_from(block * BLOCK)?)?;
    match page == expected {
        true => Ok(()),
        false => Err(format!("block {block} has not what was written at turn {turn}").into()),
    }
}

/// Reads and writes blocks at random, of which each thread has its own.
fn random() -> Result {
    let path = partition(3)?;
    let begun = Instant::now();
    let turns: Vec<Result<Vec<(usize, u8)>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..DEPTH)
            .map(|thread| {
                scope.spawn({
                    let path = &path;
                    move || operate(path, thread)
                })
            })
            .collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined.map(|turns| turns.unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    });
    let took = begun.elapsed();
    let turns: Vec<Vec<(usize, u8)>> = turns.into_iter().collect::<Result<_>>()?;
    let mut notes = vec![0; BLOCKS];
    for (block, turn) in turns.into_iter().flatten() {
        *notes.get_mut(block).ok_or("a block of the partition")? = turn;
    }
    fs::write(NOTES, notes)?;
    println!("{OPERATIONS} operations at depth {DEPTH} took {:.1} s", took.as_secs_f64());
    check_notes()
}

fn operate(path: &Path, thread: usize) -> Result<Vec<(usize, u8)>> {
    let disk = direct(path)?;
    let mut memory = vec![0; 2 * BLOCK];
    let page = page(&mut memory)?;
    let mut turns = vec![0_u8; BLOCKS / DEPTH];
    let mut state = u64::try_from(thread + 1)?.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..OPERATIONS / DEPTH {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let index = usize::try_from(state >> 32)? % turns.len();
        let turn = turns.get_mut(index).ok_or("a block of the thread")?;
        let block = index * DEPTH + thread;
        if *turn > 0 && state & 1 == 0 {
            verify(&disk, page, block, *turn)?;
        } else {
            *turn = turn.wrapping_add(1).max(1);
            fill(page, block, *turn);
            disk.write_all_at(page, u64::try_from(block * BLOCK)?)?;
        }
    }
    Ok(turns.into_iter().enumerate().map(|(index, turn)| (index * DEPTH + thread, turn)).collect())
}

/// Reads all blocks that were written.
fn check_notes() -> Result {
    let disk = direct(&partition(3)?)?;
    let mut memory = vec![0; 2 * BLOCK];
    let page = page(&mut memory)?;
    for (block, turn) in fs::read(NOTES)?.into_iter().enumerate().filter(|(_, turn)| *turn > 0) {
        verify(&disk, page, block, turn)?;
    }
    Ok(())
}

/// Makes a file system, and finds what is in its files after it was mounted again.
fn files() -> Result {
    let place = partition(2)?;
    let place = place.display();
    shell(&format!(
        "mke2fs {place} > /dev/null
        mkdir -p /mnt
        mount -t ext4 {place} /mnt
        cd /mnt
        i=0
        while [ $i -lt 40 ]; do
            head -c $((i * 37001 + 1)) /dev/urandom > file$i
            i=$((i + 1))
        done
        sha256sum file* > sums
        cd /
        umount /mnt
        echo 3 > /proc/sys/vm/drop_caches"
    ))?;
    again()
}

/// Finds the files that another step made.
fn again() -> Result {
    let place = partition(2)?;
    let place = place.display();
    shell(&format!(
        "mkdir -p /mnt
        mount -t ext4 {place} /mnt
        cd /mnt
        sha256sum -c sums > /tmp/said
        [ $(grep -c OK /tmp/said) = 40 ]
        cd /
        umount /mnt"
    ))?;
    Ok(())
}

/// Resets the function, and takes the driver from it and gives it back, with the data in between.
fn reset() -> Result {
    let function = function()?;
    let name = function.file_name().ok_or("a function has a name")?;
    let name = name.to_str().ok_or("its name is text")?;
    fs::write(function.join("reset"), "1")?;
    check_notes()?;
    fs::write("/sys/bus/pci/drivers/nvme/unbind", name)?;
    if function.join("nvme").exists() {
        return Err("the driver did not go".into());
    }
    fs::write("/sys/bus/pci/drivers/nvme/bind", name)?;
    check_notes()
}
