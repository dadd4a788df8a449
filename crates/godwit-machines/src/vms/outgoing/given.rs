//! Source: the word on a VM's handover, for a destination that has lost the connections for this message.

use godwit_core::wire::Hello;

use crate::vms::Vms;
use crate::vms::messages::Word;
use godwit_api::VmMigrationPhase as Phase;
use godwit_context::store::machine::{VmEntry, VmMark};

/// Returns the word on the move that `hello` names, for the VM of this id.
pub(in crate::vms) fn word(vms: &Vms, hello: &Hello, id: &str) -> Word {
    let migration = hello.migration.to_string();
    if let Some(vm) = vms.find(&hello.disk) {
        let inner = vm.lock();
        let leaves = inner.activity.migration() == Some(hello.migration);
        if let Some(word) = stored(&inner.entry, (&migration, id, &hello.node), leaves) {
            return word;
        }
    }
    // The VM was forgotten here, or another VM has its name.
    match vms.migrations.get(vms, &migration) {
        Ok(view) if view.to != hello.node || view.vm != hello.disk => Word::Nothing,
        Ok(view) => match view.phase {
            Phase::Completed | Phase::PullingMemory => Word::Given,
            Phase::Aborted => Word::Kept,
            _ => Word::Undecided,
        },
        Err(_) => Word::Nothing,
    }
}

/// Returns the word of the stored VM on a move of the VM `id` to `to`, or `None` if the entry does not know the move.
/// `leaves` is true while the move is under way.
fn stored(entry: &VmEntry, (migration, id, to): (&str, &str, &str), leaves: bool) -> Option<Word> {
    if let Some(gone) = &entry.moved_to {
        let left = entry.left_by.as_deref() == Some(migration);
        return (left && gone == to).then_some(Word::Given);
    }
    match &entry.mark {
        // A restart finds the mark, and takes the VM back.
        Some(VmMark::Outgoing { migration: now, .. }) if now == migration => Some(Word::Undecided),
        _ if leaves => Some(Word::Undecided),
        _ => (!id.is_empty() && entry.id == id).then_some(Word::Kept),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_context::store::machine::VmOrigin;

    fn entry() -> VmEntry {
        let machine = godwit_qemu::machine::Machine::adopt(&[String::from("q")], |_| None);
        VmEntry {
            id: String::from("i"),
            epoch: 1,
            machine: machine.expect("a machine"),
            qmp: "/q".into(),
            origin: VmOrigin::Run,
            mark: None,
            disk_ids: Vec::new(),
            moved_to: None,
            left_by: None,
            surpassed: None,
            memory: None,
            named_nics: Vec::new(),
            ended: None,
        }
    }

    #[test]
    fn the_word_of_a_move_never_changes_once_it_is_given() {
        let leaving = |migration: &str| VmEntry {
            mark: Some(VmMark::Outgoing {
                migration: migration.to_owned(),
                to: String::from("b"),
                runs: true,
            }),
            ..entry()
        };
        let gone = |by: &str, to: &str| VmEntry {
            moved_to: Some(to.to_owned()),
            left_by: Some(by.to_owned()),
            ..entry()
        };
        let say = |entry: &VmEntry, leaves| stored(entry, ("m", "i", "b"), leaves);
        assert_eq!(
            say(&entry(), true),
            Some(Word::Undecided),
            "about to be stored"
        );
        assert_eq!(say(&leaving("m"), true), Some(Word::Undecided));
        assert_eq!(
            say(&leaving("m"), false),
            Some(Word::Undecided),
            "restarted"
        );
        assert_eq!(say(&gone("m", "b"), true), Some(Word::Given));
        assert_eq!(say(&gone("m", "b"), false), Some(Word::Given));
        assert_eq!(say(&entry(), false), Some(Word::Kept));
        assert_eq!(say(&leaving("later"), false), Some(Word::Kept));
        // Only the history knows moves before the last one away from here.
        assert_eq!(say(&gone("later", "b"), false), None);
        assert_eq!(say(&gone("m", "c"), false), None);
        let other = VmEntry {
            id: String::from("another"),
            ..entry()
        };
        assert_eq!(say(&other, false), None, "another machine of its name");
    }
}
