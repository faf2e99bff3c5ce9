//! A selector that prefers the columns it has.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext, Wrap};
use zf_core::slots;
use zf_core::stage::{Candidates, Selector};
use zf_core::{Error, Result};

use super::needs_scores;
use crate::checks::{require, scored};

/// Settings of the decorator `hysteresis`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HysteresisConfig {
    /// By which part of a present column's score that of a newcomer must be higher to take its place, at least 0.
    pub margin: f64,
}

impl Default for HysteresisConfig {
    fn default() -> Self {
        Self { margin: 0.1 }
    }
}

impl HysteresisConfig {
    /// Puts the decorator around `inner`.
    ///
    /// # Errors
    /// A margin outside its range, a selector without scores.
    pub fn around(self, inner: Box<dyn Selector>) -> anyhow::Result<Hysteresis> {
        self.check()?;
        needs_scores(&*inner)?;
        Ok(Hysteresis { inner, margin: self.margin })
    }

    fn check(&self) -> anyhow::Result<()> {
        require(0.0 <= self.margin && self.margin.is_finite(), "margin", "finite and at least 0", self.margin)
    }
}

impl Build<slots::SelectWrap> for HysteresisConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Select>> {
        self.check()?;
        Ok(Box::new(move |inner| Ok(Box::new(self.around(inner)?))))
    }
}

zf_core::register!(
    slots::SelectWrap,
    "hysteresis",
    HysteresisConfig,
    "keeps a present column until a newcomer's score is higher by a margin: fewer moves between device and host",
    "[select]\nwrap = [{ kind = \"hysteresis\", margin = 0.1 }]"
);

/// Another selector, to which the scores of the present columns are shown larger by a margin, so that a newcomer takes the
/// place of one only if its score exceeds `1 + margin` times that one's. At equality the present one stays.
#[derive(Debug)]
pub struct Hysteresis {
    inner: Box<dyn Selector>,
    margin: f64,
}

impl Selector for Hysteresis {
    pass_on!(axis, check, every, score, state);

    fn clone_box(&self) -> Box<dyn Selector> {
        Box::new(Self { inner: self.inner.clone_box(), margin: self.margin })
    }

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        scored(weight)?;
        let mut scores = weight.scores.to_vec();
        for &column in weight.previous {
            let score = scores.get_mut(column as usize).ok_or_else(|| {
                let (name, columns) = (weight.name, weight.columns);
                Error::Engine(format!("weight `{name}` has {columns} columns and column {column} in its present set"))
            })?;
            // The next number, so that a newcomer of a lower index does not win at equality.
            *score = (*score * (1.0 + self.margin)).next_up();
        }
        self.inner.choose(&Candidates { scores: &scores, ..*weight })
    }
}
