//! Soft-RoCE's doorbell in a process that was restored from an image.
//!
//! Soft-RoCE tells the kernel of new requests with write(2) on the device's file. The kernel takes writes only from a
//! thread with the very credentials object with which the file was opened (`ib_safe_file_access`). CRIU gives every
//! thread its own object, so writes of the application's threads are refused (EACCES) after the control thread has
//! opened the device. The same command by ioctl(2) has no such restriction. Devices with a doorbell in memory never
//! come here.

use std::ffi::c_int;

use crate::abi::{
    CORE_IN, CORE_OUT, CommandAttribute, CommandHeader, OBJECT_DEVICE, VERBS_IOCTL, ibv_qp,
};

/// `RDMA_DRIVER_RXE`
const DRIVER_RXE: u32 = 14;
/// `IB_USER_VERBS_CMD_POST_SEND`
const COMMAND_POST_SEND: u64 = 28;
/// `UVERBS_ATTR_WRITE_CMD`
const WRITE_CMD: u16 = 2;
/// `UVERBS_ATTR_F_MANDATORY`
const MANDATORY: u16 = 1;

/// A command with three attributes.
#[repr(C)]
struct Invoke {
    header: CommandHeader,
    list: [CommandAttribute; 3],
}

/// `struct ib_uverbs_post_send`, which names the queue pair and carries no requests: the requests are in the queue
/// already.
#[repr(C)]
struct PostSend {
    response: u64,
    queue_pair: u32,
    requests: u32,
    pieces: u32,
    request_size: u32,
}

/// Rings the doorbell of the device's queue pair. Returns an errno value or 0.
#[cold]
pub(in crate::shim) unsafe fn ring(pair: *mut ibv_qp) -> c_int {
    let command = PostSend {
        response: 0,
        queue_pair: (*pair).handle,
        requests: 0,
        pieces: 0,
        request_size: size_of::<crate::abi::ibv_send_wr>() as u32,
    };
    let mut first_refused = 0u32;
    let attribute = |id, length: usize, data| CommandAttribute {
        id,
        length: length as u16,
        flags: MANDATORY,
        reserved: 0,
        data,
    };
    let mut invoke = Invoke {
        header: CommandHeader {
            length: size_of::<Invoke>() as u16,
            object: OBJECT_DEVICE,
            method: 0,
            attributes: 3,
            reserved1: 0,
            driver: DRIVER_RXE,
            reserved2: 0,
        },
        list: [
            attribute(CORE_IN, size_of::<PostSend>(), &raw const command as u64),
            attribute(CORE_OUT, size_of::<u32>(), &raw mut first_refused as u64),
            attribute(WRITE_CMD, size_of::<u64>(), COMMAND_POST_SEND),
        ],
    };
    if libc::ioctl((*(*pair).context).cmd_fd, VERBS_IOCTL, &raw mut invoke) == 0 {
        0
    } else {
        *libc::__errno_location()
    }
}
