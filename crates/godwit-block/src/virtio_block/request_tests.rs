use godwit_vhost::memory::DESCRIPTOR;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;

const CAPACITY: Sectors = Sectors(1000);
const TABLE: u64 = 0x1000;
const INDIRECT: u64 = 0x2000;
const HEADER_AT: u64 = 0x3000;
const DATA: u64 = 0x10_000;
const STATUS: u64 = 0x4000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TO_TABLE: u16 = 4;

fn memory() -> GuestMemoryMmap {
    // With a hole between the two regions.
    let regions = [
        (GuestAddress(0), 0x2_0000),
        (GuestAddress(0x10_0000), 0x1000),
    ];
    GuestMemoryMmap::from_ranges(&regions).expect("memory")
}

fn put(memory: &GuestMemoryMmap, table: u64, index: u16, descriptor: (u64, u32, u16, u16)) {
    let (address, length, flags, next) = descriptor;
    let descriptor = Descriptor::new(address, length, flags, next);
    let place = GuestAddress(table + u64::from(index) * DESCRIPTOR);
    memory.write_obj(descriptor, place).expect("the table");
}

fn header(memory: &GuestMemoryMmap, kind: u32, sector: u64) {
    let mut bytes = [0_u8; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    memory
        .write_slice(&bytes, GuestAddress(HEADER_AT))
        .expect("the header");
}

/// Lays out the descriptors as a chain and parses it.
fn parsed(
    memory: &GuestMemoryMmap,
    descriptors: &[(u64, u32, u16)],
) -> Result<(Asked, Vec<Segment>), ChainError> {
    for (index, &(address, length, flags)) in descriptors.iter().enumerate() {
        let last = index + 1 == descriptors.len();
        let flags = flags | if last { 0 } else { NEXT };
        put(
            memory,
            TABLE,
            index as u16,
            (address, length, flags, index as u16 + 1),
        );
    }
    parse_at(memory, 0)
}

fn parse_at(memory: &GuestMemoryMmap, head: u16) -> Result<(Asked, Vec<Segment>), ChainError> {
    let mut chain = Chain::default();
    let mut data = Vec::new();
    chain.follow(memory, GuestAddress(TABLE), 16, head)?;
    let parsed = parse(memory, &mut chain, CAPACITY, &mut data)?;
    Ok((parsed.asked, data))
}

fn asked(memory: &GuestMemoryMmap, descriptors: &[(u64, u32, u16)]) -> Asked {
    parsed(memory, descriptors).expect("an answer").0
}

const HEAD: (u64, u32, u16) = (HEADER_AT, 16, 0);
const TAIL: (u64, u32, u16) = (STATUS, 1, WRITE);
const ERROR: Asked = Asked::Refused(STATUS_ERROR);
const UNSUPPORTED: Asked = Asked::Refused(STATUS_UNSUPPORTED);

fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).expect("an extent")
}

#[test]
fn reads_and_writes_name_their_data() {
    let memory = memory();
    header(&memory, blk::VIRTIO_BLK_T_IN, 7);
    let (asked, data) = parsed(
        &memory,
        &[HEAD, (DATA, 512, WRITE), (DATA + 4096, 1024, WRITE), TAIL],
    )
    .expect("an answer");
    assert_eq!(asked, Asked::Read(extent(7, 3)));
    let segment = |address, length| Segment { address, length };
    assert_eq!(data, [segment(DATA, 512), segment(DATA + 4096, 1024)]);
    header(&memory, blk::VIRTIO_BLK_T_OUT, 997);
    let (asked, data) = parsed(&memory, &[HEAD, (DATA, 1536, 0), TAIL]).expect("an answer");
    assert_eq!(asked, Asked::Write(extent(997, 3)));
    assert_eq!(data, [segment(DATA, 1536)]);
}

