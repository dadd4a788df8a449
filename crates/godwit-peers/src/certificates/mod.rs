//! Certificates for operators without a certificate authority of their own. [`init`] makes an authority in a directory;
//! [`issue`] issues certificates to nodes, API clients and NBD clients, each for one role.
//!
//! | file | what | mode |
//! |---|---|---|
//! | `ca.pem`, `ca.key` | the authority, valid for ten years | 0644, 0600 |
//! | `NAME.pem`, `NAME.key` | a node or API client | 0644, 0600 |
//! | `crl.pem` | the certificates that [`revoke`] revoked | 0644 |
//! | `NAME/{ca-cert,client-cert,client-key}.pem` | an NBD client, in the layout that GnuTLS-based clients (QEMU, libnbd) take as a directory | 0644, 0644, 0600 |
//!
//! All keys are ECDSA P-256. A node's certificate carries the node's name as a DNS name: nodes check the name when they
//! connect to each other.

mod revoke;

use std::fs;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use godwit_core::wire::MAX_NAME;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};

pub use self::revoke::{RevocationList, Revoked, revoke};
use crate::names;
use crate::roles::{Role, disk_uri};

const CA_CERTIFICATE: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
const CA_VALIDITY: Duration = Duration::days(3650);

/// Clock difference tolerated between hosts: a certificate's validity begins this long before its creation.
const CLOCK_SKEW: Duration = Duration::hours(1);

/// Longest validity of an issued certificate, in days. Equals the authority's.
pub const MAX_DAYS: u32 = 3650;

/// The reason for a certificate that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The name cannot serve as both a DNS name and a file name.
    #[error(
        "{0:?} cannot name a certificate: use 1 to 63 letters, digits, '-', '_' or '.', \
         starting with a letter or digit, and not \"ca\""
    )]
    Name(String),
    /// An additional DNS name is invalid.
    #[error("{0:?} is not a DNS name")]
    DnsName(String),
    /// A disk's name is invalid.
    #[error("{0}")]
    Disk(String),
    /// Disks were named for a role other than an NBD client's.
    #[error("a certificate for the role {0} names no disks")]
    DisksOfRole(Role),
    /// The file exists and `force` is false.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// The directory has no certificate of the name.
    #[error("there is no certificate of {0:?} in the authority's directory")]
    Unknown(String),
    /// A serial number is invalid.
    #[error("{0:?} is not the serial number of a certificate")]
    Serial(String),
    /// The directory has no authority.
    #[error("there is no certificate authority in {}", .0.display())]
    NoAuthority(PathBuf),
    /// A file cannot be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The attempted action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The authority's files are damaged, or the certificate cannot be built.
    #[error("cannot {action}")]
    Build {
        /// The attempted action.
        action: &'static str,
        /// The error of the certificate library.
        source: rcgen::Error,
    },
}

/// The written files of a certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The authority's certificate, to be trusted by every peer of this certificate's holder.
    pub ca: PathBuf,
    /// The certificate.
    pub certificate: PathBuf,
    /// The private key; readable by its owner only.
    pub key: PathBuf,
    /// The serial number in hexadecimal, for a revocation without the file.
    pub serial: String,
    /// End of the validity, in seconds since 1970.
    pub not_after: i64,
}

/// The validity of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// From now for this many days, at most [`MAX_DAYS`].
    Days(u32),
    /// Ended a minute ago, for tests of the answer to an expired certificate.
    Expired,
}

/// A certificate to issue.
#[derive(Clone, Debug)]
pub struct IssueRequest<'a> {
    /// The directory that [`init`] filled.
    pub directory: &'a Path,
    /// The holder's name: the certificate's common name and first DNS name.
    pub name: &'a str,
    /// Further DNS names under which the holder is reached.
    pub dns: &'a [String],
    /// IP addresses under which the holder is reached.
    pub ip: &'a [IpAddr],
    /// The role. A node's certificate is good for servers and clients, any other for clients only.
    pub role: Role,
    /// The only disks that an NBD client may attach; empty for all.
    pub disks: &'a [String],
    /// The validity.
    pub validity: Validity,
    /// True to replace existing files.
    pub force: bool,
}

