//! Faults: bad links, sudden deaths, full and failing disks, hostile bytes, bad input, and clients that stall.

mod bad_input;
mod chaos;
mod crash;
mod disk_errors;
mod floods;
mod full_host;
mod hostile;
mod stalled_clients;
mod unencrypted_data;
