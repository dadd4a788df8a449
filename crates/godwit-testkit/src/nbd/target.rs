use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Where a disk is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdTarget {
    /// On a unix socket.
    Unix {
        /// The socket.
        socket: PathBuf,
        /// The export's name.
        export: String,
    },
    /// On plain TCP.
    Tcp {
        /// The server.
        address: SocketAddr,
        /// The export's name.
        export: String,
    },
}

impl NbdTarget {
    /// An export on a unix socket.
    pub fn unix(socket: impl Into<PathBuf>, export: &str) -> Self {
        Self::Unix {
            socket: socket.into(),
            export: export.to_owned(),
        }
    }

    /// An export on plain TCP.
    pub fn tcp(address: SocketAddr, export: &str) -> Self {
        Self::Tcp {
            address,
            export: export.to_owned(),
        }
    }

    /// The URI that standard NBD tools take.
    pub fn uri(&self) -> String {
        match self {
            Self::Unix { socket, export } => {
                format!("nbd+unix:///{export}?socket={}", socket.display())
            }
            Self::Tcp { address, export } => format!("nbd://{address}/{export}"),
        }
    }

    /// The export's name.
    pub fn export(&self) -> &str {
        match self {
            Self::Unix { export, .. } | Self::Tcp { export, .. } => export,
        }
    }

    /// Opens the socket only.
    ///
    /// # Errors
    /// Those of connecting.
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
    /// A unix socket.
    Unix(UnixStream),
    /// A TCP socket.
    Tcp(TcpStream),
}

impl NbdStream {
    /// A second handle of the same socket.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
        }
    }

    /// How long a read may wait; for ever with `None`.
    ///
    /// # Errors
    /// When the duration is zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
        }
    }

    /// Ends both directions; whoever reads sees the end of the stream.
    pub fn shutdown(&self) {
        // A socket that the peer already closed is as good as shut down.
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
