//! Memory that a client shares may be a [`Memory`].

#![expect(unsafe_code, reason = "promises that memory stays where it is")]

use dmaspan::regbuf::{HostMemory, HostSlice, Outside};

use super::{AccessError, Memory};

// SAFETY:
// 1. The mapping is this value's, which neither unmaps nor moves it before it is dropped, nor lets
//    anybody map over it. Adopted memory stays by the promise of whoever brought it.
// 2. Rust code reaches it through atomic bytes alone: others may read and write it at any time.
unsafe impl HostMemory for Memory {
    fn slice(&self) -> HostSlice<'_> {
        HostSlice::new(self.mapping().start(), self.mapping().len())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        Memory::read(self, offset, bytes).map_err(|error| outside(self, &error))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside> {
        Memory::write(self, offset, bytes).map_err(|error| outside(self, &error))
    }
}

fn outside(memory: &Memory, error: &AccessError) -> Outside {
    let (AccessError::OutOfBounds { offset, len, .. } | AccessError::Misaligned { offset, len }) =
        *error;
    Outside { offset, len, buffer: memory.len() }
}
