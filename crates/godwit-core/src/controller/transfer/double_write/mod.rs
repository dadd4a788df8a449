//! A guest's writes to the migrated region: sent to both nodes, or remembered and sent later (Alg. 1 and 3 of the
//! SmartNIC storage-migration paper).

mod delayed_table;
pub(in crate::controller) mod delayed_writes;
pub(in crate::controller) mod early_acknowledgement;
mod hot_writes;
mod min_rtt;
pub(in crate::controller) mod posted_writes;
