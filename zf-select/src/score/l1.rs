//! The size of the gradient.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Score, ScoreInput};

use super::each;

/// `|g|`, so that a column's score is the L1 norm of its gradient (Ren et al., "ZenFlow", 2025, section 3). Has no settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct L1 {}

impl Score for L1 {
    fn map(&self, input: &ScoreInput<'_>, out: &mut [f32]) {
        each(input.grad, out, f32::abs);
    }
}

impl Build<slots::Score> for L1 {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Score>> {
        Ok(Arc::new(self))
    }
}

zf_core::register!(slots::Score, "l1", L1, "the size of the gradient, |g|", "[select]\nscore = \"l1\"");
