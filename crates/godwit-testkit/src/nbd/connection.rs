use std::io::{self, IoSlice, Read, Write};
use std::time::Duration;

use super::{NbdStream, NbdTarget};

const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;

const HANDSHAKE_FIXED_NEWSTYLE: u16 = 1;
const HANDSHAKE_NO_ZEROES: u16 = 2;

const FLAG_FUA: u16 = 1;

/// Longest option reply accepted by this client, in bytes.
const MAX_OPTION_REPLY: u32 = 64 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read,
    Write,
    /// Make every completed write durable.
    Flush,
    /// Give the range up.
    Trim,
    /// Fill the range with zeroes.
    WriteZeroes,
    /// End the session.
    Disconnect,
}

impl Command {
    const fn code(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::WriteZeroes => 6,
        }
    }
}

/// A request; offset and length are in bytes and sent as given, right or wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub command: Command,
    /// True if the effect must be durable before the reply.
    pub fua: bool,
    /// Cookie, returned in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    pub length: u32,
}

/// A reply without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    /// 0, or an NBD error number.
    pub error: u32,
}

impl Request {
    /// Bytes of a request without its data.
    pub const BYTES: usize = 28;

    /// Returns a request whose effect need not be durable.
    pub const fn new(command: Command, cookie: u64, offset: u64, length: u32) -> Self {
        let fua = false;
        Self {
            command,
            fua,
            cookie,
            offset,
            length,
        }
    }

    /// Encodes the request for the wire.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut header = [0; Self::BYTES];
        header[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        let flags = if self.fua { FLAG_FUA } else { 0 };
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&self.command.code().to_be_bytes());
        header[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        header[16..24].copy_from_slice(&self.offset.to_be_bytes());
        header[24..28].copy_from_slice(&self.length.to_be_bytes());
        header
    }
}

impl Reply {
    /// Bytes of a reply without its data.
    pub const BYTES: usize = 16;

    /// Decodes a received reply.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> io::Result<Self> {
        let magic = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if magic != SIMPLE_REPLY_MAGIC {
            return Err(bad(format!("reply magic {magic:#x}")));
        }
        Ok(Self {
            error: u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
            cookie: u64_at(bytes, 8),
        })
    }
}

/// A session in the transmission phase that sends one request at a time.
#[derive(Debug)]
pub struct NbdConnection {
    size: u64,
    flags: u16,
    reader: NbdReader,
    writer: NbdWriter,
    next_cookie: u64,
}

/// The half that takes replies.
#[derive(Debug)]
pub struct NbdReader(NbdStream);

/// The half that sends requests.
#[derive(Debug)]
pub struct NbdWriter(NbdStream);

impl NbdConnection {
    /// Connects and asks for the export. Waits at most 20 s for each answer of the handshake; later reads have no
    /// timeout.
    pub fn connect(target: &NbdTarget) -> io::Result<Self> {
        let mut stream = target.open()?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let (size, flags) = negotiate(&mut stream, target.export())?;
        stream.set_read_timeout(None)?;
        let writer = NbdWriter(stream.try_clone()?);
        Ok(Self {
            size,
            flags,
            reader: NbdReader(stream),
            writer,
            next_cookie: 1,
        })
    }

    /// Returns the export's size in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the export's transmission flags.
    pub const fn flags(&self) -> u16 {
        self.flags
    }

    /// Returns the two halves, to keep many requests in flight.
    pub fn split(self) -> (NbdReader, NbdWriter) {
        (self.reader, self.writer)
    }

    /// Sends one request, with `data` for a write, and waits for the reply; read data is put into `into`. Returns the
    /// server's error number, 0 for success.
    pub fn call(
        &mut self,
        command: Command,
        offset: u64,
        length: u32,
        data: &[u8],
        into: &mut [u8],
    ) -> io::Result<u32> {
        self.next_cookie += 1;
        let cookie = self.next_cookie;
        self.writer
            .send(&Request::new(command, cookie, offset, length), data)?;
        let reply = self.reader.reply()?;
        if reply.cookie != cookie {
            return Err(bad(format!(
                "reply to {} where {cookie} was asked",
                reply.cookie
            )));
        }
        if command == Command::Read && reply.error == 0 {
            self.reader.data(into)?;
        }
        Ok(reply.error)
    }