/// Makes a certificate authority in a directory, and creates the directory if missing.
///
/// # Errors
/// [`CertificateError::Exists`] if the directory has an authority and `force` is false: certificates issued by the old
/// authority would not be trusted any more.
pub fn init(directory: &Path, force: bool) -> Result<CertificateFiles, CertificateError> {
    let building = building("make the certificate authority");
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    let (certificate, key) = (directory.join(CA_CERTIFICATE), directory.join(CA_KEY));
    refuse_existing(&[&certificate, &key], force)?;

    let now = OffsetDateTime::now_utc();
    let mut parameters = CertificateParams::default();
    let pair = KeyPair::generate().map_err(building)?;
    // Each authority has a unique name: revocation lists are found by the authority's name, and one authority may
    // follow another.
    let number = blake3::hash(pair.public_key_raw()).to_hex();
    parameters
        .distinguished_name
        .push(DnType::CommonName, format!("Godwit CA {}", &number[..8]));
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    parameters.not_before = now - CLOCK_SKEW;
    parameters.not_after = now + CA_VALIDITY;
    let signed = parameters.self_signed(&pair).map_err(building)?;

    write_file(&key, &pair.serialize_pem(), 0o600, force)?;
    write_file(&certificate, &signed.pem(), 0o644, force)?;
    let not_after = parameters.not_after.unix_timestamp();
    Ok(CertificateFiles {
        ca: certificate.clone(),
        certificate,
        key,
        serial: revoke::serial_text(signed.der()),
        not_after,
    })
}

/// Issues a certificate from the authority in a directory.
///
/// # Errors
/// See [`CertificateError`]; nothing is written unless the whole request is valid.
pub fn issue(request: &IssueRequest<'_>) -> Result<CertificateFiles, CertificateError> {
    check_name(request.name)?;
    let issuer = load_authority(request.directory)?;
    let files = target_files(request);
    let nbd = request.role == Role::NbdClient;
    refuse_existing(&[&files.certificate, &files.key], request.force)?;
    let parameters = leaf_parameters(request)?;
    let building = building("issue the certificate");
    let pair = KeyPair::generate().map_err(building)?;
    let signed = parameters.signed_by(&pair, &issuer).map_err(building)?;

    if nbd {
        let directory = request.directory.join(request.name);
        fs::create_dir_all(&directory).map_err(io_error("create", &directory))?;
        let source = request.directory.join(CA_CERTIFICATE);
        let authority = fs::read_to_string(&source).map_err(io_error("read", &source))?;
        write_file(&files.ca, &authority, 0o644, true)?;
    }
    write_file(&files.key, &pair.serialize_pem(), 0o600, request.force)?;
    write_file(&files.certificate, &signed.pem(), 0o644, request.force)?;
    Ok(CertificateFiles {
        serial: revoke::serial_text(signed.der()),
        not_after: parameters.not_after.unix_timestamp(),
        ..files
    })
}

fn target_files(request: &IssueRequest<'_>) -> CertificateFiles {
    let (ca, certificate, key) = match request.role {
        Role::Node | Role::Operator | Role::Reader => {
            let directory = request.directory;
            (
                directory.join(CA_CERTIFICATE),
                directory.join(format!("{}.pem", request.name)),
                directory.join(format!("{}.key", request.name)),
            )
        }
        Role::NbdClient => {
            let directory = request.directory.join(request.name);
            (
                directory.join("ca-cert.pem"),
                directory.join("client-cert.pem"),
                directory.join("client-key.pem"),
            )
        }
    };
    CertificateFiles {
        ca,
        certificate,
        key,
        serial: String::new(),
        not_after: 0,
    }
}

