//! The state and packets needed by a NIC's new node from the old one, cut into messages of a machine's move.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use godwit_net::clone::MOST_STATE_BYTES;
use serde::{Deserialize, Serialize};

/// Bytes in one piece: as text, a piece must fit into a message.
const PIECE: usize = 512 << 10;

/// The content to which a piece belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Content {
    /// The whole state, read while the guest stood still.
    State,
    /// Packets after the read of the state.
    Late,
}

/// A part of a NIC's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NicPiece {
    /// Number of the NIC in its machine.
    pub nic: usize,
    /// The content to which the piece belongs.
    pub content: Content,
    /// The bytes as base64.
    bytes: String,
    /// True for the last piece.
    ends: bool,
}

/// Cuts a NIC's content into pieces, in order.
pub(crate) fn cut(nic: usize, content: Content, bytes: &[u8]) -> Vec<NicPiece> {
    let count = bytes.len().div_ceil(PIECE).max(1);
    (0..count)
        .map(|number| {
            let end = bytes.len().min((number + 1) * PIECE);
            NicPiece {
                nic,
                content,
                bytes: STANDARD.encode(&bytes[number * PIECE..end]),
                ends: number + 1 == count,
            }
        })
        .collect()
}

/// Joins pieces. Each NIC needs a separate value: the pieces of a content come one after the other.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<u8>);

impl Pieces {
    /// Takes the next piece, and returns the whole content after the last.
    ///
    /// # Errors
    /// The piece is invalid, or the content too long.
    pub(crate) fn take(&mut self, piece: &NicPiece) -> Result<Option<Vec<u8>>, String> {
        let bytes = STANDARD
            .decode(&piece.bytes)
            .map_err(|error| format!("a part of a NIC's state makes no sense: {error}"))?;
        if self.0.len() + bytes.len() > MOST_STATE_BYTES {
            return Err(String::from("a NIC's state is too long"));
        }
        self.0.extend_from_slice(&bytes);
        Ok(piece.ends.then(|| std::mem::take(&mut self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_is_put_together_again() {
        for length in [0, 1, PIECE, PIECE + 1, 3 * PIECE] {
            let bytes: Vec<u8> = (0..length).map(|number| number as u8).collect();
            let mut pieces = Pieces::default();
            let mut whole = None;
            for piece in cut(1, Content::Late, &bytes) {
                assert!(whole.is_none());
                let text = serde_json::to_vec(&piece).expect("writes");
                assert!(text.len() < 1 << 20, "{length}");
                whole = pieces.take(&piece).expect("makes sense");
            }
            assert_eq!(whole, Some(bytes));
        }
    }

    #[test]
    fn pieces_that_make_no_sense_are_refused() {
        let mut piece = cut(0, Content::State, b"abc").remove(0);
        piece.bytes = String::from("!");
        assert!(Pieces::default().take(&piece).is_err());
        let large = &cut(0, Content::State, &vec![0; 2 * PIECE])[0];
        let mut pieces = Pieces::default();
        let refused = (0..1000).find(|_| pieces.take(large).is_err());
        assert!(refused.is_some_and(|taken| taken * PIECE <= MOST_STATE_BYTES));
    }
}
