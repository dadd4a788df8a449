//! A machine's network card under load and during the machine's move. Compares QEMU's e1000 and virtio-net on a tap,
//! virtio-net with a second card that is unplugged for the move, DPDK's testpmd behind vhost-user, and the NIC of a
//! Godwit node, in turns in one run. The load comes from real programs: iperf3, nginx and wrk. docs/lab/network.md
//! describes the method.

mod loads;
mod machine;
mod measure;
pub(crate) mod options;
mod peers;
mod report;
mod site;
mod testpmd;

use std::io;

use godwit_bench::interrupt;

use crate::net::machine::Machine;
use crate::net::options::Options;
use crate::net::report::{LeftOut, PeerRuns};
use crate::net::site::Site;

pub(crate) fn bench(options: &Options) -> io::Result<()> {
    site::check()?;
    interrupt::catch()?;
    let mut peers: Vec<PeerRuns> = Vec::new();
    let mut left_out = Vec::new();
    for peer in options.peers() {
        match peer.missing() {
            Some(reason) => {
                println!("{} is left out: {reason}", peer.name());
                left_out.push(LeftOut {
                    peer: peer.name(),
                    reason,
                });
            }
            None => peers.push(PeerRuns::new(peer)),
        }
    }
    let site = Site::new()?;
    let rounds = options.rounds();
    for round in 0..rounds {
        for turn in 0..peers.len() {
            interrupt::check()?;
            let turn = (round + turn) % peers.len();
            let runs = &mut peers[turn];
            println!("round {} of {rounds}: {}", round + 1, runs.peer.name());
            take_turn(&site, options, runs)
                .map_err(|error| io::Error::other(format!("{}: {error}", runs.peer.name())))?;
        }
    }
    report::conclude(options, &peers, left_out)
}

/// Measures one machine with the peer's card: under steady load first, then one move under each load.
fn take_turn(site: &Site, options: &Options, runs: &mut PeerRuns) -> io::Result<()> {
    let peer = runs.peer;
    let mut machine = Machine::start(site, peer)?;
    if peer.is_measured_steadily() {
        let measured = measure::steady(site, options.seconds())?;
        for one in &measured {
            println!("  {one}");
        }
        runs.steady.push(measured);
    }
    if peer.moves() {
        let mut moves = Vec::new();
        for load in loads::Load::ALL {
            interrupt::check()?;
            let moved = measure::moving(site, &mut machine, load, options.around())?;
            println!("  {moved}");
            moves.push(moved);
        }
        runs.moves.push(moves);
    }
    machine.stop(site)
}
