//! Learning-rate schedules. All begin with the same linear warm-up: `(t + 1) / warmup` while `t < warmup`.
//!
//! `t` counts updates from 0, `total` is their number in the run. A schedule is defined for every pair of numbers: from
//! the last update on the factor stays where it ends, and it is never negative or NaN.

mod cosine;
mod linear;
mod wsd;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::Schedule;

pub use cosine::{Cosine, CosineConfig};
pub use linear::{Linear, LinearConfig};
pub use wsd::{Decay, DecayShape, Wsd, WsdConfig};

use crate::checks::require;

/// Settings of the constant schedule.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ConstantConfig {
    /// Updates of linear warm-up.
    pub warmup: u64,
}

impl ConstantConfig {
    /// The schedule.
    ///
    /// # Errors
    /// None.
    pub fn schedule(self) -> anyhow::Result<Constant> {
        Ok(Constant(self))
    }
}

impl Build<slots::Schedule> for ConstantConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        Ok(Arc::new(self.schedule()?))
    }
}

zf_core::register!(
    slots::Schedule,
    "constant",
    ConstantConfig,
    "the base rate throughout, after a linear warm-up",
    "warmup = 20"
);

/// 1 after the warm-up.
#[derive(Debug, Clone, PartialEq)]
pub struct Constant(ConstantConfig);

impl Schedule for Constant {
    fn factor(&self, step: u64, _total: u64) -> f64 {
        warming(step, self.0.warmup).unwrap_or(1.0)
    }
}

/// The factor during the warm-up.
fn warming(step: u64, warmup: u64) -> Option<f64> {
    // `step + 1` cannot overflow below another u64.
    (step < warmup).then(|| (step + 1) as f64 / warmup as f64)
}

/// How much of `start..end` has passed at `step`, in [0, 1]; an empty stretch has passed.
fn progress(step: u64, start: u64, end: u64) -> f64 {
    if step >= end {
        1.0
    } else if step <= start {
        0.0
    } else {
        (step - start) as f64 / (end - start) as f64
    }
}

/// Checks the ratio that a schedule falls to.
fn check_ratio(min_ratio: f64) -> anyhow::Result<()> {
    require((0.0..=1.0).contains(&min_ratio), "min_ratio", "from 0 to 1", min_ratio)
}

#[cfg(test)]
mod tests;
