//! Disks that move: by every policy, changed on the way, pulled, thin, returning, and where they arrive.

mod changed_moves;
mod departed_disks;
mod late_writes;
mod moves;
mod placed_disks;
mod policies;
mod pulled_disks;
mod returning_disks;
mod thin_disks;
