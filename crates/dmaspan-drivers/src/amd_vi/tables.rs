//! The device table (2.2.2).
//!
//! An entry is 32 bytes, and the driver stores 8 at once. Word 0 says whether and through which
//! tables a device is translated, word 1 of which domain what is cached is. Hardware fetches both
//! with one access, as Linux relies on; so while neither changes that is cached, they may be stored
//! one after the other, and an entry that changes its domain is closed first:
//!
//! 1. Word 0 is closed. The entry and all that is cached of the old domain are invalidated; when
//!    that is done, the device reaches nothing, and no access that it began is under way.
//! 2. Word 1 names the new domain, then word 0 its tables. The entry is invalidated, so that the
//!    closed one is not used on.
//!
//! So hardware caches nothing of the device but what word 1 names: where a step fails, doing both
//! again makes up for it.

use core::sync::atomic::{AtomicU32, Ordering};

use dmaspan::lg2;
use lock_api::{Mutex, MutexGuard, RawMutex};

use super::spec::{LG2_DEVICE_ENTRY, device_entry};
use crate::host::Structure;
use crate::structure::Words;

/// The domain of devices that reach nothing. 0 is left out: with SNP hardware refuses it (2.2.2.1).
pub(super) const BLOCKED: u16 = 1;
/// The domain of devices that reach all memory.
pub(super) const PASSING: u16 = 2;
/// The first domain that has tables.
pub(super) const FIRST_DOMAIN: u16 = 3;

const WORDS: usize = 1 << (LG2_DEVICE_ENTRY - 3);

pub(super) struct Devices<L, S> {
    /// Held while entries are stored.
    lock: Mutex<L, ()>,
    words: Words<S>,
    /// A table without entries, which closed devices have.
    empty: Words<S>,
    last: u16,
    /// No device from here on was ever let at anything.
    end: AtomicU32,
}

/// The device table, locked.
pub(super) struct Entries<'a, L: RawMutex, S> {
    _lock: MutexGuard<'a, L, ()>,
    devices: &'a Devices<L, S>,
}

impl<L: RawMutex, S: Structure> Devices<L, S> {
    /// A table of closed devices.
    pub(super) fn new(words: Words<S>, empty: Words<S>, last: u16) -> Self {
        let devices = Self { lock: Mutex::new(()), words, empty, last, end: AtomicU32::new(0) };
        // What lies behind the last device is in the table, too, up to a whole page.
        for device in 0..=u16::MAX {
            let at = place(device);
            devices.words.set(at + 1, device_entry::with_domain(0, BLOCKED));
            devices.words.set(at, devices.closed());
        }
        devices
    }

    /// What the base register holds: where the table is, and its pages less one (3.4).
    pub(super) fn base(&self) -> u64 {
        let pages = lg2::size(lg2_size(self.last)) >> 12;
        self.words.paddr().get() | (pages - 1)
    }

    /// Word 0 of devices that reach nothing.
    pub(super) fn closed(&self) -> u64 {
        device_entry::closed(self.empty.paddr())
    }

    /// The last device.
    pub(super) fn last(&self) -> u16 {
        self.last
    }

    pub(super) fn lock(&self) -> Entries<'_, L, S> {
        Entries { _lock: self.lock.lock(), devices: self }
    }

    /// The devices that the table has in this domain.
    pub(super) fn of_domain(&self, domain: u16) -> impl Iterator<Item = u16> + '_ {
        let end = self.end.load(Ordering::Acquire);
        (0..=self.last)
            .take_while(move |&device| u32::from(device) < end)
            .filter(move |&device| self.domain(device) == domain)
    }

    pub(super) fn domain(&self, device: u16) -> u16 {
        device_entry::domain(self.words.get(place(device) + 1))
    }

    /// Whether a device is let at nothing.
    pub(super) fn is_closed(&self, device: u16) -> bool {
        self.words.get(place(device)) & device_entry::READ_WRITE == 0
    }
}

impl<L: RawMutex, S: Structure> Entries<'_, L, S> {
    /// Word 0.
    pub(super) fn translation(&self, device: u16) -> u64 {
        self.devices.words.get(place(device))
    }

    /// Stores the domain and then word 0, of a device that is closed or of that domain.
    pub(super) fn open(&self, device: u16, domain: u16, word: u64) {
        self.devices.end.fetch_max(u32::from(device) + 1, Ordering::AcqRel);
        self.set_domain(device, domain);
        self.set_translation(device, word);
    }

    /// Stores word 0.
    pub(super) fn set_translation(&self, device: u16, word: u64) {
        self.devices.words.set(place(device), word);
    }

    fn set_domain(&self, device: u16, domain: u16) {
        let at = place(device) + 1;
        let word = self.devices.words.get(at);
        self.devices.words.set(at, device_entry::with_domain(word, domain));
    }

    /// Stores what firmware asks for.
    pub(super) fn set_setting(&self, device: u16, setting: u8) {
        let at = place(device);
        let word = self.devices.words.get(at + 1);
        self.devices.words.set(at + 1, device_entry::with_setting(word, setting));
        self.devices.words.set(at + 2, device_entry::interrupts(setting));
    }
}

/// log2 of the bytes of a table up to that device: a power of two, of whole pages.
pub(super) fn lg2_size(last: u16) -> u32 {
    let lg2_devices = u16::BITS - last.leading_zeros();
    (lg2_devices + LG2_DEVICE_ENTRY).max(12)
}

/// The index of a device's first word.
fn place(device: u16) -> usize {
    usize::from(device) * WORDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_of_whole_pages_and_has_the_last_device() {
        assert_eq!(lg2_size(0), 12);
        assert_eq!(lg2_size(127), 12);
        assert_eq!(lg2_size(128), 13);
        assert_eq!(lg2_size(0xff), 13);
        assert_eq!(lg2_size(0xffff), 21);
    }
}
