//! The buffers of the locking window's slots at the source.

use std::io;
use std::rc::Rc;

use godwit_core::action::ChunkSlot;

use crate::memory::Mapping;

/// One buffer per slot, in one mapping per migration. Operations that use it hold a reference, so
/// the next migration can have a new one at any time.
#[derive(Default)]
pub(super) struct Chunks {
    memory: Option<Rc<Mapping>>,
    chunk_bytes: usize,
}

impl Chunks {
    /// Buffers for `slots` chunks of `chunk_bytes` bytes.
    pub(super) fn new(slots: u16, chunk_bytes: usize) -> io::Result<Self> {
        let chunk_bytes = chunk_bytes.next_multiple_of(4096);
        let memory = Mapping::new(usize::from(slots) * chunk_bytes)?;
        Ok(Self {
            memory: Some(Rc::new(memory)),
            chunk_bytes,
        })
    }

    /// The address of a slot's buffer and what keeps it mapped; `None` when there is none of at
    /// least `length` bytes.
    pub(super) fn buffer(&self, slot: ChunkSlot, length: usize) -> Option<(*mut u8, Rc<Mapping>)> {
        let memory = self.memory.as_ref()?;
        let start = usize::from(slot.0) * self.chunk_bytes;
        if length > self.chunk_bytes || start + self.chunk_bytes > memory.length() {
            return None;
        }
        Some((memory.at(start), Rc::clone(memory)))
    }
}
