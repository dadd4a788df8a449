//! The engine against real sockets and files.

mod after_a_move;
mod compression;
mod double_writes;
mod forwarding;
mod holes;
mod hostile;
mod migrate;
mod pair;
mod pause;
mod pulls;
mod puppet;
mod serve;
mod stalled;
mod support;
mod tls;
mod vhost;
