//! The command `godwit certs`.

use godwit_node::Role;
use godwit_node::certificates::{
    CertificateError, CertificateFiles, IssueRequest, RevocationList, Revoked, Validity, init,
    issue, revoke,
};
use serde::Serialize;

use crate::arguments::{CertsCommand, RoleArgument};
use crate::failure::Failure;
use crate::show::output::{Output, facts};

/// The written files, for `--json`.
#[derive(Serialize)]
struct Written {
    ca: String,
    certificate: String,
    key: String,
    serial: String,
    not_after: i64,
}

/// The revoked certificates, for `--json`.
#[derive(Serialize)]
struct WrittenList {
    crl: String,
    revoked: Vec<String>,
    count: usize,
}

pub(crate) fn run(command: CertsCommand, output: Output) -> Result<(), Failure> {
    let files = match command {
        CertsCommand::Init { dir, force } => init(&dir, force).map_err(explain)?,
        CertsCommand::Issue {
            name,
            dir,
            dns,
            ip,
            days,
            expired,
            role,
            disks,
            nbd_client,
            force,
        } => issue(&IssueRequest {
            directory: &dir,
            name: &name,
            dns: &dns,
            ip: &ip,
            role: match role {
                _ if nbd_client => Role::NbdClient,
                RoleArgument::Node => Role::Node,
                RoleArgument::Operator => Role::Operator,
                RoleArgument::Reader => Role::Reader,
                RoleArgument::NbdClient => Role::NbdClient,
            },
            disks: &disks,
            validity: if expired {
                Validity::Expired
            } else {
                Validity::Days(days)
            },
            force,
        })
        .map_err(explain)?,
        CertsCommand::Revoke { name, serial, dir } => {
            // The command line guarantees that one of the two is given.
            let what = match (&serial, &name) {
                (Some(serial), _) => Revoked::Serial(serial),
                (None, name) => Revoked::Name(name.as_deref().unwrap_or_default()),
            };
            let list = revoke(&dir, what).map_err(explain)?;
            return output.print(&written_list(list), |list| {
                format!(
                    "revoked {}; {} lists {} in all\ngive it to every node (--crl) in place of the one before, and \
                     reload the nodes: systemctl reload godwit",
                    list.revoked.join(", "),
                    list.crl,
                    list.count
                )
            });
        }
    };
    output.print(&written(&files), |files| {
        facts([
            ("certificate", Some(files.certificate.clone())),
            ("serial", Some(files.serial.clone())),
            ("key", Some(format!("{} (keep it secret)", files.key))),
            ("authority", Some(files.ca.clone())),
        ])
    })
}

fn written(files: &CertificateFiles) -> Written {
    Written {
        ca: files.ca.display().to_string(),
        certificate: files.certificate.display().to_string(),
        key: files.key.display().to_string(),
        serial: files.serial.clone(),
        not_after: files.not_after,
    }
}

fn written_list(list: RevocationList) -> WrittenList {
    WrittenList {
        crl: list.path.display().to_string(),
        revoked: list.added,
        count: list.count,
    }
}

fn explain(error: CertificateError) -> Failure {
    let cause = std::error::Error::source(&error);
    let failure = match cause {
        Some(cause) => Failure::caused(error.to_string(), cause),
        None => Failure::new(error.to_string()),
    };
    match error {
        CertificateError::Exists(_) => failure.hint("to replace it, repeat with --force"),
        CertificateError::NoAuthority(directory) => failure.hint(format!(
            "make one first: godwit certs init --dir {}",
            directory.display()
        )),
        CertificateError::Build { .. } => {
            failure.hint("are ca.pem and ca.key what godwit certs init wrote?")
        }
        CertificateError::Io { .. } => failure.hint("may you read and write the directory?"),
        CertificateError::DisksOfRole(_) => failure.hint("--disk goes with --role nbd-client"),
        CertificateError::Unknown(_) => {
            failure.hint("name its serial number instead: godwit certs revoke --serial HEX")
        }
        CertificateError::Serial(_) => failure
            .hint("give it in hexadecimal, as godwit certs issue NAME printed it, or openssl x509 -serial does"),
        CertificateError::Name(_) | CertificateError::DnsName(_) | CertificateError::Disk(_) => {
            failure
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_authority_says_how_to_make_one() {
        let failure = explain(CertificateError::NoAuthority("/etc/x".into()));
        assert_eq!(
            failure.hint.as_deref(),
            Some("make one first: godwit certs init --dir /etc/x")
        );
    }

    #[test]
    fn an_io_error_keeps_its_cause() {
        let failure = explain(CertificateError::Io {
            action: "write",
            path: "/x/y".into(),
            source: std::io::Error::other("disk on fire"),
        });
        assert_eq!(failure.message, "cannot write /x/y: disk on fire");
    }
}
