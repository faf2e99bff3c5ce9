//! The size of the gradient beside its usual size.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Score, ScoreInput, ScoreNeeds};

use super::{each_pair, finite};
use crate::checks::require;

/// Settings of the score `adam`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamConfig {
    /// Added to sqrt(v): the score of an element that never had a gradient is |g| / eps.
    pub eps: f64,
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self { eps: 1e-8 }
    }
}

impl AdamConfig {
    /// The score.
    ///
    /// # Errors
    /// An `eps` that is not a normal float32 above 0.
    pub fn score(self) -> anyhow::Result<Adam> {
        let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
        require(
            range.contains(&self.eps),
            "eps",
            "finite and at least 1.2e-38 (the smallest normal float32)",
            self.eps,
        )?;
        Ok(Adam { eps: self.eps as f32 })
    }
}

impl Build<slots::Score> for AdamConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Score>> {
        Ok(Arc::new(self.score()?))
    }
}

zf_core::register!(
    slots::Score,
    "adam",
    AdamConfig,
    "the size of the gradient beside its usual size, |g| / (sqrt(v) + eps); for rules that keep v (exp_avg_sq)",
    "[select]\nscore = { kind = \"adam\", eps = 1e-8 }"
);

/// `|g| / (sqrt(v) + eps)`, v the running mean of squared gradients: how far Adam would move the element, its momentum and
/// bias correction left out (Kingma and Ba, "Adam", 2015, algorithm 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    eps: f32,
}

impl Score for Adam {
    fn needs(&self) -> ScoreNeeds {
        ScoreNeeds { second_moment: true, ..ScoreNeeds::default() }
    }

    fn map(&self, input: &ScoreInput<'_>, out: &mut [f32]) {
        let eps = self.eps;
        each_pair(input.grad, input.second_moment, out, |g, v| finite(g.abs() / (v.sqrt() + eps)));
    }
}
