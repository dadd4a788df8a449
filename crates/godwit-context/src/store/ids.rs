//! A disk's id as stored: in hexadecimal.

use godwit_core::units::DiskId;
use serde::{Deserialize, Deserializer, Serializer};

pub(super) fn serialize<S: Serializer>(id: &Option<DiskId>, to: S) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => to.serialize_some(&id.to_string()),
        None => to.serialize_none(),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<DiskId>, D::Error> {
    let text = Option::<String>::deserialize(from)?;
    text.map(|text| text.parse().map_err(serde::de::Error::custom))
        .transpose()
}
