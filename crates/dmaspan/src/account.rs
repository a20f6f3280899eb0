//! Charges against a limit: what an owner may have pinned.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::error::Errno;

/// A charge does not fit under the limit. Nothing was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes do not fit: {used} of {limit} bytes are charged")]
pub struct OverLimit {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes charged already.
    pub used: u64,
    /// Bytes that may be charged at most.
    pub limit: u64,
}

impl OverLimit {
    /// `ENOMEM`, as `vfio_lock_acct` for more than `RLIMIT_MEMLOCK`.
    pub const fn errno(&self) -> Errno {
        Errno::ENOMEM
    }
}

/// What one owner has pinned, and may.
#[derive(Debug)]
pub struct Account {
    limit: u64,
    used: AtomicU64,
}

impl Account {
    /// An account with nothing charged, for at most `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    /// Bytes charged now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may be charged at most.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Charges `bytes`, until the [`Charge`] is dropped.
    ///
    /// # Errors
    ///
    /// [`OverLimit`] where that is more than is left.
    ///
    /// ```
    /// use dmaspan::Account;
    ///
    /// let account = Account::new(0x3000);
    /// let charge = account.charge(0x2000)?;
    /// assert!(account.charge(0x2000).is_err());
    /// drop(charge);
    /// assert_eq!(account.used(), 0);
    /// # Ok::<(), dmaspan::account::OverLimit>(())
    /// ```
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, OverLimit> {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map(|_| Charge { account: Arc::clone(self), bytes })
            .map_err(|used| OverLimit { asked: bytes, used, limit: self.limit })
    }
}

/// Bytes charged to an [`Account`]; given back on drop.
#[derive(Debug)]
#[must_use = "dropping a charge gives it back"]
pub struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Charge {
    /// How many bytes are charged.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_charge_changes_nothing_and_names_the_limit() {
        let account = Account::new(10);
        let _held = account.charge(7).unwrap();
        let error = account.charge(4).unwrap_err();
        assert_eq!(error, OverLimit { asked: 4, used: 7, limit: 10 });
        assert_eq!(error.errno(), Errno::ENOMEM);
        assert_eq!(account.used(), 7);
        assert!(account.charge(3).is_ok());
    }

    #[test]
    fn a_charge_near_the_top_of_the_numbers_does_not_wrap() {
        let account = Account::new(u64::MAX);
        let _held = account.charge(u64::MAX).unwrap();
        assert!(account.charge(1).is_err());
    }
}
