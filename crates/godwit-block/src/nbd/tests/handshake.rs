use godwit_core::units::Sectors;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::nbd::constants::*;
use crate::nbd::*;

const DISK: ExportInfo = ExportInfo {
    capacity: Sectors(2048),
};
const IHAVEOPT_BYTES: [u8; 8] = *b"IHAVEOPT";

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = IHAVEOPT_BYTES.to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn go_data(name: &[u8], information: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name);
    data.extend((information.len() as u16).to_be_bytes());
    information
        .iter()
        .for_each(|kind| data.extend(kind.to_be_bytes()));
    data
}

fn client(flags: u32, options: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = flags.to_be_bytes().to_vec();
    options.iter().for_each(|option| bytes.extend(option));
    bytes
}

/// The outcome of a handshake with a client's bytes.
#[derive(Debug, PartialEq)]
struct Outcome {
    sent: Vec<u8>,
    end: HandshakeStep,
}

/// Feeds the bytes in pieces of `step` to a server with one disk, named "disk".
fn converse(config: HandshakeConfig, bytes: &[u8], step: usize) -> Outcome {
    let mut handshake = Handshake::new(config);
    let mut pieces = bytes.chunks(step);
    let mut sent = Vec::new();
    loop {
        match handshake.poll() {
            HandshakeStep::Receive => match pieces.next() {
                Some(piece) => handshake.receive(piece),
                None => {
                    return Outcome {
                        sent,
                        end: HandshakeStep::Receive,
                    };
                }
            },
            HandshakeStep::Send(bytes) => sent.extend(bytes),
            HandshakeStep::NeedExport { name, .. } if name == "disk" => handshake.export(Ok(DISK)),
            HandshakeStep::NeedExport { .. } => {
                handshake.export(Err(ExportRefusal::Unknown("no such disk".into())));
            }
            HandshakeStep::List => handshake.list(["disk", "other"]),
            HandshakeStep::StartTls => handshake.tls_done(),
            HandshakeStep::Done(mut negotiated) => {
                // The bytes that came with the last option depend on the pieces.
                pieces.for_each(|piece| negotiated.leftover.extend(piece));
                return Outcome {
                    sent,
                    end: HandshakeStep::Done(negotiated),
                };
            }
            end @ (HandshakeStep::Aborted | HandshakeStep::Failed(_)) => {
                return Outcome { sent, end };
            }
        }
    }
}

fn plain(bytes: &[u8]) -> Outcome {
    converse(HandshakeConfig::new(TlsPolicy::Off), bytes, usize::MAX)
}

