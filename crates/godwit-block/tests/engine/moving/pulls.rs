//! Connections for pulls: a node that owes a part of the disk to the owner is also dialled by its former source. The
//! node keeps the connection to the owner.

use std::io::Read;
use std::time::Duration;

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{Epoch, MigrationId};
use godwit_core::wire::Message;

use crate::puppet::receive;
use crate::support::{TestEngine, plain, tcp_pair};

#[test]
fn a_node_that_owes_keeps_the_connection_to_the_owner() {
    let migration = MigrationId([2; 16]);
    let record = AuthorityRecord {
        epoch: Epoch(3),
        ownership: Ownership::Departed { migration },
        remainder: Some(migration),
    };
    let engine = TestEngine::new("owes", 4 << 20, record);
    let (mut owner, theirs) = tcp_pair();
    engine.handle.owe(plain(theirs));
    let (mut other, theirs) = tcp_pair();
    for socket in [&owner, &other] {
        let patience = Some(Duration::from_secs(10));
        socket.set_read_timeout(patience).expect("a timeout");
    }
    let owes = Message::Owes {
        migration,
        max_bandwidth: None,
    };
    assert_eq!(receive(&mut owner).0, owes);
    engine.handle.pull(plain(theirs), false);
    let mut said = Vec::new();
    other.read_to_end(&mut said).expect("it is closed");
    assert!(
        said.is_empty(),
        "that node would take it for the owner's word"
    );
    assert_eq!(receive(&mut owner).0, owes, "and it is said again");
}
