//! The data that the device's library reads from a request at posting.

use std::ffi::{c_int, c_uint};

use godwit_verbs::abi::*;

/// A request at the device. Fields that the opcode does not use are zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) wr_id: u64,
    pub(crate) opcode: c_int,
    pub(crate) flags: c_uint,
    /// Or the key to invalidate.
    pub(crate) imm_data: u32,
    /// Empty for inline data.
    pub(crate) pieces: Vec<ibv_sge>,
    pub(crate) data: Vec<u8>,
    /// The remote address and key, and the operands of atomic operations: compare or add, and swap.
    pub(crate) remote: (u64, u32, u64, u64),
    /// A datagram's handle, queue pair and key.
    pub(crate) to: (usize, u32, u32),
}

impl Taken {
    pub(super) unsafe fn of(pair_type: c_int, request: &ibv_send_wr) -> Self {
        let count = request.num_sge as usize;
        let pieces: Vec<ibv_sge> = (0..count)
            .map(|place| *request.sg_list.add(place))
            .collect();
        let mut taken = Self {
            wr_id: request.wr_id,
            opcode: request.opcode,
            flags: request.send_flags,
            imm_data: request.imm_data,
            ..Self::default()
        };
        if request.send_flags & IBV_SEND_INLINE == 0 {
            taken.pieces = pieces;
        } else {
            for piece in pieces.iter().filter(|piece| piece.length > 0) {
                let part =
                    std::slice::from_raw_parts(piece.addr as *const u8, piece.length as usize);
                taken.data.extend_from_slice(part);
            }
        }
        if pair_type == IBV_QPT_UD {
            let to = request.wr.ud;
            taken.to = (to.ah.addr(), to.remote_qpn, to.remote_qkey);
            return taken;
        }
        taken.remote = match request.opcode {
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                let rdma = request.wr.rdma;
                (rdma.remote_addr, rdma.rkey, 0, 0)
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = request.wr.atomic;
                let swap = match request.opcode {
                    IBV_WR_ATOMIC_CMP_AND_SWP => atomic.swap,
                    _ => 0,
                };
                (atomic.remote_addr, atomic.rkey, atomic.compare_add, swap)
            }
            _ => (0, 0, 0, 0),
        };
        taken
    }
}
