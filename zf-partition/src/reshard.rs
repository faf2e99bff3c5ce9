//! What happens to gathered parameters between forward and backward, as a run file says it.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zf_core::mesh::Mesh;
use zf_core::stage::Reshard;
use zf_core::{Error, Result};

/// Whether a unit's gathered parameters are freed after its forward pass: `true`, `false`, or over how many ranks they
/// are split then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// They are freed, and gathered again for backward: `true`.
    Free,
    /// They stay until backward: `false`.
    Keep,
    /// Groups of so many consecutive ranks keep one copy between them and gather it for backward.
    Ranks(usize),
    /// The ranks of a machine keep one copy between them, so that the second gather stays inside the machine (the
    /// secondary partition of hpZ: Wang et al., "ZeRO++", 2023, section 3.2).
    Node,
}

impl ReshardAfterForward {
    /// The same as the engine sees it, where parameters are split over `p` ranks. A group of `p` ranks or more is
    /// [`Reshard::Shard`], a group of one [`Reshard::Keep`].
    ///
    /// # Errors
    /// A number that does not divide `p`; a node that neither divides `p` nor is a multiple of it.
    pub fn resolve(self, p: usize, mesh: &Mesh) -> Result<Reshard> {
        let (ranks, whole) = match self {
            Self::Free => return Ok(Reshard::Shard),
            Self::Keep => return Ok(Reshard::Keep),
            // A larger node holds several copies already.
            Self::Node => (mesh.node(), mesh.node().is_multiple_of(p)),
            Self::Ranks(n) => (n, n == p),
        };
        match ranks {
            _ if whole => Ok(Reshard::Shard),
            1 => Ok(Reshard::Keep),
            n if n > 0 && p.is_multiple_of(n) => Ok(Reshard::Group(n)),
            n => Err(Error::Config(format!(
                "partition.reshard_after_forward: the ranks that keep one copy between them must divide size(p); found {n} \
                 ranks{} with p = {p}",
                if self == Self::Node { " a node" } else { "" }
            ))),
        }
    }
}

impl Serialize for ReshardAfterForward {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Free => serializer.serialize_bool(true),
            Self::Keep => serializer.serialize_bool(false),
            Self::Ranks(n) => serializer.serialize_u64(*n as u64),
            Self::Node => serializer.serialize_str("node"),
        }
    }
}

impl<'de> Deserialize<'de> for ReshardAfterForward {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = ReshardAfterForward;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, a number of ranks from 1 on, or \"node\"")
            }

            fn visit_bool<E: de::Error>(self, free: bool) -> Result<ReshardAfterForward, E> {
                Ok(if free { ReshardAfterForward::Free } else { ReshardAfterForward::Keep })
            }

            fn visit_u64<E: de::Error>(self, ranks: u64) -> Result<ReshardAfterForward, E> {
                match usize::try_from(ranks) {
                    Ok(n) if n > 0 => Ok(ReshardAfterForward::Ranks(n)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(ranks), &self)),
                }
            }

            fn visit_i64<E: de::Error>(self, ranks: i64) -> Result<ReshardAfterForward, E> {
                match u64::try_from(ranks) {
                    Ok(n) => self.visit_u64(n),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Signed(ranks), &self)),
                }
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ReshardAfterForward, E> {
                match text {
                    "node" => Ok(ReshardAfterForward::Node),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

impl JsonSchema for ReshardAfterForward {
    fn schema_name() -> Cow<'static, str> {
        "ReshardAfterForward".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "description": "true, false, or the ranks that keep one copy between them: a number or \"node\"",
            "anyOf": [
                { "type": "boolean" },
                { "type": "integer", "minimum": 1 },
                { "enum": ["node"] }
            ]
        })
    }
}
