//! The engine against real sockets and files.

mod holes;
mod hostile;
mod moving;
mod pair;
mod puppet;
mod serve;
mod stalled;
mod support;
mod tls;
mod vhost;
