//! The handshake of a session between nodes: rustls', over buffers that the session then keeps.

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

/// One side of a handshake that is going on.
pub struct Handshake {
    side: Side,
    incoming: Staging,
    outgoing: Staging,
    /// Plaintext that the other side sent right behind its last message.
    early: Vec<u8>,
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What one step of rustls asks for.
enum Step {
    Again,
    Input,
}

impl Handshake {
    /// The side that has connected to the node named `name`. The settings allow TLS 1.3 only and
    /// that secrets are extracted.
    ///
    /// # Errors
    /// The settings are of no use, or no memory is left.
    pub fn client(config: Arc<ClientConfig>, name: ServerName<'static>) -> Result<Self, TlsError> {
        let connection = UnbufferedClientConnection::new(config, name)?;
        Self::new(Side::Client(connection))
    }

    /// The side that was connected to, with settings of the same kind.
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

    /// Where what comes from the other side belongs; never empty. [`Handshake::received`] says how
    /// much it was.
    pub fn room_mut(&mut self) -> &mut [u8] {
        self.incoming.compact();
        self.incoming.room_mut()
    }

    /// That many bytes have come.
    pub fn received(&mut self, count: usize) {
        self.incoming.filled(count);
    }

    /// What to send. [`Handshake::sent`] says how much of it was.
    pub fn to_send(&self) -> &[u8] {
        self.outgoing.data()
    }

    /// That many bytes have been sent.
    pub fn sent(&mut self, count: usize) {
        self.outgoing.consume(count);
    }

    /// Goes on as far as what has come allows; true: it is complete. What [`Handshake::to_send`] then
    /// has is for the other side in any case, even if only the reason why there is no session.
    ///
    /// # Errors
    /// The other side is not who it should be, or does not speak TLS 1.3.
    pub fn advance(&mut self) -> Result<bool, TlsError> {
        if let Err(error) = self.run() {
            // What rustls has to tell the other side about it. To go on beyond it is not allowed.
            while self.side.state().wants_write() && self.step().is_ok() {}
            return Err(error.into());
        }
        let complete = !self.side.state().is_handshaking();
        if !complete && self.room_mut().is_empty() {
            return Err(Error::from(InvalidMessage::HandshakePayloadTooLarge).into());
        }
        Ok(complete)
    }

    /// The session of a complete handshake, and the chain of certificates that the other side proved
    /// to be its own.
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

    /// Lets rustls work until it needs more from the other side.
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

/// Does what rustls asks for, and says how many bytes of what came it is done with.
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
            // It leaves before anything else does.
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
