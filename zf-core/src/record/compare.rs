//! Comparing two run folders.

use std::collections::BTreeMap;
use std::path::Path;

use super::metrics::{METRICS, read_metrics};
use super::step::{LinkBytes, StepRecord};
use super::summary::{RankSummary, SUMMARY, Summary};
use crate::Result;
use crate::stage::CommBytes;

/// What is allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    /// Anything: only the figures are wanted.
    Report,
    /// The same bits: losses, norms, learning rates and validation losses of all steps, and the state hash.
    Equal,
    /// Losses, norms and validation losses that differ by at most this part of the larger one; the same steps, tokens and
    /// skips.
    Tolerance(f64),
}

/// Where two runs differ more than allowed.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The step; `None` for the run as a whole.
    pub step: Option<u64>,
    /// What differs (`loss`, `grad_norm`, `state_hash`, ...).
    pub what: &'static str,
    /// In the first run.
    pub a: String,
    /// In the second run.
    pub b: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(step) = self.step {
            write!(f, "step {step}: ")?;
        }
        write!(f, "{}: {} and {}", self.what, self.a, self.b)
    }
}

/// One figure of both runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What it is, with its unit.
    pub what: &'static str,
    /// In the first run; NaN where unknown.
    pub a: f64,
    /// In the second run; NaN where unknown.
    pub b: f64,
}

/// Two runs side by side.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Steps that both have.
    pub common: usize,
    /// Steps that only the first has.
    pub only_a: Vec<u64>,
    /// Steps that only the second has.
    pub only_b: Vec<u64>,
    /// The largest relative difference of losses, and its step.
    pub loss: Option<(f64, u64)>,
    /// The largest relative difference of gradient norms, and its step.
    pub norm: Option<(f64, u64)>,
    /// State hashes; empty where a run has no summary.
    pub state_hash: (String, String),
    /// Time, memory and bytes.
    pub figures: Vec<Figure>,
    /// The first difference that is not allowed, by step; `None` means the runs agree as far as asked.
    pub first: Option<Difference>,
    /// How many are not allowed.
    pub differences: usize,
}

impl Comparison {
    /// Whether the runs agree as far as asked.
    pub fn agree(&self) -> bool {
        self.first.is_none()
    }
}

/// Compares the run folders `a` and `b`.
///
/// # Errors
/// [`crate::Error::Input`] for folders without readable metrics, or a summary that is none.
pub fn compare(a: &Path, b: &Path, mode: Mode) -> Result<Comparison> {
    let (steps_a, steps_b) = (by_step(a)?, by_step(b)?);
    let (summary_a, summary_b) = (summary(a)?, summary(b)?);
    let only = |from: &BTreeMap<u64, StepRecord>, other: &BTreeMap<u64, StepRecord>| {
        let missing = from.keys().filter(|step| !other.contains_key(step));
        missing.copied().collect::<Vec<u64>>()
    };
    let common: Vec<(&StepRecord, &StepRecord)> =
        steps_a.iter().filter_map(|(step, a)| Some((a, steps_b.get(step)?))).collect();
    let (only_a, only_b) = (only(&steps_a, &steps_b), only(&steps_b, &steps_a));
    let hash = |summary: &Option<Summary>| summary.as_ref().map(|s| s.state_hash.clone()).unwrap_or_default();
    let state_hash = (hash(&summary_a), hash(&summary_b));

    let mut found: Vec<Difference> = common.iter().flat_map(|(a, b)| step_differences(a, b, mode)).collect();
    if mode != Mode::Report {
        let present = |yes: bool| if yes { "present" } else { "missing" }.to_owned();
        for (steps, in_a) in [(&only_a, true), (&only_b, false)] {
            found.extend(steps.iter().map(|&step| Difference {
                step: Some(step),
                what: "step",
                a: present(in_a),
                b: present(!in_a),
            }));
        }
        found.sort_by_key(|difference| difference.step);
    }
    if mode == Mode::Equal && state_hash.0 != state_hash.1 {
        let named = |hash: &str| if hash.is_empty() { "none" } else { hash }.to_owned();
        found.push(Difference { step: None, what: "state_hash", a: named(&state_hash.0), b: named(&state_hash.1) });
    }
    Ok(Comparison {
        common: common.len(),
        only_a,
        only_b,
        loss: largest(&common, |r| r.loss),
        norm: largest(&common, |r| r.grad_norm),
        state_hash,
        figures: figures((&steps_a, summary_a.as_ref()), (&steps_b, summary_b.as_ref())),
        differences: found.len(),
        first: found.into_iter().next(),
    })
}

/// The difference of two numbers as a part of the larger one: 0 for the same numbers (NaN and NaN too), infinite where
/// one alone is no finite number.
fn relative(a: f64, b: f64) -> f64 {
    if a == b || (a.is_nan() && b.is_nan()) {
        return 0.0;
    }
    let part = (a - b).abs() / a.abs().max(b.abs());
    if part.is_nan() { f64::INFINITY } else { part }
}

