//! The ways to use a disk at the other node.

/// The way to move a disk, or to use it without a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) name: &'static str,
    /// Options of `godwit migrate`; `None` for a disk that is at the other node from the start.
    pub(super) words: Option<&'static [&'static str]>,
}

const fn moved(name: &'static str, words: &'static [&'static str]) -> Policy {
    Policy {
        name,
        words: Some(words),
    }
}

pub(super) const PUSH_PULL: Policy = moved("push-pull", &["--policy", "push-pull"]);
pub(super) const MIRROR: Policy = moved("mirror", &["--policy", "mirror"]);
pub(super) const POST_COPY: Policy = moved("post-copy", &["--policy", "post-copy"]);
/// Pre-copy with unlimited rounds, like other implementations: Godwit's own switches to double writes after eight.
pub(super) const PRE_COPY: Policy = moved(
    "pre-copy",
    &["--policy", "pre-copy", "--max-rounds", "1000000"],
);
/// Godwit's pre-copy with default options.
pub(super) const ROUNDS: Policy = moved("pre-copy", &["--policy", "pre-copy"]);
pub(super) const DOUBLE_WRITE: Policy = moved("double-write", &["--policy", "double-write"]);
pub(super) const AUTO: Policy = moved("auto", &[]);
/// The disk is at the other node and all I/O crosses the link, as with a shared file system.
pub(super) const REMOTE: Policy = Policy {
    name: "remote",
    words: None,
};

/// Policies of the table, each with a turn in every round.
pub(super) const ALL: [Policy; 7] = [
    PUSH_PULL,
    MIRROR,
    POST_COPY,
    PRE_COPY,
    REMOTE,
    DOUBLE_WRITE,
    AUTO,
];

/// Policies of the scene with many machines.
pub(super) const OF_MANY: [Policy; 4] = [PUSH_PULL, MIRROR, POST_COPY, PRE_COPY];

/// Policies that a node chooses from, and its own choice.
pub(super) const OF_CHOICE: [Policy; 6] =
    [PUSH_PULL, MIRROR, POST_COPY, ROUNDS, DOUBLE_WRITE, AUTO];
