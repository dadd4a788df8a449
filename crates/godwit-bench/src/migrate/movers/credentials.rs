//! Certificates for QEMU, so that its movers encrypt and authenticate as Godwit's do.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use godwit_testkit::cluster::{authority, issue, release_binary};

/// Host name in all certificates.
pub(super) const HOST: &str = "qemu";
/// Id of QEMU's credentials object.
pub(super) const ID: &str = "tls";

/// A directory with an authority and a certificate for both ends, under the file names that QEMU expects.
#[derive(Debug)]
pub(super) struct Credentials(PathBuf);

impl Credentials {
    /// Issues the certificates in a subdirectory of `below`.
    pub(super) fn new(below: &Path) -> io::Result<Self> {
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

    /// Returns a daemon's options for the credentials of this end, `client` or `server`.
    pub(super) fn object(&self, end: &str) -> [String; 2] {
        let dir = self.0.display();
        [
            "--object".to_owned(),
            // QEMU's sanity check demands keys for key encipherment, which TLS 1.3 does not use.
            format!(
                "tls-creds-x509,id={ID},endpoint={end},dir={dir},verify-peer=on,sanity-check=off"
            ),
        ]
    }
}
