//! Two nodes, their stored state, and all possible events.

use godwit_core::authority::{Authority, AuthorityRecord, Effect, Ownership};
use godwit_core::event::AbortReason;
use godwit_core::units::MigrationId;
use godwit_core::wire::Message;
use stateright::{Model, Property};

const CRASHES: u8 = 2;
/// A step reported by the model but not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    AcceptedNotStored,
    RelinquishedNotStored,
    NotFlushed,
    /// A node forgets its debt right after giving the disk away.
    DebtForgotten,
    /// A disk leaves without its image as if whole.
    ImageForgotten,
    /// A node that lacks blocks in two places claims to have its source's blocks, too early.
    RepaidEarly,
    /// The first node's stored state is put back to the state before any move.
    PutBack,
}

/// The part of the disk left behind by a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leaves {
    Nothing,
    /// A part at the source, owed by the source.
    APart,
    /// The blocks in the disk's image, which no node owes.
    ItsImage,
    /// Both.
    ItsImageAndAPart,
}

impl Leaves {
    const fn an_image(self) -> bool {
        matches!(self, Self::ItsImage | Self::ItsImageAndAPart)
    }
}

pub(crate) struct TwoNodes {
    pub(crate) migrations: u8,
    /// Part left behind by each migration.
    pub(crate) leaves: [Leaves; 2],
    pub(crate) planted: Planted,
}

impl TwoNodes {
    /// Returns true if the disk is created from an image of which no block is here.
    fn is_on_image(&self) -> bool {
        self.leaves[0].an_image()
    }
}

/// Id under which the disk lacks its image before the first move.
const CREATION: MigrationId = MigrationId([0xFF; 16]);

/// Messages stay in the network for ever once sent. Delivery at any time, again, or never, covers loss, repetition and
/// reordering.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    nodes: [Node; 2],
    network: Network,
    started: u8,
    crashes: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    authority: Authority,
    durable: AuthorityRecord,
    storing: Option<AuthorityRecord>,
    flushing: bool,
    image: Image,
    /// True if blocks of the disk's image are not here.
    needs_image: bool,
    /// True if, beside the image, blocks of the source are not here. As durable as the disk.
    needs_source: bool,
}

/// The part of a node's disk that survives a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Image {
    Durable,
    /// Durable after the next flush.
    Received,
    /// Lost in a crash before the flush.
    Lost,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Start {
        source: usize,
        leaves: Leaves,
    },
    /// The last missing block of a node is durably on its disk.
    Arrived {
        node: usize,
    },
    /// The last block held only by a node's source is durably on its disk, but not all of the image.
    Repaid {
        node: usize,
    },
    /// A node announces a debt.
    TellDebt {
        node: usize,
    },
    Deliver {
        to: usize,
        message: Message,
    },
    Stored {
        node: usize,
    },
    /// The store refused, and the node says so.
    NotStored {
        node: usize,
    },
    Flushed {
        node: usize,
    },
    Cancel {
        node: usize,
    },
    StopReceiving {
        node: usize,
    },
    Remind {
        node: usize,
    },
    Crash {
        node: usize,
    },
    PutBack,
}

/// All messages ever sent, in an order independent of the order of sending, so that equal states look equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Network(Vec<(usize, Message)>);

impl Network {
    fn send(&mut self, to: usize, message: Message) {
        let key = |to: usize, message: &Message| {
            let (header, inline, _) = message.encode();
            (to, header.encode(), inline)
        };
        let wanted = key(to, &message);
        if let Err(at) = self
            .0
            .binary_search_by_key(&wanted, |(to, message)| key(*to, message))
        {
            self.0.insert(at, (to, message));
        }
    }
}

fn migration(number: u8) -> MigrationId {
    MigrationId([number; 16])
}

