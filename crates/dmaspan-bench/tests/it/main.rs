//! The program `dmaspan-bench`, run as its users run it.

mod container;
mod dma;
mod fixed;
mod io_pgtable;
mod program;
mod regbuf;
mod series;
mod swiotlb;
#[path = "../../../dmaspan-linux/tests/turn/mod.rs"]
mod turn;

#[test]
fn every_help_fits_a_terminal() {
    for name in ["io-pgtable", "dma", "container", "swiotlb", "regbuf", "fixed"] {
        program::shown(&[name, "--help"], &[&format!("Usage: dmaspan-bench {name}")]);
    }
    program::shown(&["--help"], &["Usage: dmaspan-bench"]);
}
