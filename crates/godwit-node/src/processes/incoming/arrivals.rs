//! Processes that arrive here. Each step is stored in advance, so the source gets one final answer about the process's
//! place.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use godwit_verbs::control::{Answer as LibraryAnswer, Request};
use godwit_verbs::mover::Arrival;
use godwit_verbs::shim::Recreated;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;

use super::holder::Holder;
use super::rounds;
use crate::node::Node;
use crate::processes::host::criu::NotRestored;
use crate::processes::host::{criu, files};
use crate::processes::messages::{Answer, ImageOffer};
use crate::processes::{ask, files_of_ours, folder, images};
use godwit_context::blocking;
use godwit_context::failpoint;

/// Serializes the steps of all arrivals.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    turn: tokio::sync::Mutex<()>,
}

/// The durable record of an arriving process.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Stored {
    peer: String,
    arrival: Arrival,
    offer: ImageOffer,
    /// True if the restore has failed, so any part that may run is only to be ended.
    #[serde(default)]
    failed: bool,
    /// True if the process was asked to recreate its objects.
    asked: bool,
    /// The recreated objects.
    made: Option<Recreated>,
    /// True if the objects were made ahead of the process.
    #[serde(default)]
    attached: bool,
}

fn record(node: &Node, id: &str) -> PathBuf {
    folder(node, id).join("arrival.json")
}

/// Returns the name of the guard of a move's address.
pub(crate) fn guard(id: &str) -> String {
    format!("godwit-{id}")
}

/// Loads the record of a move of this peer, or `None` without a record.
///
/// # Errors
/// One sentence: the record is unreadable, which says nothing about the process.
fn load(node: &Node, id: &str, peer: &str) -> Result<Option<Stored>, String> {
    let stored = files_of_ours::read::<Stored>(&record(node, id))?;
    Ok(stored.filter(|stored| stored.peer == peer))
}

/// Loads the record of a process that arrived here by a move of this peer.
///
/// # Errors
/// One sentence: the process did not arrive, or the record is unreadable.
fn load_here(node: &Node, id: &str, peer: &str) -> Result<Stored, String> {
    load(node, id, peer)?
        .filter(|stored| stored.arrival == Arrival::Here)
        .ok_or_else(|| "the process did not come here by this move".to_owned())
}

fn since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

/// Checks that a move is unknown here.
///
/// # Errors
/// One sentence.
pub(super) fn check_new(node: &Node, id: &str) -> Result<(), String> {
    match folder(node, id).try_exists() {
        Ok(false) => Ok(()),
        Ok(true) => Err("a move of this number is known here already".to_owned()),
        Err(error) => Err(format!("what is stored of moves cannot be read: {error}")),
    }
}

/// Checks that an image may come. `rounds` counts the memory rounds received on this connection.
///
/// # Errors
/// One sentence.
pub(crate) fn admit(node: &Node, id: &str, offer: &ImageOffer, rounds: u32) -> Result<(), String> {
    check_new(node, id)?;
    if ![0, rounds].contains(&offer.rounds) {
        return Err(format!(
            "the image needs {} rounds of memory that came before it, and {rounds} are here",
            offer.rounds
        ));
    }
    images::check(offer, images::free(&node.config.processes_dir()))?;
    if !criu::is_layout(&offer.layout) || i32::try_from(offer.pid).is_err() || offer.pid < 2 {
        return Err("what tells the process from others makes no sense".to_owned());
    }
    if offer.container.as_ref().is_some_and(|one| !one.is_sound()) {
        return Err("the container of the process makes no sense".to_owned());
    }
    if offer.address.as_ref().is_some_and(|own| !own.is_sound()) {
        return Err("the address of the process makes no sense".to_owned());
    }
    let roots = node.config.process_files();
    let refused = offer
        .files
        .iter()
        .find_map(|file| files::refusal(roots, &file.name));
    refused.map_or(Ok(()), Err)
}

/// Receives an admitted image.
///
/// # Errors
/// One sentence; nothing of the image is left.
pub(crate) async fn take(
    node: &Node,
    id: &str,
    peer: &str,
    offer: ImageOffer,
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<(), String> {
    let place = folder(node, id);
    let taken = async {
        let image = place.join("image");
        std::fs::create_dir_all(&image)?;
        rounds::keep(
            &node.config.processes_dir(),
            id,
            &place,
            &image,
            offer.rounds,
        )?;
        let of_criu = offer
            .image
            .iter()
            .map(|file| (image.join(&file.name), file.bytes));
        let along = (0..).zip(&offer.files);
        let along = along.map(|(number, file)| (place.join(format!("along-{number}")), file.bytes));
        images::receive(stream, of_criu.chain(along)).await
    };
    let stored = Stored {
        peer: peer.to_owned(),
        arrival: Arrival::Coming,
        offer: offer.clone(),
        failed: false,
        asked: false,
        made: None,
        attached: false,
    };
    let taken = match taken.await {
        Ok(()) => files_of_ours::write(&record(node, id), &stored),
        Err(error) => Err(format!("the image did not come: {error}")),
    };
    if taken.is_err() {
        forget(node, id);
    }
    taken
}

fn forget(node: &Node, id: &str) {
    let place = folder(node, id);
    if let Err(error) = std::fs::remove_dir_all(&place)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(place = %place.display(), %error, "cannot remove what is left of a move");
    }
}

