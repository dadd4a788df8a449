//! Certificates for QEMU, so that its movers can encrypt and prove who they are, as Godwit's do.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use godwit_testkit::cluster::{authority, issue, release_binary};

/// The name in all certificates.
pub(in crate::scenes::migrate) const HOST: &str = "qemu";
/// The id of the object with them.
pub(in crate::scenes::migrate) const ID: &str = "tls";

/// A directory with an authority and a certificate for both ends, under the names that QEMU expects.
#[derive(Debug)]
pub(in crate::scenes::migrate) struct Credentials(PathBuf);

impl Credentials {
    /// Makes them in a directory of their own below this one.
    ///
    /// # Errors
    /// When `godwit certs` fails.
    pub(in crate::scenes::migrate) fn new(below: &Path) -> io::Result<Self> {
        let dir = below.join("credentials");
        if !dir.exists() {
            let godwit = release_binary()?;
            authority(&godwit, &dir)?;
            issue(&godwit, &dir, HOST, &["--dns", HOST])?;
            symlink("ca.pem", dir.join("ca-cert.pem"))?;
            for end in ["client", "server"] {
                symlink(format!("{HOST}.pem"), dir.join(format!("{end}-cert.pem")))?;
                symlink(format!("{HOST}.key"), dir.join(format!("{end}-key.pem")))?;
            }
        }
        Ok(Self(dir))
    }

    /// The options that give a daemon what it needs as this end, `client` or `server`.
    pub(in crate::scenes::migrate) fn object(&self, end: &str) -> [String; 2] {
        let dir = self.0.display();
        [
            "--object".to_owned(),
            // QEMU's check of its own wants keys that encipher others, which TLS 1.3 has no use for.
            format!(
                "tls-creds-x509,id={ID},endpoint={end},dir={dir},verify-peer=on,sanity-check=off"
            ),
        ]
    }
}
