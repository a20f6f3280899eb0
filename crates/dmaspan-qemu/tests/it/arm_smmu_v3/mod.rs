//! The driver of Arm's SMMUv3, judged by QEMU's model of it and devices that do DMA.

mod attaching;
mod planted;
mod rig;
mod robust;
mod translating;
