//! A straight line down.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::Schedule;

use super::{check_ratio, progress, warming};

/// Settings of the linear schedule.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LinearConfig {
    /// Updates of linear warm-up.
    pub warmup: u64,
    /// The part of the base rate that remains at the end.
    pub min_ratio: f64,
}

impl LinearConfig {
    /// The schedule.
    ///
    /// # Errors
    /// `min_ratio` outside 0 to 1.
    pub fn schedule(self) -> anyhow::Result<Linear> {
        check_ratio(self.min_ratio)?;
        Ok(Linear(self))
    }
}

impl Build<slots::Schedule> for LinearConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        Ok(Arc::new(self.schedule()?))
    }
}

zf_core::register!(
    slots::Schedule,
    "linear",
    LinearConfig,
    "linear warm-up, then a straight line down to min_ratio",
    "warmup = 20\nmin_ratio = 0.0"
);

/// `m + (1 - m)(1 - (t - warmup)/(total - warmup))` after the warm-up, m = `min_ratio`.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear(LinearConfig);

impl Schedule for Linear {
    fn factor(&self, step: u64, total: u64) -> f64 {
        let LinearConfig { warmup, min_ratio } = self.0;
        warming(step, warmup).unwrap_or_else(|| min_ratio + (1.0 - min_ratio) * (1.0 - progress(step, warmup, total)))
    }
}
