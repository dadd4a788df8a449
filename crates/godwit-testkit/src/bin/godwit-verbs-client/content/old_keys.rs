//! The last check of memory windows: a replaced key is refused. The refusal breaks the queue pair. So half of the queue
//! pairs try at one side and half at the other, after everything else.

use std::io;
use std::time::{Duration, Instant};

use godwit_verbs::abi::*;

use super::super::device::{Device, Slot};
use super::super::exchange::Peer;
use super::super::traffic::{BATCH, Traffic, wr_id};
use super::ledger;

/// Longest time for a device to refuse a request.
const PATIENCE: Duration = Duration::from_secs(30);
/// Byte that must not arrive anywhere: no message begins like this.
const FORBIDDEN: u8 = 0x55;

/// Tries writes by old keys, which have to fail, and checks that none of the peer's attempts has landed here. Returns
/// the number of attempts.
pub(crate) fn try_all(traffic: &mut Traffic, connections: &mut [Peer]) -> io::Result<usize> {
    let mut tried = 0;
    for pair in 0..traffic.pairs.len() {
        let (_, place) = traffic.at_peer(pair);
        if place % 2 == usize::from(traffic.side) {
            try_one(traffic, pair)?;
            tried += 1;
        }
    }
    for connection in connections {
        connection.barrier("refused")?;
    }
    for pair in 0..traffic.pairs.len() {
        let (_, place) = traffic.at_peer(pair);
        for window in 0..2 {
            let landed = traffic.device.bytes(Slot::Landing(pair, window));
            if landed.iter().all(|byte| *byte == 0) {
                // The peer has never written there.
                continue;
            }
            let number = ledger::number_of(landed);
            ledger::check(landed, 1 - traffic.side, place, number)
                .map_err(|error| io::Error::other(format!("what the peer wrote: {error}")))?;
        }
    }
    Ok(tried)
}

/// Tries a write by an old key of a window, to the address of the window's new key.
fn try_one(traffic: &mut Traffic, pair: usize) -> io::Result<()> {
    let (window, rkey) = traffic.pairs[pair].old_key().ok_or_else(|| {
        io::Error::other("the peer has bound no window anew, so there is no old key to try")
    })?;
    let number = traffic.pairs[pair].operations.post();
    let (peer, place) = traffic.at_peer(pair);
    let remote_addr = Device::landing(peer, place, window);
    let device = &traffic.device;
    let slot = Slot::Send(pair, number);
    device.bytes(slot).fill(FORBIDDEN);
    // SAFETY: integers, null pointers and a union of both.
    let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
    let mut piece = device.piece(slot);
    (request.wr_id, request.opcode) = (wr_id(pair, number), IBV_WR_RDMA_WRITE);
    request.send_flags = IBV_SEND_SIGNALED;
    (request.sg_list, request.num_sge) = (&raw mut piece, 1);
    request.wr.rdma = ibv_rdma { remote_addr, rkey };
    device.post_send(pair, &mut request)?;
    let began = Instant::now();
    let mut completions = [ibv_wc::default(); BATCH];
    while began.elapsed() < PATIENCE {
        for completion in device.take(&mut completions, Some(Duration::from_millis(50)))? {
            if completion.wr_id == wr_id(pair, number) {
                return if completion.status == IBV_WC_REM_ACCESS_ERR {
                    Ok(())
                } else {
                    Err(io::Error::other(format!(
                        "a write by the old key {rkey:#x} ended with status {}",
                        completion.status
                    )))
                };
            }
            // Receives of failed queue pairs.
            if completion.status != IBV_WC_WR_FLUSH_ERR {
                let id = completion.wr_id;
                return Err(io::Error::other(format!(
                    "request {id:#x} completed after the last one with status {}",
                    completion.status
                )));
            }
        }
    }
    Err(io::Error::other(format!(
        "a write by the old key {rkey:#x} has not ended after {} s",
        PATIENCE.as_secs()
    )))
}
