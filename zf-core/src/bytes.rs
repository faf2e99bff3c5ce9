//! Sizes in bytes, as people write them.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A size in bytes, in a run file an integer or a text with a unit: `"25MB"`, `"1.5 GiB"`.
///
/// B, KB, MB and GB are powers of 1000; KiB, MiB and GiB powers of 1024. Upper and lower case count the same.
///
/// ```
/// use zf_core::bytes::ByteSize;
/// assert_eq!("25MB".parse(), Ok(ByteSize(25_000_000)));
/// assert_eq!("1.5 GiB".parse(), Ok(ByteSize(3 << 29)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 7] = [
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

/// A text that is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected a size such as \"25MB\" or \"24MiB\" (B, KB, MB, GB, KiB, MiB, GiB), found {0:?}")]
pub struct ByteSizeError(String);

impl std::str::FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let refuse = || ByteSizeError(text.to_owned());
        let upper = text.trim().to_ascii_uppercase();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((upper.strip_suffix(name)?.trim_end(), *unit)))
            .unwrap_or((&upper, 1));
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(unit).map(Self).ok_or_else(refuse);
        }
        // Digits and a point only: no sign, exponent, infinity.
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let value: f64 = number.parse().map_err(|_| refuse())?;
        let bytes = (value * unit as f64).round();
        if !plain || bytes >= u64::MAX as f64 {
            return Err(refuse());
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    /// The largest unit that divides the size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = [
            ("GB", 1_000_000_000),
            ("GiB", 1 << 30),
            ("MB", 1_000_000),
            ("MiB", 1 << 20),
            ("KB", 1_000),
            ("KiB", 1 << 10),
        ]
        .into_iter()
        .find(|(_, unit)| self.0 != 0 && self.0.is_multiple_of(*unit));
        match exact {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes or a size such as \"25MB\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

impl JsonSchema for ByteSize {
    fn schema_name() -> Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "description": "Bytes: an integer, or a text with B, KB, MB, GB (powers of 1000), KiB, MiB or GiB (of 1024)",
            "anyOf": [
                { "type": "integer", "minimum": 0 },
                { "type": "string", "pattern": r"^\s*[0-9.]+\s*([KkMmGg][Ii]?)?[Bb]?\s*$" }
            ]
        })
    }
}
