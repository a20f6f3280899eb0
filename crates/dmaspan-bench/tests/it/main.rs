//! The program `dmaspan-bench`, run as its users run it.

mod container;
mod dma;
mod io_pgtable;
mod program;
mod regbuf;
mod swiotlb;
#[path = "../../../dmaspan-linux/tests/turn/mod.rs"]
mod turn;
