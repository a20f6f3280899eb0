//! Registered buffers, tried from outside.

mod common;
mod descriptors;
mod directory;
mod import;
mod layouts;