/// Returns the option replies after the greeting, as (option, kind, data).
fn replies(sent: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let word = |at: &[u8]| u32::from_be_bytes(*at.first_chunk().expect("a whole reply"));
    let mut rest = &sent[18..];
    let mut found = Vec::new();
    while !rest.is_empty() {
        assert_eq!(rest[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        let length = word(&rest[16..]) as usize;
        found.push((
            word(&rest[8..]),
            word(&rest[12..]),
            rest[20..20 + length].to_vec(),
        ));
        rest = &rest[20 + length..];
    }
    found
}

fn kinds(sent: &[u8]) -> Vec<(u32, u32)> {
    replies(sent)
        .into_iter()
        .map(|(option, kind, _)| (option, kind))
        .collect()
}

#[test]
fn go_tells_size_flags_and_block_sizes_and_keeps_what_follows() {
    let mut bytes = client(
        3,
        &[
            option(OPT_STRUCTURED_REPLY, &[]),
            option(OPT_GO, &go_data(b"disk", &[INFO_BLOCK_SIZE])),
        ],
    );
    bytes.extend(b"next");
    let outcome = plain(&bytes);
    assert_eq!(outcome.sent[..18], *b"NBDMAGICIHAVEOPT\0\x03");
    let flags = 1u16 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 11;
    let mut export = vec![0, 0];
    export.extend((2048u64 * 512).to_be_bytes());
    export.extend(flags.to_be_bytes());
    let mut block_size = vec![0, 3];
    [512, 4096, 32 << 20]
        .iter()
        .for_each(|size: &u32| block_size.extend(size.to_be_bytes()));
    assert_eq!(
        replies(&outcome.sent),
        [
            (OPT_STRUCTURED_REPLY, REP_ACK, vec![]),
            (OPT_GO, REP_INFO, export),
            (OPT_GO, REP_INFO, block_size),
            (OPT_GO, REP_ACK, vec![]),
        ]
    );
    assert_eq!(
        outcome.end,
        HandshakeStep::Done(Negotiated {
            export: "disk".into(),
            info: DISK,
            structured_replies: true,
            base_allocation: false,
            leftover: b"next".to_vec(),
        })
    );
}

#[test]
fn info_leaves_the_handshake_open_and_df_needs_structured_replies() {
    let outcome = plain(&client(3, &[option(OPT_INFO, &go_data(b"disk", &[]))]));
    assert_eq!(outcome.end, HandshakeStep::Receive);
    let export = &replies(&outcome.sent)[0].2;
    assert_eq!(export[11] & (TRANSMIT_SEND_DF as u8), 0);
}

#[test]
fn the_old_way_to_name_an_export_ends_in_zeroes_unless_declined() {
    for (flags, padding) in [(0, 124), (1, 124), (3, 0)] {
        let outcome = plain(&client(flags, &[option(OPT_EXPORT_NAME, b"disk")]));
        assert_eq!(outcome.sent.len(), 18 + 10 + padding);
        assert!(matches!(outcome.end, HandshakeStep::Done(_)));
    }
    let outcome = plain(&client(3, &[option(OPT_EXPORT_NAME, b"nothing")]));
    assert_eq!(outcome.sent.len(), 18);
    assert!(matches!(
        outcome.end,
        HandshakeStep::Failed(HandshakeError::ExportRefused(_))
    ));
}

#[test]
fn an_unknown_export_can_be_followed_by_another() {
    let outcome = plain(&client(
        3,
        &[
            option(OPT_GO, &go_data(b"nothing", &[])),
            option(OPT_GO, &go_data(b"disk", &[])),
        ],
    ));
    assert_eq!(
        replies(&outcome.sent)[0],
        (OPT_GO, REP_ERR_UNKNOWN, b"no such disk".to_vec())
    );
    assert!(matches!(outcome.end, HandshakeStep::Done(_)));
}

#[test]
fn exports_are_listed() {
    let outcome = plain(&client(3, &[option(OPT_LIST, &[]), option(OPT_LIST, b"?")]));
    assert_eq!(
        replies(&outcome.sent)[..3],
        [
            (OPT_LIST, REP_SERVER, b"\0\0\0\x04disk".to_vec()),
            (OPT_LIST, REP_SERVER, b"\0\0\0\x05other".to_vec()),
            (OPT_LIST, REP_ACK, vec![]),
        ]
    );
    assert_eq!(kinds(&outcome.sent)[3], (OPT_LIST, REP_ERR_INVALID));
}

#[test]
fn unknown_options_are_told_so() {
    for number in [0, 4, 11, 12, u32::MAX] {
        let outcome = plain(&client(3, &[option(number, b"anything")]));
        assert_eq!(kinds(&outcome.sent), [(number, REP_ERR_UNSUP)]);
        assert_eq!(outcome.end, HandshakeStep::Receive);
    }
}

#[test]
fn malformed_names_are_told_so() {
    let mut long_count = go_data(b"disk", &[]);
    *long_count.last_mut().expect("a count") = 1;
    let mut long_name = go_data(b"disk", &[]);
    long_name[..4].copy_from_slice(&u32::MAX.to_be_bytes());
    for data in [
        vec![],
        long_count,
        long_name,
        go_data(b"di\0sk", &[]),
        go_data(b"\xff", &[]),
        go_data(&[b'a'; MAX_STRING + 1], &[]),
        [go_data(b"disk", &[]), vec![0]].concat(),
    ] {
        let outcome = plain(&client(3, &[option(OPT_GO, &data)]));
        assert_eq!(
            kinds(&outcome.sent),
            [(OPT_GO, REP_ERR_INVALID)],
            "{data:?}"
        );
    }
    let outcome = plain(&client(
        3,
        &[option(OPT_GO, &go_data(&[b'a'; MAX_STRING], &[]))],
    ));
    assert_eq!(kinds(&outcome.sent), [(OPT_GO, REP_ERR_UNKNOWN)]);
}

#[test]
fn aborting_is_acknowledged() {
    let outcome = plain(&client(3, &[option(OPT_ABORT, &[])]));
    assert_eq!(kinds(&outcome.sent), [(OPT_ABORT, REP_ACK)]);
    assert_eq!(outcome.end, HandshakeStep::Aborted);
}

#[test]
fn without_tls_starting_it_is_refused() {
    let outcome = plain(&client(3, &[option(OPT_STARTTLS, &[])]));
    assert_eq!(kinds(&outcome.sent), [(OPT_STARTTLS, REP_ERR_POLICY)]);
    assert_eq!(outcome.end, HandshakeStep::Receive);
}

#[test]
fn required_tls_comes_before_anything_else() {
    let config = HandshakeConfig::new(TlsPolicy::Required);
    let go = option(OPT_GO, &go_data(b"disk", &[]));
    let before = [
        option(OPT_LIST, &[]),
        go.clone(),
        option(99, &[]),
        option(OPT_STARTTLS, b"x"),
    ];
    let refused = converse(config, &client(3, &before), usize::MAX);
    assert_eq!(
        kinds(&refused.sent),
        [
            (OPT_LIST, REP_ERR_TLS_REQD),
            (OPT_GO, REP_ERR_TLS_REQD),
            (99, REP_ERR_TLS_REQD),
            (OPT_STARTTLS, REP_ERR_INVALID),
        ]
    );
    let by_name = converse(
        config,
        &client(3, &[option(OPT_EXPORT_NAME, b"disk")]),
        usize::MAX,
    );
    assert!(matches!(
        by_name.end,
        HandshakeStep::Failed(HandshakeError::ExportRefused(_))
    ));

    let all = client(3, &[option(OPT_STARTTLS, &[]), go]);
    // Byte by byte, as if the rest came through TLS.
    assert!(matches!(
        converse(config, &all, 1).end,
        HandshakeStep::Done(_)
    ));
    assert_eq!(
        converse(config, &all, usize::MAX).end,
        HandshakeStep::Failed(HandshakeError::PlaintextAfterStartTls)
    );
}

#[test]
fn what_is_not_nbd_fails() {
    assert_eq!(
        plain(&[0, 0, 0, 4]).end,
        HandshakeStep::Failed(HandshakeError::ClientFlags(4)),
    );
    assert_eq!(
        plain(b"\0\0\0\x03GET / HTTP/1.1\r\n\r\n").end,
        HandshakeStep::Failed(HandshakeError::OptionMagic),
    );
    assert_eq!(
        plain(&client(0, &[option(OPT_LIST, &[])])).end,
        HandshakeStep::Failed(HandshakeError::NotFixedNewstyle(OPT_LIST)),
    );
}

#[test]
fn options_are_bounded_in_length_and_number() {
    let mut bytes = client(3, &[]);
    bytes.extend(IHAVEOPT_BYTES);
    bytes.extend([0, 0, 0, OPT_GO as u8, 0xff, 0xff, 0xff, 0xff]);
    let outcome = plain(&bytes);
    assert_eq!(kinds(&outcome.sent), [(OPT_GO, REP_ERR_TOO_BIG)]);
    assert!(matches!(
        outcome.end,
        HandshakeStep::Failed(HandshakeError::OptionTooLong { option: OPT_GO, .. })
    ));

    let config = HandshakeConfig {
        max_options: 3,
        ..HandshakeConfig::new(TlsPolicy::Off)
    };
    let three = client(3, &vec![option(OPT_STRUCTURED_REPLY, &[]); 3]);
    assert_eq!(converse(config, &three, 7).end, HandshakeStep::Receive);
    let four = client(3, &vec![option(OPT_STRUCTURED_REPLY, &[]); 4]);
    assert_eq!(
        converse(config, &four, 7).end,
        HandshakeStep::Failed(HandshakeError::TooManyOptions(3)),
    );
}

#[test]
fn answers_without_a_question_and_calls_after_the_end_do_nothing() {
    let mut handshake = Handshake::new(HandshakeConfig::new(TlsPolicy::Off));
    handshake.export(Ok(DISK));
    handshake.list(["disk"]);
    handshake.tls_done();
    assert!(matches!(handshake.poll(), HandshakeStep::Send(greeting) if greeting.len() == 18));
    assert_eq!(handshake.poll(), HandshakeStep::Receive);
    handshake.receive(&[0xff; 4]);
    assert!(matches!(
        handshake.poll(),
        HandshakeStep::Failed(HandshakeError::ClientFlags(_))
    ));
    handshake.receive(&[0xff; 4]);
    assert_eq!(
        handshake.poll(),
        HandshakeStep::Failed(HandshakeError::Over)
    );
}

#[test]
fn a_refusal_too_long_for_the_protocol_is_cut_at_a_character() {
    let mut handshake = Handshake::new(HandshakeConfig::new(TlsPolicy::Off));
    handshake.receive(&client(3, &[option(OPT_GO, &go_data(b"disk", &[]))]));
    assert!(matches!(handshake.poll(), HandshakeStep::Send(_)));
    assert!(matches!(handshake.poll(), HandshakeStep::NeedExport { .. }));
    handshake.export(Err(ExportRefusal::Policy(format!("a{}", "é".repeat(4096)))));
    let HandshakeStep::Send(bytes) = handshake.poll() else {
        panic!("nothing was sent")
    };
    assert_eq!(bytes.len(), 20 + MAX_STRING - 1);
    assert!(core::str::from_utf8(&bytes[20..]).is_ok());
}

fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![Just(b"disk".to_vec()), vec(any::<u8>(), 0..8)];
    let go = (name, vec(any::<u16>(), 0..4)).prop_map(|(name, asked)| go_data(&name, &asked));
    let data = prop_oneof![Just(vec![]), go, vec(any::<u8>(), 0..24)];
    (prop_oneof![0u32..12, any::<u32>()], data).prop_map(|(number, data)| option(number, &data))
}

proptest! {
    #[test]
    fn pieces_do_not_matter(
        flags in prop_oneof![0u32..4, any::<u32>()],
        options in vec(any_option(), 0..6),
        rest in vec(any::<u8>(), 0..32),
        step in 2usize..40,
    ) {
        let mut bytes = client(flags, &options);
        bytes.extend(rest);
        let config = HandshakeConfig::new(TlsPolicy::Off);
        let whole = converse(config, &bytes, usize::MAX);
        prop_assert_eq!(&converse(config, &bytes, 1), &whole);
        prop_assert_eq!(&converse(config, &bytes, step), &whole);
    }

    #[test]
    fn random_bytes_end_or_wait(bytes in vec(any::<u8>(), 0..512), step in 1usize..64) {
        for tls in [TlsPolicy::Off, TlsPolicy::Required] {
            converse(HandshakeConfig::new(tls), &bytes, step);
        }
    }
}

fn contexts(export: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let counted = |text: &[u8]| [&(text.len() as u32).to_be_bytes(), text].concat();
    let mut data = counted(export);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(counted(query)));
    data
}