/// Restores the process from the received image.
pub(crate) async fn restore(node: &Node, id: &str, peer: &str) -> Answer {
    let _turn = node.processes.arrivals.turn.lock().await;
    let mut stored = match load(node, id, peer) {
        Ok(Some(stored)) => stored,
        Ok(None) => return Answer::NotHere("its image is not there".to_owned()),
        Err(error) => return Answer::Refused(error),
    };
    if !stored.arrival.may_restore() {
        return settle_now(node, id, stored).await;
    }
    let began = Instant::now();
    stored.arrival = Arrival::Restoring;
    if let Err(error) = files_of_ours::write(&record(node, id), &stored) {
        // The record may be stored nevertheless. The source asks again with [`settle`].
        return Answer::Refused(error);
    }
    let restored = async {
        let (roots, place) = (node.config.process_files().to_vec(), folder(node, id));
        let (along, of) = (stored.offer.files.clone(), id.to_owned());
        let placed = blocking(move || {
            let mut numbered = (0..).zip(&along);
            numbered.try_for_each(|(number, file): (usize, _)| {
                files::place(&roots, file, &place.join(format!("along-{number}")), &of)
            })
        });
        placed
            .await
            .map_err(|error| error.message)
            .flatten()
            .map_err(NotRestored::Nothing)?;
        let (subject, address) = (stored.offer.subject(), stored.offer.address.as_ref());
        let image = folder(node, id).join("image");
        criu::restore(&image, &subject, address, &guard(id)).await
    };
    failpoint::reach("process-arrival-restoring".to_owned()).await;
    let restored = restored.await;
    failpoint::reach("process-arrival-restored".to_owned()).await;
    let restored = match restored {
        Ok(pid) => {
            stored.offer.pid = pid;
            Ok(())
        }
        Err(NotRestored::Nothing(why)) => Err(why),
        // While parts of the process may run, the state stays `Restoring`. The rest is ended when the source asks to
        // settle.
        Err(NotRestored::Left(why)) => {
            stored.failed = true;
            return Answer::Refused(match files_of_ours::write(&record(node, id), &stored) {
                Ok(()) => why,
                Err(unstored) => format!("{why}; {unstored}"),
            });
        }
    };
    stored.arrival = match &restored {
        Ok(()) => Arrival::Here,
        Err(_) => Arrival::Never,
    };
    let known = store_for_good(node, id, &stored);
    match (restored, known) {
        // The answer is the same after a restart, since the process lives.
        (Ok(()), _) => Answer::Here {
            milliseconds: since(began),
        },
        (Err(error), Ok(())) => Answer::NotHere(error),
        // An answer that is not stored is not given: the source asks again.
        (Err(error), Err(unstored)) => Answer::Refused(format!("{error}; {unstored}")),
    }
}

/// Finds out for good if the process runs here. A process that does not run here never will.
pub(crate) async fn settle(node: &Node, id: &str, peer: &str) -> Answer {
    let _turn = node.processes.arrivals.turn.lock().await;
    match load(node, id, peer) {
        Ok(Some(stored)) => settle_now(node, id, stored).await,
        Ok(None) => Answer::NotHere("the destination knows nothing of its move".to_owned()),
        Err(error) => Answer::Refused(error),
    }
}

/// Stores the final place of the process, and removes the image, which has no use any more.
///
/// # Errors
/// One sentence if the place is not stored.
fn store_for_good(node: &Node, id: &str, stored: &Stored) -> Result<(), String> {
    files_of_ours::write(&record(node, id), stored)?;
    let place = folder(node, id);
    let along = (0..stored.offer.files.len()).map(|number| place.join(format!("along-{number}")));
    let removed = along.map(|path| (std::fs::remove_file(&path), path));
    let folders = ["image", rounds::KEPT].map(|name| place.join(name));
    let folders = folders.map(|path| (std::fs::remove_dir_all(&path), path));
    for (removed, path) in removed.chain(folders) {
        if let Err(error) = removed
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove what an image was");
        }
    }
    Ok(())
}

