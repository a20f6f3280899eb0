//! A stream can be attached to a [`DmaDomain`], which hands out its own IOVAs.

use super::domain::DmaDomain;
use super::memory::DmaMemory;
use crate::io_pgtable::{Format, TableMemory};
use crate::iommu::{Domain, IommuOps, PagingDomain};
use crate::platform::Platform;

impl<F, M, O, P, H> PagingDomain for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    M::List: Send,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    type Format = F;
    type Memory = M;
    type Ops = O;

    fn domain(&self) -> &Domain<F, M, O> {
        DmaDomain::domain(self)
    }
}
