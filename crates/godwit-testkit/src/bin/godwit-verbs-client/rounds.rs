//! Both sides' turns, from when both are ready until both are over.

use std::io;
use std::path::Path;

use super::exchange::Peer;

/// Traffic on queue pairs until the end.
pub(super) trait Load {
    /// Returns the number of queue pairs.
    fn pairs(&self) -> usize;
    /// Returns true if both sides have sent everything, and this one has received everything.
    fn is_over(&self) -> bool;
    /// Begins nothing new but the messages about the end to the other side.
    fn end(&mut self);
    /// Sends as much as there is room for on this queue pair.
    fn send(&mut self, pair: usize) -> io::Result<()>;
    /// Takes and checks completions.
    fn take_completions(&mut self) -> io::Result<()>;
}

/// Works until this file exists, and then to the end.
pub(super) fn work(load: &mut impl Load, connections: &mut [Peer], until: &Path) -> io::Result<()> {
    // No side sends before the other can receive.
    for connection in &mut *connections {
        connection.barrier("ready")?;
    }
    let mut rounds = 0u64;
    while !load.is_over() {
        if rounds.is_multiple_of(16) && until.exists() {
            load.end();
        }
        rounds += 1;
        for pair in 0..load.pairs() {
            load.send(pair)?;
        }
        load.take_completions()?;
    }
    for connection in connections {
        connection.barrier("over")?;
    }
    Ok(())
}
