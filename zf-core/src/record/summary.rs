//! `summary.json`: the run in one object.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::prediction::Prediction;
use super::step::{LinkBytes, Memory, Seconds, StepRecord, number};
use crate::checkpoint::Best;
use crate::files::write_atomic;
use crate::stage::CommBytes;
use crate::{Error, Result};

/// The file's name in the run folder.
pub const SUMMARY: &str = "summary.json";

/// The whole run. Fields that a reader does not know are passed over, missing ones are empty.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Whether the run came to its end: not interrupted, not failed.
    pub complete: bool,
    /// See [`crate::checkpoint::StateHasher`].
    pub state_hash: String,
    /// The command line.
    pub command: Vec<String>,
    /// Versions of the program and of libtorch, by name.
    pub versions: BTreeMap<String, String>,
    /// Number of ranks.
    pub ranks: usize,
    /// Parameters of the model, tied ones once.
    pub parameters: u64,
    /// Loss of the last step.
    #[serde(with = "number")]
    pub final_loss: f64,
    /// The best validation.
    pub best: Option<Best>,
    /// Sums over all steps.
    pub totals: Totals,
    /// Medians over all steps.
    pub medians: Medians,
    /// Memory and bytes of each rank.
    pub per_rank: Vec<RankSummary>,
    /// What `zf plan` predicts beside what was measured, on rank 0.
    pub prediction: Prediction,
    /// Settings without effect and the like, one text each.
    pub warnings: Vec<String>,
}

/// Sums over all steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Steps done.
    pub steps: u64,
    /// Steps without an update, because of a gradient that is not finite.
    pub skipped: u64,
    /// Target tokens of all ranks.
    pub tokens: u64,
    /// From start to end, validation and checkpoints included. 0 until the trainer fills it in.
    pub wall_seconds: f64,
    /// Where the time of the steps went, on rank 0.
    pub seconds: Seconds,
}

/// Medians over all steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Medians {
    /// Target tokens of all ranks a second.
    #[serde(with = "number")]
    pub tokens_per_second: f64,
    /// 10^12 floating-point operations a second and rank.
    #[serde(with = "number")]
    pub tflops: f64,
    /// Seconds a step.
    #[serde(with = "number")]
    pub step_seconds: f64,
    /// Seconds of stall a step.
    #[serde(with = "number")]
    pub stall_seconds: f64,
}

/// One rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankSummary {
    /// The rank.
    pub rank: usize,
    /// The highest peak of the run, with the categories at it.
    pub memory: Memory,
    /// All bytes of the run.
    pub comm_bytes: CommBytes,
    /// All bytes of the run.
    pub link_bytes: LinkBytes,
    /// What `zf plan` predicts beside what was measured.
    pub prediction: Prediction,
}

impl Summary {
    /// Fills what follows from the records of the steps: final loss, totals and medians.
    pub fn from_records(records: &[StepRecord]) -> Self {
        let mut totals = Totals::default();
        for record in records {
            totals.steps += 1;
            totals.skipped += u64::from(record.skipped);
            totals.tokens += record.tokens;
            let (sum, add) = (&mut totals.seconds, &record.seconds);
            sum.step += add.step;
            sum.forward += add.forward;
            sum.backward += add.backward;
            sum.update += add.update;
            sum.comm += add.comm;
            sum.stall += add.stall;
            sum.host += add.host;
        }
        let of = |f: fn(&StepRecord) -> f64| median(records.iter().map(f).collect());
        Self {
            final_loss: records.last().map_or(f64::NAN, |record| record.loss),
            totals,
            medians: Medians {
                tokens_per_second: of(|r| r.tokens_per_second),
                tflops: of(|r| r.tflops),
                step_seconds: of(|r| r.seconds.step),
                stall_seconds: of(|r| r.seconds.stall),
            },
            ..Self::default()
        }
    }

    /// Writes it at `path`, atomically.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|e| Error::Engine(format!("{}: {e}", path.display())))?;
        text.push(b'\n');
        write_atomic(path, &text)
    }

    /// Reads it.
    ///
    /// # Errors
    /// [`Error::Input`] naming the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path)
            .map_err(|e| Error::Input(format!("{}: expected the summary of a run: {e}", path.display())))?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::Input(format!("{}: expected the summary of a run: {e}", path.display())))
    }
}

/// The middle value, the mean of the two middle ones for an even number; NaN of nothing.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.retain(|v| !v.is_nan());
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}
