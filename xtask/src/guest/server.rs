//! The server of a guest's disk: a process beside QEMU.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::log;
use crate::cargo;

const PACKAGE: &str = "dmaspan-nvme-server";
/// The same server, with a sanitizer.
const SANITIZED: &str = "sanitized";
/// What that prints where nothing was wrong.
const CLEAN: &str = " uses, 0 errors";
/// The disk: as many bytes as the guest's partitions need.
const DISK_BYTES: u64 = 400 << 20;
/// By this line a guest has its server killed.
const KILL: &str = "guest: server kill";
/// What the server prints of a client that has gone.
const REPORT: &str = " requests, ";
const POLL: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(20);

/// The blocks of a server's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    /// They are all 0.
    New,
    /// They are those of the server before.
    Left,
}

/// A server that runs, and its disk.
pub(super) struct Server {
    child: Process,
    socket: PathBuf,
    pub(super) disk: PathBuf,
    said: PathBuf,
    /// Whether the guest had it killed.
    is_killed: bool,
}

/// A process that ends with this value.
struct Process(Child);

/// What is done while a guest runs.
pub(super) struct Watch {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Server>>,
}

/// Builds the server, with its assertions and a sanitizer; its place.
///
/// # Errors
///
/// Why it cannot be built, in one line.
pub(super) fn build() -> Result<PathBuf, String> {
    crate::run(&mut cargo(&["build", "--quiet", "-p", PACKAGE, "--example", SANITIZED]))
        .map_err(|why| format!("the server cannot be built: {why}"))?;
    Ok(crate::target_directory().join("debug/examples").join(SANITIZED))
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
        if of == Blocks::New {
            File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).map_err(fail)?;
        }
        let socket = socket(place);
        let output = File::create(&said).map_err(fail)?;
        let mut command = Command::new(program);
        command.arg(&socket).arg(&disk).stdin(Stdio::null());
        command.stderr(output.try_clone().map_err(fail)?).stdout(output);
        let mut child = Process(command.spawn().map_err(fail)?);
        let mut waited = Duration::ZERO;
        while !fs::read_to_string(&said).is_ok_and(|said| said.contains("blocks")) {
            let is_gone = child.0.try_wait().map_err(fail)?.is_some();
            if is_gone || waited > PATIENCE {
                let said = fs::read_to_string(&said).unwrap_or_default();
                return Err(format!("the server does not serve: {}", said.trim()));
            }
            thread::sleep(POLL);
            waited += POLL;
        }
        Ok(Self { child, socket, disk, said, is_killed: false })
    }

    /// The arguments of a QEMU that uses it, from those that a boot has.
    pub(super) fn arguments(&self, of_boot: &mut [String]) {
        let socket = self.socket.display().to_string();
        of_boot.iter_mut().for_each(|word| *word = word.replace("SOCKET", &socket));
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

    /// What is wrong with what the server did and what its disk has, a line each.
    fn problems(&mut self, sums: &[log::Sum]) -> Vec<String> {
        let mut problems = Vec::new();
        let mut waited = Duration::ZERO;
        let said = || fs::read_to_string(&self.said).unwrap_or_default();
        while !self.is_killed && !said().contains(REPORT) && waited < PATIENCE {
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
                Ok(None) if said.contains(REPORT) => {}
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
fn socket(place: &Path) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    std::env::temp_dir().join(format!("{}-{name}.sock", std::process::id()))
}

impl Watch {
    /// Ends with the guest: whether it had the server killed, and what is wrong, a line each.
    pub(super) fn end(mut self, sums: &[log::Sum]) -> (bool, Vec<String>) {
        self.is_over.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(mut server)) => (server.is_killed, server.problems(sums)),
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

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.socket);
    }
}

impl Process {
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
