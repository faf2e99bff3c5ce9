//! How often columns are chosen again, as a run file says it.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zf_core::stage::Every;

use crate::checks::require;

/// How often columns are chosen again: `"auto"`, a number of updates, or `{ turnover = 0.3 }`.
///
/// ```
/// use zf_core::stage::Every;
/// use zf_select::Interval;
///
/// # fn main() -> anyhow::Result<()> {
/// assert_eq!(Interval::Updates(16).every()?, Every::Updates(16));
/// assert_eq!(Interval::Auto.every()?, Every::Turnover(0.3));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Interval {
    /// When enough of the columns would change: a turnover above 0.3.
    #[default]
    Auto,
    /// After so many updates, at least 1.
    Updates(u64),
    /// When 1 - |both| / |either| of the present and the candidate columns exceeds this, from 0 to below 1.
    Turnover(f64),
}

impl Interval {
    /// The turnover of [`Interval::Auto`].
    pub const AUTO: f64 = 0.3;

    /// The same as the engine sees it.
    ///
    /// # Errors
    /// A number outside its range, as an error that points at the setting `every`.
    pub fn every(self) -> anyhow::Result<Every> {
        match self {
            Self::Auto => Ok(Every::Turnover(Self::AUTO)),
            Self::Updates(updates) => {
                require(
                    0 < updates,
                    "every",
                    "\"auto\", a number of updates from 1 on, or { turnover = 0.3 }",
                    updates,
                )?;
                Ok(Every::Updates(updates))
            }
            // Nothing exceeds 1, so columns would never be chosen again.
            Self::Turnover(turnover) => {
                require((0.0..1.0).contains(&turnover), "every.turnover", "from 0 to below 1", turnover)?;
                Ok(Every::Turnover(turnover))
            }
        }
    }
}

/// The form of a table.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    turnover: f64,
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Updates(updates) => serializer.serialize_u64(updates),
            Self::Turnover(turnover) => Table { turnover }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Interval;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", a number of updates from 1 on, or { turnover = 0.3 }")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Interval, E> {
                match text {
                    "auto" => Ok(Interval::Auto),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_u64<E: de::Error>(self, updates: u64) -> Result<Interval, E> {
                Ok(Interval::Updates(updates))
            }

            fn visit_i64<E: de::Error>(self, updates: i64) -> Result<Interval, E> {
                match u64::try_from(updates) {
                    Ok(updates) => self.visit_u64(updates),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Signed(updates), &self)),
                }
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Interval, A::Error> {
                let table = Table::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(Interval::Turnover(table.turnover))
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

impl JsonSchema for Interval {
    fn schema_name() -> Cow<'static, str> {
        "Interval".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "description": "when to choose again: after a number of updates, when { turnover = X } of the columns would change, \
                            or \"auto\" (turnover 0.3)",
            "anyOf": [
                { "enum": ["auto"] },
                { "type": "integer", "minimum": 1 },
                {
                    "type": "object",
                    "properties": { "turnover": { "type": "number", "minimum": 0, "exclusiveMaximum": 1 } },
                    "required": ["turnover"],
                    "additionalProperties": false
                }
            ]
        })
    }
}
