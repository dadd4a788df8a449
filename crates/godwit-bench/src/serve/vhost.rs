//! A client of vhost-user-blk, with one queue.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::device::Device;
use godwit_testkit::SECTOR;
use godwit_testkit::vhost_client::{Client, Options, Status};

/// Longest queue that every server accepts.
const LONGEST: u16 = 1024;
/// Descriptors of a request: header, data, status.
const DESCRIPTORS: usize = 3;

/// A started front end.
pub(crate) struct VhostDevice {
    client: Client,
    bytes: usize,
    patience: Duration,
    /// Place of the request at each descriptor.
    heads: Vec<Option<usize>>,
}

impl VhostDevice {
    /// Connects and starts the queue, with `depth` places of `bytes` each.
    pub(crate) fn connect(
        socket: &Path,
        depth: usize,
        bytes: usize,
        patience: Duration,
    ) -> io::Result<Self> {
        let least = u16::try_from(depth * DESCRIPTORS).unwrap_or(LONGEST);
        let size = least.next_power_of_two().clamp(128, LONGEST);
        let options = Options {
            size,
            data: depth * bytes,
            ..Options::default()
        };
        let mut client = Client::connect(socket, options)?;
        client.start()?;
        Ok(Self {
            client,
            bytes,
            patience,
            heads: vec![None; usize::from(size)],
        })
    }

    fn offset(&self, place: usize, at: usize) -> u64 {
        self.client.data() + (place * self.bytes + at) as u64
    }
}

impl Device for VhostDevice {
    fn submit(&mut self, place: usize, write: bool, offset: u64) -> io::Result<()> {
        let (data, sector) = (self.offset(place, 0), offset / SECTOR as u64);
        let length = self.bytes as u32;
        let head = if write {
            self.client.submit_write(0, sector, data, length)
        } else {
            self.client.submit_read(0, sector, data, length)
        };
        self.heads[usize::from(head)] = Some(place);
        Ok(())
    }

    fn notify(&mut self) -> io::Result<()> {
        self.client.queues[0].notify();
        Ok(())
    }

    fn done(&mut self, places: &mut Vec<usize>) -> io::Result<()> {
        let mut next = self.client.queues[0].wait(self.patience);
        if next.is_none() {
            return Err(io::Error::other("no answer in time"));
        }
        while let Some(done) = next {
            let place = self.heads.get_mut(usize::from(done.head));
            let place = place
                .and_then(Option::take)
                .ok_or_else(|| io::Error::other("an answer to nothing"))?;
            let status = self.client.status(0, done.head);
            if status != Status::OK {
                return Err(io::Error::other(format!("a request failed: {status:?}")));
            }
            places.push(place);
            next = self.client.queues[0].done();
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.client.flush(0) {
            Status::OK => Ok(()),
            status => Err(io::Error::other(format!("the flush failed: {status:?}"))),
        }
    }

    fn put(&mut self, place: usize, at: usize, bytes: &[u8]) {
        self.client.memory.write(self.offset(place, at), bytes);
    }

    fn get(&self, place: usize, at: usize, into: &mut [u8]) {
        self.client.memory.read(self.offset(place, at), into);
    }
}
