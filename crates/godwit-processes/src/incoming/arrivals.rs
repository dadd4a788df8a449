//! Processes that arrive here. Each step is stored in advance, so the source gets one final answer about the process's
//! place.

use std::sync::Arc;
use std::time::Instant;

use godwit_move::{Act, Answer as Said, Arrival, Decider, Order, Started};
use godwit_verbs::control::{Answer as LibraryAnswer, Request};
use godwit_verbs::shim::Recreated;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;

use super::holder::Holder;
use super::rounds;
use crate::Processes;
use crate::host::address::OwnAddress;
use crate::host::criu::NotRestored;
use crate::host::{criu, files};
use crate::messages::{Answer, ImageOffer};
use crate::{ask, folder, images, may_be_known, older_files, remove};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_context::store::process_moves::Kind;

/// The end that decides about the place of a process.
const DECIDER: Decider = Decider::Destination;

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
    /// True if the process was asked to recreate its objects.
    asked: bool,
    /// The recreated objects.
    made: Option<Recreated>,
    /// True if the objects were made ahead of the process.
    #[serde(default)]
    attached: bool,
}

impl Stored {
    /// Stores the record.
    ///
    /// # Errors
    /// One sentence.
    fn store(&self, processes: &Processes, id: &str) -> Result<(), String> {
        let stored = processes
            .context
            .store
            .put_process_move(Kind::Arrival, id, self);
        stored.map_err(|error| error.to_string())
    }
}

/// Returns the name of the guard of a move's address.
pub(crate) fn guard(id: &str) -> String {
    format!("godwit-{id}")
}

/// Loads the record of a move of this peer, or `None` without a record.
///
/// # Errors
/// One sentence: the record is unreadable, which says nothing about the process.
fn load(processes: &Processes, id: &str, peer: &str) -> Result<Option<Stored>, String> {
    let stored = processes
        .context
        .store
        .process_move::<Stored>(Kind::Arrival, id);
    let stored = stored.map_err(|error| format!("the record of a move cannot be read: {error}"))?;
    if stored.is_none() {
        older_files::none_is_left(&folder(processes, id))?;
    }
    Ok(stored.filter(|stored| stored.peer == peer))
}

