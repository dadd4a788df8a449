//! A disk as a device of vhost-user: the engine serves its rings.

use godwit_vhost::protocol::device::{Device, FrontEndReply};
use godwit_vhost::protocol::session::FrontEndCommand;

use crate::engine::EngineHandle;
use crate::virtio_block::config_space;

/// A disk for virtual machines to attach to. Guests read the first 20 bytes of the disk's name as the serial number.
#[derive(Clone, Debug)]
pub struct BlockDevice(EngineHandle);

impl BlockDevice {
    /// Returns the disk that this engine serves.
    pub const fn new(engine: EngineHandle) -> Self {
        Self(engine)
    }
}

impl Device for BlockDevice {
    fn name(&self) -> &str {
        self.0.disk()
    }

    fn features(&self) -> u64 {
        config_space::FEATURES
    }

    fn configuration(&self, offset: u32, size: u32) -> Option<Vec<u8>> {
        config_space::read(self.0.capacity(), offset, size)
    }

    fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply) {
        self.0.front_end(command, reply);
    }
}
