//! The server of a guest's disk: a process beside QEMU.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::boots::Served;
use super::{log, tools};
use crate::cargo;

const PACKAGE: &str = "dmaspan-nvme-server";
/// The same server, with a sanitizer.
const SANITIZED: &str = "sanitized";
/// What that prints where nothing was wrong.
const CLEAN: &str = " uses, 0 errors";
/// The disk: as many bytes as the guest's partitions need.
pub(super) const DISK_BYTES: u64 = 400 << 20;
/// By this line a guest has its server killed.
const KILL: &str = "guest: server kill";
/// What the server prints of a client that has gone.
const REPORT: &str = " requests, ";
/// Queues of the storage daemon's disk: one for each CPU of a guest, as Linux has them of NVMe.
const QUEUES: u32 = 2;
const POLL: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(20);

/// The blocks of a server's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    /// They are all 0, in so many bytes.
    New(u64),
    /// They are those of the server before.
    Left,
}

/// A server that runs, and its disk.
pub(super) struct Server {
    child: Process,
    socket: Socket,
    disk: PathBuf,
    said: PathBuf,
    /// Whether the guest had it killed.
    is_killed: bool,
    storage: Option<Storage>,
}

/// QEMU's storage daemon, which has a disk for vhost-user-blk.
struct Storage {
    /// It ends with this value.
    _child: Process,
    socket: Socket,
    disk: PathBuf,
}

/// A process that ends with this value.
struct Process(Child);

/// The place of a socket, which is removed with this value.
struct Socket(PathBuf);

/// What is done while a guest runs.
pub(super) struct Watch {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Server>>,
}

/// Builds the server: with its assertions and a sanitizer, or as users do; its place.
///
/// # Errors
///
/// Why it cannot be built, in one line.
pub(super) fn build(of: Served) -> Result<PathBuf, String> {
    let mut build = cargo(&["build", "--quiet", "-p", PACKAGE]);
    let place = match of {
        Served::Measured => {
            build.arg("--release");
            Path::new("release").join(PACKAGE)
        }
        _ => {
            build.args(["--example", SANITIZED]);
            Path::new("debug/examples").join(SANITIZED)
        }
    };
    crate::run(&mut build).map_err(|why| format!("the server cannot be built: {why}"))?;
    Ok(crate::target_directory().join(place))
}

impl Server {
    /// Starts a server with a disk.
    ///
    /// # Errors
    ///
    /// Why it does not serve, in one line.
    pub(super) fn start(program: &Path, place: &Path, of: Blocks) -> Result<Self, String> {
        let fail = |error: std::io::Error| format!("{} is not served: {error}", place.display());
        let (disk, said) = (place.with_extension("disk"), place.with_extension("server"));
        if let Blocks::New(bytes) = of {
            File::create(&disk).and_then(|file| file.set_len(bytes)).map_err(fail)?;
        }
        let socket = socket(place, "sock");
        let mut command = Command::new(program);
        command.arg(&socket.0).arg(&disk);
        let child = Process::serve(&mut command, &said, |said| said.contains("blocks"))?;
        Ok(Self { child, socket, disk, said, is_killed: false, storage: None })
    }

    /// The same with QEMU's storage daemon beside it, from its folder, whose disk is as long.
    ///
    /// # Errors
    ///
    /// Why that does not serve, in one line.
    pub(super) fn with_storage(self, daemon: &Path, place: &Path) -> Result<Self, String> {
        let fail = |error: std::io::Error| format!("{} is not served: {error}", place.display());
        let (socket, disk) = (socket(place, "storage"), place.with_extension("storage"));
        let len = fs::metadata(&self.disk).map_err(fail)?.len();
        File::create(&disk).and_then(|file| file.set_len(len)).map_err(fail)?;
        // It is there as soon as clients can connect.
        let begun = place.with_extension("pid");
        let _ = fs::remove_file(&begun);
        let quoted = |path: &Path| path.display().to_string().replace(',', ",,");
        let (file, path) = (quoted(&disk), quoted(&socket.0));
        let mut command = tools::storage_daemon(daemon);
        command.args(["--blockdev", &format!("driver=file,node-name=disk,filename={file}")]);
        let export = "type=vhost-user-blk,id=disk,node-name=disk,writable=on";
        let queues = format!("num-queues={QUEUES},addr.type=unix,addr.path={path}");
        command.args(["--export", &format!("{export},{queues}")]);
        command.arg("--pidfile").arg(&begun);
        let said = place.with_extension("daemon");
        let _child = Process::serve(&mut command, &said, |_| begun.exists())?;
        Ok(Self { storage: Some(Storage { _child, socket, disk }), ..self })
    }

    /// The files of its disks.
    pub(super) fn disks(&self) -> Vec<PathBuf> {
        let storage = self.storage.iter().map(|storage| storage.disk.clone());
        [self.disk.clone()].into_iter().chain(storage).collect()
    }

    /// The arguments of a QEMU that uses it, from those that a boot has.
    pub(super) fn arguments(&self, of_boot: &mut Vec<String>) {
        let socket = self.socket.0.display().to_string();
        of_boot.iter_mut().for_each(|word| *word = word.replace("SOCKET", &socket));
        if let Some(Storage { socket, .. }) = &self.storage {
            let socket = format!("socket,id=storage,path={}", socket.0.display());
            let device = format!("vhost-user-blk-pci,chardev=storage,num-queues={QUEUES},addr=0a");
            of_boot.extend(["-chardev".to_owned(), socket, "-device".to_owned(), device]);
        }
    }

