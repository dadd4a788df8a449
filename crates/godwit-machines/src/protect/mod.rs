//! Protections of machines by a second node: the disks' writes reach a *backup* before they are acknowledged, and the
//! backup starts the machine anew when its node is lost.
//!
//! `godwit_protect` decides. A task per protection carries the decisions out: `primary.rs` at the node that runs the
//! machine, `backup.rs` at the other one. Each disk is a migration that never hands its disk over
//! ([`godwit_disks::migrations::outgoing::End::Stays`]).

mod backup;
mod checkpoints;
mod decide;
mod guest;
pub(crate) mod messages;
mod primary;
mod session;
mod table;
mod taking;
mod view;
pub mod witness;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode, ProtectVm, WhenAlone};
use godwit_context::ids;
use godwit_context::store::machine::protections::{ProtectionEntry, ProtectionPart};
use godwit_core::event::{AbortReason, Event};
use godwit_core::wire::Hello;
use godwit_disks::disks::disk::{Activity, Disk};
use godwit_peers::PeerConnection;
use godwit_protect::{Ask, Grant, Member, Order, Primary};
use godwit_qemu::inspect::Facts;
use tokio::sync::{mpsc, oneshot};

use self::backup::{BackupActor, Offered};
use self::checkpoints::{Mark, Waiting};
use self::messages::{BackupLink, Hear, Opening, ProtectionOffer, Say, backup_link};
use self::primary::PrimaryActor;
use self::session::Connected;
use self::table::Here;
pub use self::table::Protections;
use self::witness::spec::WitnessSpec;
use self::witness::{Change, Swap};
use crate::vms::Vms;
use crate::vms::messages as machine_messages;
use crate::vms::outgoing::preflight;
use crate::vms::vm::{Vm, VmActivity};

/// Inputs of a protection's task that wait, at most.
const BACKLOG: usize = 64;
/// Silence after which the other node counts as lost, unless the user says otherwise.
const DEFAULT_TIMEOUT_MS: u64 = 3000;
/// Possible times of silence.
const TIMEOUTS_MS: std::ops::RangeInclusive<u64> = 1000..=60_000;
/// Checkpoints a second, unless the user says otherwise.
const DEFAULT_FREQUENCY: u32 = 20;
/// Possible numbers of checkpoints a second.
const FREQUENCIES: std::ops::RangeInclusive<u32> = 1..=100;
/// Longest wait for the end of a protection.
const LEAVE_WITHIN: Duration = Duration::from_secs(20);
/// Most disks of a protected machine.
const MAX_DISKS: usize = 24;

/// The news of a disk's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Primary: the disk is followed.
    Followed,
    /// Backup: the disk follows.
    Follows,
    /// The migration has ended, or its follower is lost.
    Lost(AbortReason),
}

type Done = oneshot::Sender<Result<(), ErrorBody>>;

/// An input of a protection's task.
#[derive(Debug)]
pub(crate) enum Input {
    /// News of a disk's migration.
    Disk(String, String, News),
    /// The answer to a request to the witness.
    Decided(Ask, Result<Grant, String>),
    /// The outcome of a look at the witness.
    Witness(Result<(), String>),
    /// Primary: the backup takes the machine's disks, or does not.
    Connected(Result<Connected, ErrorBody>),
    /// Primary: the disks' migrations of this session have begun, or not.
    Started(u64, Result<Vec<(String, String)>, ErrorBody>),
    /// The other node offers the machine.
    Offered(Box<Offered>),
    /// The second connection of an offer.
    Beats(BackupLink),
    /// Backup: the connection for checkpoints.
    Checkpoints(PeerConnection),
    /// Backup: the QEMU that waits for the machine has started, in this session, or does not.
    Waiting(u64, Result<Waiting, ErrorBody>),
    /// Backup: the first checkpoint of this session is whole.
    FirstCheckpoint(u64),
    /// No further checkpoint of this session comes, with the reason.
    CheckpointsEnded(u64, String),
    /// The other node asks who has the machine.
    Question(oneshot::Sender<(Grant, bool)>),
    /// The other node looks who has the machine.
    Look(oneshot::Sender<(Grant, bool)>),
    /// Backup: the disks are durably this node's.
    Given,
    /// An operator ends the protection.
    Unprotect { force: bool, reply: Done },
    /// An operator lets the backup take the machine.
    Failover(Done),
}

