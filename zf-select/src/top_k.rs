//! A fixed part of each weight's columns, the best.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::registry::{Build, BuildContext, Choice};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Selector};

use crate::base::{Base, from_base};
use crate::{Interval, capacity, checks, highest};

/// Settings of the selector `topk`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TopKConfig {
    /// The part of each weight's columns that is chosen, above 0 and at most 1; at least one column.
    pub ratio: f64,
    /// How much an element matters: a name of `zf stages select.score`, or a table with `kind` and settings.
    pub score: Choice<slots::Score>,
    /// Whether a column is an input feature or an output feature of the weight.
    pub axis: Axis,
    /// When to choose again: a number of updates, { turnover = 0.3 }, or "auto" (which is that).
    pub every: Interval,
}

impl Default for TopKConfig {
    fn default() -> Self {
        Self { ratio: 0.1, score: Choice::named("l1"), axis: Axis::Input, every: Interval::Auto }
    }
}

impl TopKConfig {
    /// The selector.
    ///
    /// # Errors
    /// A setting outside its range, a score that cannot be built.
    pub fn selector(self, cx: &BuildContext) -> anyhow::Result<TopK> {
        checks::ratio("ratio", self.ratio)?;
        Ok(TopK { ratio: self.ratio, base: Base::scored(self.axis, self.every, &self.score, cx)? })
    }
}

impl Build<slots::Select> for TopKConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        Ok(Box::new(self.selector(cx)?))
    }
}

zf_core::register!(
    slots::Select,
    "topk",
    TopKConfig,
    "the columns of the highest scores, a fixed part of each weight's",
    "ratio = 0.1\nscore = \"l1\"\naxis = \"input\"\nevery = 16"
);

/// The [`capacity`] columns of the highest scores (Ren et al., "ZenFlow", 2025, section 3). Among equal ones the lower index
/// goes first, a score that is not a number goes last.
#[derive(Debug, Clone)]
pub struct TopK {
    ratio: f64,
    base: Base,
}

impl Selector for TopK {
    from_base!();

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        checks::scored(weight)?;
        Ok(highest(weight.scores, capacity(self.ratio, weight.columns)))
    }
}
