//! Links the program where its machine starts it.

use std::env;

fn main() {
    let folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let cpu = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    println!("cargo:rustc-link-arg-bins=-T{folder}/src/cpu/{cpu}.ld");
    println!("cargo:rerun-if-changed=src/cpu/{cpu}.ld");
    println!("cargo:rerun-if-changed=build.rs");
}
