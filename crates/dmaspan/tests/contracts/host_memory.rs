//! `HostMemory`: reads and writes that fail and panic, and clients that unmap meanwhile.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::regbuf::{HostMemory, HostSlice, Outside, Regions};
use dmaspan::{Iova, Prot, UserAddr, UserRange};

use crate::common::{PAGE, Script, at_every_call};

const LEN: usize = 4096;

/// A page of the heap, which counts as long as it is there.
struct Page {
    start: NonNull<u8>,
    script: Arc<Script>,
    pages: Arc<AtomicUsize>,
}

impl Page {
    fn new(script: &Arc<Script>, pages: &Arc<AtomicUsize>) -> Arc<Self> {
        let bytes: Box<[u8; LEN]> = Box::new([0; LEN]);
        pages.fetch_add(1, Ordering::Relaxed);
        let start = NonNull::from(Box::leak(bytes)).cast();
        Arc::new(Self { start, script: Arc::clone(script), pages: Arc::clone(pages) })
    }

    /// Where `len` bytes are.
    fn place(&self, offset: u64, len: usize) -> Result<*mut u8, Outside> {
        let outside = Outside { offset, len: len as u64, buffer: PAGE };
        if self.script.turn() || offset + len as u64 > PAGE {
            return Err(outside);
        }
        Ok(self.start.as_ptr().wrapping_add(usize::try_from(offset).unwrap()))
    }
}

// SAFETY: the memory is reached by its pointer alone.
unsafe impl Send for Page {}
// SAFETY: as above, and by one thread.
unsafe impl Sync for Page {}

// SAFETY: the slice is the page, until it is dropped, and nobody has a reference to it.
unsafe impl HostMemory for Page {
    fn slice(&self) -> HostSlice<'_> {
        let _ = self.script.step();
        HostSlice::new(self.start, LEN)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        let from = self.place(offset, bytes.len())?;
        // SAFETY: they are bytes of the page.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside> {
        let to = self.place(offset, bytes.len())?;
        // SAFETY: they are bytes of the page.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pages.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: it was leaked when this was made.
        drop(unsafe { Box::from_raw(self.start.cast::<[u8; LEN]>().as_ptr()) });
    }
}

#[test]
fn a_hostile_host_memory_stays_while_anything_holds_it_and_no_longer() {
    at_every_call(|script| {
        let pages = Arc::new(AtomicUsize::new(0));
        let there = || pages.load(Ordering::Relaxed);
        let regions = Arc::new(Regions::<Iova, parking_lot::RawMutex>::new());
        let access = Prot::READ_WRITE;
        for at in [0, PAGE] {
            let page = Page::new(script, &pages);
            let _ = script.run(|| regions.insert(Iova::new(at), access, page));
        }
        let weak = Arc::downgrade(&regions);
        // The client unmaps all, and shares other memory.
        let (of_script, of_pages) = (Arc::clone(script), Arc::clone(&pages));
        script.on_reenter(move || {
            let Some(regions) = weak.upgrade() else { return };
            drop(regions.unmap_all());
            let page = Page::new(&of_script, &of_pages);
            let _ = regions.insert(Iova::new(PAGE), access, page);
        });
        let held = script.run(|| regions.hold(Iova::new(0x800), PAGE, access));
        let user = UserRange::from_len(UserAddr::new(0x10), 2 * PAGE - 0x20).unwrap();
        let buffer = script.run(|| regions.buffer(user, access));
        // What is held stays, whatever becomes of the regions.
        let mut kept = 0;
        if let Some(Ok(held)) = held {
            kept = there();
            let mut bytes = [0xff; 0x40];
            let _ = script.run(|| held.read(0x7f0, &mut bytes));
            let _ = script.run(|| held.write(0x7f0, &[7; 0x20]));
            let unmapping = regions.unmap_all();
            assert!(there() >= 2 && kept >= 2, "both pages are held");
            let slices = script.run(|| held.slices(0, PAGE).map(Iterator::count));
            assert!(!script.is_quiet() || slices.is_some_and(|count| count.unwrap() == 2));
            drop((held, unmapping));
        }
        assert!(!script.is_quiet() || (kept == 2 && there() == 2), "the buffer holds them");
        drop((buffer, regions.unmap_all()));
        script.forget_hooks();
        drop(regions);
        assert_eq!(there(), 0, "nothing holds them");
    });
}
