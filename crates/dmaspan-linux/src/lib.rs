//! Real Linux memory for `dmaspan`: of every page size, pinned for the long term, with its frames.
//!
//! # Where to begin
//!
//! | you write | begin with | guide |
//! |---|---|---|
//! | a driver of a device, by VFIO or iommufd | [`vfio::VfioSpace`], [`plan::Mapper`] | [driver] |
//! | a VMM | [`plan::Mapper`] over [`vfio::Ioas`] | [VMM] |
//! | a vfio-user server | [`client::ClientRegions`] | [server] |
//! | an application of io_uring | [`fixed::FixedPool`] | [io_uring] |
//! | a tool that says which devices can be used | [`pci::System`] | [operating] |
//! | something that needs pinned memory and where it is | [`LinuxPinner`] | [pinner] |
//!
//! The guides are in `docs/src` of the repository. `cargo xtask book` builds the book that they are
//! in beside these pages, where the links lead.
//!
//! [driver]: ../book/guides/driver.html
//! [VMM]: ../book/guides/vmm.html
//! [server]: ../book/guides/vfio_user.html
//! [io_uring]: ../book/guides/io_uring.html
//! [operating]: ../book/guides/operating.html
//! [pinner]: ../book/adding/pinner.html
//!
//! # Memory and pins
//!
//! The core maps *spans*. On a Linux system without VFIO they come from here: [`Memory`] is memory
//! of this process of one [kind](MemoryKind), and [`LinuxPinner`] pins ranges of it and says where
//! they are.
//!
//! ```text
//! Memory ──register (io_uring) or mlock──► LinuxPin ──/proc/self/pagemap──► spans ──► dmaspan
//!    ▲                                                                                   │
//!    └────────── FrameMap: what a simulated device reaches by physical address ◄─────────┘
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`mem`] | memory of one page size, and access to it that a device may race with |
//! | [`hugetlb`] | raising the number of hugetlb pages, and giving them back |
//! | [`registration`] | what makes a pin: registered io_uring buffers, or locks |
//! | [`pagemap`] | where memory is: one look-up for each page, or one for each huge leaf |
//! | [`pci`] | the PCI functions of this machine |
//! | [`pinner`] | the [`Pinner`](dmaspan::pin::Pinner) that joins them |
//! | [`plan`] | what to ask of a device's address space, and owning what it gave |
//! | [`platform`] | locks, numbers of threads, a clock, and how threads wait, in a process |
//! | [`bounce`] | memory of a process for bounce pools |
//! | [`physical`] | memory that devices reach by physical addresses, contiguous where need be |
//! | [`framemap`] | the way back, from a physical address to the memory |
//! | [`vfio`] | memory mapped for real devices by VFIO and iommufd |
//! | [`client`] | the memory of a client, for servers of virtual devices |
//! | [`fixed`] | pools of buffers registered with the application's rings, for I/O of its own |
//! | [`replace`] | files that programs write, whole or not at all |
//!
//! Pins by io_uring need Linux 5.19, which has sparse tables of registered buffers. On older
//! kernels, and where io_uring is forbidden, memory is locked instead, and the addresses of its
//! spans are virtual ones; see [`PinMethod`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use dmaspan::pin::Pinner;
//! use dmaspan::{HostAddr, Prot};
//! use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
//!
//! let memory = Arc::new(Memory::new(MemoryKind::Base, 1 << 20)?);
//! // Of virtual addresses, which need no privilege; those of hardware are `PhysAddr`s.
//! let pinner = LinuxPinner::<HostAddr>::new()?;
//! let mut spans = Vec::new();
//! let pin = pinner.pin(&memory, memory.user_range(), Prot::READ_WRITE, &mut spans)?;
//! assert_eq!(spans.iter().map(|span| span.len()).sum::<u64>(), 1 << 20);
//! pinner.give_back(pin);
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("dmaspan-linux needs 64-bit Linux");

pub mod bounce;
pub mod client;
pub mod fixed;
pub mod framemap;
pub mod hugetlb;
mod list;
mod log;
pub mod machine;
pub mod mem;
pub mod pagemap;
pub mod pci;
pub mod physical;
pub mod pinner;
pub mod plan;
pub mod platform;
pub mod registration;
pub mod replace;
pub mod vfio;

mod os;
mod parts;
mod sys;
mod wait;

pub use bounce::BounceMemory;
pub use framemap::FrameMap;
pub use hugetlb::HugetlbReservation;
pub use mem::{Memory, MemoryKind};
pub use pagemap::{FrameAddress, FrameMode, FrameSource, Lookup};
pub use pci::Bdf;
pub use pinner::{LinuxPin, LinuxPinner, PinnerOptions, PinnerStats};
pub use platform::{SleepHook, UserPlatform};
pub use registration::PinMethod;
pub use sys::perf::{Instructions, NoCounter};
pub use sys::{process_cpu_time, signals, stdio, thread_cpu_time};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
