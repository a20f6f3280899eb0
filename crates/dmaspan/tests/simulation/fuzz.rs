//! The fuzz targets over random bytes, and over the bytes that are kept in `fuzz/seeds`.

use std::fs;
use std::path::Path;

use proptest::prelude::Rng;
use proptest::test_runner::TestRunner;
use targets::{FORMATS, firmware, foreign, hostile, operations};

#[path = "../../../../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "the crate of the fuzz targets makes them public")]
mod targets;

/// Random bytes for every format: `rounds` each, 8 to 1024 of them.
fn each_format(rounds: u32, body: fn(&[u8])) {
    let mut runner = TestRunner::deterministic();
    let rng = runner.rng();
    for format in 0..FORMATS {
        for round in 0..rounds {
            let mut bytes = vec![0; 8 << (round % 8)];
            rng.fill_bytes(&mut bytes);
            bytes[0] = format;
            let named = Named(&bytes);
            body(&bytes);
            drop(named);
        }
    }
}

/// Says which bytes made a body panic.
struct Named<'a>(&'a [u8]);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the bytes {:?}", self.0);
        }
    }
}

fn each_seed(target: &str, body: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        let named = Named(&bytes);
        body(&bytes);
        drop(named);
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn random_operations_agree_with_the_model_in_every_format() {
    each_format(200, operations);
}

#[test]
fn kept_operations_agree_with_the_model() {
    each_seed("operations", operations);
}

#[test]
fn operations_on_random_tables_end_in_every_format() {
    each_format(200, hostile);
}

#[test]
fn operations_on_kept_tables_end() {
    each_seed("hostile", hostile);
}

#[test]
fn foreign_tables_of_random_bytes_are_read_to_an_end_in_every_format() {
    each_format(7, foreign);
    foreign(&[]);
}

#[test]
fn kept_foreign_tables_are_read_to_an_end() {
    each_seed("hostile", foreign);
}

#[test]
fn kept_firmware_is_read_without_a_panic() {
    each_seed("firmware", firmware);
}
