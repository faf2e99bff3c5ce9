//! Bandwidths, as people write them.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes a second, in a run file a text with a unit: `"50GB/s"`, `"1.5 GiB/s"`, `"800MB/s"`.
///
/// B, KB, MB and GB are powers of 1000; KiB, MiB and GiB powers of 1024. Upper and lower case count the same. Bits have no
/// unit here: 100 Gbit/s are 12.5GB/s.
///
/// ```
/// use zf_core::bandwidth::Bandwidth;
/// let link: Bandwidth = "12.5GB/s".parse()?;
/// assert_eq!(link.bytes_per_second(), 12.5e9);
/// # Ok::<(), zf_core::bandwidth::BandwidthError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Bandwidth(f64);

const UNITS: [(&str, f64); 7] = [
    ("KIB", 1024.0),
    ("MIB", 1_048_576.0),
    ("GIB", 1_073_741_824.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("B", 1.0),
];

/// A text that is not a bandwidth.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a bandwidth above 0 such as \"50GB/s\" or \"800MB/s\" (B, KB, MB, GB, KiB, MiB, GiB a second), found {0:?}"
)]
pub struct BandwidthError(String);

impl Bandwidth {
    /// 34 years, which can be added to a moment without overflow.
    pub const LONGEST: Duration = Duration::from_secs(1 << 30);

    /// Bytes a second, above 0.
    pub fn bytes_per_second(self) -> f64 {
        self.0
    }

    /// The time that so many bytes take, at most [`Bandwidth::LONGEST`].
    pub fn time(self, bytes: u64) -> Duration {
        let time = Duration::try_from_secs_f64(bytes as f64 / self.0);
        time.map_or(Self::LONGEST, |time| time.min(Self::LONGEST))
    }
}

impl std::str::FromStr for Bandwidth {
    type Err = BandwidthError;

    fn from_str(text: &str) -> Result<Self, BandwidthError> {
        let refuse = || BandwidthError(text.to_owned());
        let upper = text.trim().to_ascii_uppercase();
        let size = upper.strip_suffix("/S").ok_or_else(refuse)?.trim_end();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((size.strip_suffix(name)?.trim_end(), unit)))
            .ok_or_else(refuse)?;
        // Digits and a point only: no sign, exponent, infinity.
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let value = number.parse::<f64>().map_err(|_| refuse())? * unit;
        if plain && value > 0.0 && value.is_finite() { Ok(Self(value)) } else { Err(refuse()) }
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimal = [("GB", 1e9), ("MB", 1e6), ("KB", 1e3)].into_iter().find(|(_, unit)| self.0 >= *unit);
        let (name, unit) = decimal.unwrap_or(("B", 1.0));
        let short = self.0 / unit;
        // What is written must read back as the same number.
        if short * unit == self.0 { write!(f, "{short}{name}/s") } else { write!(f, "{}B/s", self.0) }
    }
}

impl Serialize for Bandwidth {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bandwidth {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Bandwidth {
    fn schema_name() -> Cow<'static, str> {
        "Bandwidth".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "description": "Bytes a second: a text with B/s, KB/s, MB/s, GB/s (powers of 1000), KiB/s, MiB/s or GiB/s (of 1024)",
            "type": "string",
            "pattern": r"^\s*[0-9.]+\s*([KkMmGg][Ii]?)?[Bb]\s*/[Ss]\s*$"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_read_and_written() {
        for (text, bytes, again) in [
            ("50GB/s", 50e9, "50GB/s"),
            ("1.5 gib/s", 1.5 * 1_073_741_824.0, "1.610612736GB/s"),
            ("800MB/s", 8e8, "800MB/s"),
            ("12B/s", 12.0, "12B/s"),
        ] {
            let bandwidth: Bandwidth = text.parse().expect(text);
            assert_eq!(bandwidth.bytes_per_second(), bytes, "{text}");
            assert_eq!(bandwidth.to_string(), again);
            assert_eq!(again.parse(), Ok(bandwidth));
        }
        for text in ["", "50", "50GB", "0GB/s", "-1GB/s", "GB/s", "1e3GB/s", "infGB/s", "50 Gbit/s", "5/s"] {
            let message = text.parse::<Bandwidth>().expect_err(text).to_string();
            assert!(message.ends_with(&format!("found {text:?}")), "{message}");
        }
    }

    #[test]
    fn times_are_finite() {
        let slow: Bandwidth = "1KB/s".parse().expect("valid");
        assert_eq!(slow.time(500), Duration::from_millis(500));
        let slowest: Bandwidth = "0.0000000000000000000000001B/s".parse().expect("valid");
        assert_eq!(slowest.time(u64::MAX), Bandwidth::LONGEST);
    }
}
