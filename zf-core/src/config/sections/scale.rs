//! The three forms of `run.loss_scale`.

use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::loss_scale::LossScaleConfig;

/// "dynamic", a number, or a table.
pub(super) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<LossScaleConfig, D::Error> {
    from.deserialize_any(Forms)
}

/// The schema of the three forms.
pub(super) fn schema(generator: &mut SchemaGenerator) -> Schema {
    let table = LossScaleConfig::json_schema(generator);
    json_schema!({
        "anyOf": [{ "const": "dynamic" }, { "type": "number" }, table],
    })
}

struct Forms;

impl<'de> Visitor<'de> for Forms {
    type Value = LossScaleConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"dynamic\", a number or a table")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        match text {
            "dynamic" => Ok(LossScaleConfig::default()),
            other => Err(E::unknown_variant(other, &["dynamic"])),
        }
    }

    fn visit_f64<E: Error>(self, fixed: f64) -> Result<Self::Value, E> {
        Ok(LossScaleConfig { fixed: Some(fixed), ..LossScaleConfig::default() })
    }

    fn visit_i64<E: Error>(self, fixed: i64) -> Result<Self::Value, E> {
        self.visit_f64(fixed as f64)
    }

    fn visit_u64<E: Error>(self, fixed: u64) -> Result<Self::Value, E> {
        self.visit_f64(fixed as f64)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        LossScaleConfig::deserialize(MapAccessDeserializer::new(map))
    }
}
