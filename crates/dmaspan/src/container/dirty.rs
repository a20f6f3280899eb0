//! What devices wrote.

use super::mapping::Mapping;
use crate::pin::Pinner;
use crate::range::IovaRange;

impl<P: Pinner> Mapping<P> {
    /// Notes that somebody other than a device behind a domain wrote there, or may.
    #[expect(dead_code, reason = "for what is pinned and written by others")]
    pub(super) fn mark_dirty(&mut self, _range: IovaRange) {}
}
