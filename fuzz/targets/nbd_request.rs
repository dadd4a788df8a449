//! An NBD client that sends any request: what is accepted lies on the disk, and every answer has
//! the length that the protocol gives it.

#![no_main]

use godwit_block::nbd::{
    Allocation, Command, Errno, REQUEST_HEADER_SIZE, ReplyHeader, RequestHeader, block_status,
};
use godwit_core::units::Sectors;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((header, rest)) = data.split_first_chunk::<REQUEST_HEADER_SIZE>() else {
        return;
    };
    let Ok(header) = RequestHeader::decode(header) else {
        return;
    };
    assert_eq!(RequestHeader::decode(&header.encode()), Ok(header));
    let Some((&options, rest)) = rest.split_first() else {
        return;
    };
    let Some(capacity) = rest.first_chunk() else {
        return;
    };
    let capacity = Sectors(u64::from_le_bytes(*capacity) >> (options & 63));
    let structured = options & 64 != 0;
    let end = u128::from(header.offset) + u128::from(header.length);
    let on_disk = end <= u128::from(capacity.0) * 512;

    let result = match header.command(capacity, structured) {
        Ok(Command::Operation(operation)) => {
            if let Some(extent) = operation.extent() {
                assert!(on_disk && extent.within(capacity));
                assert_eq!(extent.start().byte_offset(), header.offset);
                assert_eq!(extent.bytes(), u64::from(header.length));
                assert!(!header.payload_is_absurd());
            }
            Ok(())
        }
        Ok(Command::WriteZeroes { mut extents, .. }) => {
            assert!(on_disk);
            let mut next = header.offset;
            assert!(extents.all(|extent| {
                let follows = extent.start().byte_offset() == next && extent.within(capacity);
                next = extent.end().byte_offset();
                follows
            }));
            assert_eq!(u128::from(next), end);
            assert_eq!(header.payload_length(), 0);
            Ok(())
        }
        Ok(Command::BlockStatus { offset, length, .. }) => {
            assert!(on_disk && structured && length > 0);
            assert_eq!((offset, length), (header.offset, header.length));
            let ranges = [Allocation { length, hole: true }];
            assert_eq!(block_status(&header, &ranges).len(), 20 + 4 + 8);
            Ok(())
        }
        Ok(Command::Disconnect) => Ok(()),
        Err(errno) => Err(errno),
    };
    for result in [result, Err(Errno::Io)] {
        let reply = ReplyHeader::new(&header, structured, result);
        let chunked = header.is_read() || header.is_block_status() && result.is_err();
        let expected = match (chunked && structured, result) {
            (false, _) => 16,
            (true, Ok(())) => 28,
            (true, Err(_)) => 26,
        };
        assert_eq!(reply.as_bytes().len(), expected);
    }
});
