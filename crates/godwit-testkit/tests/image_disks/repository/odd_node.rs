//! An odd node: a server that other nodes take for a node.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use godwit_core::wire::{
    Features, Greeting, HEADER_SIZE, Header, PROTOCOL_VERSION, Purpose, Reply,
};
use godwit_testkit::cluster::ClusterOptions;

use crate::fixture::Fixture;

/// Bytes of a question. The first is the kind of question.
const QUESTION: usize = 41;
/// Kind of the question for the image behind a name.
const NAME: u8 = 3;

/// The behaviour of an odd node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Odd {
    /// Answers with other bytes than the requested ones.
    Lies,
    /// Takes questions and does not answer.
    IsSilent,
    /// Does not know images at all.
    IsOlder,
    /// Has chunks, and does not know names.
    KnowsNoNames,
    /// Resolves any name to a wrong image.
    LiesOfNames,
}

/// An odd node, and the questions received.
pub(crate) struct OddNode {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Purposes of the opened connections.
    purposes: Vec<Purpose>,
    /// The first bytes of questions.
    questions: Vec<u8>,
}

impl OddNode {
    pub(crate) fn start(odd: Odd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let told = Arc::clone(&seen);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let seen = Arc::clone(&told);
                std::thread::spawn(move || {
                    // The node hangs up when it has had enough.
                    let _ = answer(connection.unwrap(), odd, &seen);
                });
            }
        });
        Self { address, seen }
    }

    /// Starts nodes of which the first has this one as a peer named "odd".
    pub(crate) fn beside(&self, names: &[&str]) -> Fixture {
        let plain = ClusterOptions {
            tls: false,
            ..ClusterOptions::secure().unwrap()
        };
        let mut fixture = Fixture::prepare(names, &[], plain);
        let peers = &mut fixture.cluster.node_mut(names[0]).spec_mut().peers;
        peers.push((String::from("odd"), self.address));
        fixture.cluster.start_all().unwrap();
        fixture
    }

    /// Returns true if a node asked for parts of images.
    pub(crate) fn was_asked(&self) -> bool {
        let seen = self.seen.lock().unwrap();
        assert!(!seen.purposes.is_empty(), "nobody connected");
        seen.purposes.contains(&Purpose::Image)
    }

    /// Returns true if a node asked to resolve a name.
    pub(crate) fn was_asked_for_a_name(&self) -> bool {
        self.seen.lock().unwrap().questions.contains(&NAME)
    }
}

fn answer(mut connection: TcpStream, odd: Odd, seen: &Mutex<Seen>) -> std::io::Result<()> {
    let mut header = [0; HEADER_SIZE];
    connection.read_exact(&mut header)?;
    let header = Header::decode(&header).unwrap();
    let mut body = vec![0; header.payload_length as usize];
    connection.read_exact(&mut body)?;
    let Greeting::Hello(hello) = Greeting::decode(&header, &body).unwrap() else {
        panic!("no hello");
    };
    seen.lock().unwrap().purposes.push(hello.purpose);
    let features = match odd {
        Odd::IsOlder => Features::default(),
        Odd::KnowsNoNames => Features::IMAGE_CHUNKS,
        Odd::Lies | Odd::IsSilent | Odd::LiesOfNames => {
            Features::IMAGE_CHUNKS.with(Features::IMAGE_NAMES)
        }
    };
    let welcome = Greeting::Reply(Reply::Welcome {
        version: PROTOCOL_VERSION,
        features,
        node: String::from("odd"),
    });
    connection.write_all(&welcome.encode())?;
    loop {
        let mut question = [0; QUESTION];
        connection.read_exact(&mut question)?;
        seen.lock().unwrap().questions.push(question[0]);
        let said = match (odd, question[0]) {
            (Odd::IsSilent, _) => continue,
            (Odd::LiesOfNames, NAME) => [&[7; 32], &b"2020-12-31T23:59:59Z"[..]].concat(),
            _ => vec![0xAB; 256 << 10],
        };
        let head = [&[1], &(said.len() as u32).to_le_bytes()[..]].concat();
        connection.write_all(&[head, said].concat())?;
    }
}
