//! The line protocol of QEMU's `qtest`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// As much of what QEMU says on stderr is kept.
const KEPT: usize = 1 << 14;
/// How long its end may be behind that of its pipes.
const LAST_MOMENTS: Duration = Duration::from_secs(5);

/// QEMU's process and what leads to it.
pub(crate) struct Wire {
    child: Child,
    stream: BufReader<UnixStream>,
    said: Arc<Mutex<String>>,
    line: String,
    patience: Duration,
    /// Nothing is sent after an error: answers would be taken for those of other commands.
    failed: bool,
    /// The commands sent.
    pub(crate) commands: u64,
}

impl Wire {
    /// To a process of its own, which has so long for each answer.
    pub(crate) fn new(mut command: Command, patience: Duration) -> io::Result<Self> {
        // Not pipes, whose reads have no bound.
        let (ours, its) = UnixStream::pair()?;
        ours.set_read_timeout(Some(patience))?;
        ours.set_write_timeout(Some(patience))?;
        command.stdin(OwnedFd::from(its.try_clone()?)).stdout(OwnedFd::from(its));
        command.stderr(Stdio::piped());
        let said = Arc::new(Mutex::new(String::new()));
        let kept = Arc::clone(&said);
        let (sender, receiver) = mpsc::sync_channel(1);
        // QEMU ends with the thread that started it, so that is the one that lives as long.
        thread::spawn(move || {
            let mut spawned = command.spawn();
            // With it goes this side's copy of QEMU's ends.
            drop(command);
            let errors = spawned.as_mut().ok().and_then(|child| child.stderr.take());
            // The thread that started it waits for this.
            let _ = sender.send(spawned);
            errors.into_iter().for_each(|errors| keep(errors, &kept));
        });
        let child = receiver.recv().map_err(io::Error::other)??;
        let stream = BufReader::new(ours);
        let line = String::new();
        Ok(Self { child, stream, said, line, patience, failed: false, commands: 0 })
    }

    /// Sends commands, each on a line of its own, and returns what stands behind the `OK` of the
    /// last answer.
    pub(crate) fn command(&mut self, commands: &str) -> io::Result<&str> {
        if self.failed {
            return Err(io::Error::other("QEMU failed before"));
        }
        let exchanged = self.exchange(commands);
        self.failed = exchanged.is_err();
        exchanged?;
        Ok(self.line.trim_end().strip_prefix("OK").unwrap_or("").trim_start())
    }

    fn exchange(&mut self, commands: &str) -> io::Result<()> {
        self.line.clear();
        self.line.push_str(commands);
        self.line.push('\n');
        self.stream.get_mut().write_all(self.line.as_bytes()).map_err(|_| self.gone())?;
        for command in commands.lines() {
            self.commands += 1;
            self.answer(command)?;
        }
        Ok(())
    }

    /// Reads the next answer into the line; it begins with `OK`.
    fn answer(&mut self, command: &str) -> io::Result<()> {
        let end = Instant::now() + self.patience;
        loop {
            self.line.clear();
            if !self.read_line(command, end)? {
                return Err(self.gone());
            }
            if self.line.starts_with("OK") {
                return Ok(());
            }
            if !self.line.starts_with("IRQ ") {
                let said = self.line.trim_end();
                let what = format!("QEMU answered {command:?} with {said:?}");
                return Err(io::Error::other(what));
            }
        }
    }

    /// Reads the rest of a line behind what the line has; false at the end of all.
    fn read_line(&mut self, command: &str, end: Instant) -> io::Result<bool> {
        loop {
            // One that says much and does not answer is not read for ever.
            let read = match Instant::now() < end {
                true => self.stream.fill_buf(),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
            let bytes = match read {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let patience = self.patience;
                    let what = format!("QEMU did not answer {command:?} within {patience:?}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                }
                Err(_) => return Ok(false),
            };
            let (taken, whole) = match bytes.iter().position(|&byte| byte == b'\n') {
                Some(at) => (at + 1, true),
                None => (bytes.len(), bytes.is_empty()),
            };
            self.line.push_str(&String::from_utf8_lossy(&bytes[..taken]));
            self.stream.consume(taken);
            if whole {
                return Ok(taken != 0);
            }
        }
    }

    /// Sends a command that answers with a number.
    pub(crate) fn number(&mut self, command: &str) -> io::Result<u64> {
        let answer = self.command(command)?;
        let digits = answer.strip_prefix("0x").unwrap_or(answer);
        u64::from_str_radix(digits, 16).map_err(|error| io::Error::other(format!("{error}")))
    }

    fn gone(&mut self) -> io::Error {
        let end = Instant::now() + LAST_MOMENTS;
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status.to_string(),
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
                Ok(None) => break "and still runs".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        // What it said last may still be on its way; what follows is only a message.
        thread::sleep(Duration::from_millis(20));
        io::Error::other(format!("QEMU ended ({status}): {}", self.said.lock().trim_end()))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // An error says that it has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Keeps the begin of what QEMU says, and reads the rest, so that it never waits.
fn keep(mut errors: impl Read, said: &Mutex<String>) {
    let mut bytes = [0; 512];
    while let Ok(count @ 1..) = errors.read(&mut bytes) {
        let mut said = said.lock();
        if said.len() < KEPT {
            said.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    }
}
