//! The engine against real sockets and files.

mod hostile;
mod migrate;
mod serve;
mod support;
mod tls;
