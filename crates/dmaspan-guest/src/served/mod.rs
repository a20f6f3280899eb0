//! A disk of a vfio-user server, under Linux's own driver of NVMe.
//!
//! Each step is said as a case is. Lines more are for the program that started the guest:
//!
//! | line | what it says |
//! |---|---|
//! | `guest: sha256 HASH LENGTH OFFSET` | bytes of the server's file hash to this at the end |
//! | `guest: flushed N` | files up to this number are to be found by a second guest |
//! | `guest: server kill` | the server is to be killed now |

mod iops;
mod killed;
mod load;

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use load::{OPERATIONS, check_notes, under_load, until_it_goes};

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// What the server calls itself.
const MODEL: &str = "dmaspan vfio-user";
const SECTOR: u64 = 512;
/// The partitions, in sectors: random bytes, a file system, and blocks that are read and written.
const PARTITIONS: [(u32, u32); 3] = [(2048, 256 << 11), (526_336, 64 << 11), (657_408, 64 << 11)];
const RANDOM_BYTES: u64 = 256 << 20;
/// How long the kernel may take to give a controller up, or to bring it back.
const PATIENCE: Duration = Duration::from_secs(180);
/// Programs that the shell is not, and what loads them.
const TOOLS: &str = "/tools";
const LOADER: &str = "ld-linux-x86-64.so.2";
/// The host bridge's configuration space, and the byte of it that says where accesses to 64 KiB of
/// the firmware go, bit 4 for reads and bit 5 for writes: to memory, or past it (PAM0 of Intel's
/// chipsets, as QEMU's q35 has them).
const BRIDGE: &str = "/sys/bus/pci/devices/0000:00:00.0/config";
const FIRMWARE_MEMORY: u64 = 0x90;
const WRITABLE: u8 = 1 << 5;
/// How often memory goes and comes under load.
const PIECES: u32 = 100;

