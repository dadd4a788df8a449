//! NICs with names of their own as stored.

use godwit_qemu::machine::MachineNic;

use super::{NICS, Store, StoreError, VMS, json};
use crate::store::machine::VmEntry;

impl Store {
    /// Stores an adopted VM, whose NICs lose their own names.
    pub async fn put_adopted_vm(&self, name: &str, entry: &VmEntry) -> Result<(), StoreError> {
        let name = name.to_owned();
        let nics = entry.named_nics.clone();
        let entry = json(&name, entry)?;
        self.database
            .write(move |write| {
                write
                    .open_table(VMS)?
                    .insert(name.as_str(), entry.as_slice())?;
                let mut named = write.open_table(NICS)?;
                for nic in &nics {
                    named.remove(nic.as_str())?;
                }
                Ok(())
            })
            .await
    }

    /// Stores a NIC with a name of its own.
    pub async fn put_nic(&self, name: &str, nic: &MachineNic) -> Result<(), StoreError> {
        self.put(NICS, name, nic).await
    }

    /// Removes a NIC with a name of its own.
    pub async fn remove_nic(&self, name: &str) -> Result<(), StoreError> {
        let name = name.to_owned();
        self.database
            .write(move |write| {
                write.open_table(NICS)?.remove(name.as_str())?;
                Ok(())
            })
            .await
    }
}