fn leaf_parameters(request: &IssueRequest<'_>) -> Result<CertificateParams, CertificateError> {
    let mut parameters = CertificateParams::default();
    parameters
        .distinguished_name
        .push(DnType::CommonName, request.name);
    for name in std::iter::once(request.name).chain(request.dns.iter().map(String::as_str)) {
        let dns = name
            .try_into()
            .map_err(|_| CertificateError::DnsName(name.to_owned()))?;
        parameters.subject_alt_names.push(SanType::DnsName(dns));
    }
    let addresses = request.ip.iter().copied().map(SanType::IpAddress);
    parameters.subject_alt_names.extend(addresses);
    for uri in role_uris(request)? {
        let uri = uri.try_into().map_err(building("name its role"))?;
        parameters.subject_alt_names.push(SanType::URI(uri));
    }
    parameters.is_ca = IsCa::ExplicitNoCa;
    parameters.use_authority_key_identifier_extension = true;
    // TLS 1.3 needs the signature alone, but QEMU refuses a certificate that may not encipher keys.
    parameters.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if request.role == Role::Node {
        parameters
            .extended_key_usages
            .push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    let now = OffsetDateTime::now_utc();
    parameters.not_before = now - CLOCK_SKEW;
    parameters.not_after = match request.validity {
        Validity::Days(days) => now + Duration::days(i64::from(days.min(MAX_DAYS))),
        Validity::Expired => now - Duration::minutes(1),
    };
    Ok(parameters)
}

/// Returns the URIs that state the role in the certificate.
fn role_uris(request: &IssueRequest<'_>) -> Result<Vec<String>, CertificateError> {
    if !request.disks.is_empty() && request.role != Role::NbdClient {
        return Err(CertificateError::DisksOfRole(request.role));
    }
    let mut uris = vec![request.role.uri()];
    for disk in request.disks {
        names::check("disk", disk).map_err(|wrong| CertificateError::Disk(wrong.message))?;
        uris.push(disk_uri(disk));
    }
    Ok(uris)
}

fn load_authority(directory: &Path) -> Result<Issuer<'static, KeyPair>, CertificateError> {
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read_to_string(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CertificateError::NoAuthority(directory.to_owned()),
            _ => io_error("read", &path)(error),
        })
    };
    let building = building("read the certificate authority");
    let pair = KeyPair::from_pem(&read(CA_KEY)?).map_err(building)?;
    Issuer::from_ca_cert_pem(&read(CA_CERTIFICATE)?, pair).map_err(building)
}

/// Checks a certificate's name, which becomes a DNS name, a node's name on the wire, and a file's name.
fn check_name(name: &str) -> Result<(), CertificateError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let valid = name.len() <= MAX_NAME.min(63)
        && name.bytes().all(allowed)
        && name
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_alphanumeric())
        && name != "ca";
    if valid {
        Ok(())
    } else {
        Err(CertificateError::Name(name.to_owned()))
    }
}

fn refuse_existing(paths: &[&Path], force: bool) -> Result<(), CertificateError> {
    match paths.iter().find(|path| !force && path.exists()) {
        Some(path) => Err(CertificateError::Exists(path.to_path_buf())),
        None => Ok(()),
    }
}

/// Writes a file whole or not at all, with its mode from the start. Without `force` an existing file (also a file that
/// appears meanwhile) is left alone.
fn write_file(path: &Path, content: &str, mode: u32, force: bool) -> Result<(), CertificateError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(content.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| {
            if force {
                fs::rename(&temporary, path)
            } else {
                fs::hard_link(&temporary, path)
            }
        });
    // After a rename nothing is left to remove; only the outcome of the write matters.
    let _ = fs::remove_file(&temporary);
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CertificateError::Exists(path.to_owned()),
        _ => io_error("write", path)(error),
    })
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CertificateError {
    let path = path.to_owned();
    move |source| CertificateError::Io {
        action,
        path,
        source,
    }
}

