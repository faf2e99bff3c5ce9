//! What a person sees of a run: a bar on a terminal, plain lines elsewhere, and a table at the end.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use zf_core::record::{StepRecord, Summary};
use zf_core::train::Observer;

use crate::commands::size::bytes as size;

/// Shows a run's progress on standard error, and lines of interest on standard output.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    first: u64,
    started: Instant,
    printed: Option<Instant>,
}

impl Progress {
    /// For the present standard error.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(0));
        Self { bar, steps: 0, first: 0, started: Instant::now(), printed: None }
    }

    /// Removes the bar.
    pub fn close(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => say(text),
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Observer for Progress {
    fn start(&mut self, first: u64, steps: u64, notes: &[String]) {
        (self.first, self.steps, self.started) = (first, steps, Instant::now());
        notes.iter().for_each(|note| self.line(note));
        if first > 0 {
            self.line(&format!("going on after step {first} of {steps}"));
        }
        if let Some(bar) = &self.bar {
            let style =
                ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}").unwrap_or(ProgressStyle::default_bar());
            bar.set_style(style);
            bar.set_length(steps);
            bar.set_position(first);
        }
    }

    fn step(&mut self, record: &StepRecord) {
        let done = record.step + 1;
        let rate = self.started.elapsed().as_secs_f64() / (done - self.first).max(1) as f64;
        let left = Duration::from_secs_f64(rate * self.steps.saturating_sub(done) as f64);
        let mut text = format!(
            "loss {:.4}  norm {:.3}  lr {:.2e}  {:.0} tok/s  {} left",
            record.loss,
            record.grad_norm,
            record.lr,
            record.tokens_per_second,
            clock(left)
        );
        if record.skipped {
            text.push_str("  skipped");
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position(done);
                bar.set_message(text.clone());
                if let Some(loss) = record.validation_loss {
                    bar.println(format!("step {done}: validation loss {loss:.4}"));
                }
            }
            None => {
                if let Some(loss) = record.validation_loss {
                    text.push_str(&format!("  validation loss {loss:.4}"));
                }
                // In a pipe or file a line every few seconds says enough; metrics.jsonl has every step.
                let due = self.printed.is_none_or(|at| at.elapsed() >= Duration::from_secs(5));
                if due || record.validation_loss.is_some() || record.skipped || done == self.steps {
                    say(&format!("step {done}/{}  {text}", self.steps));
                    self.printed = Some(Instant::now());
                }
            }
        }
    }

    fn warn(&mut self, message: &str) {
        self.line(&format!("warning: {message}"));
    }
}

/// Prints the closing table.
pub(crate) fn print_summary(summary: &Summary, folder: &Path) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_string(), value]);
    };
    let medians = &summary.medians;
    row("steps", format!("{} ({} skipped)", summary.totals.steps, summary.totals.skipped));
    row("tokens", summary.totals.tokens.to_string());
    row("time", clock(Duration::from_secs_f64(summary.totals.wall_seconds)));
    row("final loss", format!("{:.4}", summary.final_loss));
    if let Some(best) = &summary.best {
        row("best validation loss", format!("{:.4} (step {})", best.validation_loss, best.step));
    }
    row("tokens/s (median)", format!("{:.0}", medians.tokens_per_second));
    row("TFLOP/s a rank (median)", format!("{:.4}", medians.tflops));
    row(
        "step (median)",
        format!("{:.1} ms, of which stall {:.1} ms", medians.step_seconds * 1e3, medians.stall_seconds * 1e3),
    );
    for rank in &summary.per_rank {
        let memory = &rank.memory;
        row(
            &format!("rank {} peak memory", rank.rank),
            format!(
                "{} (parameters {}, gradients {}, optimizer {}, activations {}, buffers {})",
                size(memory.device_peak),
                size(memory.parameters),
                size(memory.gradients),
                size(memory.optimizer),
                size(memory.activations),
                size(memory.buffers)
            ),
        );
    }
    row("state hash", summary.state_hash.chars().take(16).collect());
    say(&format!("{table}\nrun folder: {}", folder.display()));
}

/// Prints a line. A reader that went away, such as `head`, is no reason to end a run of hours.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Minutes and seconds, with hours where there are any.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}
