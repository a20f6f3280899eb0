//! Links without the C library, its startup code and everything else that comes by default.

fn main() {
    for argument in ["-nostartfiles", "-nodefaultlibs", "-nostdlib", "-static", "-no-pie"] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
