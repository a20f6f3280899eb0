//! RISC-V's IOMMU: RISC-V IOMMU Architecture Specification.