/// The inputs of a task, as received.
pub(crate) type Orders = mpsc::Receiver<Input>;

/// Protects a VM. Returns once the backup has begun to take its disks.
///
/// # Errors
/// The request makes no sense, or something stands in the way: the error names it, and nothing was changed.
pub async fn protect(vms: &Arc<Vms>, name: &str, request: ProtectVm) -> Result<Arc<Vm>, ErrorBody> {
    vms.context.check_open()?;
    let vm = vms.get(name)?;
    check(vms, name, &request)?;
    let _guard = vm.begin(VmActivity::Protecting, |inner| {
        vm.is_here(inner)?;
        vm.is_current(inner)
    })?;
    vms.protections.refuse(name, "protected again")?;
    let qemu = vm.qemu()?;
    let facts = Facts::read(&qemu.qmp).await;
    let facts = facts.map_err(|error| blocked(name, &request.to, &[error.to_string()]))?;
    let machine = vm.lock().entry.clone();
    let mut blockers = preflight::disks_leaving(vms, &machine.machine, &facts);
    if machine.machine.disks.is_empty() {
        blockers.push(String::from(
            "it has no disks, so nothing of it could be lost",
        ));
    }
    if machine.memory.is_some() {
        blockers.push(String::from(
            "its memory is in a memory pool, which a backup does not map",
        ));
    }
    blockers.extend(machine.machine.bound_here.iter().cloned());
    if checkpoints_wanted(&request).is_some() {
        blockers.extend(checkpoints::blockers(&vm, &qemu, &facts).await);
    }
    if !blockers.is_empty() {
        return Err(blocked(name, &request.to, &blockers));
    }
    let primary = Primary::new(Member::First, Grant::FIRST);
    let checkpoints_per_second = checkpoints_wanted(&request);
    let entry = ProtectionEntry {
        id: ids::new_id()?.to_string(),
        peer: request.to.clone(),
        me: Member::First,
        witness: request.witness,
        when_alone: request.when_alone.unwrap_or(WhenAlone::Stop),
        timeout_ms: request.heartbeat_timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS),
        max_bandwidth: request.max_bandwidth,
        pool: request.pool,
        checkpoints_per_second,
        part: ProtectionPart::Primary(primary.record()),
    };
    let connected = session::connect(vms, name, &machine, &entry).await?;
    if let Err(why) = begin(vms, &entry).await {
        connected.control.say(Say::Ended).await;
        return Err(blocked(name, &request.to, &[why]));
    }
    let stored = vms.context.store.put_protection(name, &entry).await;
    stored.map_err(|error| stored_badly(name, &error))?;
    spawn_primary(vms, name, entry, primary, Some(connected));
    Ok(vm)
}

/// Returns the checkpoints a second of a requested protection; `None` if the machine is to be started anew.
fn checkpoints_wanted(request: &ProtectVm) -> Option<u32> {
    let frequency = request.frequency.unwrap_or(DEFAULT_FREQUENCY);
    (!request.restart).then_some(frequency)
}

/// Begins the protection at its witness, if there is one.
async fn begin(vms: &Arc<Vms>, entry: &ProtectionEntry) -> Result<(), String> {
    let Some((witness, of)) = decide::witness(vms, entry)? else {
        return Ok(());
    };
    match witness.swap(&of, Change::BEGIN).await {
        Ok(Swap::Done) => Ok(()),
        Ok(Swap::Stands(_)) => Err(String::from(
            "the witness has another grant of this protection",
        )),
        Err(error) => Err(format!("the witness gives no grant: {error}")),
    }
}

