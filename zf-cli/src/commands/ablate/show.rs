//! The progress of a sweep: a bar on a terminal, plain lines elsewhere.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use zf_core::config::Sweep;
use zf_core::record::{METRICS, SUMMARY, StepRecord, Summary};

use super::job::Job;

/// Bytes at the end of the metrics that hold at least one whole line.
const TAIL: u64 = 8 << 10;

/// Shows how far a sweep is.
pub(super) struct Show {
    bar: Option<ProgressBar>,
    runs: usize,
    run: usize,
    name: String,
    started: Instant,
}

impl Show {
    /// Says what is going to run.
    pub(super) fn new(sweep: &Sweep<'_>, runs: usize, folder: &Path) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(runs as u64));
        if let Some(bar) = &bar {
            let style = ProgressStyle::with_template("{bar:20} {pos}/{len} {wide_msg}");
            bar.set_style(style.unwrap_or(ProgressStyle::default_bar()));
        }
        let show = Self { bar, runs, run: 0, name: String::new(), started: Instant::now() };
        let (cases, seeds) = (sweep.cases.len(), sweep.seeds().len());
        let seeds = if seeds > 1 { format!(" with {seeds} seeds each") } else { String::new() };
        show.say(&format!("{cases} {}{seeds}, in {}", if cases == 1 { "case" } else { "cases" }, folder.display()));
        show
    }

    /// The next run begins.
    pub(super) fn start(&mut self, name: &str) {
        self.run += 1;
        self.name = name.to_owned();
        self.started = Instant::now();
        if let Some(bar) = &self.bar {
            bar.set_message(self.name.clone());
        }
    }

    /// Something to know about the present run.
    pub(super) fn note(&self, text: &str) {
        self.say(&format!("[{}/{}] {}: {text}", self.run, self.runs, self.name));
    }

    /// Looks how far the run in `folder` is.
    pub(super) fn tick(&self, folder: &Path) {
        let Some(bar) = &self.bar else { return };
        let step = last_line(&folder.join(METRICS)).map(|record| {
            let (step, loss) = (record.step + 1, record.loss);
            format!("step {step}, loss {loss:.4}, ")
        });
        bar.set_message(format!("{}: {}{}", self.name, step.unwrap_or_default(), seconds(self.started.elapsed())));
    }

    /// The present run has ended; without `text`, well.
    pub(super) fn end(&self, job: &Job, text: &str) {
        let summary = Summary::read(&job.folder.join(SUMMARY)).ok();
        let well = summary.filter(|summary| summary.complete && text.is_empty()).map(|summary| {
            let (steps, loss) = (summary.totals.steps, summary.final_loss);
            format!("{steps} steps in {}, final loss {loss:.4}", seconds(self.started.elapsed()))
        });
        self.note(well.as_deref().unwrap_or(text));
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Removes the bar.
    pub(super) fn close(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// A reader that went away is no reason to end a sweep of hours.
    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => {
                let _ = writeln!(std::io::stdout(), "{text}");
            }
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// The newest record of metrics that are still being written.
fn last_line(metrics: &Path) -> Option<StepRecord> {
    let mut file = File::open(metrics).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    let whole = bytes.iter().rposition(|&byte| byte == b'\n')?;
    let line = bytes[..whole].rsplit(|&byte| byte == b'\n').next()?;
    serde_json::from_slice(line).ok()
}
