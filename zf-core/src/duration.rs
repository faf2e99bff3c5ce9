//! Durations in run files: a number and a unit, `"60s"`, `"500ms"`, `"10us"`, `"2m"`.
//!
//! For a field of a stage's settings: `#[serde(with = "zf_core::duration")]` and `#[schemars(with = "String")]`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer};

const UNITS: [(&str, f64); 5] = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
const LONGEST: f64 = 1e9;

/// Reads a duration such as `60s`, `1.5m`, `500ms`, `10us` or `2h`.
///
/// # Errors
/// A text that is not a positive number followed by `us`, `ms`, `s`, `m` or `h`.
pub fn parse(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("expected a duration such as \"60s\", \"500ms\", \"10us\", \"2m\" or \"1h\", found {text:?}");
    let trimmed = text.trim();
    let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &trimmed[digits.len()..];
    let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    let number: f64 = digits.trim_end().parse().map_err(|_| wrong())?;
    let seconds = number * scale;
    if seconds > 0.0 && seconds < LONGEST { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

/// Writes a duration the way [`parse`] reads it, in the largest unit that keeps it whole.
pub fn format(duration: Duration) -> String {
    let milliseconds = duration.as_millis();
    if milliseconds == 0 {
        return format!("{}us", duration.as_nanos() as f64 / 1e3);
    }
    if !duration.subsec_nanos().is_multiple_of(1_000_000) || !milliseconds.is_multiple_of(1000) {
        return format!("{}ms", duration.as_nanos() as f64 / 1e6);
    }
    match milliseconds / 1000 {
        seconds if seconds.is_multiple_of(3600) => format!("{}h", seconds / 3600),
        seconds if seconds.is_multiple_of(60) => format!("{}m", seconds / 60),
        seconds => format!("{seconds}s"),
    }
}

/// For serde: what [`format`] makes.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(*duration))
}

/// For serde: what [`parse`] reads.
///
/// # Errors
/// A text that [`parse`] refuses.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written() {
        for (text, milliseconds, again) in [
            ("60s", 60_000, "1m"),
            ("500ms", 500, "500ms"),
            ("2000us", 2, "2ms"),
            ("2m", 120_000, "2m"),
            ("1.5 s", 1500, "1500ms"),
            ("1h", 3_600_000, "1h"),
            ("90s", 90_000, "90s"),
        ] {
            let duration = parse(text).expect(text);
            assert_eq!(duration, Duration::from_millis(milliseconds), "{text}");
            assert_eq!(format(duration), again);
        }
        for text in ["5us", "0.5us", "1.25ms", "1000.5ms"] {
            assert_eq!(format(parse(text).expect(text)), text);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "60", "s", "-1s", "0s", "nan s", "inf s", "1e300h", "3 weeks", "1s2", "é"] {
            let message = parse(text).expect_err(text);
            assert!(message.contains("expected a duration"), "{message}");
        }
    }
}
