//! Greetings on a connection: bounded in size and time, whatever the other side sends.

use std::io;
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{
    DecodeError, Features, GREETING_LIMIT, Greeting, HEADER_SIZE, Header, Hello,
    MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, Purpose, Refusal, RefusalCode, Reply, TrafficClass,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::GREETING_TIMEOUT;

/// The reason why no greeting could be read or written.
#[derive(Debug, thiserror::Error)]
pub enum GreetingError {
    /// The connection failed or ended.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes are not a greeting.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The greeting took too long.
    #[error("no answer within {} seconds", .0.as_secs())]
    Timeout(Duration),
    /// The greeting does not belong here.
    #[error("an unexpected greeting came")]
    Unexpected,
}

/// Reads one greeting. Reads nothing past the greeting, and never more than [`GREETING_LIMIT`] bytes of body.
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Greeting, GreetingError> {
    read_within(stream, GREETING_TIMEOUT).await
}

/// Reads one greeting, which must arrive in full within `limit`.
pub async fn read_within(
    stream: &mut (impl AsyncRead + Unpin),
    limit: Duration,
) -> Result<Greeting, GreetingError> {
    tokio::time::timeout(limit, read_untimed(stream))
        .await
        .unwrap_or(Err(GreetingError::Timeout(limit)))
}

async fn read_untimed(stream: &mut (impl AsyncRead + Unpin)) -> Result<Greeting, GreetingError> {
    let mut header = [0; HEADER_SIZE];
    stream.read_exact(&mut header).await?;
    let header = Header::decode(&header)?;
    if header.payload_length > GREETING_LIMIT {
        return Err(DecodeError::PayloadLength(header.payload_length).into());
    }
    let mut body = vec![0; header.payload_length as usize];
    stream.read_exact(&mut body).await?;
    Ok(Greeting::decode(&header, &body)?)
}

/// Sends one greeting.
pub async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    greeting: &Greeting,
) -> Result<(), GreetingError> {
    let send = async {
        stream.write_all(&greeting.encode()).await?;
        stream.flush().await
    };
    tokio::time::timeout(GREETING_TIMEOUT, send)
        .await
        .map_err(|_| GreetingError::Timeout(GREETING_TIMEOUT))?
        .map_err(GreetingError::Io)
}

/// Returns a hello of this build, without features: [`super::dial::Dialer`] adds the wanted ones.
pub fn hello(
    node: &str,
    disk: &str,
    class: TrafficClass,
    purpose: Purpose,
    migration: MigrationId,
) -> Hello {
    Hello {
        min_version: MIN_PROTOCOL_VERSION,
        max_version: PROTOCOL_VERSION,
        features: Features::default(),
        class,
        purpose,
        migration,
        node: node.to_owned(),
        disk: disk.to_owned(),
    }
}

/// Returns the welcome to an acceptable hello, from a node that wants these features, or the refusal of its versions.
pub fn welcome(hello: &Hello, node: &str, features: Features) -> Result<Reply, Refusal> {
    match hello.agree() {
        Some(version) => Ok(Reply::Welcome {
            version,
            features: hello.features.common(features),
            node: node.to_owned(),
        }),
        None => Err(Refusal {
            code: RefusalCode::Version,
            text: format!(
                "node '{}' speaks protocol versions {} to {}, node '{node}' speaks \
                 {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: upgrade the older one",
                hello.node, hello.min_version, hello.max_version
            ),
        }),
    }
}

/// Sends a refusal; the connection is to be closed afterwards. An error is ignored, because the other side may be gone.
pub async fn refuse(stream: &mut (impl AsyncWrite + Unpin), refusal: Refusal) {
    let _ = write(stream, &Greeting::Reply(Reply::Refused(refusal))).await;
    let _ = tokio::time::timeout(GREETING_TIMEOUT, stream.shutdown()).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_core::wire::Kind;

    #[tokio::test]
    async fn a_greeting_crosses_and_nothing_past_it_is_read() {
        let (mut here, mut there) = tokio::io::duplex(1 << 16);
        let sent = Greeting::Hello(hello(
            "a",
            "root",
            TrafficClass::Control,
            Purpose::Migrate,
            MigrationId([3; 16]),
        ));
        write(&mut there, &sent).await.expect("writes");
        there.write_all(b"next").await.expect("writes");
        assert_eq!(read(&mut here).await.expect("reads"), sent);
        let mut rest = [0; 4];
        here.read_exact(&mut rest).await.expect("the rest is there");
        assert_eq!(&rest, b"next");
    }

    #[tokio::test]
    async fn hostile_bytes_are_errors() {
        let oversized = Header {
            payload_length: GREETING_LIMIT + 1,
            ..Header::new(Kind::Hello)
        }
        .encode();
        let not_a_greeting = Header::new(Kind::Ping).encode();
        let cut_short = Header {
            payload_length: 64,
            ..Header::new(Kind::Hello)
        }
        .encode();
        let huge_text = {
            let mut bytes = Header {
                payload_length: 4,
                ..Header::new(Kind::Refused)
            }
            .encode()
            .to_vec();
            bytes.extend_from_slice(&[0xff; 4]);
            bytes
        };
        for bytes in [
            b"GET / HTTP/1.1\r\nHost: godwit\r\n\r\n".as_slice(),
            &[0; HEADER_SIZE],
            &[0xff; 64],
            &oversized,
            &not_a_greeting,
            &cut_short,
            &huge_text,
        ] {
            let (mut here, mut there) = tokio::io::duplex(1 << 16);
            there.write_all(bytes).await.expect("writes");
            drop(there);
            assert!(read(&mut here).await.is_err(), "{bytes:?}");
        }
    }

    #[tokio::test]
    async fn silence_and_half_a_greeting_end_in_a_timeout() {
        let (mut here, mut there) = tokio::io::duplex(64);
        there
            .write_all(&Header::new(Kind::Hello).encode()[..20])
            .await
            .expect("writes");
        let limit = Duration::from_millis(20);
        let read = read_within(&mut here, limit).await;
        assert!(matches!(read, Err(GreetingError::Timeout(_))), "{read:?}");
    }

    #[test]
    fn a_version_from_the_future_is_refused_with_both_versions() {
        let mut future = hello(
            "a",
            "root",
            TrafficClass::Control,
            Purpose::Migrate,
            MigrationId::default(),
        );
        future.min_version = PROTOCOL_VERSION + 1;
        future.max_version = PROTOCOL_VERSION + 5;
        let refusal = welcome(&future, "b", Features::default()).expect_err("no common version");
        assert_eq!(refusal.code, RefusalCode::Version);
        assert!(
            refusal.text.contains("3 to 7") && refusal.text.contains("2 to 2"),
            "{refusal}"
        );
    }
}
