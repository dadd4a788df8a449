use godwit_core::request::{Operation, RequestError};
use godwit_core::units::{Extent, Lba, MAX_EXTENT_SECTORS, Sectors};
use proptest::prelude::*;

use crate::nbd::constants::*;
use crate::nbd::*;

fn request(kind: u16, flags: u16, offset: u64, length: u32) -> RequestHeader {
    RequestHeader {
        flags,
        kind,
        cookie: 0x1234,
        offset,
        length,
    }
}

fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).expect("a valid extent")
}

#[test]
fn requests_become_operations() {
    let all = |kind, flags, offset, length| {
        request(kind, flags, offset, length).command(Sectors(2048), true)
    };
    let two = extent(2, 2);
    for flags in [0, CMD_FLAG_FUA, CMD_FLAG_DF] {
        assert_eq!(
            all(CMD_READ, flags, 1024, 1024),
            Ok(Command::Operation(Operation::Read(two)))
        );
    }
    for (flags, fua) in [(0, false), (CMD_FLAG_FUA, true)] {
        assert_eq!(
            all(CMD_WRITE, flags, 1024, 1024),
            Ok(Command::Operation(Operation::Write { extent: two, fua }))
        );
    }
    let extents = Extents::new(1024, 1024, Sectors(2048)).expect("in range");
    for (kind, flags, fua, unmap) in [
        (CMD_TRIM, 0, false, true),
        (CMD_TRIM, CMD_FLAG_FUA, true, true),
        (CMD_WRITE_ZEROES, 0, false, true),
        (CMD_WRITE_ZEROES, CMD_FLAG_NO_HOLE, false, false),
        (
            CMD_WRITE_ZEROES,
            CMD_FLAG_NO_HOLE | CMD_FLAG_FUA,
            true,
            false,
        ),
    ] {
        assert_eq!(
            all(kind, flags, 1024, 1024),
            Ok(Command::WriteZeroes {
                extents,
                fua,
                unmap,
                fast: false,
            })
        );
    }
    assert_eq!(
        all(CMD_FLUSH, 0, 0, 0),
        Ok(Command::Operation(Operation::Flush))
    );
    assert_eq!(all(CMD_DISC, 0, 0, 0), Ok(Command::Disconnect));
}

#[test]
fn bad_requests_get_the_errors_of_the_protocol() {
    let end = 2048 * 512;
    for (kind, flags, offset, length, errno) in [
        (CMD_READ, 0, 0, 0, Errno::Invalid),
        (CMD_WRITE, 0, 0, 0, Errno::Invalid),
        (CMD_TRIM, 0, 0, 0, Errno::Invalid),
        (CMD_READ, 0, 1, 512, Errno::Invalid),
        (CMD_WRITE, 0, 0, 511, Errno::Invalid),
        (CMD_READ, 0, end, 512, Errno::Invalid),
        (CMD_READ, 0, end - 512, 1024, Errno::Invalid),
        (CMD_TRIM, 0, end - 512, 1024, Errno::Invalid),
        (CMD_WRITE, 0, end - 512, 1024, Errno::NoSpace),
        (CMD_WRITE_ZEROES, 0, end - 512, 1024, Errno::NoSpace),
        (CMD_WRITE, 0, u64::MAX - 511, 512, Errno::NoSpace),
        (
            CMD_WRITE_ZEROES,
            0,
            u64::MAX - 511,
            u32::MAX - 511,
            Errno::NoSpace,
        ),
        (CMD_READ, 0, 0, MAX_PAYLOAD + 512, Errno::Invalid),
        (CMD_READ, CMD_FLAG_DF, 0, MAX_PAYLOAD + 512, Errno::Overflow),
        (CMD_FLUSH, 0, 512, 0, Errno::Invalid),
        (CMD_FLUSH, 0, 0, 512, Errno::Invalid),
        (CMD_WRITE, CMD_FLAG_NO_HOLE, 0, 512, Errno::Invalid),
        (CMD_WRITE, CMD_FLAG_DF, 0, 512, Errno::Invalid),
        (CMD_WRITE_ZEROES, 1 << 5, 0, 512, Errno::Invalid),
        (CMD_READ, 1 << 15, 0, 512, Errno::Invalid),
        (5, 0, 0, 512, Errno::Invalid),
        (CMD_BLOCK_STATUS, 0, 0, 0, Errno::Invalid),
        (CMD_BLOCK_STATUS, 0, end, 512, Errno::Invalid),
        (CMD_BLOCK_STATUS, 0, u64::MAX - 511, 1024, Errno::Invalid),
        (CMD_BLOCK_STATUS, CMD_FLAG_DF, 0, 512, Errno::Invalid),
        (CMD_WRITE, CMD_FLAG_FAST_ZERO, 0, 512, Errno::Invalid),
        (8, 0, 0, 512, Errno::Invalid),
        (u16::MAX, 0, 0, 512, Errno::Invalid),
    ] {
        assert_eq!(
            request(kind, flags, offset, length).command(Sectors(2048), true),
            Err(errno),
            "kind {kind} flags {flags} offset {offset} length {length}"
        );
    }
    let df = request(CMD_READ, CMD_FLAG_DF, 0, 512);
    assert_eq!(df.command(Sectors(2048), false), Err(Errno::Invalid));
}

