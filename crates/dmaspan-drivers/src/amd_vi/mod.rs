//! AMD's IOMMU: I/O Virtualization Technology (48882).
