//! Checks that the stages share.

use std::fmt::Display;

use zf_core::registry::setting;
use zf_core::stage::Candidates;
use zf_core::{Error, Result};

/// Refuses the setting `key` unless `holds`.
pub(crate) fn require(holds: bool, key: &str, rule: &str, found: impl Display) -> anyhow::Result<()> {
    if holds { Ok(()) } else { Err(setting(key, format!("must be {rule}, found {found}"))) }
}

/// Checks a part of the columns of each weight.
pub(crate) fn ratio(key: &str, ratio: f64) -> anyhow::Result<()> {
    if ratio == 0.0 {
        return Err(setting(key, "must be above 0, found 0; for no columns at all use kind = \"none\""));
    }
    require(0.0 < ratio && ratio <= 1.0, key, "above 0 and at most 1", ratio)
}

/// The number of a weight's columns, which must be at least one and have a number each.
pub(crate) fn columns(weight: &Candidates<'_>) -> Result<u32> {
    u32::try_from(weight.columns).ok().filter(|&columns| 0 < columns).ok_or_else(|| {
        Error::Engine(format!("weight `{}` has {} columns; expected 1 to {}", weight.name, weight.columns, u32::MAX))
    })
}

/// Checks that each column has a score.
pub(crate) fn scored(weight: &Candidates<'_>) -> Result<()> {
    columns(weight)?;
    if weight.scores.len() != weight.columns {
        return Err(Error::Engine(format!(
            "weight `{}` has {} columns and {} scores; expected a score for each column",
            weight.name,
            weight.columns,
            weight.scores.len()
        )));
    }
    Ok(())
}
