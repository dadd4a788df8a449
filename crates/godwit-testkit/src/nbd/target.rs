use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// The address of an NBD export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdTarget {
    /// An export on a unix socket.
    Unix {
        socket: PathBuf,
        /// The export's name.
        export: String,
    },
    /// An export on plain TCP.
    Tcp {
        address: SocketAddr,
        /// The export's name.
        export: String,
    },
}

impl NbdTarget {
    pub fn unix(socket: impl Into<PathBuf>, export: &str) -> Self {
        Self::Unix {
            socket: socket.into(),
            export: export.to_owned(),
        }
    }

    pub fn tcp(address: SocketAddr, export: &str) -> Self {
        Self::Tcp {
            address,
            export: export.to_owned(),
        }
    }

    /// Returns the URI for standard NBD tools.
    pub fn uri(&self) -> String {
        match self {
            Self::Unix { socket, export } => {
                format!("nbd+unix:///{export}?socket={}", socket.display())
            }
            Self::Tcp { address, export } => format!("nbd://{address}/{export}"),
        }
    }

    /// Returns the export's name.
    pub fn export(&self) -> &str {
        match self {
            Self::Unix { export, .. } | Self::Tcp { export, .. } => export,
        }
    }

    /// Opens the socket only.
    pub fn open(&self) -> io::Result<NbdStream> {
        match self {
            Self::Unix { socket, .. } => UnixStream::connect(socket).map(NbdStream::Unix),
            Self::Tcp { address, .. } => {
                let stream = TcpStream::connect_timeout(address, Duration::from_secs(5))?;
                stream.set_nodelay(true)?;
                Ok(NbdStream::Tcp(stream))
            }
        }
    }
}

/// A connected socket of either family.
#[derive(Debug)]
pub enum NbdStream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl NbdStream {
    /// Returns a second handle of the same socket.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
        }
    }

    /// Sets the longest wait of a read; `None` for no limit.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
        }
    }

    /// Ends both directions; readers see the end of the stream.
    pub fn shutdown(&self) {
        // A socket closed by the peer is as good as shut down.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for NbdStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for NbdStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(buffer),
            Self::Tcp(stream) => stream.write(buffer),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write_vectored(parts),
            Self::Tcp(stream) => stream.write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
