//! Checks that the configurations of all models share.

use zf_core::registry::setting;

/// Every value above 0, and small enough for libtorch's signed sizes.
pub(crate) fn positive(settings: &[(&str, usize)]) -> anyhow::Result<()> {
    for &(key, value) in settings {
        if value == 0 || value > i32::MAX as usize {
            return Err(setting(key, format!("is {value}; expected a number from 1 to {}", i32::MAX)));
        }
    }
    Ok(())
}

/// A probability of dropout.
pub(crate) fn probability(key: &str, value: f64) -> anyhow::Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(setting(key, format!("is {value}; expected a probability from 0 up to, but not including, 1")))
}

/// A standard deviation.
pub(crate) fn deviation(key: &str, value: f64) -> anyhow::Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(setting(key, format!("is {value}; expected a finite number from 0")))
}

/// Indented JSON with a final newline.
pub(crate) fn pretty(value: &serde_json::Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
