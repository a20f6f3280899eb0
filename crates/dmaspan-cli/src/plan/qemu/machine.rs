//! The machines of QEMU, and the addresses that their memory has.

use super::GIB;

/// The machines whose memory is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QemuMachine {
    Q35,
    Pc,
    /// Of Arm or RISC-V: all memory from here on.
    Virt(u64),
}

impl QemuMachine {
    /// Where parts of the memory are: the address, the offset in it and the length of each
    /// (hw/i386/pc_q35.c, pc_piix.c; hw/arm/virt.c, hw/riscv/virt.c).
    pub(super) fn parts(self, total: u64, below_most: u64) -> Vec<(u64, u64, u64)> {
        let low = match self {
            Self::Virt(start) => return vec![(start, 0, total)],
            Self::Q35 if total >= 0xb000_0000 => 0x8000_0000,
            Self::Q35 => 0xb000_0000,
            Self::Pc if total >= 0xe000_0000 => 0xc000_0000,
            Self::Pc => 0xe000_0000,
        };
        let low = total.min(low).min(below_most);
        let high = total - low;
        let parts = [(0, 0, low), (4 * GIB, low, high)];
        parts.into_iter().filter(|(_, _, len)| *len > 0).collect()
    }
}
