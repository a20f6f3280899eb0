//! Arm's SMMUv2: Arm System MMU architecture, version 2 (IHI 0062).