async fn settle_now(node: &Node, id: &str, mut stored: Stored) -> Answer {
    let (subject, address) = (stored.offer.subject(), stored.offer.address.clone());
    if stored.arrival == Arrival::Restoring && !criu::wait_for_others(&folder(node, id)).await {
        return Answer::Refused("a CRIU works with its image and does not end".to_owned());
    }
    let settled = match subject.found().await {
        Ok(found) => {
            stored.offer.pid = found.unwrap_or(stored.offer.pid);
            stored.arrival.settled(found.is_some() && !stored.failed)
        }
        Err(error) => {
            return Answer::Refused(format!("whether it runs cannot be read: {error}"));
        }
    };
    if settled == stored.arrival && settled == Arrival::Never {
        return Answer::NotHere("the destination did not restore it".to_owned());
    }
    if settled == Arrival::Never
        && stored.arrival == Arrival::Restoring
        && !stored.failed
        && let Some(container) = &subject.container
        && let Err(error) = container.is_absent().await
    {
        return Answer::Refused(error);
    }
    if settled == Arrival::Never
        && stored.arrival == Arrival::Restoring
        && let Err(error) = criu::clear(&subject, address.as_ref(), &guard(id)).await
    {
        return Answer::Refused(error);
    }
    if settled == Arrival::Here
        && stored.arrival == Arrival::Restoring
        && let Some(own) = &address
    {
        crate::processes::host::address::OwnAddress::unguard(&guard(id)).await;
        own.announce();
    }
    stored.arrival = settled;
    if let Err(error) = store_for_good(node, id, &stored) {
        return Answer::Refused(error);
    }
    match settled {
        Arrival::Here => Answer::Here { milliseconds: 0.0 },
        _ => Answer::NotHere("the destination did not restore it".to_owned()),
    }
}

/// Gives the process the objects of the holder, or else has the process recreate its objects, once.
pub(crate) async fn recreate(node: &Node, id: &str, peer: &str, holder: Option<Holder>) -> Answer {
    let _turn = node.processes.arrivals.turn.lock().await;
    let began = Instant::now();
    let mut stored = match load_here(node, id, peer) {
        Ok(stored) => stored,
        Err(error) => return Answer::Refused(error),
    };
    if let Some(made) = stored.made {
        return Answer::Recreated {
            made,
            attached: stored.attached,
            warning: None,
            milliseconds: 0.0,
        };
    }
    if stored.asked {
        return Answer::Refused(
            "the node at the destination ended while the process made its objects again, and its keys are not known".to_owned(),
        );
    }
    stored.asked = true;
    if let Err(error) = files_of_ours::write(&record(node, id), &stored) {
        return Answer::Refused(error);
    }
    failpoint::reach("process-arrival-recreating".to_owned()).await;
    let pid = stored.offer.pid;
    let (attached, warning) = match holder {
        Some(holder) => match holder.give_to(pid).await {
            Ok(keys) => (Some(keys), None),
            Err(error) => (None, Some(error)),
        },
        None => (None, None),
    };
    stored.attached = attached.is_some();
    let made = match attached {
        Some(remote_keys) => Ok(Recreated {
            remote_keys,
            queue_pairs: Vec::new(),
        }),
        None => make_again(pid).await,
    };
    let made = match made {
        Ok(made) => made,
        Err(error) => return Answer::Refused(error),
    };
    stored.made = Some(made.clone());
    match files_of_ours::write(&record(node, id), &stored) {
        Ok(()) => Answer::Recreated {
            made,
            attached: stored.attached,
            warning,
            milliseconds: since(began),
        },
        Err(error) => Answer::Refused(error),
    }
}

async fn make_again(pid: u32) -> Result<Recreated, String> {
    match ask(pid, Request::Recreate { device: None }).await? {
        LibraryAnswer::Recreated(made) => Ok(made),
        _ => Err("the process gave an answer to another question".to_owned()),
    }
}

/// Passes a request to the arrived process: connect, resume, redirect, redirects or status.
pub(crate) async fn moved(node: &Node, id: &str, peer: &str, request: Request) -> Answer {
    if !matches!(
        request,
        Request::Connect { .. }
            | Request::Resume { .. }
            | Request::Redirect { .. }
            | Request::Redirects
            | Request::Status
    ) {
        return Answer::Refused("this is not asked of a process that came".to_owned());
    }
    match load_here(node, id, peer) {
        Ok(stored) => match ask(stored.offer.pid, request).await {
            Ok(answer) => Answer::Library(answer),
            Err(error) => Answer::Refused(error),
        },
        Err(error) => Answer::Refused(error),
    }
}

/// Forgets the move.
pub(crate) async fn over(node: &Node, id: &str, peer: &str) {
    let _turn = node.processes.arrivals.turn.lock().await;
    if let Ok(Some(_)) = load(node, id, peer) {
        forget(node, id);
    }
}

/// Settles or forgets a move after the node's start, before any request. An interrupted restore is settled in the
/// background. An image without a restore is forgotten, so the process is never restored.
pub(crate) fn recover(node: &Arc<Node>, id: &str) {
    let stored = match files_of_ours::read::<Stored>(&record(node, id)) {
        Ok(Some(stored)) => stored,
        // The image had not come whole.
        Ok(None) => return forget(node, id),
        // The process may run here: the folder is kept until the record is readable.
        Err(_) => return,
    };
    match stored.arrival {
        Arrival::Coming => forget(node, id),
        Arrival::Restoring => {
            let (node, id) = (Arc::clone(node), id.to_owned());
            tokio::spawn(async move { settle(&node, &id, &stored.peer).await });
        }
        Arrival::Here | Arrival::Never => {}
    }
}
