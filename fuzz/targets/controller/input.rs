//! The fuzzer's bytes, taken as choices.

/// What is left of the input. Past its end every choice is zero.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next byte, if there is one.
    pub fn next(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    pub fn byte(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    /// True for one byte in `count`.
    pub fn one_in(&mut self, count: u8) -> bool {
        self.byte() % count == 1
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }
}
