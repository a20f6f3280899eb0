//! Hugetlb pages that go back to the system however this process ends.
//!
//! A reservation raises a number of the whole system and lowers it on drop; a process that is
//! killed or interrupted never gets there. So another process holds it: this program again, in a
//! process group of its own, so that the terminal's interrupt does not reach it, and deaf to
//! `SIGTERM`, `SIGINT` and `SIGHUP`. It lets go when its standard input ends, and that ends with
//! this process at the latest. Where it goes before the memory does, the kernel frees each page
//! with the memory.
//!
//! Nothing gives the pages back where both are ended by `SIGKILL`: then the number stays raised
//! until somebody writes it to `/sys/kernel/mm/hugepages`. The next run says so, by the
//! [`ReservationRecord`] that the holder has written.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};

use dmaspan_linux::{HugetlbReservation, MemoryKind, signals};

use crate::left_over::ReservationRecord;

/// The subcommand of the holder.
pub const COMMAND: &str = "hold-hugetlb";

/// This program, also where its file was replaced meanwhile (proc_pid_exe(5)).
const OWN_EXECUTABLE: &str = "/proc/self/exe";

/// What the holder says when it holds the pages.
const HELD: &str = "held";

/// What the holder is told once the memory exists: a line.
const MAPPED: &[u8] = b"mapped\n";

/// The reason why no pages are held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// They could not be reserved; the reason is the holder's.
    #[error("{reason}")]
    Refused {
        /// What the holder says.
        reason: String,
    },
    /// There is no holder.
    #[error("the process that holds hugetlb pages could not be started: {0}")]
    NoHolder(#[from] io::Error),
}

/// Hugetlb pages held by another process, until this is dropped.
#[derive(Debug)]
pub struct HeldPages {
    holder: Child,
}

impl HeldPages {
    /// The pages for `bytes` of memory of a kind; `None` where it needs none.
    ///
    /// # Errors
    ///
    /// [`HoldError`]; nothing is reserved.
    pub fn for_memory(kind: MemoryKind, bytes: u64) -> Result<Option<Self>, HoldError> {
        if !kind.is_hugetlb() {
            return Ok(None);
        }
        let mut holder = Command::new(OWN_EXECUTABLE)
            .arg0("dmaspan")
            .args([COMMAND, kind.name(), &bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let answer = holder.stdout.take().map(BufReader::new);
        // From here on the holder ends with this.
        let held = Self { holder };
        let mut line = String::new();
        if let Some(mut answer) = answer {
            answer.read_line(&mut line)?;
        }
        match line.trim_end() {
            HELD => Ok(Some(held)),
            "" => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            reason => Err(HoldError::Refused { reason: reason.to_owned() }),
        }
    }

    /// Says that the memory that uses the pages exists, so that others may reserve pages.
    pub fn mapped(&mut self) {
        if let Some(holder) = &mut self.holder.stdin {
            // A holder that is gone holds nothing from others.
            let _ = holder.write_all(MAPPED);
        }
    }
}

impl Drop for HeldPages {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        // A holder that cannot be waited for lets go all the same.
        let _ = self.holder.wait();
    }
}

/// The holder: reserves, says so, and lets go at the end of its input.
pub fn hold(kind: MemoryKind, bytes: u64) -> ExitCode {
    signals::ignore_termination();
    let mut reservation = HugetlbReservation::for_memory(kind, bytes);
    let record = match &reservation {
        Ok(Some(reservation)) => ReservationRecord::of(kind.page_size(), reservation.added()),
        _ => None,
    };
    let answer = match &reservation {
        Ok(_) => HELD.to_owned(),
        Err(error) => error.to_string(),
    };
    let heard = writeln!(io::stdout(), "{answer}").is_ok();
    if heard && let Ok(reservation) = &mut reservation {
        let told = io::stdin().lock().read_line(&mut String::new());
        if let (Ok(1..), Some(reservation)) = (told, reservation) {
            reservation.mapped();
        }
        // An error ends it as well.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
    }
    drop(reservation);
    drop(record);
    ExitCode::SUCCESS
}
