//! The simulation beside the stack that it judges: what runs long under it, what it finds, and the
//! formats and operations that every other test builds on.

mod container_soak;
mod dma_soak;
mod fuzz;
mod mock;
mod pool_soak;
mod sanitizer;
mod smmu_v2;
