//! The kernel, as `map` uses it: the address space of a real device, or pins for one that has none.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::pin::{PinError, Pinner};
use dmaspan::{DmaSpace, Iova, IovaRange, Limits, Prot, Span, UserRange};
use dmaspan_linux::vfio::{
    Backend, NoIommuPin, NoIommuPinner, OpenError, Requests, VfioDevice, VfioSpace,
};
use dmaspan_linux::{Bdf, Memory, MemoryKind};

use crate::measure::RowError;

/// What the kernel maps or pins by for a device, and the device, which may not access memory.
#[derive(Debug)]
pub(crate) struct RealIommu {
    /// What the kernel is asked by.
    pub(crate) backend: Backend,
    pub(crate) bdf: Bdf,
    maps: Maps,
}

#[derive(Debug)]
enum Maps {
    /// An address space.
    Space { space: VfioSpace, device: VfioDevice },
    /// Pins, each under the first of the IOVAs that stand for it.
    Pins { pinner: NoIommuPinner, pins: RefCell<BTreeMap<u64, Pinned>> },
}

/// The IOVAs that stand for it, and what is pinned.
type Pinned = (IovaRange, NoIommuPin, Vec<Span>);

impl RealIommu {
    /// Opens a device, in an address space of its own.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub(crate) fn open(backend: Backend, bdf: Bdf) -> Result<Self, OpenError> {
        let maps = match backend {
            Backend::NoIommu => {
                Maps::Pins { pinner: NoIommuPinner::new(bdf)?, pins: RefCell::default() }
            }
            _ => {
                let (space, device) = VfioSpace::open(backend, bdf)?;
                Maps::Space { space, device }
            }
        };
        Ok(Self { backend, bdf, maps })
    }

    /// The address space and the device; `None` where it has no IOMMU.
    pub(crate) fn space(&self) -> Option<(&VfioSpace, &VfioDevice)> {
        match &self.maps {
            Maps::Space { space, device } => Some((space, device)),
            Maps::Pins { .. } => None,
        }
    }

    /// What can be mapped now. IOVAs that stand for pins are any.
    pub(crate) fn limits(&self) -> Limits {
        match &self.maps {
            Maps::Space { space, .. } => space.limits(),
            Maps::Pins { .. } => Limits {
                apertures: vec![IovaRange::ALL],
                page_sizes: MemoryKind::Base.page_size(),
                mappings_left: None,
            },
        }
    }

    pub(crate) fn map(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
    ) -> Result<(), RowError> {
        match &self.maps {
            Maps::Space { space, .. } => {
                space.map(memory, user, iova, Prot::READ_WRITE).map_err(RowError::KernelMap)
            }
            Maps::Pins { pinner, pins } => {
                let range = IovaRange::from_len(iova, user.len_less_one().saturating_add(1))?;
                let mut spans = Vec::new();
                let pin = pinner.pin(memory, user, Prot::READ_WRITE, &mut spans);
                let pin = pin.map_err(|failed| match failed.error {
                    PinError::Failed(error) => RowError::NoIommuPin(error),
                    // A vector takes every span.
                    _ => RowError::Unplanned { user },
                })?;
                pins.borrow_mut().insert(iova.get(), (range, pin, spans));
                Ok(())
            }
        }
    }

    /// Unmaps or unpins what is in `range`, and returns how many bytes that was.
    pub(crate) fn unmap(&self, range: IovaRange) -> Result<u64, RowError> {
        match &self.maps {
            Maps::Space { space, .. } => space.unmap(range).map_err(RowError::KernelUnmap),
            Maps::Pins { pinner, pins } => {
                let mut pins = pins.borrow_mut();
                let inside = pins.range(range.start().get()..=range.last().get());
                let inside: Vec<u64> = inside.map(|(&at, _)| at).collect();
                let gone = inside.into_iter().filter_map(|at| pins.remove(&at));
                Ok(gone.fold(0, |bytes, (at, pin, _)| {
                    pinner.give_back(pin);
                    bytes + at.len_less_one() + 1
                }))
            }
        }
    }

    /// The spans that the kernel told of what is at `iova`; `None` where it tells none.
    pub(crate) fn spans(&self, iova: Iova) -> Option<Vec<Span>> {
        match &self.maps {
            Maps::Space { .. } => None,
            Maps::Pins { pins, .. } => pins.borrow().get(&iova.get()).map(|it| it.2.clone()),
        }
    }

    /// The requests that mapped and unmapped so far.
    pub(crate) fn requests(&self) -> Requests {
        match &self.maps {
            Maps::Space { space, .. } => space.requests(),
            Maps::Pins { pinner, .. } => pinner.requests(),
        }
    }

    /// How many mappings or pins there are.
    pub(crate) fn mappings(&self) -> u64 {
        match &self.maps {
            Maps::Space { space, .. } => space.mappings(),
            Maps::Pins { pinner, .. } => pinner.pins(),
        }
    }
}
