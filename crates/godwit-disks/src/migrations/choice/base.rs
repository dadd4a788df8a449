//! Decides whether a disk moves without its base image.

use std::sync::Arc;

use godwit_core::wire::{Features, Purpose, TrafficClass};

use crate::disks::disk::Disk;
use crate::migrations::Migrations;
use godwit_api::{ErrorBody, ErrorCode, MigrationSettings, MoveOptions, Policy};
use godwit_context::ids;
use godwit_context::store::BaseImage;
use godwit_peers::config::PeerConfig;
use godwit_peers::greeting;

/// Returns the base image without which the disk moves, if any.
///
/// # Errors
/// A part of the disk is only in its base image, and the move needs the whole disk, or the destination has no
/// repository.
pub(in crate::migrations) async fn choose(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    peer: &PeerConfig,
    options: &MoveOptions,
) -> Result<Option<BaseImage>, ErrorBody> {
    let (base, fetches) = {
        let inner = disk.lock();
        let fetches = inner.entry.fetches(&inner.record).is_some();
        (inner.entry.base.clone(), fetches)
    };
    let Some(base) = base else { return Ok(None) };
    let whole = |why: String, hint: &str| match fetches {
        true => {
            let text = format!(
                "disk {} cannot be moved like that: a part of it is still in image '{}', and {why}",
                disk.name, base.image
            );
            Err(ErrorBody::new(ErrorCode::Conflict, text).hint(hint))
        }
        false => Ok(None),
    };
    let pulls = options.policy.is_some_and(|policy| policy.pulls());
    if options.whole || options.verify || options.round_block_bytes.is_some() {
        return whole(
            String::from("the rest of it moves in blocks of 4 KiB, and is not compared"),
            "leave out --no-delta, --verify and --round-block, or wait until all of it is here",
        );
    }
    if !migrations.images.has_repository() {
        return whole(
            String::from("this node knows no repository any more"),
            "start the node with its --repository again",
        );
    }
    if !fetches && !migrations.images.has_image(&base).await {
        tracing::info!(
            disk = disk.name,
            image = base.image,
            "the repository does not say that it has the image: the disk moves as a whole"
        );
        return Ok(None);
    }
    let id = ids::new_id()?;
    let name = &migrations.context.config.name;
    let hello = greeting::hello(
        name,
        &disk.name,
        TrafficClass::Control,
        Purpose::Migrate,
        id,
    );
    let knows = match migrations.context.dialer.dial(peer, hello).await {
        Ok((_, agreed)) => agreed.features,
        Err(error) => {
            return Err(error.into_body(&peer.name, &format!("migrate disk {}", disk.name)));
        }
    };
    if !knows.contain(Features::IMAGES.with(Features::PULLS)) {
        return whole(
            format!("node '{}' knows no repository", peer.name),
            "start that node with --repository, or wait until all of the disk is here",
        );
    }
    if pulls && !knows.contain(Features::TWO_PLACES) {
        return whole(
            format!(
                "node '{}' is older and serves no disk that lacks something in two places",
                peer.name
            ),
            "update that node, or leave out --policy",
        );
    }
    Ok(Some(base))
}

/// The reason why an offer failed.
pub(in crate::migrations) enum Refused {
    /// The destination cannot reach the base image that the disk would leave behind.
    Image(ErrorBody),
    /// Any other reason.
    Otherwise(ErrorBody),
}

impl From<ErrorBody> for Refused {
    fn from(error: ErrorBody) -> Self {
        Self::Otherwise(error)
    }
}

/// Adapts the settings to a move without the base image. A double write needs all of its block at both nodes. `named`
/// is true if the user chose the policy.
pub(in crate::migrations) fn adapt(
    settings: &mut MigrationSettings,
    base: &BaseImage,
    named: bool,
) {
    let asked = settings.policy;
    if asked.pulls() {
        return;
    }
    let instead = Policy(asked.usual.without_image().description());
    settings.policy = instead;
    let mut reason = format!(
        "{}: only what differs from image '{}' is sent",
        instead.name, base.image
    );
    if named && asked != instead {
        reason.push_str(&format!(
            ", and {} needs all of the disk (--no-delta sends it)",
            asked.name
        ));
    }
    settings.policy_reason = Some(reason);
}

/// Adapts the settings to a move of the whole disk after all.
pub(in crate::migrations) fn goes_as_a_whole(
    settings: &mut MigrationSettings,
    base: &BaseImage,
    peer: &str,
) {
    let name = settings.policy.name;
    settings.policy_reason = Some(format!(
        "{name}: the disk moves without its image, because node '{peer}' does not get at image '{}'",
        base.image
    ));
}
