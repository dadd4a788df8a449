//! Work requests and completions.

use std::ffi::{c_int, c_uint};

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

/// A work request to send. `wr` is the header's union: the place of the remote address, the remote key and the address
/// handle depends on the opcode and the type of the queue pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: c_uint,
    /// Or the key to invalidate.
    pub imm_data: u32,
    pub wr: ibv_send_wr_union,
    pub qp_type: u64,
    /// In the header a union with the arguments of segmentation offload, which are not longer.
    pub bind_mw: ibv_send_bind_mw,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_bind_mw {
    pub mw: *mut super::ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mw_bind_info {
    pub mr: *mut super::ibv_mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// The arguments of `ibv_bind_mw`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mw_bind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub bind_info: ibv_mw_bind_info,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_union {
    pub rdma: ibv_rdma,
    pub atomic: ibv_atomic,
    pub ud: ibv_ud,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ud {
    pub ah: *mut super::ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Or the key that the peer has invalidated.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

pub const IBV_WR_RDMA_WRITE: c_int = 0;
pub const IBV_WR_RDMA_WRITE_WITH_IMM: c_int = 1;
pub const IBV_WR_SEND: c_int = 2;
pub const IBV_WR_SEND_WITH_IMM: c_int = 3;
pub const IBV_WR_RDMA_READ: c_int = 4;
pub const IBV_WR_ATOMIC_CMP_AND_SWP: c_int = 5;
pub const IBV_WR_ATOMIC_FETCH_AND_ADD: c_int = 6;
pub const IBV_WR_LOCAL_INV: c_int = 7;
pub const IBV_WR_BIND_MW: c_int = 8;
pub const IBV_WR_SEND_WITH_INV: c_int = 9;

pub const IBV_SEND_SIGNALED: c_uint = 1 << 1;
pub const IBV_SEND_INLINE: c_uint = 1 << 3;

pub const IBV_WC_SUCCESS: c_int = 0;
/// The queue pair had failed before.
pub const IBV_WC_WR_FLUSH_ERR: c_int = 5;
/// The peer's device does not know the key, or the key does not permit the access.
pub const IBV_WC_REM_ACCESS_ERR: c_int = 10;
/// Set in opcodes of receive completions.
pub const IBV_WC_RECV: c_int = 1 << 7;
pub const IBV_WC_WITH_IMM: c_uint = 1 << 1;
pub const IBV_WC_IP_CSUM_OK: c_uint = 1 << 2;
pub const IBV_WC_WITH_INV: c_uint = 1 << 3;
/// The flags of a message with an invalidated key, on some devices or on others.
pub const WITH_INV_OF_ANY_DEVICE: c_uint = IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK;

impl ibv_send_wr {
    /// Returns true if this request consumes a receive at the other side.
    #[inline]
    pub fn is_two_sided(&self) -> bool {
        const TWO_SIDED: u32 = 1 << IBV_WR_SEND
            | 1 << IBV_WR_SEND_WITH_IMM
            | 1 << IBV_WR_SEND_WITH_INV
            | 1 << IBV_WR_RDMA_WRITE_WITH_IMM;
        // No device has as many opcodes as this number has bits.
        TWO_SIDED.wrapping_shr(self.opcode as u32) & 1 != 0
    }

    /// Returns true if this request concerns an object of this side, in order with the other requests.
    #[inline]
    pub fn is_local(&self) -> bool {
        matches!(self.opcode, IBV_WR_LOCAL_INV | IBV_WR_BIND_MW)
    }
}

impl ibv_wc {
    /// Returns true if the peer invalidated a key with this message of a reliable connection.
    ///
    /// soft-RoCE gives applications the kernel's flag, which in the header means a good checksum of an IP packet.
    /// Reliable connections have no such checksums.
    pub fn invalidates(&self) -> bool {
        let as_the_kernel_says = IBV_WC_IP_CSUM_OK | IBV_WC_WITH_IMM;
        self.wc_flags & IBV_WC_WITH_INV != 0
            || self.wc_flags & as_the_kernel_says == IBV_WC_IP_CSUM_OK
    }
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<ibv_sge>() == 16);
    assert!(size_of::<ibv_recv_wr>() == 32);
    assert!(size_of::<ibv_send_wr>() == 128);
    assert!(offset_of!(ibv_send_wr, wr) == 40);
    assert!(offset_of!(ibv_send_wr, bind_mw) == 80);
    assert!(offset_of!(ibv_send_wr, bind_mw.bind_info) == 96);
    assert!(size_of::<ibv_mw_bind>() == 48);
    assert!(size_of::<ibv_wc>() == 48);
    assert!(offset_of!(ibv_wc, qp_num) == 28);
};
