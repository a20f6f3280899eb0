//! Transactions wait here for SMMU_CBn_RESUME.

use dmaspan::Iova;

use crate::walker::Access;

/// A transaction that was stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StallId {
    pub(super) bank: usize,
    number: u64,
}

impl StallId {
    /// The context bank whose SMMU_CBn_RESUME it waits for.
    pub fn bank(&self) -> usize {
        self.bank
    }
}

/// What a device does: an address of a stream, read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transaction {
    pub(super) stream: u16,
    pub(super) iova: Iova,
    pub(super) access: Access,
}

/// What became of a stalled transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Waiting,
    Retry,
    Terminate,
}

/// The stalled transactions of a bank.
#[derive(Debug, Default)]
pub(super) struct Stalls {
    next: u64,
    stalled: Vec<(u64, Transaction, Outcome)>,
}

impl Stalls {
    pub(super) fn stall(&mut self, bank: usize, transaction: Transaction) -> StallId {
        let number = self.next;
        self.next += 1;
        self.stalled.push((number, transaction, Outcome::Waiting));
        StallId { bank, number }
    }

    /// How many are waiting.
    pub(super) fn waiting(&self) -> usize {
        self.stalled.iter().filter(|(.., outcome)| *outcome == Outcome::Waiting).count()
    }

    /// Decides about all that wait.
    pub(super) fn resume(&mut self, decided: Outcome) {
        for (.., outcome) in &mut self.stalled {
            if *outcome == Outcome::Waiting {
                *outcome = decided;
            }
        }
    }

    /// Takes one out that waits no more.
    pub(super) fn take(&mut self, id: StallId) -> Option<(Transaction, Outcome)> {
        let is_done = |&(number, _, outcome): &(u64, Transaction, Outcome)| {
            number == id.number && outcome != Outcome::Waiting
        };
        let at = self.stalled.iter().position(is_done)?;
        let (_, transaction, outcome) = self.stalled.swap_remove(at);
        Some((transaction, outcome))
    }
}
