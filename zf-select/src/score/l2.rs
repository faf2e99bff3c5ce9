//! The square of the gradient.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Score, ScoreInput};

use super::{each, finite};

/// `g^2`, so that a column's score is the square of the L2 norm of its gradient: single large elements count more than in
/// [`L1`](super::L1). Has no settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct L2 {}

impl Score for L2 {
    fn map(&self, input: &ScoreInput<'_>, out: &mut [f32]) {
        each(input.grad, out, |g| finite(g * g));
    }
}

impl Build<slots::Score> for L2 {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Score>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(slots::Score, "l2", L2, "the square of the gradient, g^2", "[select]\nscore = \"l2\"");
