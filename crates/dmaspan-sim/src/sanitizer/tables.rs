//! Tables that were taken out of a tree, with the unmap that did it.

use std::collections::HashMap;
use std::thread::ThreadId;

use dmaspan::{IovaRange, Span};

use super::event::Record;

/// By their addresses.
#[derive(Debug, Default)]
pub(super) struct DetachedTables {
    /// Those whose unmap has not been told yet. The thread that takes tables out tells next.
    untold: Vec<(ThreadId, u64)>,
    /// The IOVAs and the number of the unmap.
    told: HashMap<u64, (IovaRange, u64)>,
}

impl DetachedTables {
    pub(super) fn retired(&mut self, span: Span, now: &Record) {
        self.untold.push((now.origin.thread, span.paddr().get()));
    }

    /// The unmap of a thread, with which its tables went.
    pub(super) fn unmapped(&mut self, range: IovaRange, now: &Record) {
        let own = self.untold.extract_if(.., |(thread, _)| *thread == now.origin.thread);
        self.told.extend(own.map(|(_, table)| (table, (range, now.number))));
    }

    /// The unmap that a table went with.
    pub(super) fn freed(&mut self, span: Span) -> Option<(IovaRange, u64)> {
        let table = span.paddr().get();
        self.untold.retain(|(_, untold)| *untold != table);
        self.told.remove(&table)
    }
}
