//! A selector with smoothed scores.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zf_core::registry::{Build, BuildContext, Wrap};
use zf_core::slots;
use zf_core::stage::{Candidates, Selector};
use zf_core::{Error, Result};

use super::needs_scores;
use crate::checks::{require, scored};

/// Settings of the decorator `ema`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EmaConfig {
    /// How much of the mean so far remains at each selection, from 0 to below 1.
    pub beta: f64,
}

impl Default for EmaConfig {
    fn default() -> Self {
        Self { beta: 0.9 }
    }
}

impl EmaConfig {
    /// Puts the decorator around `inner`.
    ///
    /// # Errors
    /// A `beta` outside its range, a selector without scores.
    pub fn around(self, inner: Box<dyn Selector>) -> anyhow::Result<Ema> {
        self.check()?;
        needs_scores(&*inner)?;
        Ok(Ema { inner, beta: self.beta, means: BTreeMap::new() })
    }

    fn check(&self) -> anyhow::Result<()> {
        require((0.0..1.0).contains(&self.beta), "beta", "from 0 to below 1", self.beta)
    }
}

impl Build<slots::SelectWrap> for EmaConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Select>> {
        self.check()?;
        Ok(Box::new(move |inner| Ok(Box::new(self.around(inner)?))))
    }
}

zf_core::register!(
    slots::SelectWrap,
    "ema",
    EmaConfig,
    "smooths the scores over selections: a running mean of each column's",
    "[select]\nwrap = [{ kind = \"ema\", beta = 0.9 }]"
);

/// Another selector, to which running means are shown instead of scores: `m = beta m + (1 - beta) score` for each column at
/// each call of [`Selector::choose`], divided by `1 - beta^calls` as Adam does (Kingma and Ba, 2015, section 3), so that the
/// first selections see scores of full size.
///
/// A score that is not finite enters as 0: one must not spoil the mean for ever.
#[derive(Debug)]
pub struct Ema {
    inner: Box<dyn Selector>,
    beta: f64,
    /// By the names of weights.
    means: BTreeMap<String, Mean>,
}

/// The running mean of each column of a weight, before correction.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mean {
    /// `1 - beta^calls`, by the recursion of the values, so that a column of equal scores has that score as its mean.
    weight: f64,
    values: Vec<f64>,
}

/// What a checkpoint holds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    means: BTreeMap<String, Mean>,
    inner: Value,
}

impl Selector for Ema {
    pass_on!(axis, check, every, score);

    fn clone_box(&self) -> Box<dyn Selector> {
        Box::new(Self { inner: self.inner.clone_box(), beta: self.beta, means: self.means.clone() })
    }

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        scored(weight)?;
        let new = || Mean { weight: 0.0, values: vec![0.0; weight.columns] };
        let mean = self.means.entry(weight.name.to_owned()).or_insert_with(new);
        if mean.values.len() != weight.columns {
            return Err(Error::Engine(format!(
                "weight `{}` has {} columns; the means of its scores are of {}, from a checkpoint of another model or axis",
                weight.name,
                weight.columns,
                mean.values.len()
            )));
        }
        let keep = |old: f64, new: f64| self.beta * old + (1.0 - self.beta) * new;
        mean.weight = keep(mean.weight, 1.0);
        for (value, &score) in mean.values.iter_mut().zip(weight.scores) {
            *value = keep(*value, if score.is_finite() { score } else { 0.0 });
        }
        let scores: Vec<f64> = mean.values.iter().map(|value| value / mean.weight).collect();
        self.inner.choose(&Candidates { scores: &scores, ..*weight })
    }

    fn state(&self) -> Value {
        json!({ "means": self.means, "inner": self.inner.state() })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let State { means, inner } = State::deserialize(state).map_err(|error| {
            Error::Input(format!(
                "the checkpoint holds no state of the decorator `ema` of [select] ({error}); resume with the list `wrap` that \
                 wrote it"
            ))
        })?;
        self.inner.restore(&inner)?;
        self.means = means;
        Ok(())
    }
}
