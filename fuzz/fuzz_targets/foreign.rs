//! Foreign tables made of any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dmaspan_fuzz::foreign(bytes));
