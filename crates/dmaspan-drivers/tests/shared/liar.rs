//! A domain that is another one after a while, which nothing unsafe is needed for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan::io_pgtable::{Format, TableMemory};
use dmaspan::iommu::{
    AttachError, Attachment, Domain, IommuOps, PagingDomain, Port, Prepared, Target,
};

/// Answers with the first domain so many times, and then with the second.
pub(crate) struct Liar<F: Format, M: TableMemory<F::Word>, O: IommuOps> {
    fits: Arc<Domain<F, M, O>>,
    other: Arc<Domain<F, M, O>>,
    truths: AtomicU32,
}

impl<F, M, O> PagingDomain for Liar<F, M, O>
where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    O: IommuOps,
{
    type Format = F;
    type Memory = M;
    type Ops = O;

    fn domain(&self) -> &Domain<F, M, O> {
        let one_less = |truths: u32| truths.checked_sub(1);
        match self.truths.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
            Ok(_) => &self.fits,
            Err(_) => &self.other,
        }
    }
}

/// Attaches a stream to such domains, which begin to lie later and later, until one does not come
/// to it. However it ends, hardware never has the other domain, whose hooks would not tell it to
/// forget anything, or whose tables it reads as something else.
pub(crate) fn attach<F, M, O, P>(
    stream: &Attachment<P>,
    [fits, other]: [&Arc<Domain<F, M, O>>; 2],
    mut has_other: impl FnMut() -> bool,
) where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    O: IommuOps,
    P: Port<Paging = Liar<F, M, O>>,
{
    let mut refused = 0;
    for truths in 0.. {
        let (fits, other) = (Arc::clone(fits), Arc::clone(other));
        let liar = Arc::new(Liar { fits, other, truths: truths.into() });
        let result = stream.attach(Target::Paging(Prepared::new(Arc::clone(&liar))));
        assert!(!has_other(), "after {truths} answers with the domain that fits: {result:?}");
        match result {
            Ok(()) => stream.detach().unwrap(),
            Err(AttachError::Incompatible(_) | AttachError::Hardware { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        if liar.truths.load(Ordering::Relaxed) > 0 {
            break;
        }
    }
    assert!(refused > 0, "the other domain is one that the stream cannot have");
}
