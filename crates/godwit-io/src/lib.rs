//! The ground of the data planes: the `io_uring` of a thread, byte streams over `io_uring`, TLS records, and
//! page-aligned buffers. Knows the frames of the wire and no engine.

pub mod page_buffers;
pub mod ring;
pub mod stream;
pub mod tls;
pub mod zeroes;
