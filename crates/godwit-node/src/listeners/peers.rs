//! Accepts connections of other nodes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::ProtectionId;
use godwit_core::wire::{Features, Greeting, Hello, Purpose, Refusal, RefusalCode, TrafficClass};
use godwit_io::tls::Handshake;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::listeners::cannot_take;
use crate::listeners::handshake_slots::HandshakeSlots;
use crate::node::Node;
use crate::owners;
use godwit_disks::images::peers::giving;
use godwit_disks::migrations::afterwards::{forward, pulling, resolve};
use godwit_disks::migrations::incoming;
use godwit_machines::protect::witness::serve::serve;
use godwit_machines::vms;
use godwit_peers::names;
use godwit_peers::open::SocketNumber;
use godwit_peers::tls::{NodeTls, belongs_to};
use godwit_peers::transport::Transport;
use godwit_peers::transport::secure::shake_hands;
use godwit_peers::{GREETING_TIMEOUT, PeerConnection, greeting};
use godwit_processes::incoming::serve::serve as serve_process;

/// Unfinished handshakes and greetings, at most.
const MAX_HANDSHAKES: usize = 64;

/// Time for a refused client to notice the refusal, and bytes read meanwhile.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: u64 = 64 << 10;

/// Accepts connections until the node is closing.
pub(crate) async fn listen(node: Arc<Node>, listener: TcpListener, tls: Option<NodeTls>) {
    let slots = HandshakeSlots::new(MAX_HANDSHAKES);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = node.context.closed() => return,
        };
        match accepted {
            Ok((socket, address)) => {
                if tls.is_none() && !address.ip().is_loopback() {
                    continue;
                }
                let (node, tls) = (Arc::clone(&node), tls.clone());
                slots.spawn(async move {
                    if let Err(error) = welcome(&node, socket, tls.as_ref()).await {
                        tracing::debug!(%address, %error, "turned a connection away");
                    }
                });
            }
            Err(error) => cannot_take("a connection of another node", &error).await,
        }
    }
}

/// Identifies the node and the purpose of a connection.
async fn welcome(
    node: &Arc<Node>,
    socket: TcpStream,
    tls: Option<&NodeTls>,
) -> Result<(), greeting::GreetingError> {
    // Greetings are small and wait for each other; a failure here only costs speed.
    let _ = socket.set_nodelay(true);
    let mut connection = match tls {
        None => Transport::Plain(socket),
        Some(tls) => accept_tls(socket, tls).await?,
    };
    let Greeting::Hello(hello) = greeting::read(&mut connection).await? else {
        return Err(greeting::GreetingError::Unexpected);
    };
    match dispatch(node, &connection, tls, &hello) {
        Ok((reply, action)) => action.run(reply, node, connection, hello).await,
        Err(refusal) => {
            tracing::warn!(peer = hello.node, disk = hello.disk, %refusal, "refused a connection");
            greeting::refuse(&mut connection, refusal).await;
            Ok(())
        }
    }
}

async fn accept_tls(socket: TcpStream, tls: &NodeTls) -> io::Result<PeerConnection> {
    let number = SocketNumber::of(&socket);
    let handshake =
        Handshake::server(Arc::clone(&tls.current().nodes)).map_err(io::Error::other)?;
    match tokio::time::timeout(GREETING_TIMEOUT, shake_hands(handshake, socket)).await {
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
        Ok(Ok(stream)) => {
            tls.opened(number, Some(stream.certificates()))?;
            Ok(Transport::Tls(Box::new(stream)))
        }
        Ok(Err((error, mut socket))) => {
            // The client's first bytes stay unread. They must not reset the connection before the client has the TLS
            // alert with the reason.
            let _ = socket.shutdown().await;
            let reading = async {
                let mut rest = socket.take(LINGER_BYTES);
                tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
            };
            let _ = tokio::time::timeout(LINGER, reading).await;
            Err(error)
        }
    }
}

/// The purpose of a welcomed connection.
enum Action {
    /// A check that this node answers.
    Probe,
    /// An offer of a disk follows.
    Offer,
    /// Belongs to an accepted offer.
    Join(tokio::sync::mpsc::Sender<(TrafficClass, PeerConnection)>),
    /// A question about the owner of a disk.
    Resolve(resolve::Answer),
    /// Forwards I/O of clients that stayed at the source.
    Forward(Arc<godwit_disks::disks::disk::Disk>),
    /// Pulls chunks that the disk's owner lacks.
    Pull(Arc<godwit_disks::disks::disk::Disk>),
    /// Requests for parts of images follow.
    Give(tokio::sync::OwnedSemaphorePermit),
    /// An offer of a VM follows.
    Machine,
    /// Carries the memory of a VM whose offer was accepted.
    Memory(tokio::sync::mpsc::Sender<PeerConnection>),
    /// Carries a moving process.
    Process,
    /// A question about the grant of a protected machine follows.
    Witness,
}

fn identity(text: String) -> Refusal {
    Refusal {
        code: RefusalCode::Identity,
        text,
    }
}

