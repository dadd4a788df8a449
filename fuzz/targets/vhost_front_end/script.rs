//! What the front end does, read from an input: any input is a script.
//!
//! ```text
//! input    how it leaves (1), steps, 0 (1), memory (the rest)
//! message  1, code (1), flags (1), descriptors (1), length (1), payload
//! raw      2, descriptors (1), length (1), bytes
//! kick     3, event counter (1)
//! poke     4, offset in the memory (2), length (1), bytes
//! wait     5
//! ```

/// Steps of a script. More would fill the socket while the server is busy.
const MOST_STEPS: usize = 64;

/// Waits of a script.
const MOST_WAITS: usize = 4;

/// Asks for an answer to the message.
const NEED_REPLY: u32 = 8;

/// The only version of the protocol.
const VERSION: u32 = 1;

/// Requests that the protocol knows, and some that it does not.
const CODES: u8 = 48;

/// Descriptors that go with a message.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Attached {
    Nothing,
    /// The event counter of this number.
    Counter(usize),
    /// So often the guest's memory.
    Memory(usize),
    /// An event counter that holds up whoever adds to it.
    FullCounter,
    /// A file that is not memory.
    File,
    Socket,
    /// Memory of zeroes.
    Zeroes,
    /// So many event counters.
    Many(usize),
}

impl Attached {
    const fn new(byte: u8) -> Self {
        let number = (byte >> 3) as usize;
        match byte & 7 {
            0 => Self::Nothing,
            1 => Self::Counter(number % super::front_end::COUNTERS),
            2 => Self::Memory(number % 10 + 1),
            3 => Self::FullCounter,
            4 => Self::File,
            5 => Self::Socket,
            6 => Self::Zeroes,
            _ => Self::Many(number * 8),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Step<'a> {
    Send {
        header: Option<[u32; 3]>,
        payload: &'a [u8],
        attached: Attached,
    },
    Kick(usize),
    Poke {
        offset: usize,
        bytes: &'a [u8],
    },
    /// Until what was sent is dealt with.
    Wait,
}

#[derive(Debug)]
pub(crate) struct Script<'a> {
    pub(crate) steps: Vec<Step<'a>>,
    /// Leaves without waiting for anything.
    pub(crate) abrupt: bool,
    /// What the guest's memory holds first.
    pub(crate) memory: &'a [u8],
}

impl<'a> Script<'a> {
    pub(crate) fn parse(data: &'a [u8]) -> Self {
        let mut left = Left(data);
        let abrupt = left.byte() & 1 != 0;
        let (mut steps, mut waits) = (Vec::new(), 0);
        while steps.len() < MOST_STEPS {
            let step = match left.byte() {
                0 => break,
                kind => match kind % 5 {
                    1 => message(&mut left),
                    2 => Step::Send {
                        header: None,
                        attached: Attached::new(left.byte()),
                        payload: left.counted(),
                    },
                    3 => Step::Kick(usize::from(left.byte()) % super::front_end::COUNTERS),
                    4 => Step::Poke {
                        offset: usize::from(u16::from_le_bytes([left.byte(), left.byte()])),
                        bytes: left.counted(),
                    },
                    _ if waits == MOST_WAITS => continue,
                    _ => {
                        waits += 1;
                        Step::Wait
                    }
                },
            };
            steps.push(step);
        }
        Self {
            steps,
            abrupt,
            memory: left.0,
        }
    }
}

fn message<'a>(left: &mut Left<'a>) -> Step<'a> {
    let code = u32::from(left.byte() % CODES);
    let flags = left.byte();
    let attached = Attached::new(left.byte());
    let payload = left.counted();
    let mut header = [code, VERSION, payload.len() as u32];
    if flags & 1 != 0 {
        header[1] |= NEED_REPLY;
    }
    if flags & 0xf0 == 0xf0 {
        // Now and then it lies.
        header[1] ^= u32::from(flags & 6);
        header[2] = header[2].wrapping_add(u32::from(flags >> 3 & 1)) ^ u32::from(flags & 1) << 31;
    }
    Step::Send {
        header: Some(header),
        payload,
        attached,
    }
}

/// What is left of an input; zeroes come after its end.
struct Left<'a>(&'a [u8]);

impl<'a> Left<'a> {
    fn byte(&mut self) -> u8 {
        let (&byte, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        byte
    }

    /// As many bytes as the next byte says, or fewer at the end.
    fn counted(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }
}
