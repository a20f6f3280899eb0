//! Memory that knows what of it is allocated, and who used what was not.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::regbuf::{Buffer, Keep, Segments, SegmentsBuilder};
use dmaspan::{DmaAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_nvme::access::SharedMemory;
use parking_lot::Mutex;

const BASE: u64 = 0x1_0000_0000;
const BYTES: u64 = 48 << 20;

pub(crate) struct Ram {
    words: Box<[AtomicU64]>,
    books: Mutex<Books>,
}

struct Books {
    next: u64,
    /// Start and length of what is allocated.
    live: BTreeMap<u64, u64>,
    violations: Vec<String>,
}

impl Ram {
    pub(crate) fn new() -> Arc<Self> {
        let words = (0..BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let books = Books { next: BASE, live: BTreeMap::new(), violations: Vec::new() };
        Arc::new(Self { words, books: Mutex::new(books) })
    }

    /// Memory that is never given out again. A page behind it belongs to nobody.
    pub(crate) fn allocate(&self, bytes: u64, align: u64) -> u64 {
        let mut books = self.books.lock();
        let start = books.next.next_multiple_of(align.max(8));
        books.next = start + bytes + 4096;
        assert!(books.next <= BASE + BYTES, "the test needs more memory");
        books.live.insert(start, bytes);
        start
    }

    fn free(&self, start: u64) {
        assert!(self.books.lock().live.remove(&start).is_some());
    }

    /// How many pieces of memory are allocated.
    pub(crate) fn live(&self) -> usize {
        self.books.lock().live.len()
    }

    /// What was used that was not allocated.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.books.lock().violations.clone()
    }

    /// A device uses memory; whether it may.
    fn may_use(&self, addr: u64, len: u64) -> bool {
        let mut books = self.books.lock();
        let inside = |(start, bytes): (&u64, &u64)| addr + len <= start + bytes;
        let allowed = books.live.range(..=addr).next_back().is_some_and(inside);
        if !allowed {
            books.violations.push(format!("{len:#x} bytes at {addr:#x}"));
        }
        allowed
    }

    fn word(&self, addr: u64) -> &AtomicU64 {
        &self.words[((addr - BASE) / 8) as usize]
    }

    pub(crate) fn word_at(&self, addr: u64) -> u64 {
        if self.may_use(addr, 8) {
            u64::from_le(self.word(addr).load(Ordering::Relaxed))
        } else {
            0
        }
    }

    pub(crate) fn set_word(&self, addr: u64, value: u64) {
        if self.may_use(addr, 8) {
            self.word(addr).store(value.to_le(), Ordering::Release);
        }
    }

    pub(crate) fn read(&self, addr: u64, to: &mut [u8]) {
        if !self.may_use(addr, to.len() as u64) {
            return;
        }
        if addr.is_multiple_of(8) && to.len().is_multiple_of(8) {
            for (at, bytes) in (addr..).step_by(8).zip(to.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
            }
            return;
        }
        for (at, byte) in (addr..).zip(to) {
            let word = self.word(at).load(Ordering::Relaxed).to_ne_bytes();
            *byte = word[(at % 8) as usize];
        }
    }

    pub(crate) fn write(&self, addr: u64, from: &[u8]) {
        if !self.may_use(addr, from.len() as u64) {
            return;
        }
        if addr.is_multiple_of(8) && from.len().is_multiple_of(8) {
            for (at, bytes) in (addr..).step_by(8).zip(from.as_chunks().0) {
                self.word(at).store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            return;
        }
        for (at, byte) in (addr..).zip(from) {
            let mut word = self.word(at).load(Ordering::Relaxed).to_ne_bytes();
            word[(at % 8) as usize] = *byte;
            self.word(at).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }

    /// A buffer of these bytes, which are freed with it.
    #[expect(unsafe_code, reason = "a buffer of such memory is promised")]
    pub(crate) fn buffer(self: &Arc<Self>, spans: &[(u64, u64)], access: Prot) -> RegisteredBuffer {
        let mut builder = SegmentsBuilder::new();
        for (start, len) in spans {
            builder.push(Span::new(DmaAddr::new(*start), *len).unwrap()).unwrap();
        }
        let segments = builder.build().unwrap();
        let user = UserRange::from_len(UserAddr::new(0x7000_0000), segments.len()).unwrap();
        let starts = spans.iter().map(|(start, _)| *start).collect();
        let keep = Box::new(Kept { ram: Arc::clone(self), starts });
        // SAFETY: memory of `Ram` is only accessed by atomics, whoever owns it.
        let buffer = unsafe { Buffer::new(segments, user, access, keep) };
        Arc::new(buffer.unwrap())
    }

    /// A buffer in pieces of these lengths, the first of which begins `offset` bytes into a page
    /// and all others at one.
    pub(crate) fn scattered(self: &Arc<Self>, offset: u64, lens: &[u64]) -> RegisteredBuffer {
        let mut spans = Vec::new();
        for (n, len) in lens.iter().enumerate() {
            let lead = if n == 0 { offset } else { 0 };
            let start = self.allocate(lead + len, 4096);
            self.free(start);
            self.books.lock().live.insert(start + lead, *len);
            spans.push((start + lead, *len));
        }
        self.buffer(&spans, Prot::READ_WRITE)
    }

    pub(crate) fn fill(&self, buffer: &Buffer<DmaAddr>, offset: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for span in buffer.segments().import(offset, bytes.len() as u64).unwrap() {
            let (now, later) = rest.split_at(span.len() as usize);
            self.write(span.start().get(), now);
            rest = later;
        }
    }

    pub(crate) fn content(&self, buffer: &Buffer<DmaAddr>, offset: u64, len: u64) -> Vec<u8> {
        let mut content = Vec::new();
        for span in buffer.segments().import(offset, len).unwrap() {
            let from = content.len();
            content.resize(from + span.len() as usize, 0);
            self.read(span.start().get(), &mut content[from..]);
        }
        content
    }
}

pub(crate) type RegisteredBuffer = Arc<Buffer<DmaAddr>>;

struct Kept {
    ram: Arc<Ram>,
    starts: Vec<u64>,
}

impl Keep<DmaAddr> for Kept {
    fn end(&mut self, _segments: &Segments<DmaAddr>) {
        self.starts.iter().for_each(|start| self.ram.free(*start));
    }
}

/// Memory for the driver's queues.
pub(crate) struct Block {
    ram: Arc<Ram>,
    start: u64,
    words: usize,
}

impl Block {
    pub(crate) fn new(ram: &Arc<Ram>, bytes: u64, align: u64) -> Self {
        let start = ram.allocate(bytes, align);
        Self { ram: Arc::clone(ram), start, words: bytes.div_ceil(8) as usize }
    }
}

#[expect(unsafe_code, reason = "a controller in memory")]
// SAFETY: nobody else is given the memory while the block exists, and it stays where it is.
unsafe impl SharedMemory for Block {
    fn addr(&self) -> DmaAddr {
        DmaAddr::new(self.start)
    }

    fn words(&self) -> &[AtomicU64] {
        let first = ((self.start - BASE) / 8) as usize;
        &self.ram.words[first..first + self.words]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.ram.free(self.start);
    }
}
