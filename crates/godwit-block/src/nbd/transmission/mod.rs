//! The transmission phase: requests in, replies out, each a fixed number of bytes.

mod extents;
mod reply;
mod request;
mod status;

pub use extents::Extents;
pub use reply::ReplyHeader;
pub use request::{Command, InvalidRequest, REQUEST_HEADER_SIZE, RequestHeader};
pub use status::{Allocation, block_status};
