//! The line protocol of QEMU's `qtest`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout};
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;

/// As much of what QEMU says on stderr is kept.
const KEPT: usize = 1 << 14;

/// QEMU's process and the pipes to it.
pub(crate) struct Wire {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    said: Arc<Mutex<String>>,
    line: String,
    /// The commands sent.
    pub(crate) commands: u64,
}

impl Wire {
    /// To a process with three pipes.
    pub(crate) fn new(mut child: Child) -> io::Result<Self> {
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(to), Some(from), Some(errors)) = pipes else {
            return Err(io::Error::other("QEMU was started without pipes"));
        };
        let said = Arc::new(Mutex::new(String::new()));
        let kept = Arc::clone(&said);
        thread::spawn(move || keep(errors, &kept));
        let from = BufReader::new(from);
        Ok(Self { child, to, from, said, line: String::new(), commands: 0 })
    }

    /// Sends commands, each on a line of its own, and returns what stands behind the `OK` of the
    /// last answer.
    pub(crate) fn command(&mut self, commands: &str) -> io::Result<&str> {
        self.line.clear();
        self.line.push_str(commands);
        self.line.push('\n');
        self.to.write_all(self.line.as_bytes())?;
        for command in commands.lines() {
            self.commands += 1;
            self.answer(command)?;
        }
        Ok(self.line.trim_end().strip_prefix("OK").unwrap_or("").trim_start())
    }

    /// Reads the next answer into the line; it begins with `OK`.
    fn answer(&mut self, command: &str) -> io::Result<()> {
        loop {
            self.line.clear();
            if self.from.read_line(&mut self.line)? == 0 {
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

    /// Sends a command that answers with a number.
    pub(crate) fn number(&mut self, command: &str) -> io::Result<u64> {
        let answer = self.command(command)?;
        let digits = answer.strip_prefix("0x").unwrap_or(answer);
        u64::from_str_radix(digits, 16).map_err(|error| io::Error::other(format!("{error}")))
    }

    fn gone(&mut self) -> io::Error {
        let status = self.child.wait().map_or_else(|error| error.to_string(), |s| s.to_string());
        // What it said last may still be on its way; what follows is only a message.
        thread::sleep(std::time::Duration::from_millis(20));
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
