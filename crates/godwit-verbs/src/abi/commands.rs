//! Commands to the kernel through ioctl(2) (`rdma/rdma_user_ioctl_cmds.h`).

use std::ffi::c_ulong;

/// `RDMA_VERBS_IOCTL`
pub(crate) const VERBS_IOCTL: c_ulong = 0xc018_1b01;
/// `UVERBS_OBJECT_DEVICE`: method 0, among others, carries a command of write(2).
pub(crate) const OBJECT_DEVICE: u16 = 0;
/// `UVERBS_ATTR_CORE_IN`, `UVERBS_ATTR_CORE_OUT`
pub(crate) const CORE_IN: u16 = 0;
pub(crate) const CORE_OUT: u16 = 1;

/// `struct ib_uverbs_ioctl_hdr` without the attributes that follow.
#[repr(C)]
pub(crate) struct CommandHeader {
    /// Bytes, including the attributes.
    pub(crate) length: u16,
    pub(crate) object: u16,
    pub(crate) method: u16,
    /// Number of attributes.
    pub(crate) attributes: u16,
    pub(crate) reserved1: u64,
    pub(crate) driver: u32,
    pub(crate) reserved2: u32,
}

/// `struct ib_uverbs_attr`
#[repr(C)]
pub(crate) struct CommandAttribute {
    pub(crate) id: u16,
    /// Bytes behind `data`.
    pub(crate) length: u16,
    pub(crate) flags: u16,
    pub(crate) reserved: u16,
    /// A value or an address.
    pub(crate) data: u64,
}

const _: () = {
    assert!(size_of::<CommandHeader>() == 24);
    assert!(size_of::<CommandAttribute>() == 16);
};