#[test]
fn descriptors_may_be_cut_anywhere() {
    let memory = memory();
    header(&memory, blk::VIRTIO_BLK_T_OUT, 1);
    memory
        .write_slice(&[0; 16], GuestAddress(HEADER_AT + 16))
        .expect("memory");
    // The header in three pieces, the last together with the data.
    let pieces = [
        (HEADER_AT, 5, 0),
        (HEADER_AT + 5, 3, 0),
        (HEADER_AT + 8, 8 + 512, 0),
        (STATUS, 100, WRITE),
    ];
    let (asked, data) = parsed(&memory, &pieces).expect("an answer");
    assert_eq!(asked, Asked::Write(extent(1, 1)));
    let address = HEADER_AT + 16;
    assert_eq!(
        data,
        [Segment {
            address,
            length: 512
        }]
    );
    // The status at the end of the data.
    header(&memory, blk::VIRTIO_BLK_T_IN, 1);
    let (asked, data) = parsed(&memory, &[HEAD, (DATA, 513, WRITE)]).expect("an answer");
    assert_eq!(asked, Asked::Read(extent(1, 1)));
    assert_eq!(
        data,
        [Segment {
            address: DATA,
            length: 512
        }]
    );
}

#[test]
fn ranges_that_the_disk_does_not_have_fail() {
    let memory = memory();
    for (sector, bytes) in [(1000, 512), (999, 1024), (u64::MAX, 512), (1 << 55, 512)] {
        header(&memory, blk::VIRTIO_BLK_T_IN, sector);
        assert_eq!(
            asked(&memory, &[HEAD, (DATA, bytes, WRITE), TAIL]),
            ERROR,
            "{sector}"
        );
    }
    for bytes in [1, 511, 513, 0] {
        header(&memory, blk::VIRTIO_BLK_T_OUT, 0);
        assert_eq!(
            asked(&memory, &[HEAD, (DATA, bytes, 0), TAIL]),
            ERROR,
            "{bytes}"
        );
    }
    header(&memory, blk::VIRTIO_BLK_T_IN, 0);
    assert_eq!(asked(&memory, &[HEAD, TAIL]), ERROR, "no data");
}

#[test]
fn data_that_is_not_memory_fails() {
    let memory = memory();
    for address in [
        0x2_0000 - 511,
        0x2_0000,
        0x10_0e01,
        u64::MAX - 511,
        u64::MAX,
    ] {
        header(&memory, blk::VIRTIO_BLK_T_IN, 0);
        assert_eq!(asked(&memory, &[HEAD, (address, 512, WRITE), TAIL]), ERROR);
        header(&memory, blk::VIRTIO_BLK_T_OUT, 0);
        assert_eq!(asked(&memory, &[HEAD, (address, 512, 0), TAIL]), ERROR);
    }
    assert_eq!(
        asked(&memory, &[(0x2_0000 - 15, 16, 0), TAIL]),
        ERROR,
        "header"
    );
}

#[test]
fn wrong_directions_fail() {
    let memory = memory();
    header(&memory, blk::VIRTIO_BLK_T_IN, 0);
    assert_eq!(asked(&memory, &[HEAD, (DATA, 512, 0), TAIL]), ERROR);
    header(&memory, blk::VIRTIO_BLK_T_OUT, 0);
    assert_eq!(asked(&memory, &[HEAD, (DATA, 512, WRITE), TAIL]), ERROR);
    assert_eq!(
        asked(&memory, &[HEAD, TAIL, (DATA, 512, 0)]),
        ERROR,
        "order"
    );
    assert_eq!(
        asked(&memory, &[(HEADER_AT, 15, 0), TAIL]),
        ERROR,
        "short header"
    );
    assert_eq!(parsed(&memory, &[HEAD]), Err(ChainError::NoStatus));
    assert_eq!(
        parsed(&memory, &[HEAD, (STATUS, 0, WRITE)]),
        Err(ChainError::NoStatus)
    );
    assert_eq!(
        parsed(&memory, &[HEAD, (0x2_0000, 1, WRITE)]),
        Err(ChainError::NoStatus)
    );
    let wraps = (u64::MAX, 2, WRITE);
    assert_eq!(parsed(&memory, &[HEAD, wraps]), Err(ChainError::NoStatus));
}

