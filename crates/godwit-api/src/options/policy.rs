//! A policy's name in the API and on the command line.

use core::ops::Deref;

use godwit_core::{DOUBLE_WRITE, POLICIES, PolicyDescription};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// The policy of a disk's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy(pub &'static PolicyDescription);

impl Policy {
    /// Returns the policy of this name.
    pub fn named(name: &str) -> Option<Self> {
        POLICIES.into_iter().find(|it| it.name == name).map(Self)
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self(DOUBLE_WRITE)
    }
}

impl Deref for Policy {
    type Target = PolicyDescription;

    fn deref(&self) -> &PolicyDescription {
        self.0
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| {
            let known = POLICIES.map(|policy| policy.name).join("`, `");
            D::Error::custom(format!(
                "unknown variant `{name}`, expected one of `{known}`"
            ))
        })
    }
}

impl PartialSchema for Policy {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some("The policy of a disk's move."))
            .enum_values(Some(POLICIES.map(|policy| policy.name)))
            .into()
    }
}

impl ToSchema for Policy {}
