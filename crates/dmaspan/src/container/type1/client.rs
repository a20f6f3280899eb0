//! The client that sends a request, and its memory.

use alloc::sync::Arc;

use crate::account::Account;
use crate::pin::Pinner;

/// Says whether the process whose memory is mapped still has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Process {
    /// It has.
    #[default]
    Alive,
    /// It has exited, and its memory is gone: nothing more of it is pinned.
    Exited,
}

/// The client that asks: its memory is mapped, and its account is charged.
#[expect(missing_debug_implementations, reason = "spaces and closures have no text")]
pub struct Client<'a, P: Pinner> {
    pub(super) space: &'a P::Space,
    pub(super) account: &'a Arc<Account>,
    pub(super) process: Process,
    pub(super) interrupted: &'a dyn Fn() -> bool,
}

impl<'a, P: Pinner> Client<'a, P> {
    /// A process with this memory, charged to `account`.
    ///
    /// Linux charges what is mapped twice two times: an account that refuses exactly where it does
    /// counts [mappings](crate::account::Counting::Mappings). A process that may lock memory
    /// without limit, as those with `CAP_IPC_LOCK`, has an account [without
    /// one](Account::unlimited).
    pub fn new(space: &'a P::Space, account: &'a Arc<Account>) -> Self {
        Self { space, account, process: Process::Alive, interrupted: &|| false }
    }

    /// The same client, whose process is alive or not.
    #[must_use]
    pub fn with_process(self, process: Process) -> Self {
        Self { process, ..self }
    }

    /// The same client, which a signal may interrupt: once `interrupted` answers `true`, a map ends
    /// with `EINTR` and nothing is mapped.
    #[must_use]
    pub fn interrupted_by(self, interrupted: &'a dyn Fn() -> bool) -> Self {
        Self { interrupted, ..self }
    }

    pub(super) fn has_exited(&self) -> bool {
        self.process == Process::Exited
    }
}
