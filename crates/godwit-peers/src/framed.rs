//! JSON messages on a connection between nodes, each after its length: 4 bytes, little-endian.

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Sends a message of at most `longest` bytes.
///
/// # Errors
/// The message is longer, the connection fails, or sending takes longer than `within`.
pub async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
    longest: u32,
    within: Duration,
) -> io::Result<()> {
    let body = serde_json::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).ok().filter(|&l| l <= longest);
    let length = length.ok_or_else(|| too_long(body.len()))?;
    let send = async {
        stream.write_all(&length.to_le_bytes()).await?;
        stream.write_all(&body).await?;
        stream.flush().await
    };
    tokio::time::timeout(within, send)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Reads the length of the next message in bytes. Bytes received so far are lost if the future is dropped.
///
/// # Errors
/// The length exceeds `longest`, or the connection fails.
pub async fn length(stream: &mut (impl AsyncRead + Unpin), longest: u32) -> io::Result<u32> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_le_bytes(length);
    if length > longest {
        return Err(too_long(length as usize));
    }
    Ok(length)
}

/// Reads a message of `length` bytes. Bytes received so far are lost if the future is dropped.
///
/// # Errors
/// The bytes are not such a message, or the connection fails.
pub async fn body<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    length: u32,
) -> io::Result<T> {
    // Grows with the received bytes, not with the announced length.
    let mut body = Vec::new();
    let read = stream
        .take(u64::from(length))
        .read_to_end(&mut body)
        .await?;
    if read < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&body).map_err(io::Error::other)
}

fn too_long(bytes: usize) -> io::Error {
    io::Error::other(format!("a message of {bytes} bytes is too long"))
}
