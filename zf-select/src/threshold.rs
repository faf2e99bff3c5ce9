//! As many columns as it takes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::registry::{Build, BuildContext, Choice};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Selector};

use crate::base::{Base, from_base};
use crate::checks::{self, require};
use crate::rank::ranked;
use crate::{Interval, capacity};

/// Settings of the selector `threshold`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ThresholdConfig {
    /// The part of a weight's whole score that its chosen columns shall hold, above 0 and at most 1.
    pub share: f64,
    /// The largest part of a weight's columns that may be chosen, above 0 and at most 1: bounds the memory.
    pub max_ratio: f64,
    /// How much an element matters: a name of `zf stages select.score`, or a table with `kind` and settings.
    pub score: Choice<slots::Score>,
    /// Whether a column is an input feature or an output feature of the weight.
    pub axis: Axis,
    /// When to choose again: a number of updates, { turnover = 0.3 }, or "auto" (which is that).
    pub every: Interval,
}

impl Default for ThresholdConfig {
    fn default() -> Self {
        let (axis, every) = (Axis::Input, Interval::Auto);
        Self { share: 0.5, max_ratio: 0.2, score: Choice::named("l1"), axis, every }
    }
}

impl ThresholdConfig {
    /// The selector.
    ///
    /// # Errors
    /// A setting outside its range, a score that cannot be built.
    pub fn selector(self, cx: &BuildContext) -> anyhow::Result<Threshold> {
        require(0.0 < self.share && self.share <= 1.0, "share", "above 0 and at most 1", self.share)?;
        checks::ratio("max_ratio", self.max_ratio)?;
        let base = Base::scored(self.axis, self.every, &self.score, cx)?;
        Ok(Threshold { share: self.share, max_ratio: self.max_ratio, base })
    }
}

impl Build<slots::Select> for ThresholdConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        Ok(Box::new(self.selector(cx)?))
    }
}

zf_core::register!(
    slots::Select,
    "threshold",
    ThresholdConfig,
    "as many columns as hold a share of the weight's whole score, up to a part of them",
    "share = 0.5\nmax_ratio = 0.2\nscore = \"l1\"\nevery = 16"
);

/// The fewest columns that together hold a share of the weight's whole score, at most the [`capacity`] of `max_ratio`; none
/// where all scores are 0. Among equal ones the lower index goes first; scores that are not above 0, and those that are not a
/// number, count as 0.
#[derive(Debug, Clone)]
pub struct Threshold {
    share: f64,
    max_ratio: f64,
    base: Base,
}

impl Selector for Threshold {
    from_base!();

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        checks::scored(weight)?;
        let mut columns = ranked(weight.scores);
        // `max` also takes 0 for NaN.
        let score = |column: &u32| weight.scores[*column as usize].max(0.0);
        // Both sums go the same way, so that the last column reaches a share of 1 exactly, whatever was rounded.
        let goal = self.share * columns.iter().map(score).sum::<f64>();
        let mut held = 0.0;
        let needed = columns.iter().take_while(|column| {
            let more = held < goal;
            held += score(column);
            more
        });
        let needed = needed.count();
        columns.truncate(needed.min(capacity(self.max_ratio, weight.columns)));
        columns.sort_unstable();
        Ok(columns)
    }
}
