//! Commands to the kernel, between libibverbs and ioctl(2): one process keeps the kernel's answers, and another process
//! repeats them.
//!
//! libibverbs makes its objects from the kernel's answers (handles, numbers, map offsets of queues). A process with the
//! same file of the device can therefore make libibverbs' objects for existing objects of the kernel. The command is
//! answered from the kept answers, and no new object of the device is made.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_ulong, c_void};
use std::sync::OnceLock;

use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use base64::{DecodeError, Engine as _};
use serde::{Deserialize, Serialize};

use super::libibverbs::replace_ioctl;
use crate::abi::{CORE_OUT, CommandAttribute, CommandHeader, OBJECT_DEVICE, VERBS_IOCTL};

/// `UVERBS_OBJECT_CQ`, `UVERBS_OBJECT_QP` and `UVERBS_OBJECT_SRQ`
const OBJECT_CQ: u16 = 3;
const OBJECT_QP: u16 = 4;
const OBJECT_SRQ: u16 = 5;
/// The attribute with the new object's handle, for all three kinds.
const NEW_HANDLE: u16 = 0;
/// `UVERBS_ATTR_UHW_OUT`: the answer of the device's driver.
const DRIVER_OUT: u16 = 0x1001;
/// `UVERBS_ATTR_F_VALID_OUTPUT`
const VALID_OUTPUT: u16 = 2;
/// `UVERBS_ATTR_CREATE_QP_RESP_QP_NUM`
const QP_NUMBER: u16 = 14;
/// Limits for a command that makes an object: no answer is longer, and no command has more attributes.
const LONGEST: usize = 4096;
const MOST_ATTRIBUTES: usize = 64;

/// The kernel's answer to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    object: u16,
    method: u16,
    attributes: Vec<Attribute>,
}

/// An attribute that the kernel has written. The encoding is compact, since a process reads the attributes of all its
/// queues while it stands still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Told", into = "Told")]
struct Attribute {
    id: u16,
    flags: u16,
    /// The attribute's own value: a handle.
    value: u64,
    /// Bytes written to the attribute's address.
    contents: Vec<u8>,
}

/// The encoding of an attribute.
type Told = (u16, u16, u64, String);

impl From<Attribute> for Told {
    fn from(attribute: Attribute) -> Self {
        let contents = BASE64.encode(attribute.contents);
        (attribute.id, attribute.flags, attribute.value, contents)
    }
}

impl TryFrom<Told> for Attribute {
    type Error = DecodeError;

    fn try_from((id, flags, value, contents): Told) -> Result<Self, DecodeError> {
        Ok(Self {
            id,
            flags,
            value,
            contents: BASE64.decode(contents)?,
        })
    }
}

impl Answer {
    /// Returns the handle of the new queue.
    pub(super) fn handle(&self) -> Option<u32> {
        let made = matches!(self.object, OBJECT_CQ | OBJECT_QP | OBJECT_SRQ);
        let attribute = self.attributes.iter().find(|one| one.id == NEW_HANDLE)?;
        made.then(|| u32::try_from(attribute.value).ok()).flatten()
    }

    /// Returns the number of the new queue pair.
    pub(super) fn queue_pair_number(&self) -> Option<u32> {
        let number = self.attributes.iter().find(|one| one.id == QP_NUMBER)?;
        let bytes = number.contents.first_chunk()?;
        (self.object == OBJECT_QP).then_some(u32::from_ne_bytes(*bytes))
    }

    /// Replaces a channel's descriptor by the number in this process.
    pub(in crate::shim) fn set_descriptor(&mut self, descriptor: c_int) {
        if self.object != OBJECT_DEVICE {
            return;
        }
        if let Some(out) = self.attributes.iter_mut().find(|one| one.id == CORE_OUT) {
            out.contents = descriptor.to_ne_bytes().to_vec();
        }
    }
}

/// The treatment of this thread's commands.
enum Mode {
    /// Commands go to the kernel.
    Pass,
    /// Commands go to the kernel, and the answers are kept.
    Keep {
        answers: Vec<Answer>,
        /// The value that events of the object carry.
        cookie: u64,
    },
    /// Commands are answered from these answers, in their order.
    Repeat(VecDeque<Answer>),
}

thread_local! {
    static MODE: RefCell<Mode> = const { RefCell::new(Mode::Pass) };
}

fn set_mode(mode: Mode) -> Mode {
    MODE.with(|current| current.replace(mode))
}

