//! The handshake of a session between nodes: rustls' handshake, over buffers that the session then keeps.

use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::{
    AlertDescription, ClientConfig, CommonState, Error, ExtractedSecrets, InvalidMessage,
    ServerConfig,
};

use super::TlsError;
use super::records::{Records, Secrets};
use super::session::{Session, buffers};
use crate::page_buffers::Staging;

/// One side of a handshake in progress.
pub struct Handshake {
    side: Side,
    incoming: Staging,
    outgoing: Staging,
    /// Plaintext sent by the other side right behind its last message.
    early: Vec<u8>,
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// The next need of rustls.
enum Step {
    Again,
    Input,
}

impl Handshake {
    /// Returns the side that has connected to the node `name`. The settings allow only TLS 1.3 and permit the
    /// extraction of secrets.
    ///
    /// # Errors
    /// The settings do not fit, or no memory is left.
    pub fn client(config: Arc<ClientConfig>, name: ServerName<'static>) -> Result<Self, TlsError> {
        let connection = UnbufferedClientConnection::new(config, name)?;
        Self::new(Side::Client(connection))
    }

    /// Returns the side that accepted the connection, with settings of the same kind.
    ///
    /// # Errors
    /// As for [`Handshake::client`].
    pub fn server(config: Arc<ServerConfig>) -> Result<Self, TlsError> {
        let connection = UnbufferedServerConnection::new(config)?;
        Self::new(Side::Server(connection))
    }

    fn new(side: Side) -> Result<Self, TlsError> {
        let (incoming, outgoing) = buffers()?;
        Ok(Self {
            side,
            incoming,
            outgoing,
            early: Vec::new(),
        })
    }

    /// Returns the room for bytes from the other side; never empty. [`Handshake::received`] counts them.
    pub fn room_mut(&mut self) -> &mut [u8] {
        self.incoming.compact();
        self.incoming.room_mut()
    }

    /// Counts `count` bytes as received.
    pub fn received(&mut self, count: usize) {
        self.incoming.filled(count);
    }

    /// Returns the bytes to send. [`Handshake::sent`] counts the sent ones.
    pub fn to_send(&self) -> &[u8] {
        self.outgoing.data()
    }

    /// Counts `count` bytes as sent.
    pub fn sent(&mut self, count: usize) {
        self.outgoing.consume(count);
    }

    /// Advances the handshake as far as the received bytes allow. Returns true once the handshake is complete.
    /// [`Handshake::to_send`] is for the other side in any case, even after an error: it then holds the alert.
    ///
    /// # Errors
    /// The other side is not the expected node, or does not speak TLS 1.3.
    pub fn advance(&mut self) -> Result<bool, TlsError> {
        if let Err(error) = self.run() {
            // Queues the alerts of rustls. Further steps are not allowed.
            while self.side.state().wants_write() && self.step().is_ok() {}
            return Err(error.into());
        }
        let complete = !self.side.state().is_handshaking();
        if !complete && self.room_mut().is_empty() {
            return Err(Error::from(InvalidMessage::HandshakePayloadTooLarge).into());
        }
        Ok(complete)
    }

    /// Returns the session of a complete handshake, and the certificate chain that the other side proved to own.
    ///
    /// # Errors
    /// The handshake is not complete, or its outcome is not TLS 1.3.
    pub fn finish(self) -> Result<(Session, Vec<CertificateDer<'static>>), TlsError> {
        let certificates = self.side.state().peer_certificates();
        let certificates = certificates.unwrap_or_default().to_vec();
        let (keys, secrets) = self.side.into_secrets()?;
        let records = Records::new(secrets, keys, self.early)?;
        let session = Session::records(records, self.incoming, self.outgoing);
        Ok((session, certificates))
    }

    /// Lets rustls work until it needs more input.
    fn run(&mut self) -> Result<(), Error> {
        while let Step::Again = self.step()? {}
        Ok(())
    }

    fn step(&mut self) -> Result<Step, Error> {
        let incoming = self.incoming.data_mut();
        let (discard, step) = match &mut self.side {
            Side::Client(connection) => {
                let status = connection.process_tls_records(incoming);
                handle(status, &mut self.outgoing, &mut self.early)
            }
            Side::Server(connection) => {
                let status = connection.process_tls_records(incoming);
                handle(status, &mut self.outgoing, &mut self.early)
            }
        };
        self.incoming.consume(discard);
        step
    }
}

impl Side {
    fn state(&self) -> &CommonState {
        match self {
            Self::Client(connection) => connection,
            Self::Server(connection) => connection,
        }
    }

    fn into_secrets(self) -> Result<(ExtractedSecrets, Secrets), Error> {
        Ok(match self {
            Self::Client(connection) => {
                let (keys, kernel) = connection.dangerous_into_kernel_connection()?;
                (keys, Secrets::Client(kernel))
            }
            Self::Server(connection) => {
                let (keys, kernel) = connection.dangerous_into_kernel_connection()?;
                (keys, Secrets::Server(kernel))
            }
        })
    }
}

/// Serves the request of rustls. Returns the number of received bytes to discard.
fn handle<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut Staging,
    early: &mut Vec<u8>,
) -> (usize, Result<Step, Error>) {
    let step = status.state.and_then(|state| match state {
        ConnectionState::EncodeTlsData(mut message) => {
            let count = message
                .encode(outgoing.room_mut())
                .map_err(|error| Error::General(error.to_string()))?;
            outgoing.filled(count);
            Ok(Step::Again)
        }
        ConnectionState::TransmitTlsData(transmit) => {
            // The message leaves before anything else does.
            transmit.done();
            Ok(Step::Again)
        }
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                early.extend_from_slice(record?.payload);
            }
            Ok(Step::Again)
        }
        ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => Ok(Step::Input),
        ConnectionState::PeerClosed | ConnectionState::Closed => {
            Err(Error::AlertReceived(AlertDescription::CloseNotify))
        }
        other => Err(Error::General(format!("an unexpected state: {other:?}"))),
    });
    (status.discard, step)
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Handshake").finish_non_exhaustive()
    }
}