    pub fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let length = into.len() as u32;
        let error = self.call(Command::Read, offset, length, &[], into)?;
        succeeded("read", offset, error)
    }

    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let error = self.call(Command::Write, offset, data.len() as u32, data, &mut [])?;
        succeeded("write", offset, error)
    }

    /// Makes every completed write durable.
    pub fn flush(&mut self) -> io::Result<()> {
        let error = self.call(Command::Flush, 0, 0, &[], &mut [])?;
        succeeded("flush", 0, error)
    }
}

impl NbdReader {
    /// Waits for the next reply's header; after a successful read, [`NbdReader::data`] must follow.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let mut bytes = [0; Reply::BYTES];
        self.0.read_exact(&mut bytes)?;
        Reply::decode(&bytes)
    }

    /// Takes the data of a read.
    pub fn data(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact(into)
    }

    /// Sets the longest wait for a reply.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(timeout)
    }
}

/// Raw replies, for readers of many at once.
impl Read for NbdReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

/// Encoded requests, for writers of many at once.
impl Write for NbdWriter {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.write(buffer)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl NbdWriter {
    pub fn send(&mut self, request: &Request, data: &[u8]) -> io::Result<()> {
        self.0.write_all(&request.encode())?;
        self.0.write_all(data)
    }

    /// Sends a disconnect request; the server closes the connection.
    pub fn disconnect(&mut self) {
        let goodbye = Request::new(Command::Disconnect, 0, 0, 0);
        // A server that is gone needs no disconnect request.
        let _ = self.send(&goodbye, &[]);
    }

    /// Ends both directions of the connection at once.
    pub fn shutdown(&self) {
        self.0.shutdown();
    }

    /// Returns a second handle of this half, to shut the connection down from another thread.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

/// Performs the fixed newstyle handshake up to the answer to `NBD_OPT_GO`; returns the export's size and flags.
fn negotiate(stream: &mut NbdStream, export: &str) -> io::Result<(u64, u16)> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if u64_at(&greeting, 0) != NBD_MAGIC || u64_at(&greeting, 8) != OPTION_MAGIC {
        return Err(bad("not a newstyle NBD server".to_owned()));
    }
    let offered = u16::from_be_bytes([greeting[16], greeting[17]]);
    if offered & HANDSHAKE_FIXED_NEWSTYLE == 0 {
        return Err(bad("server is not fixed newstyle".to_owned()));
    }
    let flags = offered & (HANDSHAKE_FIXED_NEWSTYLE | HANDSHAKE_NO_ZEROES);

    let mut message = Vec::with_capacity(64);
    message.extend_from_slice(&u32::from(flags).to_be_bytes());
    message.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    message.extend_from_slice(&OPT_GO.to_be_bytes());
    message.extend_from_slice(&(export.len() as u32 + 6).to_be_bytes());
    message.extend_from_slice(&(export.len() as u32).to_be_bytes());
    message.extend_from_slice(export.as_bytes());
    message.extend_from_slice(&0u16.to_be_bytes());
    stream.write_all(&message)?;

    let mut found = None;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        if u64_at(&header, 0) != OPTION_REPLY_MAGIC {
            return Err(bad("bad option reply".to_owned()));
        }
        let kind = u32::from_be_bytes([header[12], header[13], header[14], header[15]]);
        let length = u32::from_be_bytes([header[16], header[17], header[18], header[19]]);
        if length > MAX_OPTION_REPLY {
            return Err(bad(format!("option reply of {length} bytes")));
        }
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body)?;
        match kind {
            REP_INFO if body.len() >= 12 && body[..2] == INFO_EXPORT.to_be_bytes() => {
                found = Some((u64_at(&body, 2), u16::from_be_bytes([body[10], body[11]])));
            }
            REP_INFO => {}
            REP_ACK => return found.ok_or_else(|| bad("export without size".to_owned())),
            error if error & REP_ERROR != 0 => {
                let words = String::from_utf8_lossy(&body);
                return Err(bad(format!(
                    "export '{export}' refused ({error:#x}): {words}"
                )));
            }
            other => return Err(bad(format!("option reply of kind {other}"))),
        }
    }
}

fn succeeded(what: &str, offset: u64, error: u32) -> io::Result<()> {
    if error == 0 {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "{what} at byte {offset}: server's error {error}"
        )))
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(word)
}

fn bad(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