fn building(action: &'static str) -> impl Fn(rcgen::Error) -> CertificateError + Copy {
    move |source| CertificateError::Build { action, source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, client::WebPkiServerVerifier};

    use super::*;

    fn request<'a>(directory: &'a Path, name: &'a str) -> IssueRequest<'a> {
        IssueRequest {
            directory,
            name,
            dns: &[],
            ip: &[],
            role: Role::Node,
            disks: &[],
            validity: Validity::Days(30),
            force: false,
        }
    }

    /// Checks a certificate as a node does: against the authority, for a server's name.
    fn verify_server(files: &CertificateFiles, name: &str) -> Result<(), rustls::Error> {
        use rustls::client::danger::ServerCertVerifier as _;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(roots(&files.ca), provider).build();
        let leaf = CertificateDer::from_pem_file(&files.certificate).unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        verifier
            .unwrap()
            .verify_server_cert(&leaf, &[], &name, &[], UnixTime::now())
            .map(drop)
    }

    fn verify_client(files: &CertificateFiles) -> Result<(), rustls::Error> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots(&files.ca), provider).build();
        let leaf = CertificateDer::from_pem_file(&files.certificate).unwrap();
        verifier
            .unwrap()
            .verify_client_cert(&leaf, &[], UnixTime::now())
            .map(drop)
    }

    fn roots(ca: &Path) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(ca).unwrap())
            .unwrap();
        Arc::new(roots)
    }

    #[test]
    fn a_node_certificate_is_good_for_its_names_and_both_directions_and_no_other_name() {
        let directory = tempfile::tempdir().unwrap();
        init(directory.path(), false).unwrap();
        let files = issue(&IssueRequest {
            dns: &["alpha.example".to_owned()],
            ip: &["127.0.0.1".parse().unwrap()],
            ..request(directory.path(), "alpha")
        })
        .unwrap();
        for name in ["alpha", "alpha.example", "127.0.0.1"] {
            verify_server(&files, name).unwrap();
        }
        assert!(verify_server(&files, "beta").is_err());
        verify_client(&files).unwrap();
    }

    #[test]
    fn certificates_of_another_authority_and_expired_ones_are_refused() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        init(here.path(), false).unwrap();
        init(there.path(), false).unwrap();
        let foreign = issue(&request(there.path(), "alpha")).unwrap();
        let foreign = CertificateFiles {
            ca: here.path().join("ca.pem"),
            ..foreign
        };
        assert!(verify_server(&foreign, "alpha").is_err());

        let expired = IssueRequest {
            validity: Validity::Expired,
            ..request(here.path(), "beta")
        };
        let error = verify_server(&issue(&expired).unwrap(), "beta").unwrap_err();
        assert!(format!("{error:?}").contains("Expired"), "{error:?}");
    }

    #[test]
    fn an_nbd_client_certificate_has_the_layout_of_gnutls_and_cannot_act_as_a_server() {
        let directory = tempfile::tempdir().unwrap();
        init(directory.path(), false).unwrap();
        let client = IssueRequest {
            role: Role::NbdClient,
            ..request(directory.path(), "vm1")
        };
        let files = issue(&client).unwrap();
        for name in ["ca-cert.pem", "client-cert.pem", "client-key.pem"] {
            assert!(directory.path().join("vm1").join(name).is_file(), "{name}");
        }
        verify_client(&files).unwrap();
        assert!(verify_server(&files, "vm1").is_err());
    }

    #[test]
    fn keys_are_private_and_nothing_is_replaced_unless_forced() {
        let directory = tempfile::tempdir().unwrap();
        let ca = init(directory.path(), false).unwrap();
        let node = issue(&request(directory.path(), "alpha")).unwrap();
        for key in [&ca.key, &node.key] {
            let mode = fs::metadata(key).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", key.display());
        }
        let before = fs::read(&node.certificate).unwrap();
        let again = issue(&request(directory.path(), "alpha")).unwrap_err();
        assert!(matches!(again, CertificateError::Exists(_)), "{again}");
        assert!(matches!(
            init(directory.path(), false),
            Err(CertificateError::Exists(_))
        ));
        assert_eq!(fs::read(&node.certificate).unwrap(), before);

        issue(&IssueRequest {
            force: true,
            ..request(directory.path(), "alpha")
        })
        .unwrap();
        assert_ne!(fs::read(&node.certificate).unwrap(), before);
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 4, "temporary files are left: {left:?}");
    }

    #[test]
    fn names_that_cannot_be_a_file_and_a_dns_name_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        init(directory.path(), false).unwrap();
        let long = "a".repeat(64);
        for name in ["", "ca", "../x", "a/b", ".a", "-a", "a b", "é", &long] {
            let error = issue(&request(directory.path(), name)).unwrap_err();
            assert!(
                matches!(error, CertificateError::Name(_)),
                "{name:?}: {error}"
            );
        }
    }

    #[test]
    fn without_an_authority_nothing_is_issued() {
        let directory = tempfile::tempdir().unwrap();
        let error = issue(&request(directory.path(), "alpha")).unwrap_err();
        assert!(matches!(error, CertificateError::NoAuthority(_)), "{error}");
    }
}