/// Redirects libibverbs' commands of this process to [`command`], once.
fn in_the_way() -> Result<(), String> {
    static REPLACED: OnceLock<Result<(), String>> = OnceLock::new();
    REPLACED.get_or_init(|| replace_ioctl(command)).clone()
}

/// Keeps the kernel's answers while `act` makes an object, whose events carry `cookie`. For a new queue, libibverbs is
/// told that the command failed. So this process does not map the queue's memory, and the receiver of the answers can
/// map it.
pub(super) fn keep<T>(cookie: u64, act: impl FnOnce() -> T) -> Result<(T, Vec<Answer>), String> {
    in_the_way()?;
    set_mode(Mode::Keep {
        answers: Vec::new(),
        cookie,
    });
    let result = act();
    match set_mode(Mode::Pass) {
        Mode::Keep { answers, .. } => Ok((result, answers)),
        _ => Err("commands to the device were kept twice at once".to_owned()),
    }
}

/// Answers commands from `answers` while `act` makes an object.
pub(in crate::shim) fn repeat<T>(answers: &[Answer], act: impl FnOnce() -> T) -> Result<T, String> {
    in_the_way()?;
    set_mode(Mode::Repeat(answers.iter().cloned().collect()));
    let result = act();
    set_mode(Mode::Pass);
    Ok(result)
}

/// Replaces ioctl(2) in libibverbs.
unsafe extern "C" fn command(descriptor: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request != VERBS_IOCTL || argument.is_null() {
        return libc::ioctl(descriptor, request, argument);
    }
    let answered = MODE.try_with(|mode| {
        let mut mode = mode.borrow_mut();
        // SAFETY: the argument of this request is a header followed by as many attributes as the header says.
        let header = &*argument.cast::<CommandHeader>();
        let parts = std::slice::from_raw_parts_mut(
            argument
                .cast::<CommandHeader>()
                .add(1)
                .cast::<CommandAttribute>(),
            usize::from(header.attributes).min(MOST_ATTRIBUTES),
        );
        match &mut *mode {
            Mode::Pass => libc::ioctl(descriptor, request, argument),
            Mode::Keep { answers, cookie } => {
                carry_cookie(header, parts, *cookie);
                let result = libc::ioctl(descriptor, request, argument);
                if result != 0 {
                    return result;
                }
                answers.push(answer_of(header, parts));
                if matches!(header.object, OBJECT_CQ | OBJECT_QP | OBJECT_SRQ) {
                    *libc::__errno_location() = libc::ECANCELED;
                    return -1;
                }
                0
            }
            Mode::Repeat(answers) => match answers.pop_front() {
                Some(answer)
                    if answer.object == header.object && answer.method == header.method =>
                {
                    give(&answer, parts);
                    0
                }
                _ => {
                    *libc::__errno_location() = libc::EPROTO;
                    -1
                }
            },
        }
    });
    // A thread that is ending has no mode any more.
    answered.unwrap_or_else(|_| libc::ioctl(descriptor, request, argument))
}

/// Sets the value that events of a queue carry, which libibverbs takes for an address.
fn carry_cookie(header: &CommandHeader, parts: &mut [CommandAttribute], cookie: u64) {
    // `UVERBS_ATTR_CREATE_CQ_USER_HANDLE`, `..._QP_...`, `..._SRQ_...`
    let wanted = match header.object {
        OBJECT_CQ => 2,
        OBJECT_QP => 7,
        OBJECT_SRQ => 4,
        _ => return,
    };
    if let Some(part) = parts.iter_mut().find(|part| part.id == wanted) {
        part.data = cookie;
    }
}

unsafe fn answer_of(header: &CommandHeader, parts: &[CommandAttribute]) -> Answer {
    let is_device = header.object == OBJECT_DEVICE;
    let attributes = parts.iter().filter_map(|part| {
        let names_object = !is_device && part.id == NEW_HANDLE;
        let written = part.flags & VALID_OUTPUT != 0 || part.id == DRIVER_OUT;
        // A channel's descriptor is set there even if the kernel does not mark it as written.
        if !(written || names_object || is_device && part.id == CORE_OUT) {
            return None;
        }
        let length = usize::from(part.length).min(LONGEST);
        let contents = if written && length > 0 && part.data != 0 {
            // SAFETY: the kernel has just written there, as much as the attribute says.
            std::slice::from_raw_parts(part.data as *const u8, length).to_vec()
        } else {
            Vec::new()
        };
        Some(Attribute {
            id: part.id,
            flags: part.flags,
            value: if names_object { part.data } else { 0 },
            contents,
        })
    });
    Answer {
        object: header.object,
        method: header.method,
        attributes: attributes.collect(),
    }
}