/// Loads the record of a process that arrived here by a move of this peer.
///
/// # Errors
/// One sentence: the process did not arrive, or the record is unreadable.
fn load_here(processes: &Processes, id: &str, peer: &str) -> Result<Stored, String> {
    load(processes, id, peer)?
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
pub(super) fn check_new(processes: &Processes, id: &str) -> Result<(), String> {
    match folder(processes, id).try_exists() {
        Ok(false) if !may_be_known(processes, id) => Ok(()),
        Ok(_) => Err("a move of this number is known here already".to_owned()),
        Err(error) => Err(format!("what is stored of moves cannot be read: {error}")),
    }
}

/// Checks that an image may come. `rounds` counts the memory rounds received on this connection.
///
/// # Errors
/// One sentence.
pub fn admit(
    processes: &Processes,
    id: &str,
    offer: &ImageOffer,
    rounds: u32,
) -> Result<(), String> {
    check_new(processes, id)?;
    if ![0, rounds].contains(&offer.rounds) {
        return Err(format!(
            "the image needs {} rounds of memory that came before it, and {rounds} are here",
            offer.rounds
        ));
    }
    images::check(
        offer,
        images::free(&processes.context.config.processes_dir()),
    )?;
    if !criu::is_layout(&offer.layout) || i32::try_from(offer.pid).is_err() || offer.pid < 2 {
        return Err("what tells the process from others makes no sense".to_owned());
    }
    if offer.container.as_ref().is_some_and(|one| !one.is_sound()) {
        return Err("the container of the process makes no sense".to_owned());
    }
    if offer.address.as_ref().is_some_and(|own| !own.is_sound()) {
        return Err("the address of the process makes no sense".to_owned());
    }
    let roots = processes.context.config.process_files();
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
pub async fn take(
    processes: &Processes,
    id: &str,
    peer: &str,
    offer: ImageOffer,
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<(), String> {
    let place = folder(processes, id);
    let taken = async {
        let image = place.join("image");
        std::fs::create_dir_all(&image)?;
        rounds::keep(
            &processes.context.config.processes_dir(),
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
        asked: false,
        made: None,
        attached: false,
    };
    let taken = match taken.await {
        Ok(()) => stored.store(processes, id),
        Err(error) => Err(format!("the image did not come: {error}")),
    };
    if taken.is_err() {
        forget(processes, id);
    }
    taken
}

fn forget(processes: &Processes, id: &str) {
    if let Err(error) = processes
        .context
        .store
        .remove_process_move(Kind::Arrival, id)
    {
        tracing::warn!(id, %error, "cannot forget a move");
    }
    let place = folder(processes, id);
    if let Err(error) = remove(&place) {
        tracing::warn!(place = %place.display(), %error, "cannot remove what is left of a move");
    }
}

/// Restores the process from the received image.
pub async fn restore(processes: &Processes, id: &str, peer: &str) -> Answer {
    let _turn = processes.arrivals.turn.lock().await;
    let mut stored = match load(processes, id, peer) {
        Ok(Some(stored)) => stored,
        Ok(None) => return Answer::NotHere("its image is not there".to_owned()),
        Err(error) => return Answer::Refused(error),
    };
    if stored.arrival.ordered(Order::Run, DECIDER) != Act::Start {
        return settle_now(processes, id, stored).await;
    }
    let began = Instant::now();
    if let Err(error) = stored.store(processes, id) {
        // The record may be stored nevertheless. The source asks again with [`settle`].
        return Answer::Refused(error);
    }
    let restored = async {
        let (roots, place) = (
            processes.context.config.process_files().to_vec(),
            folder(processes, id),
        );
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
        let image = folder(processes, id).join("image");
        criu::restore(&image, &subject, address, &guard(id)).await
    };
    failpoint::reach("process-arrival-restoring".to_owned()).await;
    let restored = restored.await;
    failpoint::reach("process-arrival-restored".to_owned()).await;
    stored.arrival.started(outcome(&restored), DECIDER);
    match restored {
        Ok(pid) => {
            stored.offer.pid = pid;
            // The answer is the same after a restart, since the process lives.
            let _known = store_for_good(processes, id, &stored);
            Answer::Here {
                milliseconds: since(began),
            }
        }
        // An answer that is not stored is not given: the source asks again.
        Err(NotRestored::Nothing(why)) => match store_for_good(processes, id, &stored) {
            Ok(()) => Answer::NotHere(why),
            Err(unstored) => Answer::Refused(format!("{why}; {unstored}")),
        },
        // While parts of the process may run, nothing is decided. The rest is ended when the source asks to settle.
        Err(NotRestored::Left(why)) => Answer::Refused(match stored.store(processes, id) {
            Ok(()) => why,
            Err(unstored) => format!("{why}; {unstored}"),
        }),
    }
}

const fn outcome(restored: &Result<u32, NotRestored>) -> Started {
    match restored {
        Ok(_) => Started::Runs,
        Err(NotRestored::Nothing(_)) => Started::Nothing,
        Err(NotRestored::Left(_)) => Started::Rest,
    }
}

/// Finds out for good if the process runs here. A process that does not run here never will.
pub(crate) async fn settle(processes: &Processes, id: &str, peer: &str) -> Answer {
    let _turn = processes.arrivals.turn.lock().await;
    match load(processes, id, peer) {
        Ok(Some(stored)) => settle_now(processes, id, stored).await,
        Ok(None) => Answer::NotHere("the destination knows nothing of its move".to_owned()),
        Err(error) => Answer::Refused(error),
    }
}

/// Stores the final place of the process, and removes the image, which has no use any more.
///
/// # Errors
/// One sentence if the place is not stored.
fn store_for_good(processes: &Processes, id: &str, stored: &Stored) -> Result<(), String> {
    stored.store(processes, id)?;
    let place = folder(processes, id);
    if let Err(error) = remove(&place) {
        tracing::warn!(place = %place.display(), %error, "cannot remove what an image was");
    }
    Ok(())
}

async fn settle_now(processes: &Processes, id: &str, mut stored: Stored) -> Answer {
    let before = stored.arrival;
    let act = stored.arrival.ordered(Order::Settle, DECIDER);
    let said = match act {
        Act::Look | Act::Clear => match find_out(processes, id, &mut stored, act).await {
            Ok(said) => said,
            Err(error) => return Answer::Refused(error),
        },
        said => said,
    };
    if stored.arrival != before
        && let Err(error) = store_for_good(processes, id, &stored)
    {
        return Answer::Refused(error);
    }
    match said {
        Act::Say(Said::Here) => Answer::Here { milliseconds: 0.0 },
        Act::Say(Said::NotHere) => Answer::NotHere("the destination did not restore it".to_owned()),
        _ => Answer::Refused("the place of the process is not decided".to_owned()),
    }
}

/// Finds out if a process runs whose restore was begun, and ends the rest of one that does not.
///
/// # Errors
/// One sentence: nothing is known, or something is left.
async fn find_out(
    processes: &Processes,
    id: &str,
    stored: &mut Stored,
    mut act: Act,
) -> Result<Act, String> {
    let (subject, address) = (stored.offer.subject(), stored.offer.address.clone());
    if !criu::wait_for_others(&folder(processes, id)).await {
        return Err("a CRIU works with its image and does not end".to_owned());
    }
    if act == Act::Look {
        let found = subject.found().await;
        let found = found.map_err(|error| format!("whether it runs cannot be read: {error}"))?;
        stored.offer.pid = found.unwrap_or(stored.offer.pid);
        act = stored.arrival.looked(found.is_some(), DECIDER);
        if act != Act::Clear {
            if let Some(own) = &address {
                OwnAddress::unguard(&guard(id)).await;
                own.announce();
            }
            return Ok(act);
        }
        if let Some(container) = &subject.container {
            container.is_absent().await?;
        }
    }
    criu::clear(&subject, address.as_ref(), &guard(id)).await?;
    Ok(stored.arrival.cleared())
}

/// Gives the process the objects of the holder, or else has the process recreate its objects, once.
pub(crate) async fn recreate(
    processes: &Processes,
    id: &str,
    peer: &str,
    holder: Option<Holder>,
) -> Answer {
    let _turn = processes.arrivals.turn.lock().await;
    let began = Instant::now();
    let mut stored = match load_here(processes, id, peer) {
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
    if let Err(error) = stored.store(processes, id) {
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
    match stored.store(processes, id) {
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
pub(crate) async fn moved(processes: &Processes, id: &str, peer: &str, request: Request) -> Answer {
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
    match load_here(processes, id, peer) {
        Ok(stored) => match ask(stored.offer.pid, request).await {
            Ok(answer) => Answer::Library(answer),
            Err(error) => Answer::Refused(error),
        },
        Err(error) => Answer::Refused(error),
    }
}

/// Forgets the move.
pub(crate) async fn over(processes: &Processes, id: &str, peer: &str) {
    let _turn = processes.arrivals.turn.lock().await;
    if let Ok(Some(mut stored)) = load(processes, id, peer)
        && stored.arrival.ordered(Order::Over, DECIDER) == Act::Forget
    {
        forget(processes, id);
    }
}

/// Settles or forgets moves after the node's start, before any request. An interrupted restore is settled in the
/// background. An image without a restore is forgotten, so the process is never restored.
pub fn recover(processes: &Arc<Processes>) {
    let stored = match processes
        .context
        .store
        .process_moves::<Stored>(Kind::Arrival)
    {
        Ok(stored) => stored,
        Err(error) => {
            tracing::error!(%error, "no process that came is known: their records cannot be listed");
            return;
        }
    };
    for (id, stored) in stored {
        if let Err(error) = older_files::none_is_left(&folder(processes, &id)) {
            tracing::error!(
                id,
                error,
                "a process that came is not known: a file of the last version is left"
            );
            continue;
        }
        let stored = match stored {
            Ok(stored) => stored,
            // The process may run here: the record is kept.
            Err(error) => {
                tracing::error!(id, %error, "a process that came is not known");
                continue;
            }
        };
        match stored.arrival.recover(DECIDER) {
            Act::Forget => forget(processes, &id),
            Act::Look | Act::Clear => {
                let processes = Arc::clone(processes);
                godwit_context::spawn(async move { settle(&processes, &id, &stored.peer).await });
            }
            Act::Nothing | Act::Start | Act::Say(_) => {}
        }
    }
}
