//! QEMU's NVMe controller, driven by `dmaspan-nvme` over registered buffers.

mod access;
mod direct;
mod disk;
mod exercise;
mod rig;
mod translated;
mod unmapped;
