//! JSON messages on a connection between nodes, each behind its length: 4 bytes, little-endian.

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Sends a message of at most so many bytes.
///
/// # Errors
/// It is longer, the connection fails, or it is not taken within this time.
pub(crate) async fn write(
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

/// How many bytes the next message has. What has arrived of them is lost when the future is dropped.
///
/// # Errors
/// There are more than the longest has, or the connection fails.
pub(crate) async fn length(stream: &mut (impl AsyncRead + Unpin), longest: u32) -> io::Result<u32> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = u32::from_le_bytes(length);
    if length > longest {
        return Err(too_long(length as usize));
    }
    Ok(length)
}

/// A message of so many bytes. What has arrived of it is lost when the future is dropped.
///
/// # Errors
/// It is none, or the connection fails.
pub(crate) async fn body<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    length: u32,
) -> io::Result<T> {
    // It grows with what comes, not with what is announced.
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