/// Copies a kept answer to the places that this command names.
unsafe fn give(answer: &Answer, parts: &mut [CommandAttribute]) {
    for part in parts {
        let Some(known) = answer.attributes.iter().find(|known| known.id == part.id) else {
            continue;
        };
        part.flags = known.flags;
        if answer.object != OBJECT_DEVICE && part.id == NEW_HANDLE {
            part.data = known.value;
        }
        let length = known.contents.len().min(usize::from(part.length));
        if length > 0 && part.data != 0 {
            // SAFETY: an attribute that the kernel writes to points to as many bytes as it says.
            std::ptr::copy_nonoverlapping(known.contents.as_ptr(), part.data as *mut u8, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command as libibverbs builds it, with two attributes.
    #[repr(C)]
    struct Command {
        header: CommandHeader,
        parts: [CommandAttribute; 2],
    }

    fn command_with(object: u16, parts: [(u16, u64, u16); 2]) -> Command {
        Command {
            header: CommandHeader {
                length: size_of::<Command>() as u16,
                object,
                method: 7,
                attributes: 2,
                reserved1: 0,
                driver: 0,
                reserved2: 0,
            },
            parts: parts.map(|(id, data, length)| CommandAttribute {
                id,
                length,
                flags: 0,
                reserved: 0,
                data,
            }),
        }
    }

    fn queue_pair(handle: u64, number: u32) -> Answer {
        let mut kept = number;
        let mut command = command_with(
            OBJECT_QP,
            [
                (NEW_HANDLE, handle, 0),
                (QP_NUMBER, &raw mut kept as u64, 4),
            ],
        );
        command.parts[1].flags = VALID_OUTPUT;
        // SAFETY: the second attribute points to four bytes.
        unsafe { answer_of(&command.header, &command.parts) }
    }

    #[test]
    fn what_was_answered_is_answered_again() {
        let answer = queue_pair(5, 77);
        assert_eq!(
            (answer.handle(), answer.queue_pair_number()),
            (Some(5), Some(77))
        );
        let text = serde_json::to_string(&answer).unwrap();
        let answer: Answer = serde_json::from_str(&text).unwrap();
        let mut number = 0u32;
        let mut asked = command_with(
            OBJECT_QP,
            [(NEW_HANDLE, 0, 0), (QP_NUMBER, &raw mut number as u64, 4)],
        );
        set_mode(Mode::Repeat(VecDeque::from([answer])));
        let ask = |asked: &mut Command| {
            // SAFETY: the command has the attributes that it says; nothing reaches a file.
            unsafe { command(-1, VERBS_IOCTL, ptr(asked)) }
        };
        assert_eq!(ask(&mut asked), 0);
        assert_eq!((asked.parts[0].data, number), (5, 77));
        assert_eq!(asked.parts[1].flags, VALID_OUTPUT);
        // No second answer was kept.
        assert_eq!(ask(&mut asked), -1);
        set_mode(Mode::Pass);
    }

    fn ptr(command: &mut Command) -> *mut c_void {
        std::ptr::from_mut(command).cast()
    }

    #[test]
    fn another_command_than_was_kept_is_refused() {
        set_mode(Mode::Repeat(VecDeque::from([queue_pair(5, 77)])));
        let mut asked = command_with(OBJECT_CQ, [(NEW_HANDLE, 1, 0), (2, 0, 8)]);
        // SAFETY: as above.
        assert_eq!(unsafe { command(-1, VERBS_IOCTL, ptr(&mut asked)) }, -1);
        assert_eq!(asked.parts[0].data, 1);
        set_mode(Mode::Pass);
    }

    #[test]
    fn an_answer_that_is_longer_than_asked_for_is_cut() {
        let answer = queue_pair(5, 0x4d4d_4d4d);
        let mut into = [0u8; 4];
        let mut asked = command_with(
            OBJECT_QP,
            [(NEW_HANDLE, 0, 0), (QP_NUMBER, into.as_mut_ptr() as u64, 2)],
        );
        // SAFETY: the second attribute points to more bytes than it says.
        unsafe { give(&answer, &mut asked.parts) };
        assert_eq!(into, [77, 77, 0, 0]);
    }

    #[test]
    fn events_carry_what_the_holder_was_told() {
        let mut asked = command_with(OBJECT_CQ, [(NEW_HANDLE, 0, 0), (2, 99, 8)]);
        carry_cookie(&asked.header, &mut asked.parts, 0x5000);
        assert_eq!((asked.parts[0].data, asked.parts[1].data), (0, 0x5000));
    }
}
