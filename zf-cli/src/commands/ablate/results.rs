//! What came out: figures of each run, its comparison with the baseline, and whether that was expected.

use std::path::{Path, PathBuf};

use serde::Serialize;
use zf_core::config::{Case, Expect, Sweep};
use zf_core::record::{self, METRICS, Mode, SUMMARY, StepRecord, Summary, read_metrics};

use super::job::Job;

/// How a run ended.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// At its end.
    Done,
    /// With an error.
    Failed {
        /// In words.
        how: String,
        /// The end of its log.
        says: String,
    },
    /// On request, or not begun.
    Stopped,
}

/// The whole sweep, as `ablation.json` holds it.
#[derive(Debug, Serialize)]
pub(super) struct Ablation {
    /// The sweep's file.
    pub(super) file: PathBuf,
    /// Whether all runs came to an end, good or bad.
    pub(super) complete: bool,
    /// In the order of the sweep.
    pub(super) cases: Vec<CaseResult>,
}

/// A case over its seeds.
#[derive(Debug, Serialize)]
pub(super) struct CaseResult {
    pub(super) name: String,
    /// By dotted key.
    pub(super) settings: serde_json::Map<String, serde_json::Value>,
    /// The name of the case that it is compared with.
    pub(super) baseline: String,
    /// `"equal"`, `"different"`, `{ "tolerance": x }` or null.
    pub(super) expect: serde_json::Value,
    pub(super) verdict: Verdict,
    /// The mean over the runs that came to their end.
    pub(super) mean: Option<Figures>,
    /// Steps a second, those of the baseline being 1: the mean over the seeds.
    pub(super) speed: Option<f64>,
    /// The largest difference of losses over the seeds.
    pub(super) loss_difference: Option<f64>,
    /// One a seed.
    pub(super) runs: Vec<RunResult>,
}

/// One run.
#[derive(Debug, Serialize)]
pub(super) struct RunResult {
    pub(super) name: String,
    pub(super) seed: u64,
    pub(super) folder: PathBuf,
    pub(super) verdict: Verdict,
    /// How it failed, and what it said last.
    pub(super) error: Option<String>,
    pub(super) figures: Option<Figures>,
    /// Steps a second, those of the baseline being 1.
    pub(super) speed: Option<f64>,
    pub(super) difference: Option<Difference>,
}

/// From the best to the worst; a case has the worst of its runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// Others are compared with it.
    Baseline,
    /// Nothing was expected.
    Compared,
    /// As expected.
    Met,
    /// Not as expected.
    Unmet,
    /// The baseline has failed.
    NoBaseline,
    /// Stopped, or not begun.
    Stopped,
    /// It has failed.
    Failed,
}

/// Figures of a run. Bytes a step are those of rank 0. Times leave the first step out, which warms up, if there are more.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Figures {
    pub(super) steps: f64,
    pub(super) final_loss: f64,
    /// The last one measured.
    pub(super) validation_loss: Option<f64>,
    /// The mean, in seconds.
    pub(super) step_seconds: f64,
    /// The median, in seconds.
    pub(super) step_seconds_median: f64,
    /// Part of the steps' time in which the device waited.
    pub(super) stall_share: f64,
    /// Bytes, of the rank with the highest peak.
    pub(super) device_peak: f64,
    /// Sent between ranks.
    pub(super) comm_bytes: f64,
    /// Moved between device and host, both ways.
    pub(super) link_bytes: f64,
}

/// A run beside its baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Difference {
    /// The largest of losses, as a part of the larger one; infinite (in JSON null) where one alone is no number.
    pub(super) loss: f64,
    /// The step of that.
    pub(super) step: Option<u64>,
    /// Whether the final states are the same bits.
    pub(super) state_equal: bool,
    /// Steps that only one of the two has.
    pub(super) unmatched_steps: usize,
}

