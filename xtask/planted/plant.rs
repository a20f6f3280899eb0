
extern crate std;

/// Stands before each call: an access of the bytes there that is no atomic one, or one of another
/// size, where the environment says so.
#[allow(unsafe_code, clippy::all)]
pub(crate) fn plant<T>(place: usize, at: *const T) {
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
    let grows = std::env::var("PLANTED").unwrap_or_default();
    let at = at.cast_mut().cast::<u8>();
    if grows == std::format!("{place}-volatile") {
        unsafe { at.write_volatile(at.read_volatile()) };
    } else if grows == std::format!("{place}-mixed") {
        let around = at.map_addr(|at| at & !7).cast();
        unsafe { AtomicU64::from_ptr(around) }.fetch_or(0, Relaxed);
    }
}
