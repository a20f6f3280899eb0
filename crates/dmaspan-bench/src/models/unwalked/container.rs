//! A container over tables that no hardware walks: for measuring what mapping costs.

use std::sync::Arc;

use dmaspan::io_pgtable::{Format, PageTable};
use dmaspan::iommu::{self, Domain};
use dmaspan::pin::Pinner;
use dmaspan::{Account, Container, PhysAddr};

use super::dma::Untold;
use dmaspan_sim::arena::Arena;

/// A [`Container`] with one domain, behind which there is no hardware: invalidations are counted
/// (see [`Told`](super::Told)) and done at once.
#[derive(Debug)]
pub(crate) struct UnwalkedContainer<P: Pinner> {
    container: Container<P, parking_lot::RawMutex>,
    tables: Arena,
}

impl<P: Pinner<Address = PhysAddr>> UnwalkedContainer<P> {
    /// An empty container that charges `account`, with tables of this format, which have room for
    /// `table_bytes` from `tables_at` on.
    ///
    /// # Errors
    ///
    /// [`iommu::Error`] where the root has no room.
    pub(crate) fn new<F: Format>(
        format: F,
        tables_at: PhysAddr,
        table_bytes: u64,
        pinner: P,
        account: Arc<Account>,
    ) -> Result<Self, iommu::Error> {
        let tables = Arena::new(tables_at, table_bytes);
        let domain = Domain::new(PageTable::new(format, tables.clone())?, Untold)?;
        Ok(Self { container: Container::with_domain(pinner, domain, account), tables })
    }

    /// What maps and unmaps.
    #[inline]
    pub(crate) fn container(&self) -> &Container<P, parking_lot::RawMutex> {
        &self.container
    }

    /// How many tables there are, the root included.
    pub(crate) fn tables(&self) -> usize {
        self.tables.tables()
    }
}