impl Node {
    fn new(record: AuthorityRecord, image: Image, needs_image: bool) -> Self {
        Self {
            authority: Authority::new(record),
            durable: record,
            storing: None,
            flushing: false,
            image,
            needs_image,
            needs_source: false,
        }
    }
}

impl State {
    fn apply(&mut self, node: usize, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    self.network.send(1 - node, message);
                }
                Effect::Flush => self.nodes[node].flushing = true,
                Effect::Persist(record) => self.nodes[node].storing = Some(record),
                Effect::Relinquished(_)
                | Effect::Departed(_)
                | Effect::Owner(_)
                | Effect::OwesNothing(_)
                | Effect::ReceiveAborted(..) => {}
                Effect::Whole(migration) => {
                    self.network.send(1 - node, Message::Whole { migration });
                }
            }
        }
    }

    fn take(&mut self, step: &Step, planted: Planted) {
        match *step {
            Step::Start { source, leaves } => {
                self.started += 1;
                let migration = migration(self.started);
                if self.nodes[1 - source].authority.receive(migration) {
                    self.nodes[1 - source].image = Image::Received;
                    self.nodes[1 - source].needs_image = leaves.an_image();
                    self.nodes[1 - source].needs_source = leaves == Leaves::ItsImageAndAPart;
                    let source_has = &mut self.nodes[source].authority;
                    let tells = planted != Planted::ImageForgotten;
                    let effects = match leaves {
                        Leaves::Nothing => source_has.prepare(migration, false),
                        Leaves::APart => source_has.prepare(migration, true),
                        Leaves::ItsImage => source_has.prepare_on_image(migration, tells, false),
                        Leaves::ItsImageAndAPart => {
                            source_has.prepare_on_image(migration, true, true)
                        }
                    };
                    self.apply(source, effects);
                }
            }
            Step::Arrived { node } => {
                let effects = self.nodes[node].authority.whole();
                if !effects.is_empty() {
                    self.nodes[node].needs_image = false;
                    self.nodes[node].needs_source = false;
                }
                self.apply(node, effects);
            }
            Step::Repaid { node } => {
                let it = &mut self.nodes[node];
                it.needs_source = planted == Planted::RepaidEarly;
                if let Some(migration) = it.authority.lacks() {
                    self.network.send(1 - node, Message::Whole { migration });
                }
            }
            Step::TellDebt { node } => {
                if let Some(migration) = self.nodes[node].authority.owes() {
                    let max_bandwidth = None;
                    let owes = Message::Owes {
                        migration,
                        max_bandwidth,
                    };
                    self.network.send(1 - node, owes);
                }
            }
            Step::Deliver { to, message } => {
                let effects = self.nodes[to].authority.handle(&message);
                self.apply(to, effects);
            }
            Step::Stored { node } => {
                let it = &mut self.nodes[node];
                let Some(record) = it.storing.take() else {
                    return;
                };
                let skipped = match record.ownership {
                    Ownership::Accepted { .. } => planted == Planted::AcceptedNotStored,
                    Ownership::Relinquished { .. } => planted == Planted::RelinquishedNotStored,
                    _ => false,
                };
                if !skipped {
                    it.durable = record;
                }
                if planted == Planted::DebtForgotten && record.owes().is_some() {
                    it.durable.remainder = None;
                }
                let effects = it.authority.persisted();
                self.apply(node, effects);
            }
            Step::NotStored { node } => {
                if self.nodes[node].authority.keep() {
                    self.nodes[node].storing = None;
                }
            }
            Step::Flushed { node } => {
                let it = &mut self.nodes[node];
                it.flushing = false;
                if it.image == Image::Received && planted != Planted::NotFlushed {
                    it.image = Image::Durable;
                }
                let effects = self.nodes[node].authority.flushed();
                self.apply(node, effects);
            }
            Step::Cancel { node } => {
                self.nodes[node].authority.cancel();
            }
            Step::StopReceiving { node } => {
                let effects = self.nodes[node]
                    .authority
                    .stop_receiving(AbortReason::PeerLost);
                self.apply(node, effects);
            }
            Step::Remind { node } => {
                if let Some(message) = self.nodes[node].authority.remind() {
                    self.network.send(1 - node, message);
                }
            }
            Step::PutBack => {
                self.crashes += 1;
                self.nodes[0] = Node::new(AuthorityRecord::created(), Image::Durable, false);
            }
            Step::Crash { node } => {
                self.crashes += 1;
                let it = &self.nodes[node];
                let image = match it.image {
                    Image::Durable => Image::Durable,
                    Image::Received | Image::Lost => Image::Lost,
                };
                self.nodes[node] = Node {
                    needs_source: it.needs_source,
                    ..Node::new(it.durable, image, it.needs_image)
                };
            }
        }
    }

    fn owners(&self) -> usize {
        self.nodes
            .iter()
            .filter(|node| node.authority.may_serve())
            .count()
    }

    /// Counts the nodes with a stored ownership that serve.
    fn settled_owners(&self) -> usize {
        let owns = |node: &&Node| {
            let stored = node.authority.record().ownership == Ownership::Serving;
            stored && node.authority.may_serve()
        };
        self.nodes.iter().filter(owns).count()
    }

    /// Returns true if the other node's record forbids this node to serve.
    fn is_surpassed(&self, node: usize) -> bool {
        let record = self.nodes[node].authority.record();
        record.is_surpassed_by(&self.nodes[1 - node].durable)
    }

    /// Returns true if exactly one node serves, and none is in doubt, once the nodes are up, talk, and undecided
    /// attempts time out.
    fn resolves(&self) -> bool {
        let mut state = self.clone();
        for _ in 0..8 {
            for node in 0..2 {
                state.take(&Step::Flushed { node }, Planted::Nothing);
                state.take(&Step::Stored { node }, Planted::Nothing);
            }
            state.network = Network::default();
            for node in 0..2 {
                state.take(&Step::Cancel { node }, Planted::Nothing);
                state.take(&Step::StopReceiving { node }, Planted::Nothing);
                state.take(&Step::Remind { node }, Planted::Nothing);
            }
            for (to, message) in state.network.clone().0 {
                state.take(&Step::Deliver { to, message }, Planted::Nothing);
            }
            for (to, message) in state.network.clone().0 {
                state.take(&Step::Deliver { to, message }, Planted::Nothing);
            }
        }
        state.owners() == 1
            && state
                .nodes
                .iter()
                .all(|node| node.authority.in_doubt().is_none())
    }
}

