//! `ib_write_bw` with any number of queue pairs, for the demo and the benchmarks.

use std::borrow::Cow;

use super::Program;

/// Returns `ib_write_bw` over this many queue pairs, with `depth` writes of `bytes` bytes in flight on each and at
/// least `messages` on each altogether. At most 100 may be in flight.
///
/// The number of messages is a multiple of `depth`. Of small messages perftest has every `depth`th signalled, counts
/// `depth` for each completion, and stops polling once the sum reaches the number of all messages. With another number
/// perftest counts too many at the end of a queue pair. Some of several queue pairs then wait for ever for unpolled
/// completions, with or without a move.
pub fn write_bw(queue_pairs: u32, depth: u32, bytes: u32, messages: u32) -> Program {
    let messages = messages.next_multiple_of(depth);
    Program {
        name: Cow::Owned(format!("ib_write_bw -q {queue_pairs}")),
        command: Cow::Owned(format!(
            "ib_write_bw -d rxe0 -F -x 1 -q {queue_pairs} -t {depth} -s {bytes} -n {messages}"
        )),
        work_seconds: 0.5,
        silent_server: false,
    }
}

/// Returns [`write_bw`] with enough small messages to last into the move: the more queue pairs, the longer the
/// preparations of a move take.
pub fn write_bw_through_a_move(queue_pairs: u32) -> Program {
    write_bw(queue_pairs, 4, 4096, 24_000 / queue_pairs + 400)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perftest_counts_no_message_too_many() {
        for (queue_pairs, depth, messages) in [(64, 4, 375), (1, 4, 24_000), (256, 64, 93)] {
            let command = write_bw(queue_pairs, depth, 4096, messages).command;
            let (_, last) = command.rsplit_once("-n ").unwrap();
            let last: u32 = last.parse().unwrap();
            assert!(last >= messages && last < messages + depth, "{command}");
            assert_eq!(last % depth, 0, "{command}");
        }
    }
}
