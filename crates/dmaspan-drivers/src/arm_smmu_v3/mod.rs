//! Arm's SMMUv3: Arm System MMU architecture, version 3 (IHI 0070).
