//! An NBD client with little CPU use: one thread, one write for all ready requests, one read for all answers that have
//! arrived.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::time::Duration;

use super::device::Device;
use godwit_testkit::nbd::{
    Command, NbdConnection, NbdReader, NbdTarget, NbdWriter, Reply, Request,
};

/// Bytes of answers read at once. The rest of a longer answer goes straight to its place.
const AHEAD: usize = 128 << 10;

pub(crate) struct NbdDevice {
    reader: NbdReader,
    writer: NbdWriter,
    places: Vec<Vec<u8>>,
    /// True for each place whose request is a write.
    writes: Vec<bool>,
    /// Headers of unsent requests, and their places.
    ready: VecDeque<([u8; Request::BYTES], usize)>,
    staging: Vec<u8>,
    taken: usize,
    filled: usize,
}

impl NbdDevice {
    /// Connects, with `depth` places of `bytes` each.
    pub(crate) fn connect(
        target: &NbdTarget,
        depth: usize,
        bytes: usize,
        patience: Duration,
    ) -> io::Result<Self> {
        let (reader, writer) = NbdConnection::connect(target)?.split();
        reader.set_timeout(Some(patience))?;
        Ok(Self {
            reader,
            writer,
            places: vec![vec![0; bytes]; depth],
            writes: vec![false; depth],
            ready: VecDeque::with_capacity(depth),
            staging: vec![0; AHEAD],
            taken: 0,
            filled: 0,
        })
    }

    /// Reads until `wanted` bytes are in the staging area.
    fn stage(&mut self, wanted: usize) -> io::Result<()> {
        if self.filled - self.taken >= wanted {
            return Ok(());
        }
        self.staging.copy_within(self.taken..self.filled, 0);
        self.filled -= self.taken;
        self.taken = 0;
        while self.filled < wanted {
            match self.reader.read(&mut self.staging[self.filled..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.filled += count,
            }
        }
        Ok(())
    }

    fn reply(&mut self) -> io::Result<Reply> {
        self.stage(Reply::BYTES)?;
        let mut header = [0; Reply::BYTES];
        header.copy_from_slice(&self.staging[self.taken..][..Reply::BYTES]);
        self.taken += Reply::BYTES;
        let reply = Reply::decode(&header)?;
        if reply.error != 0 {
            return Err(io::Error::other(format!(
                "a request failed: server's error {}",
                reply.error
            )));
        }
        Ok(reply)
    }

    /// Takes an answer with its data, and returns its place.
    fn answer(&mut self) -> io::Result<usize> {
        let place = self.reply()?.cookie as usize;
        let (Some(data), Some(&write)) = (self.places.get_mut(place), self.writes.get(place))
        else {
            return Err(io::Error::other(format!(
                "reply to {place}, which was not asked"
            )));
        };
        if !write {
            let here = (self.filled - self.taken).min(data.len());
            data[..here].copy_from_slice(&self.staging[self.taken..][..here]);
            self.taken += here;
            self.reader.read_exact(&mut data[here..])?;
        }
        Ok(place)
    }
}

impl Device for NbdDevice {
    fn submit(&mut self, place: usize, write: bool, offset: u64) -> io::Result<()> {
        let request = Request {
            command: if write { Command::Write } else { Command::Read },
            fua: false,
            cookie: place as u64,
            offset,
            length: self.places[place].len() as u32,
        };
        self.writes[place] = write;
        self.ready.push_back((request.encode(), place));
        Ok(())
    }

    fn notify(&mut self) -> io::Result<()> {
        let mut parts = Vec::with_capacity(2 * self.ready.len());
        for (header, place) in &self.ready {
            parts.push(IoSlice::new(header));
            if self.writes[*place] {
                parts.push(IoSlice::new(&self.places[*place]));
            }
        }
        let mut left = &mut parts[..];
        while !left.is_empty() {
            let sent = self.writer.write_vectored(left)?;
            IoSlice::advance_slices(&mut left, sent);
        }
        self.ready.clear();
        Ok(())
    }

    fn done(&mut self, places: &mut Vec<usize>) -> io::Result<()> {
        places.push(self.answer()?);
        // Answers in the staging area need no wait, except for the rest of the last one's data.
        while self.filled - self.taken >= Reply::BYTES {
            places.push(self.answer()?);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let request = Request {
            command: Command::Flush,
            fua: false,
            cookie: u64::MAX,
            offset: 0,
            length: 0,
        };
        self.writer.send(&request, &[])?;
        self.reply().map(drop)
    }

    fn put(&mut self, place: usize, at: usize, bytes: &[u8]) {
        self.places[place][at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn get(&self, place: usize, at: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.places[place][at..at + into.len()]);
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        self.writer.disconnect();
    }
}
