//! Each unsafe trait, implemented by code that keeps what the trait asks it to promise and is
//! hostile in all else: at each of its calls it fails, panics, or calls back, numbers that it is
//! free to choose differ from call to call, and what devices reach is looked at between any two.
#![expect(unsafe_code, reason = "the tests keep the promises of unsafe traits, and nothing more")]

mod bounce_pool;
mod common;
mod dma_memory;
mod format;
mod frame_alloc;
mod host_memory;
mod iommu_ops;
mod pinner;
mod pool_memory;
mod port;
mod table_memory;
mod user_tables;
