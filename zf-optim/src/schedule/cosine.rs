//! Half a cosine (Loshchilov and Hutter, "SGDR", without restarts).

use std::f64::consts::PI;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::Schedule;

use super::{check_ratio, progress, warming};

/// Settings of the cosine schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CosineConfig {
    /// Updates of linear warm-up.
    pub warmup: u64,
    /// The part of the base rate that remains at the end.
    pub min_ratio: f64,
}

impl Default for CosineConfig {
    fn default() -> Self {
        Self { warmup: 0, min_ratio: 0.1 }
    }
}

impl CosineConfig {
    /// The schedule.
    ///
    /// # Errors
    /// `min_ratio` outside 0 to 1.
    pub fn schedule(self) -> anyhow::Result<Cosine> {
        check_ratio(self.min_ratio)?;
        Ok(Cosine(self))
    }
}

impl Build<slots::Schedule> for CosineConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        Ok(Arc::new(self.schedule()?))
    }
}

zf_core::register!(
    slots::Schedule,
    "cosine",
    CosineConfig,
    "linear warm-up, then half a cosine down to min_ratio",
    "warmup = 20\nmin_ratio = 0.1"
);

/// `m + (1 - m)/2 (1 + cos(pi (t - warmup)/(total - warmup)))` after the warm-up, m = `min_ratio`.
#[derive(Debug, Clone, PartialEq)]
pub struct Cosine(CosineConfig);

impl Schedule for Cosine {
    fn factor(&self, step: u64, total: u64) -> f64 {
        let CosineConfig { warmup, min_ratio } = self.0;
        warming(step, warmup).unwrap_or_else(|| {
            let x = progress(step, warmup, total);
            min_ratio + (1.0 - min_ratio) / 2.0 * (1.0 + (PI * x).cos())
        })
    }
}
