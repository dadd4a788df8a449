//! A disk that has moved on to a third node, which lacks a part, before the first node has heard that the second lacks
//! nothing: both owe, each by another migration.

use godwit_core::Controller;
use godwit_core::action::Action;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{Epoch, MigrationId, Time};
use godwit_core::wire::{Message, TrafficClass};

use crate::owner::{CAPACITY, LIMITS};

const FIRST: MigrationId = MigrationId([1; 16]);
const SECOND: MigrationId = MigrationId([2; 16]);
const NOW: Time = Time(0);

fn owing(epoch: u64, migration: MigrationId) -> Controller {
    let record = AuthorityRecord {
        epoch: Epoch(epoch),
        ownership: Ownership::Departed { migration },
        remainder: Some(migration),
    };
    Controller::new(LIMITS, CAPACITY, record)
}

/// Returns a node's messages on the pull connection. The node's records are durable at once.
fn said(node: &mut Controller) -> Vec<Message> {
    let mut said = Vec::new();
    while let Some(action) = node.poll_action() {
        match action {
            Action::Send {
                class: TrafficClass::Pull,
                message,
            } => said.push(message),
            Action::Persist { .. } => node.handle_persisted(NOW),
            _ => {}
        }
    }
    said
}

fn hears(node: &mut Controller, message: Message) -> Vec<Message> {
    node.handle_message(NOW, TrafficClass::Pull, message, None);
    said(node)
}

#[test]
fn each_debt_is_paid_to_whom_it_is_owed() {
    let (mut first, mut second) = (owing(1, FIRST), owing(2, SECOND));
    first.handle_pull_up(NOW, true);
    second.handle_pull_up(NOW, false);
    let owes = [Message::Owes {
        migration: FIRST,
        max_bandwidth: None,
    }];
    assert_eq!(said(&mut first), owes);
    assert_eq!(said(&mut second), [], "it owes to another");
    let whole = Message::Whole { migration: FIRST };
    assert_eq!(hears(&mut second, owes[0]), [whole]);
    // A debt claimed on a dialled connection, as by earlier versions, is not an owner's answer.
    let owes_other = Message::Owes {
        migration: SECOND,
        max_bandwidth: None,
    };
    assert_eq!(hears(&mut first, owes_other), []);
    assert_eq!(hears(&mut first, whole), []);
    assert_eq!(first.record().remainder, None);
    assert_eq!(second.record().remainder, Some(SECOND));
    // The owner is dialled, and told.
    second.handle_pull_up(NOW, true);
    assert_eq!(said(&mut second), [owes_other]);
}

#[test]
fn an_owner_that_has_shown_life_and_is_silent_since_is_not_there() {
    const SECOND_LATER: Time = Time(1_000_000_000);
    const LATER: Time = Time(10_000_000_000);
    let mut source = owing(1, FIRST);
    assert!(!source.owner_is_there());
    source.handle_pull_up(NOW, true);
    // An owner of an earlier version gives no signs of life.
    source.handle_timer(LATER);
    assert!(source.owner_is_there());
    source.handle_pull_up(NOW, true);
    source.handle_message(NOW, TrafficClass::Pull, Message::Ping, None);
    source.handle_timer(SECOND_LATER);
    assert!(source.owner_is_there());
    source.handle_timer(LATER);
    assert!(!source.owner_is_there());
    source.handle_message(LATER, TrafficClass::Pull, Message::Ping, None);
    assert!(source.owner_is_there());
    source.handle_pull_lost(LATER);
    assert!(!source.owner_is_there());
}