fn check(vms: &Arc<Vms>, name: &str, request: &ProtectVm) -> Result<(), ErrorBody> {
    let invalid = |text: &str, hint: &str| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("VM {name}: {text}")).hint(hint))
    };
    if request.to == vms.context.config.name {
        return invalid("its backup cannot be its own node", "name another node");
    }
    vms.context.peer(&request.to)?;
    if let Some(frequency) = request.frequency {
        if request.restart {
            return invalid(
                "a machine that is started anew has no checkpoints",
                "give --restart or --frequency",
            );
        }
        if !FREQUENCIES.contains(&frequency) {
            return invalid(
                &format!("{frequency} checkpoints a second are not possible"),
                "give 1 to 100",
            );
        }
    }
    match (&request.witness, request.when_alone) {
        (None, None) => {
            return invalid(
                "who decides between two nodes that have lost each other?",
                "give --when-alone stop (nothing goes on before you decide: no write is lost, and the machine may stand \
                 still) or --when-alone continue (it goes on by itself: if only the link is cut, it runs twice, and the \
                 writes of one of them are lost)",
            );
        }
        (Some(_), Some(_)) => {
            return invalid(
                "a witness and --when-alone contradict each other",
                "give one of them",
            );
        }
        (Some(witness), None) => {
            let unusable = |why| ErrorBody::new(ErrorCode::Invalid, format!("VM {name}: {why}"));
            let spec: WitnessSpec = witness.parse().map_err(unusable)?;
            let parts = [&request.to, &vms.context.config.name];
            if let WitnessSpec::Node(third) = &spec
                && parts.contains(&third)
            {
                return invalid(
                    &format!("node '{third}' is one of its two nodes, and cannot be its witness"),
                    "name a third node",
                );
            }
            witness::connect(&spec, &vms.context)?;
        }
        (None, Some(_)) => {}
    }
    let timeout = request.heartbeat_timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS);
    if !TIMEOUTS_MS.contains(&timeout) {
        return invalid("the timeout is not possible", "give 1s to 60s");
    }
    Ok(())
}

fn blocked(vm: &str, to: &str, blockers: &[String]) -> ErrorBody {
    let list = blockers.join("\n- ");
    let text = format!("cannot protect VM {vm} by node '{to}':\n- {list}");
    ErrorBody::new(ErrorCode::Conflict, text)
        .hint("nothing was changed; put this right and try again")
}

fn stored_badly(vm: &str, error: &dyn std::fmt::Display) -> ErrorBody {
    ErrorBody::new(
        ErrorCode::Internal,
        format!("the protection of VM {vm} cannot be stored: {error}"),
    )
    .hint("see the node's log, and whether its data directory has space")
}

/// Ends the protection of a VM, which goes on without a backup. `force` asks no other node.
///
/// # Errors
/// There is none, the machine is the other node's, or nobody decides in time that it is not.
pub async fn unprotect(vms: &Arc<Vms>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let order = |reply| Input::Unprotect { force, reply };
    ordered(vms, name, order).await?.unwrap_or_else(|| {
        let text = format!(
            "the protection of VM {name} has not ended yet: the last word on who has it is not heard"
        );
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
            "see 'godwit vm show'; if the backup is down for good and does not run it, --force ends it all the same",
        ))
    })
}

