//! The key of one direction and the number of the next record (RFC 8446, section 5.3).

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce,
    UnboundKey,
};
use rustls::{ConnectionTrafficSecrets, Error};

/// Bytes of the authentication tag at the end of a record; the same for every algorithm of TLS 1.3.
pub(super) const TAG: usize = 16;

/// The cipher state of one direction.
pub(super) struct Keys {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
}

impl Keys {
    /// Builds the keys from the secrets and the number of the next record.
    pub(super) fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, Error> {
        use ConnectionTrafficSecrets::{Aes128Gcm, Aes256Gcm, Chacha20Poly1305};
        let (algorithm, key, iv): (&'static Algorithm, _, _) = match &secrets {
            Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(unsupported()),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unsupported())?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv: iv.as_ref().try_into().map_err(|_| unsupported())?,
            sequence,
        })
    }

    /// Returns the number of records encrypted or decrypted with this key.
    pub(super) const fn used(&self) -> u64 {
        self.sequence
    }

    /// Encrypts `plaintext`, followed by the byte `kind`, to `out`, which is longer by that byte and [`TAG`].
    pub(super) fn seal(
        &mut self,
        header: &[u8],
        plaintext: &[u8],
        kind: u8,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let nonce = self.next()?;
        let (ciphertext, rest) = out.split_at_mut(plaintext.len());
        self.key
            .seal_out_of_place_scatter(
                nonce,
                Aad::from(header),
                plaintext,
                ciphertext,
                &[kind],
                rest,
            )
            .map_err(|_| Error::EncryptError)
    }

    /// Decrypts `ciphertext` to `out`, which has the same length. After an error `out` holds nothing of use.
    pub(super) fn open(
        &mut self,
        header: &[u8],
        ciphertext: &[u8],
        tag: &[u8],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let nonce = self.next()?;
        self.key
            .open_separate_gather(nonce, Aad::from(header), ciphertext, tag, out)
            .map_err(|_| Error::DecryptError)
    }

    /// Returns the next record's nonce. No number is used twice.
    fn next(&mut self) -> Result<Nonce, Error> {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.sequence.to_be_bytes())
        {
            *byte ^= number;
        }
        self.sequence = self.sequence.checked_add(1).ok_or(Error::EncryptError)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

fn unsupported() -> Error {
    Error::General(String::from("the session's cipher is not supported"))
}
