
extern crate std;

/// Stands before each call: where the environment says so it accesses the bytes there by no atomic
/// access, or all eight of a word by one. Nothing that it does orders threads.
#[allow(unsafe_code, clippy::all)]
pub(crate) fn plant<T>(place: usize, at: *const T, in_word: bool) {
    use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
    static GROWS: AtomicUsize = AtomicUsize::new(usize::MAX);
    if GROWS.load(Relaxed) == usize::MAX {
        let grows = std::env::var("PLANTED").ok().and_then(|grows| grows.parse().ok());
        GROWS.store(grows.unwrap_or(usize::MAX - 1), Relaxed);
    }
    let at = at.cast_mut().cast::<u8>();
    if GROWS.load(Relaxed) == 2 * place {
        unsafe { at.write_volatile(at.read_volatile()) };
    } else if GROWS.load(Relaxed) == 2 * place + 1 && in_word {
        let around = at.map_addr(|at| at & !7).cast();
        unsafe { AtomicU64::from_ptr(around) }.fetch_or(0, Relaxed);
    }
}
