//! Columns drawn at random.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::random::{Stream, uniform_into};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Selector};

use crate::base::{Base, from_base};
use crate::{Interval, capacity, checks, highest};

/// Settings of the selector `random`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RandomConfig {
    /// The part of each weight's columns that is chosen, above 0 and at most 1; at least one column.
    pub ratio: f64,
    /// Which columns; that of the run where it is not given.
    pub seed: Option<u64>,
    /// Whether a column is an input feature or an output feature of the weight.
    pub axis: Axis,
    /// When to choose again: a number of updates, { turnover = 0.3 }, or "auto" (which is that).
    pub every: Interval,
}

impl Default for RandomConfig {
    fn default() -> Self {
        Self { ratio: 0.1, seed: None, axis: Axis::Input, every: Interval::Auto }
    }
}

impl RandomConfig {
    /// The selector, in a run of this seed.
    ///
    /// # Errors
    /// A setting outside its range.
    pub fn selector(self, run_seed: u64) -> anyhow::Result<Random> {
        checks::ratio("ratio", self.ratio)?;
        let seed = self.seed.unwrap_or(run_seed);
        Ok(Random { ratio: self.ratio, seed, base: Base::new(self.axis, self.every)? })
    }
}

impl Build<slots::Select> for RandomConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        Ok(Box::new(self.selector(cx.seed)?))
    }
}

zf_core::register!(
    slots::Select,
    "random",
    RandomConfig,
    "columns drawn at random, a fixed part of each weight's: what a score has to beat",
    "ratio = 0.1\nseed = 1\nevery = 16"
);

/// [`capacity`] columns drawn without preference, anew at each selection. They follow from the seed, the weight's name and
/// the number of the update, so that they are the same on all ranks and after a resume.
#[derive(Debug, Clone)]
pub struct Random {
    ratio: f64,
    seed: u64,
    base: Base,
}

impl Selector for Random {
    from_base!();

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        checks::columns(weight)?;
        // The stream of the plain name gives the weight's initial values.
        let stream = Stream::named(self.seed, &format!("select.random/{}", weight.name)).child(weight.update);
        // Two draws of 24 bits a column: with one alone, equal draws would favour lower columns.
        let mut draws = vec![0.0; 2 * weight.columns];
        uniform_into(&mut draws, stream, 0, 0.0, 1.0);
        let lots: Vec<f64> = draws
            .as_chunks()
            .0
            .iter()
            .map(|&[high, low]| f64::from(high) + f64::from(low) * (1.0 / 16_777_216.0))
            .collect();
        Ok(highest(&lots, capacity(self.ratio, weight.columns)))
    }
}
