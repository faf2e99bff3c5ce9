//! A learning-rate schedule in a crate of one's own: `inverse-sqrt`, from "Attention Is All You Need" (section 5.3).
//!
//! The settings, the schedule, `build`, and one `register!` line; the binary in `main.rs` is the whole `zf` program with
//! this stage in it.

use std::sync::Arc;

use zf_core::registry::{Build, BuildContext, setting};
use zf_core::slots;
use zf_core::stage::Schedule;

/// The rate rises for `warmup` steps and then falls with the inverse square root of the step.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InverseSqrt {
    /// Steps until the full rate.
    pub warmup: u64,
    /// The factor never falls below this after the warm-up.
    #[serde(default)]
    pub min_ratio: f64,
}

impl Schedule for InverseSqrt {
    fn factor(&self, step: u64, _total: u64) -> f64 {
        let (step, warmup) = (step as f64 + 1.0, self.warmup as f64);
        if step < warmup { step / warmup } else { (warmup / step).sqrt().max(self.min_ratio) }
    }
}

impl Build<slots::Schedule> for InverseSqrt {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        if self.warmup == 0 {
            return Err(setting("warmup", "must be at least 1, found 0"));
        }
        if !(0.0..=1.0).contains(&self.min_ratio) {
            return Err(setting("min_ratio", format!("must be from 0 to 1, found {}", self.min_ratio)));
        }
        Ok(Arc::new(self))
    }
}

zf_core::register!(
    slots::Schedule,
    "inverse-sqrt",
    InverseSqrt,
    "linear warm-up, then the inverse square root of the step",
    "warmup = 20\nmin_ratio = 0.05"
);