impl Ablation {
    /// Reads what the runs left.
    pub(super) fn new(file: &Path, sweep: &Sweep<'_>, jobs: &[Job], outcomes: Vec<Outcome>) -> Self {
        let complete = !outcomes.contains(&Outcome::Stopped);
        let mut runs: Vec<RunResult> = jobs.iter().zip(outcomes).map(|(job, outcome)| result(job, outcome)).collect();
        let baseline: Vec<Option<usize>> = jobs
            .iter()
            .map(|job| {
                let wanted = sweep.cases[job.case].baseline;
                jobs.iter().position(|other| other.case == wanted && other.seed == job.seed)
            })
            .collect();
        for at in 0..runs.len() {
            let Some(base) = baseline[at] else { continue };
            let (base_folder, base_figures) = (runs[base].folder.clone(), runs[base].figures);
            let case = &sweep.cases[jobs[at].case];
            compare(&mut runs[at], case, at == base, &base_folder, base_figures);
        }
        let mut cases: Vec<CaseResult> = sweep.cases.iter().map(|case| of_case(case, sweep)).collect();
        for (run, job) in runs.into_iter().zip(jobs) {
            cases[job.case].runs.push(run);
        }
        cases.iter_mut().for_each(CaseResult::combine);
        Self { file: file.to_owned(), complete, cases }
    }

    /// Runs that came to their end.
    pub(super) fn done(&self) -> usize {
        self.runs().filter(|(_, run)| run.figures.is_some()).count()
    }

    /// All runs, case by case.
    pub(super) fn runs(&self) -> impl Iterator<Item = (&CaseResult, &RunResult)> {
        self.cases.iter().flat_map(|case| case.runs.iter().map(move |run| (case, run)))
    }