/// Returns true if the client may ask for allocation in the end, and the server's answers before `NBD_OPT_GO`.
fn selects(options: &[Vec<u8>]) -> (bool, Vec<(u32, u32)>) {
    let mut all = options.to_vec();
    all.push(option(OPT_GO, &go_data(b"disk", &[])));
    let outcome = plain(&client(3, &all));
    let HandshakeStep::Done(negotiated) = outcome.end else {
        panic!("{:?}", outcome.end)
    };
    let told = kinds(&outcome.sent).into_iter();
    let told = told.filter(|(option, _)| *option != OPT_GO).collect();
    (negotiated.base_allocation, told)
}

#[test]
fn allocation_is_selected_for_the_export_that_is_entered_only() {
    let structured = option(OPT_STRUCTURED_REPLY, &[]);
    let set =
        |export: &[u8], queries: &[&[u8]]| option(OPT_SET_META_CONTEXT, &contexts(export, queries));
    let ok = (OPT_STRUCTURED_REPLY, REP_ACK);
    let (found, done) = (
        (OPT_SET_META_CONTEXT, REP_META_CONTEXT),
        (OPT_SET_META_CONTEXT, REP_ACK),
    );
    let wanted = set(b"disk", &[b"qemu:x", b"base:allocation"]);
    let first = [structured.clone(), wanted.clone()];
    assert_eq!(selects(&first), (true, vec![ok, found, done]));
    // Without structured replies, for another disk, by a wildcard, or taken back.
    let (may, told) = selects(std::slice::from_ref(&wanted));
    assert!(!may);
    assert_eq!(told, [(OPT_SET_META_CONTEXT, REP_ERR_INVALID)]);
    let other = [structured.clone(), set(b"other", &[b"base:allocation"])];
    let unknown = (OPT_SET_META_CONTEXT, REP_ERR_UNKNOWN);
    assert_eq!(selects(&other), (false, vec![ok, unknown]));
    let wildcard = [structured.clone(), set(b"disk", &[b"base:"])];
    assert_eq!(selects(&wildcard), (false, vec![ok, done]));
    let back = [structured, wanted, set(b"disk", &[])];
    assert_eq!(selects(&back), (false, vec![ok, found, done, done]));
}

#[test]
fn contexts_are_listed_and_lengths_that_lie_are_refused() {
    let structured = option(OPT_STRUCTURED_REPLY, &[]);
    let list = |data: &[u8]| {
        let options = [structured.clone(), option(OPT_LIST_META_CONTEXT, data)];
        selects(&options).1[1..].to_vec()
    };
    let number = OPT_LIST_META_CONTEXT;
    for queries in [&[][..], &[b"base:".as_slice()], &[b"base:allocation"]] {
        let told = list(&contexts(b"disk", queries));
        assert_eq!(told, [(number, REP_META_CONTEXT), (number, REP_ACK)]);
    }
    assert_eq!(list(&contexts(b"disk", &[b"x:"])), [(number, REP_ACK)]);
    let whole = contexts(b"disk", &[b"base:allocation"]);
    for wrong in [
        &whole[..whole.len() - 1],
        &whole[..3],
        &[&whole[..], b"x"].concat(),
        &[&whole[..8], &u32::MAX.to_be_bytes()].concat(),
        &u32::MAX.to_be_bytes(),
        &[],
    ] {
        assert_eq!(list(wrong), [(number, REP_ERR_INVALID)], "{wrong:?}");
    }
}
