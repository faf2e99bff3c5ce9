//! A selector in a crate of one's own: `stripes`, every n-th column, one further at each selection.
//!
//! In n selections every column has its turn, whatever its gradient: what a score has to beat. A selector says which columns of
//! a weight are important and nothing else. Settings, the trait, `build`, and one `register!` line; the engine moves columns
//! between device and host, saves the state and restores it.

use serde_json::{Value, json};
use zf_core::registry::{Build, BuildContext, setting};
use zf_core::slots;
use zf_core::stage::{Axis, Candidates, Every, Score, Selector};
use zf_core::{Error, Result};
use zf_select::Interval;

/// Every n-th column.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StripesConfig {
    /// One column in so many is chosen, at least 1.
    pub n: u32,
    /// Whether a column is an input feature or an output feature of the weight.
    #[serde(default)]
    pub axis: Axis,
    /// When to choose again: a number of updates, { turnover = 0.3 }, or "auto" (which is that).
    #[serde(default)]
    pub every: Interval,
}

/// Every n-th column, starting one further at each selection.
#[derive(Debug, Clone)]
pub struct Stripes {
    n: u32,
    axis: Axis,
    every: Every,
    /// Where the stripes start, below `n`, and the update they were chosen at; none before the first.
    turn: Option<(u32, u64)>,
}

impl Selector for Stripes {
    fn clone_box(&self) -> Box<dyn Selector> {
        Box::new(self.clone())
    }

    fn axis(&self) -> Axis {
        self.axis
    }

    fn every(&self) -> Every {
        self.every
    }

    /// None: columns are chosen by their number, so the engine computes no scores.
    fn score(&self) -> Option<&dyn Score> {
        None
    }

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        // All weights are asked at one update; the first of them begins the next turn.
        let start = match self.turn {
            None => 0,
            Some((start, update)) if update == weight.update => start,
            Some((start, _)) => (start + 1) % self.n,
        };
        self.turn = Some((start, weight.update));
        Ok((start..).step_by(self.n as usize).take_while(|&column| (column as usize) < weight.columns).collect())
    }

    fn state(&self) -> Value {
        json!({ "turn": self.turn })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let wrong = || Error::Input(format!("the checkpoint's selector is not `stripes` with n = {}: {state}", self.n));
        let turn = state.get("turn").ok_or_else(wrong)?;
        let turn: Option<(u32, u64)> = serde_json::from_value(turn.clone()).map_err(|_| wrong())?;
        if turn.is_some_and(|(start, _)| self.n <= start) {
            return Err(wrong());
        }
        self.turn = turn;
        Ok(())
    }
}

impl Build<slots::Select> for StripesConfig {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Box<dyn Selector>> {
        if self.n == 0 {
            return Err(setting("n", "must be at least 1, found 0; for no columns at all use kind = \"none\""));
        }
        Ok(Box::new(Stripes { n: self.n, axis: self.axis, every: self.every.every()?, turn: None }))
    }
}

zf_core::register!(
    slots::Select,
    "stripes",
    StripesConfig,
    "every n-th column, one further at each selection",
    "n = 10\nevery = 16"
);
