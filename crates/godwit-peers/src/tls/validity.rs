//! The validity of certificates, and warnings before the end of the validity.

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use crate::clock;

const DAY: i64 = 24 * 60 * 60;

/// Time before its end at which a certificate deserves a warning.
const NEAR: i64 = 30 * DAY;

/// The ends of a node's certificates, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The earliest end in the chain of the node's own certificate below the authority.
    pub certificate: i64,
    /// The earliest end among the trusted authorities.
    pub authority: i64,
}

impl Ends {
    /// Returns the ends of this chain and these authorities. A certificate that cannot be parsed never ends, because
    /// loading did not refuse it.
    pub fn of(chain: &[CertificateDer<'_>], authorities: &[CertificateDer<'_>]) -> Self {
        Self {
            certificate: first_end(chain),
            authority: first_end(authorities),
        }
    }

    /// Returns the warnings at `now`, each with true if the certificate has ended.
    pub fn notices(self, now: i64) -> Vec<(bool, String)> {
        let both = [
            ("the node's certificate", self.certificate),
            ("the authority's certificate", self.authority),
        ];
        both.into_iter()
            .filter_map(|(what, end)| {
                let (at, left) = (clock::text_of(end), end.saturating_sub(now));
                if left <= 0 {
                    return Some((
                        true,
                        format!("{what} ended at {at}: other nodes and clients refuse this node"),
                    ));
                }
                let days = left / DAY;
                let soon = match days {
                    0 => String::from("today or tomorrow"),
                    1 => String::from("in a day"),
                    days => format!("in {days} days"),
                };
                (left < NEAR).then(|| (false, format!("{what} ends {soon}, at {at}")))
            })
            .collect()
    }
}

fn first_end(certificates: &[CertificateDer<'_>]) -> i64 {
    let ends = certificates.iter().filter_map(|certificate| {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        Some(parsed.validity().not_after.timestamp())
    });
    ends.min().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(certificate: i64, authority: i64, now: i64) -> Vec<(bool, String)> {
        let ends = Ends {
            certificate,
            authority,
        };
        ends.notices(now)
    }

    #[test]
    fn an_end_is_told_when_it_is_near_or_past() {
        let end = 1_700_000_000;
        assert!(told(end, end, end - 31 * DAY).is_empty());
        assert_eq!(
            told(end, i64::MAX, end - 3 * DAY - 1),
            [(
                false,
                String::from("the node's certificate ends in 3 days, at 2023-11-14T22:13:20.000Z")
            )]
        );
        let past = told(i64::MAX, end, end);
        assert!(
            past[0].0
                && past[0]
                    .1
                    .starts_with("the authority's certificate ended at 2023")
        );
    }
}
