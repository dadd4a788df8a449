use super::*;
use crate::controller::{MIRROR, PRE_COPY, PUSH_PULL};

fn offer(place: Option<Place>, policy: &'static PolicyDescription) -> Greeting {
    Greeting::Offer(Offer {
        epoch: Epoch(2),
        capacity: Sectors(2048),
        allocated: 4096,
        chunk_sectors: 256,
        window_chunks: 8,
        copy_connections: 2,
        place,
        policy,
        image: None,
        id: None,
    })
}

fn decoded(body: &[u8]) -> Result<Greeting, DecodeError> {
    let header = Header {
        payload_length: body.len() as u32,
        ..Header::new(Kind::Offer)
    };
    Greeting::decode(&header, body)
}

#[test]
fn an_offer_says_where_the_disk_is_to_be_put_or_nothing_of_it() {
    let usual = DOUBLE_WRITE;
    let plain = offer(None, usual).encode();
    for place in [
        Place::Pool(String::from("fast")),
        Place::Path(String::from("/dev/vg0/d")),
    ] {
        let placed = offer(Some(place), usual);
        let frame = placed.encode();
        let body = &frame[HEADER_SIZE..];
        assert_eq!(decoded(body), Ok(placed));
        // An older node reads the bytes up to there.
        let before = plain.len() - HEADER_SIZE;
        assert_eq!(body[..before], plain[HEADER_SIZE..]);
        assert_eq!(decoded(&body[..before]), Ok(offer(None, usual)));
        for cut in before + 1..body.len() {
            assert!(decoded(&body[..cut]).is_err(), "{cut}");
        }
        let mut unknown = body.to_vec();
        unknown[before] = 3;
        assert_eq!(decoded(&unknown), Err(DecodeError::Field("place")));
    }
}

#[test]
fn an_acceptance_tells_of_an_older_copy_and_is_what_older_nodes_say_where_there_is_none() {
    let accepted = |older| Greeting::Reply(Reply::Accepted(older));
    let read = |body: &[u8]| {
        let header = Header {
            payload_length: body.len() as u32,
            ..Header::new(Kind::Accepted)
        };
        Greeting::decode(&header, body)
    };
    assert_eq!(accepted(OlderCopy::None).encode().len(), HEADER_SIZE);
    for older in [
        OlderCopy::None,
        OlderCopy::Unknown,
        OlderCopy::Zeroes,
        OlderCopy::Since(MigrationId([9; 16])),
    ] {
        let frame = accepted(older).encode();
        assert_eq!(read(&frame[HEADER_SIZE..]), Ok(accepted(older)));
    }
    let since = accepted(OlderCopy::Since(MigrationId([9; 16]))).encode();
    assert!(read(&since[HEADER_SIZE..HEADER_SIZE + 9]).is_err(), "cut");
    assert_eq!(read(&[5]), Err(DecodeError::Field("older copy")));
    let but = |areas: &[u32]| {
        Greeting::Reply(Reply::AcceptedBut(ActiveAreas {
            of: MigrationId([9; 16]),
            areas: areas.to_vec(),
        }))
    };
    for areas in [&[][..], &[3, 70_000], &[u32::MAX; MAX_AREAS]] {
        let frame = but(areas).encode();
        assert_eq!(read(&frame[HEADER_SIZE..]), Ok(but(areas)));
        assert!(read(&frame[HEADER_SIZE..frame.len() - 1]).is_err(), "cut");
    }
    let long = but(&[1; MAX_AREAS + 1]).encode();
    let refused = Err(DecodeError::Field("activity log"));
    assert_eq!(read(&long[HEADER_SIZE..]), refused);
}

#[test]
fn an_offer_names_the_image_that_it_does_not_bring() {
    for prefetch in [false, true] {
        let Greeting::Offer(plain) = offer(None, PRE_COPY) else {
            unreachable!("it is an offer");
        };
        let named = Greeting::Offer(Offer {
            image: Some(OfferedImage {
                image: String::from("debian:12"),
                manifest: String::from("12ab"),
                prefetch,
            }),
            ..plain.clone()
        });
        let before = Greeting::Offer(plain).encode().len() - HEADER_SIZE;
        let frame = named.encode();
        let body = &frame[HEADER_SIZE..];
        assert_eq!(decoded(body), Ok(named));
        for cut in before + 1..body.len() {
            assert!(decoded(&body[..cut]).is_err(), "{cut}");
        }
        let mut unknown = body.to_vec();
        unknown[before] = 3;
        assert_eq!(decoded(&unknown), Err(DecodeError::Field("image")));
    }
}

#[test]
fn an_offer_names_its_policy_unless_that_is_the_only_one_that_older_nodes_know() {
    let usual = DOUBLE_WRITE;
    for place in [None, Some(Place::Pool(String::from("fast")))] {
        let plain = offer(place.clone(), usual).encode();
        for policy in [PRE_COPY, MIRROR, PUSH_PULL] {
            let named = offer(place.clone(), policy);
            let frame = named.encode();
            let body = &frame[HEADER_SIZE..];
            assert_eq!(decoded(body), Ok(named));
            assert!(frame.len() > plain.len());
            let mut unknown = body.to_vec();
            *unknown.last_mut().expect("a policy") = 9;
            assert_eq!(decoded(&unknown), Err(DecodeError::Field("policy")));
        }
    }
}

#[test]
fn an_offer_names_its_disk_with_or_without_an_image() {
    let image = OfferedImage {
        image: String::from("debian:12"),
        manifest: String::from("12ab"),
        prefetch: true,
    };
    for image in [None, Some(image)] {
        let Greeting::Offer(plain) = offer(None, DOUBLE_WRITE) else {
            unreachable!("it is an offer");
        };
        let named = Greeting::Offer(Offer {
            image,
            id: Some(DiskId([7; 16])),
            ..plain
        });
        let frame = named.encode();
        let body = &frame[HEADER_SIZE..];
        assert_eq!(decoded(body), Ok(named));
        for cut in 1..16 {
            assert!(decoded(&body[..body.len() - cut]).is_err(), "{cut}");
        }
    }
}
