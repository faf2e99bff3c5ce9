//! Warm-up, stable, decay (Hu et al., "MiniCPM", section 4).

use std::f64::consts::PI;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::Schedule;

use super::{check_ratio, progress, warming};
use crate::checks::require;

/// How long the decay takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Decay {
    /// This many updates (an integer).
    Updates(u64),
    /// This part of all updates, rounded to the nearest number of them (a number with a point, from 0.0 to 1.0).
    Fraction(f64),
}

/// The form of the decay, x from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DecayShape {
    /// 1 - x.
    #[default]
    Linear,
    /// (1 + cos(pi x)) / 2.
    Cosine,
    /// 1 - sqrt(x) (Hagele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").
    Sqrt,
}

/// Settings of the schedule `wsd`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WsdConfig {
    /// Updates of linear warm-up.
    pub warmup: u64,
    /// How long the decay at the end takes: an integer is updates, a number with a point a part of all updates. It never
    /// reaches into the warm-up.
    pub decay: Decay,
    /// The part of the base rate that remains at the end.
    pub min_ratio: f64,
    /// The form of the decay.
    pub shape: DecayShape,
}

impl Default for WsdConfig {
    fn default() -> Self {
        Self { warmup: 0, decay: Decay::Fraction(0.1), min_ratio: 0.1, shape: DecayShape::Linear }
    }
}

impl WsdConfig {
    /// The schedule.
    ///
    /// # Errors
    /// `min_ratio` or a fraction of `decay` outside 0 to 1.
    pub fn schedule(self) -> anyhow::Result<Wsd> {
        check_ratio(self.min_ratio)?;
        if let Decay::Fraction(x) = self.decay {
            let rule = "a number of updates (an integer) or a part of them from 0.0 to 1.0";
            require((0.0..=1.0).contains(&x), "decay", rule, x)?;
        }
        Ok(Wsd(self))
    }
}

impl Build<slots::Schedule> for WsdConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        Ok(Arc::new(self.schedule()?))
    }
}

zf_core::register!(
    slots::Schedule,
    "wsd",
    WsdConfig,
    "linear warm-up, the base rate, then a decay to min_ratio at the end",
    "warmup = 20\ndecay = 0.2\nshape = \"sqrt\""
);

/// 1 after the warm-up, and `m + (1 - m) shape(x)` over the last updates, m = `min_ratio`.
#[derive(Debug, Clone, PartialEq)]
pub struct Wsd(WsdConfig);

impl Schedule for Wsd {
    fn factor(&self, step: u64, total: u64) -> f64 {
        let WsdConfig { warmup, decay, min_ratio, shape } = self.0;
        warming(step, warmup).unwrap_or_else(|| {
            let length = match decay {
                Decay::Updates(n) => n,
                Decay::Fraction(x) => (x * total as f64).round() as u64,
            };
            let x = progress(step, total.saturating_sub(length).max(warmup), total);
            let fall = match shape {
                DecayShape::Linear => 1.0 - x,
                DecayShape::Cosine => (1.0 + (PI * x).cos()) / 2.0,
                DecayShape::Sqrt => 1.0 - x.sqrt(),
            };
            min_ratio + (1.0 - min_ratio) * fall
        })
    }
}
