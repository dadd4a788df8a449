//! What both front ends have in common.

use std::io;

/// A disk that takes many requests at a time. Each request has one of the device's places, which
/// holds its data and can be used again when the request is done.
pub trait Device {
    /// Starts a request of the whole place at a byte of the disk. The server may be told only with
    /// [`Device::notify`].
    ///
    /// # Errors
    /// Those of the connection.
    fn submit(&mut self, place: usize, write: bool, offset: u64) -> io::Result<()>;

    /// Tells the server of what was submitted.
    ///
    /// # Errors
    /// Those of the connection.
    fn notify(&mut self) -> io::Result<()>;

    /// Waits until a request is done, and adds the places of all that are.
    ///
    /// # Errors
    /// Those of the connection, when no answer comes, and when a request failed.
    fn done(&mut self, places: &mut Vec<usize>) -> io::Result<()>;

    /// Makes everything that was written durable. Nothing may be in flight.
    ///
    /// # Errors
    /// As [`Device::done`].
    fn flush(&mut self) -> io::Result<()>;

    /// Puts bytes into a place.
    fn put(&mut self, place: usize, at: usize, bytes: &[u8]);

    /// Takes bytes out of a place.
    fn get(&self, place: usize, at: usize, into: &mut [u8]);
}
