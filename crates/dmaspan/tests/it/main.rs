//! The core's promises, tried from outside.
#![expect(unsafe_code, reason = "the tests own the ranges, and no hardware walks their tables")]

mod bounced_frames;
mod common;
mod converted;
mod corrupt;
mod domain;
mod dump;
mod edges;
mod errors;
mod failures;
mod flushing;
mod foreign;
mod formats;
mod frames;
mod layout;
mod listing;
mod quarantine;
mod soft_iommu;
mod taken;
mod walker;
