//! Over how many ranks parameters, gradients and optimizer states are split.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zf_core::mesh::Mesh;
use zf_core::{Error, Result};

/// The size of the groups of consecutive ranks that hold one copy together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// This many ranks; 1 means that every rank holds everything.
    Ranks(usize),
    /// All ranks of the data axis.
    World,
    /// The ranks of one machine ([`Mesh::node`]).
    Node,
}

impl Serialize for Scope {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Ranks(n) => serializer.serialize_u64(*n as u64),
            Self::World => serializer.serialize_str("world"),
            Self::Node => serializer.serialize_str("node"),
        }
    }
}

impl<'de> Deserialize<'de> for Scope {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = Scope;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of ranks from 1 on, \"world\" or \"node\"")
            }

            fn visit_u64<E: de::Error>(self, ranks: u64) -> Result<Scope, E> {
                match usize::try_from(ranks) {
                    Ok(n) if n > 0 => Ok(Scope::Ranks(n)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(ranks), &self)),
                }
            }

            fn visit_i64<E: de::Error>(self, ranks: i64) -> Result<Scope, E> {
                match u64::try_from(ranks) {
                    Ok(n) => self.visit_u64(n),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Signed(ranks), &self)),
                }
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Scope, E> {
                match text {
                    "world" => Ok(Scope::World),
                    "node" => Ok(Scope::Node),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

impl JsonSchema for Scope {
    fn schema_name() -> Cow<'static, str> {
        "Scope".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "description": "Ranks that hold one copy together: a number, \"world\" (the data axis) or \"node\"",
            "anyOf": [
                { "type": "integer", "minimum": 1 },
                { "enum": ["world", "node"] }
            ]
        })
    }
}

/// The three scopes of a strategy.
///
/// Examples: FSDP (Zhao et al., "PyTorch FSDP", 2023) is `world` three times; MiCS (Zhang et al., "MiCS: Near-linear
/// Scaling for Training Gigantic Model on Public Cloud", 2022, section 3) and FSDP's hybrid sharding are `node` three times,
/// each node a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scopes {
    /// Parameters.
    pub p: Scope,
    /// Accumulated gradients.
    pub g: Scope,
    /// Masters and optimizer states.
    pub o: Scope,
}

/// The same as numbers of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Parameters.
    pub p: usize,
    /// Accumulated gradients.
    pub g: usize,
    /// Masters and optimizer states.
    pub o: usize,
}

impl Scopes {
    /// The scopes of a ZeRO stage (Rajbhandari et al., "ZeRO", section 5): 0 splits nothing, 1 the optimizer states, 2 also
    /// the gradients, 3 also the parameters.
    pub fn of_stage(stage: u8) -> Option<Self> {
        let split = |from| {
            if stage >= from { Scope::World } else { Scope::Ranks(1) }
        };
        (stage <= 3).then(|| Self { p: split(3), g: split(2), o: split(1) })
    }

    /// Whether any of them is that of a machine.
    pub fn names_node(&self) -> bool {
        [self.p, self.g, self.o].contains(&Scope::Node)
    }

    /// The sizes on `mesh`, which obey the rule: each divides the data axis, size(O) >= size(G) >= size(P), and each
    /// divides the next larger.
    ///
    /// # Errors
    /// Sizes that break the rule, all of them named.
    pub fn sizes(&self, mesh: &Mesh) -> Result<Sizes> {
        let data = mesh.size("data");
        let size = |scope: Scope| match scope {
            Scope::Ranks(n) => n,
            Scope::World => data,
            Scope::Node => mesh.node(),
        };
        let sizes = Sizes { p: size(self.p), g: size(self.g), o: size(self.o) };
        let Sizes { p, g, o } = sizes;
        let found = format!("found o = {o}, g = {g}, p = {p} on {data} data-parallel ranks, {} a node", mesh.node());
        for (which, n) in [("o", o), ("g", g), ("p", p)] {
            if n == 0 || !data.is_multiple_of(n) {
                return Err(Error::Config(format!(
                    "partition.scope.{which}: each scope must divide the number of data-parallel ranks; {found}"
                )));
            }
        }
        if !(o >= g && g >= p) {
            return Err(Error::Config(format!(
                "partition.scope: size(o) >= size(g) >= size(p) must hold, since what is updated together must be reduced \
                 together and what is reduced together must be gathered together; {found}"
            )));
        }
        if !o.is_multiple_of(g) || !g.is_multiple_of(p) {
            return Err(Error::Config(format!(
                "partition.scope: size(g) must divide size(o), and size(p) size(g); {found}"
            )));
        }
        Ok(sizes)
    }
}
