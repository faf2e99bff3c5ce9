//! Which columns of a weight are important.
//!
//! A *column* of a 2-D weight is what feeds from one input feature: a column of `[out, in]`, a row of GPT-2's `[in, out]`; along
//! the output axis it is the other way round. Ren et al., "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous
//! Updates", 2025, section 3.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Result;

/// What a [`Score`] reads beside the gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScoreNeeds {
    /// The float32 master weight.
    pub weight: bool,
    /// The rule's running mean of squared gradients, of the name `exp_avg_sq`.
    pub second_moment: bool,
}

/// A run of elements of one weight. All slices have the same length; what was not asked for is empty.
#[derive(Debug, Clone, Copy)]
pub struct ScoreInput<'a> {
    /// The gradient as the update sees it: unscaled and clipped.
    pub grad: &'a [f32],
    /// Master weights.
    pub weight: &'a [f32],
    /// Running means of squared gradients.
    pub second_moment: &'a [f32],
}

/// How the values of a column's elements combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreReduction {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
}

/// How much an element matters. The engine reduces over a column, over shards and over ranks, so that a score knows
/// nothing of where elements lie.
pub trait Score: fmt::Debug + Send + Sync {
    /// What it reads beside the gradient.
    fn needs(&self) -> ScoreNeeds {
        ScoreNeeds::default()
    }

    /// Writes the value of each element, finite and not negative for finite input, into `out` (of the same length).
    fn map(&self, input: &ScoreInput<'_>, out: &mut [f32]);

    /// How a column's values combine.
    fn reduction(&self) -> ScoreReduction {
        ScoreReduction::Sum
    }
}

/// Along which dimension of a weight columns are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// A column is an input feature.
    #[default]
    Input,
    /// A column is an output feature: a row of `[out, in]`.
    Output,
}

/// How often columns are chosen again (R).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Every {
    /// After so many updates, at least 1.
    Updates(u64),
    /// At each window in which the candidates differ enough from the present set: 1 - |both| / |either| of all weights
    /// together exceeds this.
    Turnover(f64),
}

/// One weight that is to be chosen from.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// Number of columns, at least 1.
    pub columns: usize,
    /// The score of each column; empty where [`Selector::score`] is none.
    pub scores: &'a [f64],
    /// The present set, ascending.
    pub previous: &'a [u32],
    /// Number of the update, from the end of warm-up.
    pub update: u64,
}

/// Which columns are important now. All ranks call it with the same arguments in the same order and get the same answer:
/// it may depend on nothing else. A decorator wraps another selector.
pub trait Selector: fmt::Debug + Send + Sync {
    /// A copy with the present state, for another rank or another start.
    fn clone_box(&self) -> Box<dyn Selector>;

    /// Along which dimension columns are counted.
    fn axis(&self) -> Axis;

    /// How often to choose again.
    fn every(&self) -> Every;

    /// What it scores columns by; none where it needs no scores.
    fn score(&self) -> Option<&dyn Score>;

    /// Told before the first choice which weights it will be asked about, with their numbers of columns.
    ///
    /// # Errors
    /// Settings that do not suit them, such as names that no weight has.
    fn check(&self, _weights: &BTreeMap<&str, usize>) -> Result<()> {
        Ok(())
    }

    /// The chosen columns of one weight, ascending and without repetition; possibly none or all.
    ///
    /// # Errors
    /// A weight that it has no answer for.
    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>>;

    /// Its state, for a checkpoint; null where it has none.
    fn state(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Takes over a state of [`Selector::state`].
    ///
    /// # Errors
    /// A value that is no state of this selector.
    fn restore(&mut self, _state: &serde_json::Value) -> Result<()> {
        Ok(())
    }
}