impl Model for TwoNodes {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let created = AuthorityRecord {
            remainder: self.is_on_image().then_some(CREATION),
            ..AuthorityRecord::created()
        };
        vec![State {
            nodes: [
                Node::new(created, Image::Durable, self.is_on_image()),
                Node::new(AuthorityRecord::vacant(), Image::Durable, false),
            ],
            network: Network::default(),
            started: 0,
            crashes: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (to, message) in &state.network.0 {
            steps.push(Step::Deliver {
                to: *to,
                message: *message,
            });
        }
        for (node, it) in state.nodes.iter().enumerate() {
            if it.authority.may_serve() && !it.needs_source && state.started < self.migrations {
                let leaves = self.leaves[usize::from(state.started)];
                steps.push(Step::Start {
                    source: node,
                    leaves,
                });
            }
            if it.authority.record().lacks().is_some() {
                steps.push(Step::Arrived { node });
            }
            if it.needs_source && it.authority.may_serve() {
                steps.push(Step::Repaid { node });
            }
            if it.authority.owes().is_some() {
                steps.push(Step::TellDebt { node });
            }
            if it.storing.is_some() {
                steps.push(Step::Stored { node });
                steps.push(Step::NotStored { node });
            }
            if it.flushing {
                steps.push(Step::Flushed { node });
            }
            steps.push(Step::Cancel { node });
            steps.push(Step::StopReceiving { node });
            steps.push(Step::Remind { node });
            if state.crashes < CRASHES {
                steps.push(Step::Crash { node });
            }
        }
        if self.planted == Planted::PutBack && state.crashes < CRASHES {
            steps.push(Step::PutBack);
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        next.take(&step, self.planted);
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("at most one owner", |_, state: &State| state.owners() <= 1),
            Property::always(
                "whoever owns the disk has flushed it",
                |_, state: &State| {
                    let mut owners = state.nodes.iter().filter(|it| it.authority.may_serve());
                    owners.all(|it| it.image == Image::Durable)
                },
            ),
            Property::always(
                "an epoch is stored before it is served",
                |_, state: &State| {
                    let mut owners = state.nodes.iter().filter(|it| it.authority.may_serve());
                    owners.all(|it| {
                        it.durable.epoch == it.authority.record().epoch
                            && matches!(
                                it.durable.ownership,
                                Ownership::Serving | Ownership::Accepted { .. }
                            )
                    })
                },
            ),
            Property::always(
                "an owner that has not what is in its image fetches it",
                |_, state: &State| {
                    let mut owners = state.nodes.iter().filter(|it| it.authority.may_serve());
                    owners.all(|it| !it.needs_image || it.authority.lacks().is_some())
                },
            ),
            Property::always(
                "what a node lacks is kept for it",
                |model: &Self, state: &State| {
                    (0..2).all(|node| {
                        let Some(migration) = state.nodes[node].authority.lacks() else {
                            return true;
                        };
                        if model.is_on_image() && !state.nodes[node].needs_source {
                            return true;
                        }
                        let other = &state.nodes[1 - node];
                        other.durable.owes() == Some(migration)
                            && other.authority.receiving().is_none()
                    })
                },
            ),
            Property::always(
                "an owner by right is never surpassed",
                |model: &Self, state: &State| {
                    model.planted == Planted::PutBack
                        || (0..2).all(|node| !state.is_surpassed(node))
                },
            ),
            Property::always("of two owners one is surpassed", |_, state: &State| {
                state.settled_owners() < 2 || (0..2).any(|node| state.is_surpassed(node))
            }),
            Property::always("every doubt can be resolved", |_, state: &State| {
                state.resolves()
            }),
            Property::sometimes("the disk moves", |_, state: &State| {
                state.nodes[1].authority.may_serve()
            }),
            Property::sometimes("it is served before that is stored", |_, state: &State| {
                state.nodes.iter().any(|it| {
                    it.authority.may_serve()
                        && matches!(it.durable.ownership, Ownership::Accepted { .. })
                })
            }),
            Property::sometimes("the disk comes back", |_, state: &State| {
                let record = state.nodes[0].authority.record();
                state.nodes[0].authority.may_serve() && record.epoch.0 == 3
            }),
            Property::sometimes(
                "a debt is known to be paid",
                |model: &Self, state: &State| {
                    let gave =
                        matches!(state.nodes[0].durable.ownership, Ownership::Departed { .. });
                    let owed = state.nodes[0].durable.remainder.is_some();
                    let whole = state.nodes[1].durable.lacks().is_none();
                    model.leaves[0] != Leaves::APart
                        || gave && !owed && whole && state.nodes[1].authority.may_serve()
                },
            ),
            Property::sometimes(
                "the disk leaves before its image is here, and nobody owes it",
                |model: &Self, state: &State| {
                    let [gave, has] = &state.nodes;
                    let left = matches!(gave.durable.ownership, Ownership::Departed { .. });
                    let owes = gave.durable.remainder.is_some();
                    !model.is_on_image() || left && !owes && has.durable.lacks().is_some()
                },
            ),
            Property::sometimes("a doubt is left open", |_, state: &State| {
                state.nodes[1].authority.in_doubt().is_some() && state.owners() == 0
            }),
        ]
    }
}
