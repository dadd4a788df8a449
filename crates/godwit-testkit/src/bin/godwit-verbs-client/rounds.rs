//! Both sides' turns, from when both are ready until both are over.

use std::io;
use std::path::Path;

use super::exchange::Peer;

/// What is sent and received on queue pairs until it ends.
pub(super) trait Load {
    /// How many queue pairs it uses.
    fn pairs(&self) -> usize;
    /// Whether both sides have sent all that they will, and this one has received it.
    fn is_over(&self) -> bool;
    /// Begins nothing new but what tells the other side of the end.
    fn end(&mut self);
    /// Sends what there is room for on this queue pair.
    ///
    /// # Errors
    /// The device refuses it.
    fn send(&mut self, pair: usize) -> io::Result<()>;
    /// Takes and checks what was completed.
    ///
    /// # Errors
    /// Something is lost, twice, out of order or wrong.
    fn take_completions(&mut self) -> io::Result<()>;
}

/// Works until this file is there, and then to the end.
///
/// # Errors
/// Those of the load, or the other side is gone.
pub(super) fn work(load: &mut impl Load, connections: &mut [Peer], until: &Path) -> io::Result<()> {
    // Nobody sends before the other side can receive.
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
