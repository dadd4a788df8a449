//! The rights of a certificate's holder.
//!
//! A certificate states its role as a URI among its subject's alternative names: [`Role::uri`], and for an NBD client
//! one URI for each disk that the client may attach ([`disk_uri`]; none for every disk). Any authority can issue such
//! certificates.
//!
//! | role | connections of nodes | API | disks over NBD and TLS |
//! |---|---|---|---|
//! | `node` | if it is a peer | what everybody sees | none |
//! | `operator` | no | everything | all |
//! | `reader` | no | metrics and lists | none |
//! | `nbd-client` | no | what everybody sees | those that it names, or all |
//!
//! A certificate without a role is `node` and `operator` if good for servers, and an `nbd-client` for all disks
//! otherwise: certificates from before the roles have these rights. A certificate with an unknown role has no rights.

use std::collections::BTreeSet;
use std::fmt;

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;

/// Prefix of every URI about roles.
const SCHEME: &str = "godwit:";
const ROLE: &str = "role:";
const DISK: &str = "disk:";

/// Longest common name in messages, in characters.
const SHOWN: usize = 64;

/// The purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A node: other nodes with the node as a peer take migrations from the node.
    Node,
    /// A person or program that controls nodes.
    Operator,
    /// A person or program that reads metrics and lists.
    Reader,
    /// A client of disks.
    NbdClient,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 4] = [Self::Node, Self::Operator, Self::Reader, Self::NbdClient];

    /// Returns the role's name for messages and arguments.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Operator => "operator",
            Self::Reader => "reader",
            Self::NbdClient => "nbd-client",
        }
    }

    /// Returns the URI that states this role in a certificate.
    pub fn uri(self) -> String {
        format!("{SCHEME}{ROLE}{}", self.name())
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Returns the URI that allows an NBD client to attach the disk of this name.
pub(crate) fn disk_uri(disk: &str) -> String {
    format!("{SCHEME}{DISK}{disk}")
}

/// The right that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No right: the answer says nothing about this node's disks and VMs.
    Everybody,
    /// Reads state.
    Read,
    /// Changes state, or runs a program.
    Operate,
}

/// The proven holder of a certificate, with the holder's rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    name: String,
    rights: Rights,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rights {
    Role(Role, Disks),
    /// A certificate without a role that is good for servers.
    NodeAndOperator,
    /// The certificate's role is unknown or contradictory.
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Disks {
    All,
    Named(BTreeSet<String>),
}

impl Holder {
    /// Reads a certificate whose chain was checked; `serves` is true if the certificate is good for servers.
    pub fn of(certificate: &CertificateDer<'_>, serves: bool) -> Self {
        match X509Certificate::from_der(certificate) {
            Ok((_, parsed)) => Self {
                name: common_name(&parsed),
                rights: rights(&uris(&parsed), serves),
            },
            Err(_) => Self::nobody(),
        }
    }

    /// Returns a holder without a readable certificate.
    pub(crate) fn nobody() -> Self {
        Self {
            name: String::new(),
            rights: Rights::Nothing,
        }
    }

    /// Returns true if the holder may open connections of nodes under a peer's name.
    pub fn is_node(&self) -> bool {
        matches!(
            self.rights,
            Rights::Role(Role::Node, _) | Rights::NodeAndOperator
        )
    }

    /// Returns true if the holder may make an API request that needs this right.
    pub fn may(&self, access: Access) -> bool {
        match (access, &self.rights) {
            (_, Rights::NodeAndOperator | Rights::Role(Role::Operator, _))
            | (Access::Everybody, Rights::Role(..)) => true,
            (Access::Read, Rights::Role(role, _)) => *role == Role::Reader,
            (Access::Operate, Rights::Role(..)) | (_, Rights::Nothing) => false,
        }
    }

    /// Returns true if the holder may attach this disk.
    pub fn may_attach(&self, disk: &str) -> bool {
        match &self.rights {
            Rights::NodeAndOperator | Rights::Role(Role::Operator, _) => true,
            Rights::Role(Role::NbdClient, Disks::All) => true,
            Rights::Role(Role::NbdClient, Disks::Named(names)) => names.contains(disk),
            Rights::Role(Role::Node | Role::Reader, _) | Rights::Nothing => false,
        }
    }
}

/// Writes the holder and the role, as in "the certificate of …".
impl fmt::Display for Holder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.rights {
            Rights::Role(role, Disks::All) => write!(formatter, "{name:?} (role {role})"),
            Rights::Role(role, Disks::Named(disks)) => {
                let disks: Vec<_> = disks.iter().map(String::as_str).collect();
                let disks = disks.join(", ");
                write!(formatter, "{name:?} (role {role} for {disks})")
            }
            Rights::NodeAndOperator => write!(formatter, "{name:?} (roles node and operator)"),
            Rights::Nothing => write!(formatter, "{name:?} (a role that is not known here)"),
        }
    }
}