    /// Kills it when the guest asks for that on its console.
    pub(super) fn watch(mut self, console: &Path) -> Watch {
        let (is_over, console) = (Arc::new(AtomicBool::new(false)), console.to_path_buf());
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let text = fs::read(&console).unwrap_or_default();
                let text = String::from_utf8_lossy(&text);
                if !self.is_killed && text.lines().any(|line| log::clean(line) == KILL) {
                    self.is_killed = true;
                    self.child.end();
                }
                thread::sleep(POLL);
            }
            self
        });
        Watch { is_over, thread: Some(thread) }
    }

    /// What is wrong with what the server did for as many clients and what its disk has, a line
    /// each.
    fn problems(&mut self, clients: usize, sums: &[log::Sum]) -> Vec<String> {
        let mut problems = Vec::new();
        let mut waited = Duration::ZERO;
        let said = || fs::read_to_string(&self.said).unwrap_or_default();
        // The last of them has gone when there are as many reports.
        let have_gone = |said: &str| said.matches(REPORT).count() >= clients;
        while !self.is_killed && !have_gone(&said()) && waited < PATIENCE {
            thread::sleep(POLL);
            waited += POLL;
        }
        let said = said();
        for line in said.lines().filter(|line| line.contains(REPORT)) {
            println!("   the server: {line}");
            if !line.contains(" 0 refused") || !line.contains(" 0 failed") {
                problems.push(format!("the server refused a request: {line}"));
            }
        }
        if !self.is_killed {
            match self.child.0.try_wait() {
                Ok(None) if have_gone(&said) => {}
                Ok(None) => problems.push("the server has not noticed that QEMU ended".to_owned()),
                Ok(Some(status)) => problems.push(format!("the server ended with {status}")),
                Err(error) => problems.push(format!("the server cannot be looked at: {error}")),
            }
        }
        for line in said.lines().filter(|line| line.starts_with("sanitizer: ")) {
            println!("   the server's {line}");
            if !line.ends_with(CLEAN) {
                problems.push(format!("{line}: {}", self.said.display()));
            }
        }
        if said.contains("panicked") {
            problems.push(format!("the server panicked: {}", self.said.display()));
        }
        for sum in sums {
            match self.sha256(sum) {
                Ok(hash) if hash == sum.hash => println!("   the server's file: sha256 {hash}"),
                Ok(hash) => problems.push(format!(
                    "{} bytes at {} of the server's file hash to {hash}, and the guest wrote {}",
                    sum.len, sum.offset, sum.hash
                )),
                Err(why) => problems.push(why),
            }
        }
        problems
    }

    /// What bytes of the disk hash to.
    fn sha256(&self, sum: &log::Sum) -> Result<String, String> {
        let part = self.disk.with_extension("part");
        let copy = || -> std::io::Result<()> {
            let mut disk = File::open(&self.disk)?;
            disk.seek(SeekFrom::Start(sum.offset))?;
            let mut file = File::create(&part)?;
            std::io::copy(&mut disk.take(sum.len), &mut file)?;
            file.flush()
        };
        copy().map_err(|error| format!("{}: {error}", self.disk.display()))?;
        let hash = crate::sha256(&part);
        let _ = fs::remove_file(part);
        hash
    }
}

/// The place of a socket: its name is short, and folders may be deep.
fn socket(place: &Path, kind: &str) -> Socket {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    Socket(std::env::temp_dir().join(format!("{}-{name}.{kind}", std::process::id())))
}

impl Watch {
    /// Ends with the guest, which was booted so often: whether it had the server killed, and what
    /// is wrong, a line each.
    pub(super) fn end(mut self, boots: usize, sums: &[log::Sum]) -> (bool, Vec<String>) {
        self.is_over.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(mut server)) => (server.is_killed, server.problems(boots, sums)),
            _ => (false, vec!["what watches the server panicked".to_owned()]),
        }
    }
}

impl Drop for Watch {
    /// The server ends with its thread, also where nobody asked what is wrong.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Process {
    /// Starts a process and waits until it serves, by what it has said in a file.
    ///
    /// # Errors
    ///
    /// Why it does not, in one line.
    fn serve(
        command: &mut Command,
        said: &Path,
        serves: impl Fn(&str) -> bool,
    ) -> Result<Self, String> {
        let fail = |error: std::io::Error| format!("the server does not start: {error}");
        let output = File::create(said).map_err(fail)?;
        command.stdin(Stdio::null()).stderr(output.try_clone().map_err(fail)?).stdout(output);
        let mut process = Self(command.spawn().map_err(fail)?);
        let mut waited = Duration::ZERO;
        loop {
            let said = fs::read_to_string(said).unwrap_or_default();
            if serves(&said) {
                return Ok(process);
            }
            let is_gone = process.0.try_wait().map_err(fail)?.is_some();
            if is_gone || waited > PATIENCE {
                return Err(format!("the server does not serve: {}", said.trim()));
            }
            thread::sleep(POLL);
            waited += POLL;
        }
    }

    fn end(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}
