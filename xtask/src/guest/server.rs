//! The server of a guest's disk: a process beside QEMU.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::log;
use crate::cargo;

const PACKAGE: &str = "dmaspan-nvme-server";
/// The disk: as many bytes as the guest's partitions need.
const DISK_BYTES: u64 = 400 << 20;
/// What the server prints of a client that has gone.
const REPORT: &str = " requests, ";
const POLL: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(20);

/// A server that runs, and its disk.
pub(super) struct Server {
    child: Child,
    pub(super) socket: PathBuf,
    pub(super) disk: PathBuf,
    said: PathBuf,
}

/// Builds the server, with its assertions; its place.
///
/// # Errors
///
/// Why it cannot be built, in one line.
pub(super) fn build() -> Result<PathBuf, String> {
    crate::run(&mut cargo(&["build", "--quiet", "-p", PACKAGE]))
        .map_err(|why| format!("the server cannot be built: {why}"))?;
    Ok(crate::target_directory().join("debug").join(PACKAGE))
}

impl Server {
    /// Starts a server with an empty disk.
    ///
    /// # Errors
    ///
    /// Why it does not serve, in one line.
    pub(super) fn start(program: &Path, place: &Path) -> Result<Self, String> {
        let fail = |error: std::io::Error| format!("{} is not served: {error}", place.display());
        let (disk, said) = (place.with_extension("disk"), place.with_extension("server"));
        File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).map_err(fail)?;
        // Names of sockets are short, and folders may be deep.
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let socket = std::env::temp_dir().join(format!("{}-{name}.sock", std::process::id()));
        let output = File::create(&said).map_err(fail)?;
        let mut command = Command::new(program);
        command.arg(&socket).arg(&disk).stdin(Stdio::null());
        command.stderr(output.try_clone().map_err(fail)?).stdout(output);
        let mut child = command.spawn().map_err(fail)?;
        let mut waited = Duration::ZERO;
        while !fs::read_to_string(&said).is_ok_and(|said| said.contains("blocks")) {
            let is_gone = child.try_wait().map_err(fail)?.is_some();
            if is_gone || waited > PATIENCE {
                let said = fs::read_to_string(&said).unwrap_or_default();
                return Err(format!("the server does not serve: {}", said.trim()));
            }
            thread::sleep(POLL);
            waited += POLL;
        }
        Ok(Self { child, socket, disk, said })
    }

    /// What is wrong with what the server did and what its disk has, a line each.
    pub(super) fn problems(&mut self, sums: &[log::Sum]) -> Vec<String> {
        let mut problems = Vec::new();
        let mut waited = Duration::ZERO;
        let said = || fs::read_to_string(&self.said).unwrap_or_default();
        while !said().contains(REPORT) && waited < PATIENCE {
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
        match self.child.try_wait() {
            Ok(None) if said.contains(REPORT) => {}
            Ok(None) => problems.push("the server has not noticed that QEMU ended".to_owned()),
            Ok(Some(status)) => problems.push(format!("the server ended with {status}")),
            Err(error) => problems.push(format!("the server cannot be looked at: {error}")),
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

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}