/// Does the steps of these names; `None` where one has no such name.
pub(crate) fn run(names: &[&str]) -> Option<ExitCode> {
    let steps: Vec<Step> = names.iter().map(|name| step(name)).collect::<Option<_>>()?;
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

type Step = Box<dyn FnOnce() -> Result>;

fn step(name: &str) -> Option<Step> {
    let step: fn() -> Result = match name {
        "layout" => layout,
        "write" => || write(RANDOM_BYTES),
        "part" => || write(RANDOM_BYTES / 8),
        "random" => random,
        "files" => files,
        "reset" => reset,
        "pieces" => pieces,
        "unbind" => unbind,
        "iops" => iops::iops,
        "killed" => killed::killed,
        "killed-busy" => killed::killed_busy,
        _ => {
            let flushed = name.strip_prefix("flushed=")?.parse().ok()?;
            return Some(Box::new(move || killed::again(flushed)));
        }
    };
    Some(Box::new(step))
}

/// The name of a controller of this model, and the namespace's.
fn names(of_model: &str) -> Result<(String, String)> {
    let begun = Instant::now();
    loop {
        for entry in fs::read_dir("/sys/class/nvme")? {
            let controller = entry?.file_name().to_string_lossy().into_owned();
            let place = Path::new("/sys/class/nvme").join(&controller);
            let model = fs::read_to_string(place.join("model")).unwrap_or_default();
            let namespace = format!("{controller}n1");
            if model.trim() == of_model && Path::new("/dev").join(&namespace).exists() {
                return Ok((controller, namespace));
            }
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("no controller is a `{of_model}` with a namespace").into());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// The place of a partition, from 1 on.
fn partition(number: u32) -> Result<PathBuf> {
    let path = Path::new("/dev").join(format!("{}p{number}", names(MODEL)?.1));
    let begun = Instant::now();
    while !path.exists() {
        if begun.elapsed() > PATIENCE {
            return Err(format!("the kernel found no partition {number}").into());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(path)
}

/// The file of a PCI function.
fn function() -> Result<PathBuf> {
    Ok(fs::canonicalize(format!("/sys/class/nvme/{}/device", names(MODEL)?.0))?)
}

/// What a script of the shell prints.
fn shell(script: &str) -> Result<String> {
    output(Command::new("/bin/sh").args(["-e", "-c", script]))
}

/// What a program for file systems prints.
fn tool(name: &str, arguments: &[&str]) -> Result<String> {
    let tools = Path::new(TOOLS);
    let mut command = Command::new(tools.join(LOADER));
    command.arg("--library-path").arg(tools).arg(tools.join(name)).args(arguments);
    output(&mut command)
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}: {text}{errors}", output.status).replace('\n', "; ").into())
}

/// Partitions the disk.
fn layout() -> Result {
    let (_, namespace) = names(MODEL)?;
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
    partition(3)?;
    Ok(())
}

/// Writes random bytes to the first partition.
fn write(len: u64) -> Result {
    layout()?;
    let first = partition(1)?;
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

/// Reads and writes blocks at random.
fn random() -> Result {
    let begun = Instant::now();
    under_load(|load| load.wait(OPERATIONS))?;
    let (depth, took) = (load::DEPTH, begun.elapsed().as_secs_f64());
    println!("{OPERATIONS} operations at depth {depth} and their verification took {took:.1} s");
    Ok(())
}

/// Has memory go and come in pieces under load: that of the firmware's 64 KiB becomes writable, so
/// that it is one with the memory behind it, and read-only again.
fn pieces() -> Result {
    let bridge = OpenOptions::new().read(true).write(true).open(BRIDGE)?;
    let mut before = [0];
    bridge.read_exact_at(&mut before, FIRMWARE_MEMORY)?;
    let [value] = before;
    let done = under_load(|load| {
        for _ in 0..PIECES {
            for value in [value ^ WRITABLE, value] {
                load.wait(8)?;
                bridge.write_all_at(&[value], FIRMWARE_MEMORY)?;
            }
        }
        Ok(())
    })?;
    println!("memory went {} times under {done} operations", 2 * PIECES);
    Ok(())
}

/// Makes a file system with a journal, and finds what is in its files after it was mounted again.
fn files() -> Result {
    let place = make_file_system()?;
    shell(&format!(
        "mkdir -p /mnt
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
        echo 3 > /proc/sys/vm/drop_caches
        mount -t ext4 {place} /mnt
        cd /mnt
        sha256sum -c sums > /tmp/said
        [ $(grep -c OK /tmp/said) = 40 ]
        cd /
        umount /mnt"
    ))?;
    check_file_system(&place)
}

/// Formats the second partition as ext4, with a journal; its place.
fn make_file_system() -> Result<String> {
    let place = partition(2)?.display().to_string();
    // Nothing is written behind the back of who asks for nothing.
    let now = "lazy_itable_init=0,lazy_journal_init=0";
    tool("mke2fs", &["-q", "-F", "-t", "ext4", "-O", "has_journal", "-E", now, &place])?;
    Ok(place)
}

/// Has a file system looked at from end to end.
fn check_file_system(place: &str) -> Result {
    tool("e2fsck", &["-f", "-n", place])?;
    Ok(())
}

/// Resets the function, and takes the driver from it and gives it back, with the data in between.
fn reset() -> Result {
    let function = function()?;
    fs::write(function.join("reset"), "1")?;
    check_notes()?;
    rebind(&function)?;
    check_notes()
}

/// Takes the driver from the function under load, and gives it back.
fn unbind() -> Result {
    let function = function()?;
    until_it_goes(|load| {
        load.wait(1000)?;
        rebind(&function)
    })?;
    check_notes()
}

fn rebind(function: &Path) -> Result {
    let name = function.file_name().ok_or("a function has a name")?;
    let name = name.to_str().ok_or("its name is text")?;
    fs::write("/sys/bus/pci/drivers/nvme/unbind", name)?;
    if function.join("nvme").exists() {
        return Err("the driver did not go".into());
    }
    Ok(fs::write("/sys/bus/pci/drivers/nvme/bind", name)?)
}