fn dispatch(
    node: &Arc<Node>,
    connection: &PeerConnection,
    tls: Option<&NodeTls>,
    hello: &Hello,
) -> Result<(godwit_core::wire::Reply, Action), Refusal> {
    let reply = greeting::welcome(
        hello,
        &node.context.config.name,
        node.context.config.features(),
    )?;
    check_identity(node, connection, tls, hello)?;
    let action = match (hello.purpose, hello.class) {
        (Purpose::Resolve, TrafficClass::Control) if hello.disk.is_empty() => Action::Probe,
        (Purpose::Migrate, TrafficClass::Control) => Action::Offer,
        (Purpose::Migrate, TrafficClass::Sync | TrafficClass::Copy) => {
            Action::Join(node.migrations.gatherings.join(hello)?)
        }
        (Purpose::Resolve, TrafficClass::Control) => {
            Action::Resolve(resolve::decide(&node.migrations, hello)?)
        }
        (Purpose::Machine, TrafficClass::Control) => Action::Machine,
        (Purpose::Process, TrafficClass::Control) => Action::Process,
        (Purpose::Witness, TrafficClass::Control) => Action::Witness,
        (Purpose::Machine, TrafficClass::Copy) => {
            Action::Memory(node.vms.memory_doors.find(hello)?)
        }
        (Purpose::Forward, TrafficClass::Sync) => {
            Action::Forward(forward::admit(&node.migrations, hello)?)
        }
        (Purpose::Pull, TrafficClass::Pull) => {
            Action::Pull(pulling::admit(&node.migrations, hello)?)
        }
        (Purpose::Image, TrafficClass::Pull) => Action::Give(giving::admit(&node.images)?),
        _ => {
            return Err(Refusal {
                code: RefusalCode::Invalid,
                text: String::from("purpose and traffic class do not go together"),
            });
        }
    };
    Ok((reply, action))
}

/// Checks that the dialling node is the peer that it claims to be.
fn check_identity(
    node: &Arc<Node>,
    connection: &PeerConnection,
    tls: Option<&NodeTls>,
    hello: &Hello,
) -> Result<(), Refusal> {
    if let Some(tls) = tls {
        let chain = connection.certificates();
        let named = chain
            .and_then(<[_]>::first)
            .is_some_and(|own| belongs_to(own, &hello.node));
        let holder = tls.holder(chain);
        if !named || !holder.is_node() {
            return Err(identity(format!(
                "the certificate of {holder} is not one of a node named {:?}",
                hello.node
            )));
        }
    }
    let invalid = |text: String| Refusal {
        code: RefusalCode::Invalid,
        text,
    };
    names::check("node", &hello.node).map_err(|error| invalid(error.message))?;
    if hello.node == node.context.config.name {
        return Err(invalid(format!(
            "node '{}' was dialled by itself: check the peers' addresses",
            hello.node
        )));
    }
    // The authority vouches for a name, but does not say which nodes may bring disks and run VMs here.
    let own = &node.context.config.name;
    if node.context.peer(&hello.node).is_err() {
        return Err(identity(format!(
            "node '{own}' takes connections of its peers only, and '{}' is none of them: start node \
             '{own}' with --peer {}=HOST:PORT",
            hello.node, hello.node
        )));
    }
    Ok(())
}

impl Action {
    /// Answers, and hands the connection on: the work that follows takes longer than a handshake may.
    async fn run(
        self,
        reply: godwit_core::wire::Reply,
        node: &Arc<Node>,
        mut connection: PeerConnection,
        hello: Hello,
    ) -> Result<(), greeting::GreetingError> {
        if let Self::Resolve(answer) = self {
            godwit_context::spawn(resolve::take_question(
                Arc::clone(&node.migrations),
                connection,
                hello,
                reply,
                answer,
            ));
            return Ok(());
        }
        let agreed = reply.features();
        greeting::write(&mut connection, &Greeting::Reply(reply)).await?;
        let connection = godwit_peers::after_welcome(connection, hello.class, agreed)?;
        match self {
            Self::Probe if agreed.contain(Features::OWNERS) => {
                godwit_context::spawn(owners::answer(Arc::clone(node), connection, hello.node));
            }
            Self::Probe | Self::Resolve(_) => {}
            Self::Offer => {
                godwit_context::spawn(incoming::take_offer(
                    Arc::clone(&node.migrations),
                    connection,
                    hello,
                ));
            }
            Self::Join(streams) => {
                // The migration may have ended meanwhile: the connection is then closed.
                let _ = streams.send((hello.class, connection)).await;
            }
            Self::Machine => {
                godwit_context::spawn(vms::take_machine(Arc::clone(&node.vms), connection, hello));
            }
            Self::Memory(door) => {
                // The VM's move may have ended meanwhile: the connection is then closed.
                let _ = door.send(connection).await;
            }
            Self::Process => {
                let id = hello.migration.to_string();
                let processes = Arc::clone(&node.processes);
                godwit_context::spawn(serve_process(processes, connection, hello.node, id));
            }
            Self::Witness => {
                let id = ProtectionId(hello.migration.0);
                godwit_context::spawn(serve(Arc::clone(&node.context), connection, hello.node, id));
            }
            Self::Forward(disk) => {
                godwit_context::spawn(forward::serve(disk, connection, hello.node));
            }
            Self::Give(place) => {
                godwit_context::spawn(giving::serve(
                    Arc::clone(&node.images),
                    connection,
                    hello.node,
                    place,
                ));
            }
            Self::Pull(disk) => {
                godwit_context::spawn(pulling::serve(disk, connection, hello));
            }
        }
        Ok(())
    }
}