#[test]
fn only_writes_carry_data_and_only_absurd_ones_end_the_connection() {
    assert_eq!(request(CMD_WRITE, 0, 0, 77).payload_length(), 77);
    assert_eq!(request(CMD_WRITE_ZEROES, 0, 0, 77).payload_length(), 0);
    assert_eq!(request(CMD_READ, 0, 0, 77).payload_length(), 0);
    assert!(!request(CMD_WRITE, 0, 0, MAX_PAYLOAD).payload_is_absurd());
    assert!(request(CMD_WRITE, 0, 0, MAX_PAYLOAD + 1).payload_is_absurd());
    assert!(!request(CMD_TRIM, 0, 0, u32::MAX).payload_is_absurd());
}

#[test]
fn replies_have_the_bytes_of_the_protocol() {
    let read = request(CMD_READ, 0, 0x1000, 512);
    let write = request(CMD_WRITE, 0, 0x1000, 512);
    let cookie = [0, 0, 0, 0, 0, 0, 0x12, 0x34];
    let simple = |error| [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, error], &cookie[..]].concat();
    for (header, structured) in [(read, false), (write, false), (write, true)] {
        assert_eq!(
            ReplyHeader::new(&header, structured, Ok(())).as_bytes(),
            simple(0)
        );
        assert_eq!(
            ReplyHeader::new(&header, structured, Err(Errno::Io)).as_bytes(),
            simple(5)
        );
    }
    let magic = [0x66, 0x8e, 0x33, 0xef];
    let data = [
        &magic,
        &[0, 1, 0, 1][..],
        &cookie,
        &[0, 0, 2, 8],
        &[0, 0, 0, 0, 0, 0, 0x10, 0],
    ];
    assert_eq!(
        ReplyHeader::new(&read, true, Ok(())).as_bytes(),
        data.concat()
    );
    let error = [
        &magic,
        &[0, 1, 0x80, 1][..],
        &cookie,
        &[0, 0, 0, 6],
        &[0, 0, 0, 22, 0, 0],
    ];
    assert_eq!(
        ReplyHeader::new(&read, true, Err(Errno::Invalid)).as_bytes(),
        error.concat()
    );
}

#[test]
fn failures_map_to_the_errors_of_the_protocol() {
    for (error, number) in [
        (RequestError::OutOfRange, 28),
        (RequestError::Misaligned, 22),
        (RequestError::Io, 5),
        (RequestError::NoSpace, 28),
        (RequestError::NotServing, 108),
    ] {
        assert_eq!(request(CMD_WRITE, 0, 0, 512).errno(error).code(), number);
        let read = if error == RequestError::OutOfRange {
            22
        } else {
            number
        };
        assert_eq!(request(CMD_READ, 0, 0, 512).errno(error).code(), read);
        assert_eq!(request(CMD_TRIM, 0, 0, 512).errno(error).code(), read);
    }
}

fn any_request() -> impl Strategy<Value = RequestHeader> {
    let kind = prop_oneof![0u16..9, any::<u16>()];
    let offset = prop_oneof![(0u64..4096).prop_map(|sector| sector * 512), any::<u64>()];
    let length = prop_oneof![(0u32..4096).prop_map(|sectors| sectors * 512), any::<u32>()];
    (
        prop_oneof![0u16..8, any::<u16>()],
        kind,
        any::<u64>(),
        offset,
        length,
    )
        .prop_map(|(flags, kind, cookie, offset, length)| RequestHeader {
            flags,
            kind,
            cookie,
            offset,
            length,
        })
}

proptest! {
    #[test]
    fn requests_round_trip(header in any_request()) {
        prop_assert_eq!(RequestHeader::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn what_is_accepted_lies_on_the_disk(
        header in any_request(),
        capacity in 1u64..8192,
        structured: bool,
    ) {
        let capacity = Sectors(capacity);
        match header.command(capacity, structured) {
            Ok(Command::Operation(operation)) => if let Some(extent) = operation.extent() {
                prop_assert!(extent.within(capacity));
                prop_assert_eq!(extent.start().byte_offset(), header.offset);
                prop_assert_eq!(extent.bytes(), u64::from(header.length));
            }
            Ok(Command::WriteZeroes { extents, .. }) => {
                prop_assert_eq!(extents.sectors().bytes().0, u64::from(header.length));
                prop_assert!(extents.clone().all(|extent| extent.within(capacity)));
            }
            Ok(Command::Disconnect) => prop_assert_eq!(header.kind, CMD_DISC),
            Ok(Command::BlockStatus { offset, length, .. }) => {
                prop_assert!(structured && length > 0);
                prop_assert!(offset + u64::from(length) <= capacity.0 * 512);
            }
            Err(errno) => prop_assert!(matches!(errno.code(), 22 | 28 | 75)),
        }
    }

    #[test]
    fn extents_cover_their_range_in_order(start in 0u64..1 << 40, sectors in 1u64..1 << 33) {
        let extents =
            Extents::new(start * 512, sectors * 512, Sectors(u64::MAX)).expect("in range");
        let count = extents.len() as u64;
        prop_assert_eq!(count, sectors.div_ceil(u64::from(MAX_EXTENT_SECTORS)));
        let mut next = start;
        for extent in extents.take(70) {
            prop_assert_eq!(extent.start().0, next);
            next = extent.end().0;
        }
        let last = extents.last().map(|extent| extent.end().0);
        prop_assert_eq!(last, Some(start + sectors));
    }
}
