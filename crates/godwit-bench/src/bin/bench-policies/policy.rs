//! The ways in which a disk comes to be used at the other node.

/// How a disk is moved, or that it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Policy {
    /// How the report calls it.
    pub(crate) name: &'static str,
    /// What `godwit migrate` is given; nothing for a disk that is at the other node from the start.
    pub(crate) words: Option<&'static [&'static str]>,
}

const fn moved(name: &'static str, words: &'static [&'static str]) -> Policy {
    Policy {
        name,
        words: Some(words),
    }
}

pub(crate) const PUSH_PULL: Policy = moved("push-pull", &["--policy", "push-pull"]);
pub(crate) const MIRROR: Policy = moved("mirror", &["--policy", "mirror"]);
pub(crate) const POST_COPY: Policy = moved("post-copy", &["--policy", "post-copy"]);
/// Rounds without an end, as everybody's pre-copy makes them: Godwit's own would send writes to both nodes after eight.
pub(crate) const PRE_COPY: Policy = moved(
    "pre-copy",
    &["--policy", "pre-copy", "--max-rounds", "1000000"],
);
/// Godwit's pre-copy as it is without options.
pub(crate) const ROUNDS: Policy = moved("pre-copy", &["--policy", "pre-copy"]);
pub(crate) const DOUBLE_WRITE: Policy = moved("double-write", &["--policy", "double-write"]);
pub(crate) const AUTO: Policy = moved("auto", &[]);
/// The disk is at the other node, and all I/O crosses the link: what a shared file system would be.
pub(crate) const REMOTE: Policy = Policy {
    name: "remote",
    words: None,
};

/// Those of the table, each of which has a turn in a round.
pub(crate) const ALL: [Policy; 7] = [
    PUSH_PULL,
    MIRROR,
    POST_COPY,
    PRE_COPY,
    REMOTE,
    DOUBLE_WRITE,
    AUTO,
];

/// Those with which many machines move at once.
pub(crate) const OF_MANY: [Policy; 4] = [PUSH_PULL, MIRROR, POST_COPY, PRE_COPY];

/// What a node has to choose from, and its choice.
pub(crate) const OF_CHOICE: [Policy; 6] =
    [PUSH_PULL, MIRROR, POST_COPY, ROUNDS, DOUBLE_WRITE, AUTO];
