//! The kernel's log, read record by record (Documentation/ABI/testing/dev-kmsg).

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// A place in the log that moves on as it is read.
#[derive(Debug)]
pub(crate) struct Log(File);

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// How grave it is, from 0, an emergency; 4 is a warning.
    pub(crate) level: u8,
    /// When it was written, in microseconds since the kernel started.
    pub(crate) micros: u64,
    /// Its text.
    pub(crate) text: String,
}

impl Log {
    /// The log from its oldest record on.
    ///
    /// # Errors
    ///
    /// Why it cannot be opened.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        Ok(Self(OpenOptions::new().read(true).custom_flags(flags).open("/dev/kmsg")?))
    }

    /// What was written since the last call.
    pub(crate) fn new_records(&mut self) -> Vec<Record> {
        let mut records = Vec::new();
        // The longest record that the kernel hands out.
        let mut buffer = [0; 8192];
        loop {
            match self.0.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    let record = buffer.get(..length).unwrap_or_default();
                    records.extend(Record::parse(&String::from_utf8_lossy(record)));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Records were overwritten; the next read continues behind them.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PIPE) => {}
                // There are no more, which is `WouldBlock`, or there is no reading at all.
                Err(_) => break,
            }
        }
        records
    }
}

impl Record {
    /// Reads `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT`, and ignores the lines behind it.
    fn parse(record: &str) -> Option<Self> {
        let (header, text) = record.lines().next()?.split_once(';')?;
        let mut fields = header.split(',');
        let priority: u64 = fields.next()?.parse().ok()?;
        let micros = fields.nth(1)?.parse().ok()?;
        let level = u8::try_from(priority & 7).ok()?;
        Some(Self { level, micros, text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_without_their_dictionary() {
        let record = Record::parse("11,339,5140900,-;DMAR: [DMA Write]; x\n SUBSYSTEM=pci\n");
        let text = "DMAR: [DMA Write]; x".to_owned();
        assert_eq!(record, Some(Record { level: 3, micros: 5_140_900, text }));
        for nothing in ["", "11,339;x", "a,1,2,-;x", "11,339,5140900,-"] {
            assert_eq!(Record::parse(nothing), None, "{nothing}");
        }
    }
}
