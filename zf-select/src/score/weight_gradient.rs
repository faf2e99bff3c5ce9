//! The gradient times the weight.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Score, ScoreInput, ScoreNeeds};

use super::{each_pair, finite};

/// `|w g|`, to first order how much the loss would change without the element (Molchanov et al., "Importance Estimation for
/// Neural Network Pruning", 2019, section 3). Has no settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightGradient {}

impl Score for WeightGradient {
    fn needs(&self) -> ScoreNeeds {
        ScoreNeeds { weight: true, ..ScoreNeeds::default() }
    }

    fn map(&self, input: &ScoreInput<'_>, out: &mut [f32]) {
        each_pair(input.grad, input.weight, out, |g, w| finite((w * g).abs()));
    }
}

impl Build<slots::Score> for WeightGradient {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Score>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(
    slots::Score,
    "weight-gradient",
    WeightGradient,
    "the gradient times the weight, |w g|",
    "[select]\nscore = \"weight-gradient\""
);
