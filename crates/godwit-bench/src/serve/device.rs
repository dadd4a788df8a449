//! Common interface of both front ends.

use std::io;

/// A disk that takes many requests at a time. Each request uses one of the device's places, which holds its data and is
/// free again when the request is done.
pub(crate) trait Device {
    /// Starts a request for the whole place at a byte of the disk. The server may only learn of it from
    /// [`Device::notify`].
    fn submit(&mut self, place: usize, write: bool, offset: u64) -> io::Result<()>;

    /// Notifies the server of the submitted requests.
    fn notify(&mut self) -> io::Result<()>;

    /// Waits until a request is done, and adds the places of all completed requests.
    fn done(&mut self, places: &mut Vec<usize>) -> io::Result<()>;

    /// Makes all writes durable. No request may be in flight.
    fn flush(&mut self) -> io::Result<()>;

    /// Copies bytes into a place.
    fn put(&mut self, place: usize, at: usize, bytes: &[u8]);

    /// Copies bytes out of a place.
    fn get(&self, place: usize, at: usize, into: &mut [u8]);
}