/// Lets the backup take a VM whose primary is down.
///
/// # Errors
/// This node is not the backup, does not have every write, or the primary is not lost.
pub async fn failover(vms: &Arc<Vms>, name: &str) -> Result<(), ErrorBody> {
    ordered(vms, name, Input::Failover)
        .await?
        .unwrap_or_else(|| {
            let text = format!("VM {name} is not taken over yet");
            Err(ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit vm show'"))
        })
}

/// Gives a protection's task an order. Returns the answer, or `None` if it takes too long.
async fn ordered(
    vms: &Arc<Vms>,
    name: &str,
    order: impl FnOnce(Done) -> Input,
) -> Result<Option<Result<(), ErrorBody>>, ErrorBody> {
    let inputs = vms.protections.inputs_of(name).ok_or_else(|| {
        let known = vms.get(name).err();
        known.unwrap_or_else(|| {
            let text = format!("VM {name} is not protected");
            ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
                "protect it: godwit vm protect {name} --to NODE --restart"
            ))
        })
    })?;
    let (reply, answer) = oneshot::channel();
    // A task that has just ended drops the order.
    let _ = inputs.send(order(reply)).await;
    Ok(match tokio::time::timeout(LEAVE_WITHIN, answer).await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(_)) | Err(_) => None,
    })
}

/// Returns the newest grant that this node knows, and true if the VM is this node's.
async fn word(
    vms: &Vms,
    vm: &str,
    ours: Option<&table::Known>,
    question: fn(oneshot::Sender<(Grant, bool)>) -> Input,
) -> Option<(Grant, bool)> {
    let Some(known) = ours else {
        let holds_disks = vms.find(vm).is_some_and(|vm| vm.lock().holds_disks());
        return Some((Grant::FIRST, holds_disks));
    };
    let (reply, answer) = oneshot::channel();
    let _ = known.inputs.send(question(reply)).await;
    answer.await.ok()
}

/// Takes a connection of the other node of a protection.
pub(crate) async fn welcome(
    vms: &Arc<Vms>,
    mut connection: PeerConnection,
    hello: Hello,
    opening: Opening,
) {
    let id = hello.migration.to_string();
    let known = vms.protections.known(&hello.disk);
    let ours = known
        .as_ref()
        .filter(|it| it.id == id && it.peer == hello.node);
    match opening {
        Opening::Question | Opening::Look => {
            let question = match opening {
                Opening::Look => Input::Look,
                _ => Input::Question,
            };
            if let Some((grant, took)) = word(vms, &hello.disk, ours, question).await {
                // A node without the answer asks again.
                let _ = machine_messages::write(&mut connection, &Hear::Word { grant, took }).await;
            }
        }
        Opening::Beats => {
            if let Some(known) = ours {
                let _ = known
                    .inputs
                    .send(Input::Beats(backup_link(connection)))
                    .await;
            }
        }
        Opening::Checkpoints => {
            if let Some(known) = ours {
                let _ = known.inputs.send(Input::Checkpoints(connection)).await;
            }
        }
        Opening::Offer(offer) => {
            let link = backup_link(connection);
            if let Some(why) = impossible(vms, &hello, &offer) {
                return link.say(Hear::Refused(vec![why])).await;
            }
            let from = hello.node.clone();
            let offered = Offered {
                link,
                offer: *offer,
                from,
            };
            match (ours, &known) {
                (Some(ours), _) => {
                    let _ = ours.inputs.send(Input::Offered(Box::new(offered))).await;
                }
                (None, Some(other)) if other.peer != hello.node || !other.is_backup() => {
                    let text = format!(
                        "node '{}' has another protection of a VM named {}",
                        vms.context.config.name, hello.disk
                    );
                    offered.link.say(Hear::Refused(vec![text])).await;
                }
                (None, other) => {
                    if other.is_some() {
                        // The primary has ended that protection, and could not say so.
                        let _ = unprotect(vms, &hello.disk, true).await;
                    }
                    let entry = backup::entry_of(id, &offered);
                    spawn_backup(vms, &hello.disk, entry, false, Some(offered));
                }
            }
        }
    }
}

