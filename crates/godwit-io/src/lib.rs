//! What the data planes run on: the `io_uring` of a thread, byte streams over it, TLS records, and
//! page-aligned buffers. It knows the wire's frames and no engine.

pub mod page_buffers;
pub mod ring;
pub mod stream;
pub mod tls;
pub mod zeroes;
