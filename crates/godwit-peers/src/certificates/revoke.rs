//! The list of revoked certificates of an authority (`crl.pem`), which nodes read with `--crl`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;
use x509_parser::revocation_list::CertificateRevocationList;

use super::{
    CA_VALIDITY, CLOCK_SKEW, CertificateError, building, check_name, io_error, load_authority,
    write_file,
};

const LIST: &str = "crl.pem";

/// Longest serial number of a certificate, in bytes (RFC 5280).
const LONGEST_SERIAL: usize = 20;

/// The selection of certificates to revoke.
#[derive(Clone, Copy, Debug)]
pub enum Revoked<'a> {
    /// All certificates of this holder in the authority's directory.
    Name(&'a str),
    /// The serial number in hexadecimal, with or without colons, for a certificate whose file is gone.
    Serial(&'a str),
}

/// A written revocation list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    /// The path of the list.
    pub path: PathBuf,
    /// The serial numbers that were added, in hexadecimal.
    pub added: Vec<String>,
    /// The number of certificates on the list.
    pub count: usize,
}

/// Adds certificates to the revocation list in an authority's directory.
///
/// # Errors
/// The authority or the certificate is missing, or a file is invalid. The list then stays as before.
pub fn revoke(directory: &Path, what: Revoked<'_>) -> Result<RevocationList, CertificateError> {
    let issuer = load_authority(directory)?;
    let added = match what {
        Revoked::Name(name) => serials_of(directory, name)?,
        Revoked::Serial(text) => vec![parse_serial(text)?],
    };
    let path = directory.join(LIST);
    let (number, mut revoked) = read(&path)?;
    let now = OffsetDateTime::now_utc();
    for serial in &added {
        if !revoked
            .iter()
            .any(|known| known.serial_number.as_ref() == serial)
        {
            revoked.push(entry(serial, now));
        }
    }
    let count = revoked.len();
    let parameters = CertificateRevocationListParams {
        this_update: now - CLOCK_SKEW,
        next_update: now + CA_VALIDITY,
        crl_number: SerialNumber::from(number + 1),
        issuing_distribution_point: None,
        revoked_certs: revoked,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let building = building("sign the list of revoked certificates");
    let signed = parameters.signed_by(&issuer).map_err(building)?;
    write_file(&path, &signed.pem().map_err(building)?, 0o644, true)?;
    let added = added.iter().map(|serial| hexadecimal(serial)).collect();
    Ok(RevocationList { path, added, count })
}

fn entry(serial: &[u8], revocation_time: OffsetDateTime) -> RevokedCertParams {
    RevokedCertParams {
        serial_number: SerialNumber::from_slice(serial),
        revocation_time,
        reason_code: Some(RevocationReason::Unspecified),
        invalidity_date: None,
    }
}

/// Returns the number of the present list and its entries; 0 and none without a list.
fn read(path: &Path) -> Result<(u64, Vec<RevokedCertParams>), CertificateError> {
    let pem = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, Vec::new())),
        read => read.map_err(io_error("read", path))?,
    };
    let wrong = |why: String| io_error("read", path)(io::Error::other(why));
    let list = CertificateRevocationListDer::from_pem_slice(&pem);
    let list = list.map_err(|error| wrong(error.to_string()))?;
    let (_, parsed) =
        CertificateRevocationList::from_der(&list).map_err(|error| wrong(error.to_string()))?;
    let number = parsed
        .crl_number()
        .and_then(|number| number.to_u64_digits().first().copied());
    let revoked = parsed.iter_revoked_certificates().map(|known| {
        let since = known.revocation_date.to_datetime();
        entry(known.raw_serial(), since)
    });
    Ok((number.unwrap_or(0), revoked.collect()))
}

/// Returns the serial numbers of a holder's certificates in the authority's directory.
fn serials_of(directory: &Path, name: &str) -> Result<Vec<Vec<u8>>, CertificateError> {
    check_name(name)?;
    let files = [
        directory.join(format!("{name}.pem")),
        directory.join(name).join("client-cert.pem"),
    ];
    let mut serials = Vec::new();
    for file in files.iter().filter(|file| file.exists()) {
        let wrong = |why: String| io_error("read", file)(io::Error::other(why));
        let certificate = CertificateDer::from_pem_file(file);
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        serials.push(serial(&certificate).ok_or_else(|| wrong(String::from("no certificate")))?);
    }
    match serials.is_empty() {
        true => Err(CertificateError::Unknown(name.to_owned())),
        false => Ok(serials),
    }
}

fn serial(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(parsed.raw_serial().to_vec())
}

/// Returns the serial number of a certificate in hexadecimal.
pub(super) fn serial_text(certificate: &CertificateDer<'_>) -> String {
    serial(certificate).map_or_else(String::new, |serial| hexadecimal(&serial))
}

fn parse_serial(text: &str) -> Result<Vec<u8>, CertificateError> {
    let wrong = || CertificateError::Serial(text.to_owned());
    let digits = text.replace(':', "");
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    if digits.is_empty() || digits.len() > 2 * LONGEST_SERIAL || !digits.len().is_multiple_of(2) {
        return Err(wrong());
    }
    let bytes: Option<Vec<u8>> = (0..digits.len()).step_by(2).map(byte).collect();
    bytes.ok_or_else(wrong)
}

fn hexadecimal(serial: &[u8]) -> String {
    serial.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{IssueRequest, Validity, init, issue};
    use super::*;
    use crate::roles::Role;

    fn authority() -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a folder");
        init(directory.path(), false).expect("an authority");
        for (name, role) in [("a", Role::Node), ("vm", Role::NbdClient)] {
            let request = IssueRequest {
                directory: directory.path(),
                name,
                dns: &[],
                ip: &[],
                role,
                disks: &[],
                validity: Validity::Days(30),
                force: false,
            };
            issue(&request).expect("issues");
        }
        directory
    }

    #[test]
    fn a_list_grows_and_counts_none_twice() {
        let directory = authority();
        let revoke = |what| revoke(directory.path(), what).expect("revokes");
        assert_eq!(revoke(Revoked::Name("a")).count, 1);
        let vm = revoke(Revoked::Name("vm"));
        assert_eq!((vm.count, vm.added.len()), (2, 1));
        assert_eq!(revoke(Revoked::Serial(&vm.added[0])).count, 2);
        assert_eq!(revoke(Revoked::Serial("01:aB")).added, ["01ab"]);
        let (number, revoked) = read(&directory.path().join(LIST)).expect("reads");
        assert_eq!((number, revoked.len()), (4, 3));
    }

    #[test]
    fn what_names_no_certificate_changes_nothing() {
        let directory = authority();
        for what in [
            Revoked::Name("b"),
            Revoked::Name("../a"),
            Revoked::Serial(""),
            Revoked::Serial("1"),
            Revoked::Serial("xy"),
            Revoked::Serial("é0"),
        ] {
            revoke(directory.path(), what).expect_err("names none");
        }
        assert!(!directory.path().join(LIST).exists());
    }
}
