//! The bodies over random bytes, and over the bytes that are kept in `fuzz/seeds`.

use std::fs;
use std::path::Path;

use super::{formats, hostile, operations};
use crate::rng::Rng;

/// Random bytes for every format: `rounds` each, of 8 bytes up to a `kilobyte`.
fn each_format(rounds: u64, body: fn(&[u8])) {
    for format in 0..formats::COUNT {
        for round in 0..rounds {
            let mut rng = Rng::new(u64::from(format) << 32 | round);
            let len = 8 + rng.below(1 << (3 + round % 8));
            let mut bytes = vec![format];
            bytes.extend((0..len).map(|_| rng.next().to_le_bytes()[0]));
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
