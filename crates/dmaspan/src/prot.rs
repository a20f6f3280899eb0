//! [`Prot`] says what a device may do with mapped memory, and how it is cached.

bitflags::bitflags! {
    /// Permissions and memory type of a mapping, as Linux's `IOMMU_READ` … `IOMMU_PRIV`
    /// (include/linux/iommu.h).
    ///
    /// A format that cannot express a wish grants more, never less: Arm's stage 1 has no write-only
    /// entry, so `WRITE` alone maps as `READ | WRITE` there. What was granted is what a walk
    /// reports.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct Prot: u32 {
        /// The device may read.
        const READ = 1 << 0;
        /// The device may write.
        const WRITE = 1 << 1;
        /// The device's accesses are coherent with the CPU's caches.
        const CACHE = 1 << 2;
        /// The device may not fetch instructions.
        const NOEXEC = 1 << 3;
        /// Device registers, not memory.
        const MMIO = 1 << 4;
        /// Only privileged accesses of the device.
        const PRIV = 1 << 5;
    }
}

impl Prot {
    /// Reading and writing.
    pub const READ_WRITE: Self = Self::READ.union(Self::WRITE);

    /// Returns whether the device may do anything at all.
    pub const fn permits_access(self) -> bool {
        self.intersects(Self::READ_WRITE)
    }
}

/// Says which way the data of a buffer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The device reads what the CPU wrote.
    ToDevice,
    /// The CPU reads what the device wrote.
    FromDevice,
    /// Both.
    Bidirectional,
}

/// Says whether a device's accesses see the CPU's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coherency {
    /// They do.
    Coherent,
    /// They do not: somebody writes caches back and invalidates them.
    NonCoherent,
}

impl Direction {
    /// Returns what a device needs to be allowed for this direction, as dma-iommu.c's
    /// `dma_info_to_prot`.
    ///
    /// ```
    /// use dmaspan::{Coherency, Direction, Prot};
    ///
    /// let prot = Direction::FromDevice.prot(Coherency::Coherent);
    /// assert_eq!(prot, Prot::WRITE | Prot::CACHE);
    /// ```
    pub const fn prot(self, coherency: Coherency) -> Prot {
        let access = match self {
            Self::ToDevice => Prot::READ,
            Self::FromDevice => Prot::WRITE,
            Self::Bidirectional => Prot::READ_WRITE,
        };
        match coherency {
            Coherency::Coherent => access.union(Prot::CACHE),
            Coherency::NonCoherent => access,
        }
    }
}
