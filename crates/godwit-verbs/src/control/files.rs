//! Transfer of open files along with a line.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Files that one message can carry (`SCM_MAX_FD`).
pub(crate) const MOST: usize = 253;
/// Room for the header and so many descriptors, in bytes.
const ROOM: usize = 1088;

/// Aligned as control messages must be.
#[repr(C, align(8))]
struct Room([u8; ROOM]);

/// Sends one byte with these files.
pub(super) fn send(stream: &UnixStream, byte: u8, files: &[OwnedFd]) -> io::Result<()> {
    if files.is_empty() || files.len() > MOST {
        return Err(io::Error::other(format!(
            "{} files in one message",
            files.len()
        )));
    }
    let numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let bytes = size_of_val(&numbers[..]);
    let mut room = Room([0; ROOM]);
    let mut data = [byte];
    let mut piece = libc::iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: a zeroed message has no parts; its parts live until the call returns, and the descriptors fit into the
    // room.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
        message.msg_control = room.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(bytes as u32) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes as u32) as _;
        std::ptr::copy_nonoverlapping(numbers.as_ptr().cast(), libc::CMSG_DATA(header), bytes);
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if sent == 1 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Receives one byte and its files; none at the end of the stream.
pub(super) fn receive(stream: &UnixStream) -> io::Result<Option<(u8, Vec<OwnedFd>)>> {
    let mut room = Room([0; ROOM]);
    let mut data = [0u8];
    let mut piece = libc::iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut files = Vec::new();
    // SAFETY: as above. Each received number is a new descriptor of this process without another owner.
    let (received, flags) = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
        message.msg_control = room.0.as_mut_ptr().cast();
        message.msg_controllen = ROOM as _;
        let received = libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        if received < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes =
                    ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let numbers = libc::CMSG_DATA(header).cast::<RawFd>();
                for place in 0..bytes / size_of::<RawFd>() {
                    files.push(OwnedFd::from_raw_fd(numbers.add(place).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        (received, message.msg_flags)
    };
    if flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::other("more files came than there is room for"));
    }
    Ok((received == 1).then_some((data[0], files)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn files_arrive_in_their_order_with_the_byte() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let made = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file.rewind().unwrap();
            OwnedFd::from(file)
        };
        send(&ours, b'x', &[made("first"), made("second")]).unwrap();
        let (byte, files) = receive(&theirs).unwrap().unwrap();
        assert_eq!(byte, b'x');
        let said = files.into_iter().map(|file| {
            let mut text = String::new();
            std::fs::File::from(file).read_to_string(&mut text).unwrap();
            text
        });
        assert_eq!(said.collect::<Vec<_>>(), ["first", "second"]);
        drop(ours);
        assert!(receive(&theirs).unwrap().is_none());
    }

    #[test]
    fn as_many_as_a_message_carries_and_no_more() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let files = |count: usize| -> Vec<OwnedFd> {
            (0..count)
                .map(|_| file.try_clone().unwrap().into())
                .collect()
        };
        send(&ours, b'x', &files(MOST)).unwrap();
        assert_eq!(receive(&theirs).unwrap().unwrap().1.len(), MOST);
        assert!(send(&ours, b'x', &files(MOST + 1)).is_err());
        assert!(send(&ours, b'x', &[]).is_err());
    }
}
