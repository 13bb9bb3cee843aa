//! Rows of the device-side tables.

/// Hands out slots and remembers which ones the runner must be told to close.
#[derive(Debug)]
pub(crate) struct Slots {
    free: Vec<u32>,
    /// Left by their sequence since the last plan.
    closed: Vec<u32>,
}

impl Slots {
    pub(crate) fn new(count: u32) -> Self {
        Self { free: (0..count).rev().collect(), closed: Vec::new() }
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives a slot back. No step in flight may name it.
    pub(crate) fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
        self.closed.push(slot);
    }

    /// Slots that were left and not yet reported.
    pub(crate) fn take_closed(&mut self) -> impl Iterator<Item = u32> {
        self.closed.drain(..)
    }
}
