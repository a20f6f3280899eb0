//! A [`Promise`] is what a caller promises to the implementer of an unsafe trait.

use core::marker::PhantomData;

/// The promise that a call keeps what the called method asks of its caller.
///
/// [`TableMemory`](crate::io_pgtable::TableMemory), [`Pinner`](crate::pin::Pinner) and
/// [`IommuOps`](crate::iommu::IommuOps) are unsafe to implement, and some of their methods rely on
/// their callers as well: that a table is freed once, that no device reaches what is unpinned, that
/// a root is the domain's. Such a method takes a promise, so that safe code that
/// has the memory or the pinner in its hands cannot call it. This crate makes promises where it
/// keeps them.
///
/// A promise is for the call that it came with. An implementer that wraps another one passes it on
/// in calls that are part of that call.
///
/// # Examples
///
/// Tables, freed by code that answers for it:
///
/// ```
/// use dmaspan::Promise;
/// use dmaspan::io_pgtable::{Format, PageTable, TableMemory};
///
/// fn free<F: Format, M: TableMemory<F::Word>>(table: &PageTable<F, M>, list: M::List) {
///     // SAFETY: all in the list are of this shape and memory, and no hardware reads them.
///     let promise = unsafe { Promise::new() };
///     table.memory().free(promise, table.geometry().table, list);
/// }
/// ```
///
/// Safe code cannot:
///
/// ```compile_fail,E0061
/// use dmaspan::io_pgtable::{Format, PageTable, TableMemory};
///
/// fn free<F: Format, M: TableMemory<F::Word>>(table: &PageTable<F, M>, list: M::List) {
///     table.memory().free(table.geometry().table, list);
/// }
/// ```
///
/// ```compile_fail,E0133
/// use dmaspan::Promise;
/// use dmaspan::io_pgtable::{Format, PageTable, TableMemory};
///
/// fn free<F: Format, M: TableMemory<F::Word>>(table: &PageTable<F, M>, list: M::List) {
///     let promise = Promise::new();
///     table.memory().free(promise, table.geometry().table, list);
/// }
/// ```
///
/// Nor can it make a table of other memory and publish it as one that hardware reads:
///
/// ```
/// use dmaspan::PhysAddr;
/// use dmaspan::io_pgtable::{Fresh, TableMemory};
///
/// fn publish<M: TableMemory<u64>>(memory: &M, at: PhysAddr, words: &mut [u64]) {
///     // SAFETY: the words are what hardware reads there.
///     memory.publish(unsafe { Fresh::new(at, words) });
/// }
/// ```
///
/// ```compile_fail,E0133
/// use dmaspan::PhysAddr;
/// use dmaspan::io_pgtable::{Fresh, TableMemory};
///
/// fn publish<M: TableMemory<u64>>(memory: &M, at: PhysAddr, words: &mut [u64]) {
///     memory.publish(Fresh::new(at, words));
/// }
/// ```
///
/// Memory of a container, which its devices use:
///
/// ```
/// use dmaspan::pin::{Dirty, Kind, Pinner};
/// use dmaspan::{Container, Promise, Span};
/// use parking_lot::RawMutex;
///
/// fn end<P>(container: &Container<P, RawMutex>, mut pin: P::Pin, spans: &[Span<P::Address>])
/// where
///     P: Pinner,
/// {
///     // SAFETY: the container knows nothing of the pin, and no device reaches the spans.
///     let promise = unsafe { Promise::new() };
///     container.pinner().unpin(promise, &mut pin, spans, Kind::Memory, Dirty::Clean);
///     container.pinner().release(promise, pin);
/// }
/// ```
///
/// ```compile_fail,E0061
/// use dmaspan::pin::{Dirty, Kind, Pinner};
/// use dmaspan::{Container, Span};
/// use parking_lot::RawMutex;
///
/// fn end<P>(container: &Container<P, RawMutex>, mut pin: P::Pin, spans: &[Span<P::Address>])
/// where
///     P: Pinner,
/// {
///     container.pinner().unpin(&mut pin, spans, Kind::Memory, Dirty::Clean);
/// }
/// ```
///
/// ```compile_fail,E0061
/// use dmaspan::Container;
/// use dmaspan::pin::Pinner;
/// use parking_lot::RawMutex;
///
/// fn end<P: Pinner>(container: &Container<P, RawMutex>, pin: P::Pin) {
///     container.pinner().release(pin);
/// }
/// ```
///
/// Tables that hardware walks:
///
/// ```compile_fail,E0061
/// use dmaspan::PhysAddr;
/// use dmaspan::io_pgtable::{Format, TableMemory};
/// use dmaspan::iommu::{Domain, IommuOps};
///
/// fn walk<F: Format, M: TableMemory<F::Word>, O: IommuOps>(domain: &Domain<F, M, O>) {
///     // Would have devices translated by whatever is there.
///     let _ = domain.ops().root_changed(&|| (PhysAddr::new(0x1000), 3));
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Promise<'c>(PhantomData<&'c ()>);

impl Promise<'_> {
    /// Makes the promise, for code outside of this crate that calls such a method itself.
    ///
    /// # Safety
    ///
    /// Each call that the result is given to keeps what the method's documentation says that the
    /// caller promises.
    #[expect(unsafe_code, reason = "the caller takes over what the method's caller promises")]
    pub const unsafe fn new() -> Self {
        Self(PhantomData)
    }

    /// [`new`](Self::new) for the parts of this crate that keep the promise.
    #[inline(always)]
    pub(crate) const fn kept() -> Self {
        Self(PhantomData)
    }
}
