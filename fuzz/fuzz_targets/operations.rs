//! Operations on a page table against an interval map, in every format.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dmaspan_fuzz::operations(bytes));
