//! What a person sees of a run: a bar on a terminal, plain lines elsewhere, and a table at the end.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use zf_core::record::timeline::Timeline;
use zf_core::record::{Budget, METRICS, StepRecord, Summary, read_metrics};
use zf_core::trace::Lane;
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

/// Prints the closing tables.
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
    say(&table.to_string());
    // The metrics may have gone meanwhile: no reason to fail at the end.
    if let Some(budget) = read_metrics(&folder.join(METRICS)).ok().and_then(|records| Budget::of(&records)) {
        let trace = budget.link.and_then(|_| Timeline::read(folder, 0).ok());
        say(&budget_text(&budget, trace.as_ref()));
    }
    say(&format!("run folder: {}", folder.display()));
}

/// Where the time of a step goes, with how long the link was busy where a trace says it.
fn budget_text(budget: &Budget, trace: Option<&Timeline>) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["ms a step", "median", "99 %", "mean", "share"]);
    for row in &budget.rows {
        let name = if row.name == "host" { "host, beside" } else { row.name };
        let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
        let share = format!("{:.1} %", row.share * 100.0);
        table.add_row([name.to_owned(), ms(row.median), ms(row.p99), ms(row.mean), share]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = table.to_string();
    if let Some(hidden) = budget.hidden() {
        text.push_str(&format!("\nat least {:.1} % of the host's time is hidden behind the device", hidden * 100.0));
    }
    if budget.overlap > 0.0 {
        text.push_str(&format!("\n{:.2} ms a step of these go on at once", budget.overlap * 1e3));
    }
    if let Some(link) = &budget.link {
        let busy = |lane| trace.map(|trace| format!(" ({:.1} % busy)", trace.busy(lane) * 100.0)).unwrap_or_default();
        text.push_str(&format!(
            "\nlink, a step: {} to the host{}, {} to the device{}, {} of moves",
            size(link.to_host as u64),
            busy(Lane::ToHost),
            size(link.to_device as u64),
            busy(Lane::ToDevice),
            size(link.moves as u64)
        ));
    }
    text
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

#[cfg(test)]
mod tests {
    use zf_core::record::{LinkBytes, Seconds};

    use super::*;

    #[test]
    fn the_budget_says_what_is_hidden_and_what_crossed_the_link() {
        let seconds =
            Seconds { step: 0.1, forward: 0.03, backward: 0.06, update: 0.0, comm: 0.0, stall: 0.002, host: 0.08 };
        let link_bytes = LinkBytes { to_host: 3 << 20, to_device: 1536, moves: 0 };
        let record = |step| StepRecord { step, seconds, link_bytes, ..StepRecord::default() };
        let budget = Budget::of(&[record(0), record(1)]).unwrap();
        let text = budget_text(&budget, None);
        let words =
            |line: &str| line.split([' ', '│']).filter(|w| !w.is_empty()).map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<Vec<String>> = text.lines().map(words).collect();
        let has = |line: &[&str]| lines.iter().any(|found| found == line);
        assert!(has(&["backward", "60.00", "60.00", "60.00", "60.0", "%"]), "{text}");
        assert!(has(&["stall", "2.00", "2.00", "2.00", "2.0", "%"]), "{text}");
        assert!(has(&["other", "8.00", "8.00", "8.00", "8.0", "%"]), "{text}");
        assert!(has(&["host,", "beside", "80.00", "80.00", "80.00", "80.0", "%"]), "{text}");
        assert!(!text.contains("update") && !text.contains("at once"), "{text}");
        assert!(text.contains("at least 97.5 % of the host's time is hidden behind the device"), "{text}");
        assert!(text.ends_with("link, a step: 3.0 MiB to the host, 1.5 KiB to the device, 0 B of moves"), "{text}");
    }
}