fn step_differences(a: &StepRecord, b: &StepRecord, mode: Mode) -> Vec<Difference> {
    let (tolerance, exact) = match mode {
        Mode::Report => return Vec::new(),
        Mode::Equal => (0.0, true),
        Mode::Tolerance(tolerance) => (tolerance, false),
    };
    let numbers = [
        ("loss", a.loss, b.loss, tolerance),
        ("grad_norm", a.grad_norm, b.grad_norm, tolerance),
        ("validation_loss", a.validation_loss.unwrap_or(f64::NAN), b.validation_loss.unwrap_or(f64::NAN), tolerance),
        // Within a tolerance the schedule shows in the losses.
        ("lr", a.lr, b.lr, if exact { 0.0 } else { f64::INFINITY }),
    ];
    let mut found: Vec<Difference> = numbers
        .into_iter()
        .filter(|&(_, x, y, allowed)| relative(x, y) > allowed)
        .map(|(what, x, y, _)| difference(a.step, what, x, y))
        .collect();
    if a.tokens != b.tokens {
        found.push(difference(a.step, "tokens", a.tokens, b.tokens));
    }
    if a.skipped != b.skipped {
        found.push(difference(a.step, "skipped", a.skipped, b.skipped));
    }
    found
}

fn difference<T: std::fmt::Display>(step: u64, what: &'static str, a: T, b: T) -> Difference {
    Difference { step: Some(step), what, a: a.to_string(), b: b.to_string() }
}

fn figures(
    a: (&BTreeMap<u64, StepRecord>, Option<&Summary>),
    b: (&BTreeMap<u64, StepRecord>, Option<&Summary>),
) -> Vec<Figure> {
    type Of = fn(&Summary) -> f64;
    let rows: [(&'static str, Of); 10] = [
        ("final loss", |s| s.final_loss),
        ("best validation loss", |s| s.best.map_or(f64::NAN, |best| best.validation_loss)),
        ("tokens/s (median)", |s| s.medians.tokens_per_second),
        ("TFLOP/s (median)", |s| s.medians.tflops),
        ("step (median, s)", |s| s.medians.step_seconds),
        ("stall (median, s)", |s| s.medians.stall_seconds),
        ("wall time (s)", |s| s.totals.wall_seconds),
        ("device memory (peak of all ranks, bytes)", |s| of_ranks(s, |r| r.memory.device_peak, u64::max)),
        ("sent between ranks (all ranks, bytes)", |s| of_ranks(s, |r| sent(&r.comm_bytes), u64::saturating_add)),
        ("moved over links (all ranks, bytes)", |s| of_ranks(s, |r| moved(&r.link_bytes), u64::saturating_add)),
    ];
    // Without a summary the metrics tell what they can.
    let whole = |(steps, summary): (&BTreeMap<u64, StepRecord>, Option<&Summary>)| {
        summary.cloned().unwrap_or_else(|| {
            let records: Vec<StepRecord> = steps.values().cloned().collect();
            let mut summary = Summary::from_records(&records);
            summary.totals.wall_seconds = f64::NAN;
            summary
        })
    };
    let (a, b) = (whole(a), whole(b));
    rows.map(|(what, of)| Figure { what, a: of(&a), b: of(&b) }).into()
}

/// A figure over the ranks; NaN where the summary names none.
fn of_ranks(summary: &Summary, of: fn(&RankSummary) -> u64, combine: fn(u64, u64) -> u64) -> f64 {
    let ranks = summary.per_rank.iter().map(of);
    ranks.reduce(combine).map_or(f64::NAN, |bytes| bytes as f64)
}

fn moved(bytes: &LinkBytes) -> u64 {
    bytes.to_host + bytes.to_device + bytes.moves
}

fn sent(bytes: &CommBytes) -> u64 {
    bytes.all_reduce + bytes.reduce_scatter + bytes.all_gather + bytes.all_to_all + bytes.broadcast + bytes.control
}

fn by_step(folder: &Path) -> Result<BTreeMap<u64, StepRecord>> {
    let records = read_metrics(&folder.join(METRICS))?;
    Ok(records.into_iter().map(|r| (r.step, r)).collect())
}

/// A run that goes on, or was killed, has no summary.
fn summary(folder: &Path) -> Result<Option<Summary>> {
    let path = folder.join(SUMMARY);
    path.exists().then(|| Summary::read(&path)).transpose()
}

fn largest(common: &[(&StepRecord, &StepRecord)], of: fn(&StepRecord) -> f64) -> Option<(f64, u64)> {
    common.iter().map(|(a, b)| (relative(of(a), of(b)), a.step)).max_by(|x, y| x.0.total_cmp(&y.0).then(y.1.cmp(&x.1)))
}