#[test]
fn ranges_of_discards_are_checked() {
    let memory = memory();
    let range = |sector: u64, count: u32, flags: u32| {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        memory
            .write_slice(&bytes, GuestAddress(DATA))
            .expect("memory");
        let one = [HEAD, (DATA, 16, 0), TAIL];
        header(&memory, blk::VIRTIO_BLK_T_DISCARD, 0);
        let discard = asked(&memory, &one);
        header(&memory, blk::VIRTIO_BLK_T_WRITE_ZEROES, 0);
        (discard, asked(&memory, &one))
    };
    let zero = |unmap| Asked::Zero {
        extent: extent(5, 8),
        unmap,
    };
    assert_eq!(range(5, 8, 0), (zero(true), zero(false)));
    assert_eq!(range(5, 8, 1), (UNSUPPORTED, zero(true)));
    assert_eq!(range(5, 8, 2), (UNSUPPORTED, UNSUPPORTED));
    for (sector, count) in [(1000, 1), (5, 0), (u64::MAX, 1), (0, u32::MAX)] {
        assert_eq!(range(sector, count, 0), (ERROR, ERROR));
    }
    header(&memory, blk::VIRTIO_BLK_T_DISCARD, 0);
    assert_eq!(asked(&memory, &[HEAD, (DATA, 32, 0), TAIL]), UNSUPPORTED);
    assert_eq!(asked(&memory, &[HEAD, (DATA, 15, 0), TAIL]), ERROR);
}

#[test]
fn other_requests() {
    let memory = memory();
    header(&memory, blk::VIRTIO_BLK_T_FLUSH, 9999);
    assert_eq!(asked(&memory, &[HEAD, TAIL]), Asked::Flush);
    header(&memory, blk::VIRTIO_BLK_T_GET_ID, 0);
    assert_eq!(
        asked(&memory, &[HEAD, (DATA, 20, WRITE), TAIL]),
        Asked::Identify
    );
    assert_eq!(asked(&memory, &[HEAD, TAIL]), ERROR);
    for kind in [
        2,
        3,
        5,
        12,
        14,
        u32::MAX,
        blk::VIRTIO_BLK_T_IN | 0x8000_0000,
    ] {
        header(&memory, kind, 0);
        assert_eq!(
            asked(&memory, &[HEAD, (DATA, 512, WRITE), TAIL]),
            UNSUPPORTED
        );
    }
}

#[test]
fn tables_of_descriptors_are_followed_once() {
    let memory = memory();
    header(&memory, blk::VIRTIO_BLK_T_FLUSH, 0);
    put(&memory, INDIRECT, 0, (HEADER_AT, 16, NEXT, 1));
    put(&memory, INDIRECT, 1, (STATUS, 1, WRITE, 0));
    put(&memory, TABLE, 3, (INDIRECT, 32, TO_TABLE, 0));
    assert_eq!(parse_at(&memory, 3).expect("an answer").0, Asked::Flush);
    for length in [0, 15, 33] {
        put(&memory, TABLE, 3, (INDIRECT, length, TO_TABLE, 0));
        assert_eq!(parse_at(&memory, 3), Err(ChainError::Table));
    }
    put(&memory, TABLE, 3, (INDIRECT, 32, TO_TABLE | NEXT, 4));
    assert_eq!(parse_at(&memory, 3), Err(ChainError::Table));
    put(&memory, TABLE, 3, (INDIRECT, 32, TO_TABLE, 0));
    put(&memory, INDIRECT, 1, (INDIRECT, 32, TO_TABLE, 0));
    assert_eq!(
        parse_at(&memory, 3),
        Err(ChainError::Table),
        "within a table"
    );
    put(&memory, TABLE, 3, (u64::MAX - 7, 32, TO_TABLE, 0));
    assert_eq!(parse_at(&memory, 3), Err(ChainError::Missing(0)));
}

#[test]
fn chains_that_go_nowhere_are_refused() {
    let memory = memory();
    put(&memory, TABLE, 0, (DATA, 1, NEXT, 0));
    assert_eq!(parse_at(&memory, 0), Err(ChainError::Endless));
    put(&memory, TABLE, 0, (DATA, 1, NEXT, 1));
    put(&memory, TABLE, 1, (DATA, 1, NEXT, 0));
    assert_eq!(parse_at(&memory, 0), Err(ChainError::Endless));
    put(&memory, TABLE, 1, (DATA, 1, NEXT, 16));
    assert_eq!(parse_at(&memory, 0), Err(ChainError::Missing(16)));
    assert_eq!(parse_at(&memory, 16), Err(ChainError::Missing(16)));
    let mut chain = Chain::default();
    let nowhere = GuestAddress(0x2_0000 - 8);
    assert!(chain.follow(&memory, nowhere, 16, 0).is_err());
}
