//! The driver of SMMUv2, against the register model of `dmaspan-sim`, which was written from the
//! manual and knows nothing of the driver.

mod accesses;
mod banks;
mod faults;
mod host;
mod hostile;
mod invalidations;
#[path = "../shared/liar.rs"]
mod liar;
mod random;
mod reset;
mod rig;
mod streams;