fn rights(uris: &[&str], serves: bool) -> Rights {
    let ours: Vec<&str> = uris
        .iter()
        .filter_map(|uri| uri.strip_prefix(SCHEME))
        .collect();
    if ours.is_empty() {
        return match serves {
            true => Rights::NodeAndOperator,
            false => Rights::Role(Role::NbdClient, Disks::All),
        };
    }
    let (mut role, mut disks) = (None, BTreeSet::new());
    for said in ours {
        let named = said.strip_prefix(ROLE).and_then(|name| {
            let mut known = Role::ALL.into_iter();
            known.find(|role| role.name() == name)
        });
        match (named, said.strip_prefix(DISK)) {
            (Some(found), _) if role.is_none() => role = Some(found),
            (None, Some(disk)) => drop(disks.insert(disk.to_owned())),
            _ => return Rights::Nothing,
        }
    }
    match role {
        Some(role) if disks.is_empty() => Rights::Role(role, Disks::All),
        Some(Role::NbdClient) => Rights::Role(Role::NbdClient, Disks::Named(disks)),
        _ => Rights::Nothing,
    }
}

fn uris<'a>(certificate: &'a X509Certificate<'_>) -> Vec<&'a str> {
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names.map_or(&[][..], |extension| &extension.value.general_names);
    names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        })
        .collect()
}

fn common_name(certificate: &X509Certificate<'_>) -> String {
    let name = certificate.subject().iter_common_name().next();
    let name = name.and_then(|name| name.as_str().ok()).unwrap_or_default();
    name.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(uris: &[&str], serves: bool) -> Holder {
        Holder {
            name: String::from("h"),
            rights: rights(uris, serves),
        }
    }

    fn access(holder: &Holder) -> [bool; 4] {
        let may = |access| holder.may(access);
        [
            holder.is_node(),
            may(Access::Everybody),
            may(Access::Read),
            may(Access::Operate),
        ]
    }

    #[test]
    fn a_role_allows_what_it_is_for_and_no_more() {
        for (role, expected, attaches) in [
            (Role::Node, [true, true, false, false], false),
            (Role::Operator, [false, true, true, true], true),
            (Role::Reader, [false, true, true, false], false),
            (Role::NbdClient, [false, true, false, false], true),
        ] {
            for serves in [true, false] {
                let holder = holder(&[&role.uri()], serves);
                assert_eq!(access(&holder), expected, "{role}");
                assert_eq!(holder.may_attach("d"), attaches, "{role}");
            }
        }
    }

    #[test]
    fn an_nbd_client_attaches_the_disks_that_its_certificate_names() {
        let holder = holder(
            &[
                "godwit:disk:a",
                "godwit:role:nbd-client",
                "godwit:disk:b",
                "https://else.where",
            ],
            false,
        );
        assert!(holder.may_attach("a") && holder.may_attach("b"));
        assert!(!holder.may_attach("ab") && !holder.may_attach(""));
        assert_eq!(holder.to_string(), "\"h\" (role nbd-client for a, b)");
    }

    #[test]
    fn without_a_role_it_is_what_it_was_before_there_were_roles() {
        let server = holder(&["https://else.where"], true);
        assert_eq!(access(&server), [true; 4]);
        assert!(server.may_attach("d"));
        let client = holder(&[], false);
        assert_eq!(access(&client), [false, true, false, false]);
        assert!(client.may_attach("d"));
    }

    #[test]
    fn what_is_not_understood_allows_nothing() {
        for uris in [
            &["godwit:role:king"][..],
            &["godwit:role:"],
            &["godwit:role:Operator"],
            &["godwit:"],
            &["godwit:role:operator", "godwit:role:reader"],
            &["godwit:role:operator", "godwit:more"],
            &["godwit:role:operator", "godwit:disk:a"],
            &["godwit:disk:a"],
        ] {
            let holder = holder(uris, true);
            assert_eq!(access(&holder), [false; 4], "{uris:?}");
            assert!(!holder.may_attach("a"), "{uris:?}");
        }
        assert_eq!(access(&Holder::nobody()), [false; 4]);
        let garbage = CertificateDer::from(&b"no certificate"[..]);
        assert_eq!(Holder::of(&garbage, true), Holder::nobody());
    }
}
