#![doc = include_str!("../README.md")]

mod backend;
mod dma;
mod error;

pub use backend::{DeviceModel, ModelBackend};
pub use dma::{ClientDma, ClientFiles};
pub use error::ClientDmaError;
