//! Random ids of migrations, disks and machines.

use godwit_api::{ErrorBody, ErrorCode};
use godwit_core::units::MigrationId;
use rustls::crypto::aws_lc_rs;

/// Returns an unused migration id.
///
/// # Errors
/// The system has no randomness.
pub fn new_id() -> Result<MigrationId, ErrorBody> {
    random_id().map(MigrationId)
}

/// Returns an id unique among migrations, disks and machines.
///
/// # Errors
/// The system has no random bytes.
pub fn random_id() -> Result<[u8; 16], ErrorBody> {
    let mut id = [0; 16];
    aws_lc_rs::default_provider()
        .secure_random
        .fill(&mut id)
        .map_err(|_| {
            ErrorBody::new(
                ErrorCode::Internal,
                "the system gave no random bytes for an id",
            )
        })?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::new_id;

    #[test]
    fn ids_differ() {
        assert_ne!(new_id().expect("random"), new_id().expect("random"));
    }
}
