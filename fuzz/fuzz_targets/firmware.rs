//! Tables of firmware made of any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dmaspan_fuzz::firmware(bytes));
