//! An NBD client that sends anything, in pieces of any size: the handshake must end or wait, hold
//! no more memory than it was given, and not care where the pieces were cut.

#![no_main]

use godwit_block::nbd::{
    ExportInfo, ExportRefusal, Handshake, HandshakeConfig, HandshakeStep, TlsPolicy,
};
use godwit_core::units::Sectors;
use libfuzzer_sys::fuzz_target;

/// Most that 256 options can be answered with: the longest answer lists both exports.
const MOST_SENT: usize = 18 + 257 * 128;

fuzz_target!(|data: &[u8]| {
    let [tls, step, bytes @ ..] = data else {
        return;
    };
    if tls & 1 == 1 {
        // What may follow a request for TLS depends on the cut, so only survival counts.
        converse(TlsPolicy::Required, bytes, usize::from(*step) + 1);
    } else {
        let whole = converse(TlsPolicy::Off, bytes, usize::MAX);
        assert_eq!(
            converse(TlsPolicy::Off, bytes, usize::from(*step) + 1),
            whole
        );
    }
});

fn converse(tls: TlsPolicy, bytes: &[u8], step: usize) -> (Vec<u8>, HandshakeStep) {
    let mut handshake = Handshake::new(HandshakeConfig::new(tls));
    let mut pieces = bytes.chunks(step);
    let mut sent = Vec::new();
    loop {
        match handshake.poll() {
            HandshakeStep::Receive => match pieces.next() {
                Some(piece) => handshake.receive(piece),
                None => return (sent, HandshakeStep::Receive),
            },
            HandshakeStep::Send(bytes) => {
                sent.extend(bytes);
                assert!(sent.len() <= MOST_SENT, "{} bytes were sent", sent.len());
            }
            HandshakeStep::NeedExport { name, .. } => handshake.export(if name.len() < 2 {
                Ok(ExportInfo {
                    capacity: Sectors(8),
                })
            } else {
                Err(ExportRefusal::Unknown("unknown".to_owned()))
            }),
            HandshakeStep::List => handshake.list(["a", "b"]),
            HandshakeStep::StartTls => handshake.tls_done(),
            HandshakeStep::Done(mut negotiated) => {
                pieces.for_each(|piece| negotiated.leftover.extend(piece));
                assert!(bytes.ends_with(&negotiated.leftover));
                return (sent, HandshakeStep::Done(negotiated));
            }
            end @ (HandshakeStep::Aborted | HandshakeStep::Failed(_)) => return (sent, end),
        }
    }
}
