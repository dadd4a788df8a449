//! The system calls of an operation on the image: through the ring, or in place.
//!
//! The ring leaves calls that must wait, such as a flush, to a kernel thread. If the process may have no more threads
//! (`pids.max` of its control group, `TasksMax` of its unit), the call ends with ECANCELED instead, although nothing
//! cancelled it. The guest would see a broken disk, so the engine's thread makes the call itself, and everything of
//! this disk waits meanwhile.

use std::os::fd::RawFd;

use io_uring::{opcode, squeue, types};

/// A step of an operation: a single system call.
pub(in crate::engine) struct Step {
    pub(in crate::engine) file: RawFd,
    pub(in crate::engine) offset: u64,
    pub(in crate::engine) call: Call,
}

pub(in crate::engine) enum Call {
    Read(Target),
    /// With flags of `pwritev2`.
    Write(Target, i32),
    /// With the mode of `fallocate`.
    Allocate {
        length: u64,
        mode: i32,
    },
    Sync,
    Nothing,
}

/// The memory of a transfer.
#[derive(Clone, Copy)]
pub(in crate::engine) enum Target {
    Whole {
        memory: *mut u8,
        length: u32,
    },
    Pieces {
        first: *const libc::iovec,
        count: u32,
    },
}

impl Target {
    /// Returns the memory as a list of pieces; `whole` is the list if there is none.
    const fn list(self, whole: &mut libc::iovec) -> (*const libc::iovec, libc::c_int) {
        match self {
            Self::Pieces { first, count } => (first, count as libc::c_int),
            Self::Whole { memory, length } => {
                *whole = libc::iovec {
                    iov_base: memory.cast(),
                    iov_len: length as usize,
                };
                (&raw const *whole, 1)
            }
        }
    }
}

impl Step {
    /// Returns the ring's operation for the step.
    pub(in crate::engine) fn entry(&self) -> squeue::Entry {
        let file = types::Fd(self.file);
        let offset = self.offset;
        match self.call {
            Call::Read(Target::Whole { memory, length }) => opcode::Read::new(file, memory, length)
                .offset(offset)
                .build(),
            Call::Read(Target::Pieces { first, count }) => opcode::Readv::new(file, first, count)
                .offset(offset)
                .build(),
            Call::Write(Target::Whole { memory, length }, flags) => {
                opcode::Write::new(file, memory, length)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            Call::Write(Target::Pieces { first, count }, flags) => {
                opcode::Writev::new(file, first, count)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            Call::Allocate { length, mode } => opcode::Fallocate::new(file, length)
                .offset(offset)
                .mode(mode)
                .build(),
            Call::Sync => opcode::Fsync::new(file)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Call::Nothing => opcode::Nop::new().build(),
        }
    }

    /// Carries out the step on this thread. Returns the ring's result: a count of bytes, or a negated error number.
    ///
    /// # Safety
    /// As for the ring's operation: the file is open, and the memory, and the list of its pieces, is valid and not used
    /// in a conflicting way.
    pub(in crate::engine) unsafe fn carry_out(&self) -> i32 {
        let Ok(offset) = libc::off_t::try_from(self.offset) else {
            return -libc::EINVAL;
        };
        let mut whole = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let result = match self.call {
            Call::Read(target) => {
                let (first, count) = target.list(&mut whole);
                // SAFETY: the caller answers for the file and the memory; `whole` outlives the call.
                unsafe { libc::preadv(self.file, first, count, offset) }
            }
            Call::Write(target, flags) => {
                let (first, count) = target.list(&mut whole);
                // SAFETY: as for reads.
                unsafe { libc::pwritev2(self.file, first, count, offset, flags) }
            }
            Call::Allocate { length, mode } => {
                let Ok(length) = libc::off_t::try_from(length) else {
                    return -libc::EINVAL;
                };
                // SAFETY: the call uses no memory.
                unsafe { libc::fallocate(self.file, mode, offset, length) as isize }
            }
            // SAFETY: the call uses no memory.
            Call::Sync => unsafe { libc::fdatasync(self.file) as isize },
            Call::Nothing => 0,
        };
        match i32::try_from(result) {
            Ok(count) if count >= 0 => count,
            _ => -std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn carry_out(file: &std::fs::File, offset: u64, call: Call) -> i32 {
        let step = Step {
            file: file.as_raw_fd(),
            offset,
            call,
        };
        // SAFETY: the tests' memory lives longer than the call.
        unsafe { step.carry_out() }
    }

    fn whole(bytes: &mut [u8]) -> Target {
        Target::Whole {
            memory: bytes.as_mut_ptr(),
            length: bytes.len() as u32,
        }
    }

    #[test]
    fn every_step_does_in_place_what_the_ring_would() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("a length");
        let mut data = *b"first, second";
        let write = Call::Write(whole(&mut data), libc::RWF_DSYNC);
        assert_eq!(carry_out(&file, 8192, write), 13);
        let (mut one, mut two) = ([1_u8; 5], [2_u8; 3]);
        let piece = |bytes: &mut [u8]| libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let pieces = [piece(&mut one), piece(&mut two)];
        let pieces = || Target::Pieces {
            first: pieces.as_ptr(),
            count: 2,
        };
        assert_eq!(carry_out(&file, 8205, Call::Write(pieces(), 0)), 8);
        let mut back = [0; 21];
        assert_eq!(carry_out(&file, 8192, Call::Read(whole(&mut back))), 21);
        assert_eq!(&back, b"first, second\x01\x01\x01\x01\x01\x02\x02\x02");
        assert_eq!(carry_out(&file, 8192, Call::Read(pieces())), 8);
        assert_eq!((&one, &two), (b"first", b", s"));
        assert_eq!(carry_out(&file, 0, Call::Sync), 0);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let length = 1 << 20;
        assert_eq!(carry_out(&file, 0, Call::Allocate { length, mode }), 0);
        assert_eq!(carry_out(&file, 8192, Call::Read(whole(&mut back))), 21);
        assert_eq!(back, [0; 21]);
    }

    #[test]
    fn errors_are_those_of_the_ring() {
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        let step = |call| Step {
            file: reader.as_raw_fd(),
            offset: 0,
            call,
        };
        // SAFETY: the call uses no memory.
        assert_eq!(unsafe { step(Call::Sync).carry_out() }, -libc::EINVAL);
        let mut byte = [0];
        let read = Call::Read(whole(&mut byte));
        // SAFETY: the byte lives longer than the call.
        assert_eq!(unsafe { step(read).carry_out() }, -libc::ESPIPE);
    }
}
