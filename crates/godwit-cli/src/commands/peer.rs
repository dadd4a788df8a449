//! The command `godwit peer`.

use godwit_api::Peer;

use crate::arguments::PeerCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, table};

pub(crate) async fn run(
    command: PeerCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        PeerCommand::List => {
            let peers: Vec<Peer> = client.get(routes::PEERS).await?;
            output.print(&peers, |peers| {
                let empty = "this node knows no peers: start it with --peer NAME=HOST:PORT";
                table(["NAME", "ADDRESS", "STATUS"], peers.iter().map(row), empty)
            })
        }
    }
}

fn row(peer: &Peer) -> [String; 3] {
    let status = match (&peer.error, peer.protocol_version) {
        (Some(error), _) => error.message.clone(),
        (None, Some(version)) if peer.reachable => {
            let data = match peer.data_encrypted {
                Some(false) => ", data unencrypted",
                Some(true) | None => "",
            };
            let compression = match peer.compression {
                Some(false) => ", nothing compressed",
                Some(true) | None => "",
            };
            format!("answers, protocol {version}{data}{compression}")
        }
        (None, _) if peer.reachable => "answers".to_owned(),
        (None, _) => "does not answer".to_owned(),
    };
    [peer.name.clone(), peer.address.clone(), status]
}