/// Returns the reason if an offer cannot be valid.
fn impossible(vms: &Vms, hello: &Hello, offer: &ProtectionOffer) -> Option<String> {
    let disks = offer.machine.disks.len();
    if let Err(error) = godwit_peers::names::check("VM", &hello.disk) {
        return Some(error.message);
    }
    let names = offer.machine.disks.iter().map(|(name, _)| name);
    let same = names.eq(&offer.machine.machine.disks);
    let fits = (1..=MAX_DISKS).contains(&disks) && offer.disk_epochs.len() == disks && same;
    let frequency = offer.checkpoints_per_second;
    let possible = frequency.is_none_or(|frequency| FREQUENCIES.contains(&frequency));
    if !fits || !possible || !TIMEOUTS_MS.contains(&offer.timeout_ms) {
        return Some(String::from("the offer makes no sense"));
    }
    vms.protections.is_full().then(|| {
        format!(
            "node '{}' has as many protections as it can",
            vms.context.config.name
        )
    })
}

/// Starts the task of a primary.
fn spawn_primary(
    vms: &Arc<Vms>,
    vm: &str,
    entry: ProtectionEntry,
    primary: Primary,
    connected: Option<Connected>,
) {
    let (here, orders) = Here::enter(vms, vm, &entry);
    let actor = PrimaryActor::new(here, orders, entry, primary);
    tokio::spawn(actor.run(connected, Vec::new()));
}

/// Starts the task of a backup, which takes the offer first. `stored`: the entry is durable.
fn spawn_backup(
    vms: &Arc<Vms>,
    vm: &str,
    entry: ProtectionEntry,
    stored: bool,
    offered: Option<Offered>,
) {
    let (here, orders) = Here::enter(vms, vm, &entry);
    tokio::spawn(BackupActor::new(here, orders, entry, stored).run(offered));
}

/// Holds the disks and the packets of machines that a backup may have taken. To be called before disks and NICs are served.
pub fn hold_disks(
    vms: &Arc<Vms>,
    stored: &[(String, ProtectionEntry)],
    machines: &[(String, godwit_context::store::machine::VmEntry)],
) {
    for (name, entry) in stored {
        if entry.primary().is_none_or(|record| record.alone) {
            continue;
        }
        if entry.checkpoints_per_second.is_some() {
            vms.protections.hold_packets(name, true);
        }
        let machine = machines.iter().find(|(machine, _)| machine == name);
        let disks = machine.map(|(_, entry)| entry.machine.disks.as_slice());
        for disk in disks.unwrap_or_default() {
            if let Some(disk) = vms.disks.find(disk) {
                godwit_disks::disks::following::hold(&disk);
            }
        }
    }
}

/// Takes up the stored protections, once the machines are found.
pub fn recover(vms: &Arc<Vms>, stored: Vec<(String, ProtectionEntry)>) {
    for (name, entry) in stored {
        let Some(record) = entry.primary().copied() else {
            spawn_backup(vms, &name, entry, true, None);
            continue;
        };
        let (primary, orders): (Primary, Vec<Order>) = Primary::restarted(record);
        let (here, inputs) = Here::enter(vms, &name, &entry);
        tokio::spawn(PrimaryActor::new(here, inputs, entry, primary).recover(orders));
    }
}

/// Tells a protection of an event of a disk's engine.
pub async fn disk_event(vms: &Arc<Vms>, disk: &str, event: &Event) {
    if let Event::CheckpointMarked { migration, number } = event {
        let (disk, migration) = (disk.to_owned(), migration.to_string());
        return vms.protections.marked(Mark {
            disk,
            migration,
            number: *number,
        });
    }
    let (migration, news) = match event {
        Event::Followed { migration } => (migration, News::Followed),
        Event::Follows { migration, .. } => (migration, News::Follows),
        Event::Severed { migration, reason }
        | Event::MigrationAborted {
            migration, reason, ..
        }
        | Event::ReceiveAborted { migration, reason } => (migration, News::Lost(*reason)),
        _ => return,
    };
    if let Some(inputs) = vms.protections.with_disk(disk) {
        let input = Input::Disk(disk.to_owned(), migration.to_string(), news);
        // Spawned: a protection's task may wait for the engine, whose events the caller handles.
        tokio::spawn(async move { inputs.send(input).await });
    }
}

fn activity(disk: &Arc<Disk>) -> Activity {
    disk.lock().activity
}
