//! Repositories in a directory and at two S3 servers.

mod bad;
mod collecting;
mod images;
mod restoring;
mod servers;
mod support;
