//! A transaction is refused for one of these reasons, and the device gets something instead.

use dmaspan::Iova;

use super::stall::StallId;
use crate::walker::{Access, Fault, FaultKind};

/// A fault that belongs to no context (IHI 0062, "SMMU_sGFSR, Global Fault Status Register").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GlobalFault {
    /// ICF: the stream's SMMU_S2CRn says fault, or its context allows no translation.
    InvalidContext,
    /// USF: no stream mapping group is for the stream, and SMMU_sCR0.USFCFG is 1.
    UnidentifiedStream,
    /// SMCF: several groups are for the stream.
    StreamMatchConflict,
    /// UCBF: a context bank is named that is not implemented.
    UnimplementedContextBank,
}

/// The reason why a transaction was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A global fault.
    Global(GlobalFault),
    /// A context fault, recorded in this bank. The address in it is what that stage translates.
    Context {
        /// The context bank.
        bank: usize,
        /// The fault.
        fault: Fault,
    },
    /// An earlier fault of this bank is outstanding, and SMMU_CBn_SCTLR.HUPCF is 0.
    Outstanding {
        /// The context bank.
        bank: usize,
    },
    /// It was stalled, and SMMU_CBn_RESUME has terminated it.
    Terminated {
        /// The context bank.
        bank: usize,
    },
}

/// Says what the device gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Response {
    /// An abort.
    Aborted,
    /// Zeros for a read, and a write is ignored: fault reports are disabled (sCR0.GFRE or
    /// SCTLR.CFRE).
    Ignored,
    /// Nothing, until SMMU_CBn_RESUME is written.
    Stalled(StallId),
}

/// A transaction that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{access:?} of iova {iova} by stream {stream:#x} was refused: {why:?}, {response:?}")]
pub struct RefusedTransaction {
    /// The stream.
    pub stream: u16,
    /// The address that the device used.
    pub iova: Iova,
    /// What the device did.
    pub access: Access,
    /// The reason.
    pub why: Why,
    /// What the device gets.
    pub response: Response,
}

impl RefusedTransaction {
    /// The same as a fault of a walk: a translation fault where no table is to blame.
    pub fn fault(&self) -> Fault {
        match self.why {
            Why::Context { fault, .. } => Fault { iova: self.iova, ..fault },
            Why::Global(_) | Why::Outstanding { .. } | Why::Terminated { .. } => Fault {
                kind: FaultKind::Translation,
                level: 0,
                iova: self.iova,
                access: self.access,
            },
        }
    }
}