    /// What is wrong with the whole, if anything.
    pub(super) fn complaint(&self) -> Option<String> {
        let count = |verdicts: &[Verdict]| self.runs().filter(|(_, run)| verdicts.contains(&run.verdict)).count();
        let total = self.runs().count();
        let (failed, unmet) = (count(&[Verdict::Failed]), count(&[Verdict::Unmet, Verdict::NoBaseline]));
        let mut parts = Vec::new();
        if failed > 0 {
            parts.push(format!("{failed} of {total} runs failed"));
        }
        if unmet > 0 {
            parts.push(format!(
                "{unmet} of {total} runs {} not what is expected",
                if unmet == 1 { "is" } else { "are" }
            ));
        }
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

impl CaseResult {
    fn combine(&mut self) {
        self.verdict = self.runs.iter().map(|run| run.verdict).max().unwrap_or(Verdict::Stopped);
        let all: Vec<Figures> = self.runs.iter().filter_map(|run| run.figures).collect();
        let of = |figure: fn(&Figures) -> f64| mean(all.iter().map(figure)).unwrap_or(f64::NAN);
        self.mean = (!all.is_empty()).then(|| Figures {
            steps: of(|f| f.steps),
            final_loss: of(|f| f.final_loss),
            validation_loss: mean(all.iter().filter_map(|f| f.validation_loss)),
            step_seconds: of(|f| f.step_seconds),
            step_seconds_median: of(|f| f.step_seconds_median),
            stall_share: of(|f| f.stall_share),
            device_peak: of(|f| f.device_peak),
            comm_bytes: of(|f| f.comm_bytes),
            link_bytes: of(|f| f.link_bytes),
        });
        self.speed = mean(self.runs.iter().filter_map(|run| run.speed));
        let differences = self.runs.iter().filter_map(|run| Some(run.difference.as_ref()?.loss));
        self.loss_difference = differences.max_by(f64::total_cmp);
    }
}

impl Figures {
    /// Of a run folder.
    fn read(folder: &Path) -> zf_core::Result<Self> {
        let summary = Summary::read(&folder.join(SUMMARY))?;
        Ok(Self::of(&read_metrics(&folder.join(METRICS))?, &summary))
    }

    fn of(records: &[StepRecord], summary: &Summary) -> Self {
        let warm = if records.len() > 1 { &records[1..] } else { records };
        let total = Summary::from_records(warm);
        let steps = records.last().map_or(0, |record| record.step + 1) as f64;
        // A line of the metrics holds the bytes since the line before it.
        let comm = |r: &StepRecord| {
            let c = &r.comm_bytes;
            c.all_reduce + c.reduce_scatter + c.all_gather + c.all_to_all + c.broadcast + c.control
        };
        let link = |r: &StepRecord| r.link_bytes.to_host + r.link_bytes.to_device + r.link_bytes.moves;
        let a_step = |of: &dyn Fn(&StepRecord) -> u64| records.iter().map(of).sum::<u64>() as f64 / steps;
        let peak = summary.per_rank.iter().map(|rank| rank.memory.device_peak).max();
        Self {
            steps,
            final_loss: summary.final_loss,
            validation_loss: records.iter().rev().find_map(|record| record.validation_loss),
            step_seconds: total.totals.seconds.step / total.totals.steps as f64,
            step_seconds_median: total.medians.step_seconds,
            stall_share: total.totals.seconds.stall / total.totals.seconds.step,
            device_peak: peak.map_or(f64::NAN, |bytes| bytes as f64),
            comm_bytes: a_step(&comm),
            link_bytes: a_step(&link),
        }
    }
}

impl Difference {
    /// Between two run folders.
    fn between(baseline: &Path, folder: &Path) -> zf_core::Result<Self> {
        let found = record::compare(baseline, folder, Mode::Report)?;
        let (loss, step) = found.loss.unzip();
        Ok(Self {
            loss: loss.unwrap_or(f64::INFINITY),
            step: step.filter(|_| loss != Some(0.0)),
            state_equal: found.state_hash.0 == found.state_hash.1 && !found.state_hash.0.is_empty(),
            unmatched_steps: found.only_a.len() + found.only_b.len(),
        })
    }

    /// Whether this is what was expected.
    fn meets(&self, expect: Expect) -> bool {
        let equal = self.loss == 0.0 && self.state_equal && self.unmatched_steps == 0;
        match expect {
            Expect::Equal => equal,
            Expect::Different => !equal,
            Expect::Tolerance(tolerance) => self.loss <= tolerance && self.unmatched_steps == 0,
        }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.step {
            None if self.loss == 0.0 => write!(f, "losses are equal")?,
            None => write!(f, "no step is in both")?,
            Some(step) => write!(f, "losses differ by at most {:.2e} (relative), at step {step}", self.loss)?,
        }
        if self.unmatched_steps > 0 {
            write!(f, ", steps in one of them only: {}", self.unmatched_steps)?;
        }
        write!(f, ", final states are {}", if self.state_equal { "equal" } else { "different" })
    }
}

fn of_case(case: &Case, sweep: &Sweep<'_>) -> CaseResult {
    let value = |value: &toml::Value| serde_json::to_value(value).unwrap_or_default();
    CaseResult {
        name: case.name.clone(),
        settings: case.settings.iter().map(|(key, setting)| (key.clone(), value(setting))).collect(),
        baseline: sweep.cases[case.baseline].name.clone(),
        expect: match case.expect {
            None => serde_json::Value::Null,
            Some(Expect::Equal) => "equal".into(),
            Some(Expect::Different) => "different".into(),
            Some(Expect::Tolerance(tolerance)) => serde_json::json!({ "tolerance": tolerance }),
        },
        verdict: Verdict::Stopped,
        mean: None,
        speed: None,
        loss_difference: None,
        runs: Vec::new(),
    }
}

fn result(job: &Job, outcome: Outcome) -> RunResult {
    let (verdict, error, figures) = match outcome {
        Outcome::Stopped => (Verdict::Stopped, None, None),
        Outcome::Failed { how, says } => {
            let text = if says.is_empty() { how } else { format!("{how}\n{says}") };
            (Verdict::Failed, Some(text), None)
        }
        Outcome::Done => match Figures::read(&job.folder) {
            Ok(figures) => (Verdict::Compared, None, Some(figures)),
            Err(error) => (Verdict::Failed, Some(error.to_string()), None),
        },
    };
    let (name, folder) = (job.name.clone(), job.folder.clone());
    RunResult { name, seed: job.seed, folder, verdict, error, figures, speed: None, difference: None }
}

/// Puts a run that came to its end beside its baseline.
fn compare(run: &mut RunResult, case: &Case, is_baseline: bool, base_folder: &Path, base: Option<Figures>) {
    let Some(figures) = run.figures else { return };
    if is_baseline {
        (run.verdict, run.speed) = (Verdict::Baseline, Some(1.0));
        return;
    }
    let Some(base) = base else {
        run.verdict = Verdict::NoBaseline;
        return;
    };
    run.speed = Some(base.step_seconds / figures.step_seconds).filter(|speed| speed.is_finite());
    match Difference::between(base_folder, &run.folder) {
        Ok(difference) => {
            run.verdict = match case.expect {
                None => Verdict::Compared,
                Some(expect) if difference.meets(expect) => Verdict::Met,
                Some(_) => Verdict::Unmet,
            };
            run.difference = Some(difference);
        }
        Err(error) => (run.verdict, run.error) = (Verdict::Failed, Some(error.to_string())),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

#[cfg(test)]
mod tests;
