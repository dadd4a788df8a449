//! Virtual machines: their guest, their names and owners, and moves in which a node or a QEMU fails or refuses.

mod diskless;
mod guest;
mod names;
mod owners;
mod post_copy;
mod qemu_user;
mod silent_qemus;
mod still_machines;
mod zero_copy_refusals;
