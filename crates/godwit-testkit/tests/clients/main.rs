//! Programs on a disk that a node serves, and the client that verifies it.

mod programs;
mod verifying_client;
