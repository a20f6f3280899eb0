//! Operations on tables made of any words, in every format.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dmaspan_fuzz::hostile(bytes));
