//! `zf compare`: two run folders side by side.

use std::io::Write;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use zf_core::record::{self, Comparison, Mode};

use super::size::bytes;

/// Prints the comparison of the run folders `a` and `b`.
///
/// # Errors
/// Folders that are no runs; runs that differ more than `mode` allows, naming the first step and what differs there.
pub fn run(a: &Path, b: &Path, mode: Mode, out: &mut dyn Write) -> anyhow::Result<()> {
    if let Mode::Tolerance(tolerance) = mode
        && !(tolerance >= 0.0 && tolerance.is_finite())
    {
        // Nothing is larger than NaN: the runs would always agree.
        return Err(zf_core::Error::Config(format!("--tolerance must be 0 or more, found {tolerance}")).into());
    }
    let comparison = record::compare(a, b, mode)?;
    writeln!(out, "A: {}\nB: {}\n", a.display(), b.display())?;
    write_table(&comparison, out)?;
    write_steps(&comparison, out)?;
    match &comparison.first {
        None if mode == Mode::Report => Ok(()),
        None => Ok(writeln!(out, "\nthe runs agree")?),
        Some(first) => {
            out.flush()?;
            anyhow::bail!(
                "the runs differ more than allowed, first at {first} ({} difference{} in all)",
                comparison.differences,
                if comparison.differences == 1 { "" } else { "s" }
            )
        }
    }
}

fn write_table(comparison: &Comparison, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["", "A", "B", "B / A"]);
    for figure in &comparison.figures {
        let show = |value: f64| match value {
            _ if value.is_nan() => "-".to_owned(),
            _ if figure.what.ends_with("bytes)") => bytes(value as u64),
            _ if value == value.trunc() || 1e4 <= value.abs() => format!("{value:.1}"),
            _ => format!("{value:.6}"),
        };
        let ratio = figure.b / figure.a;
        let ratio = if ratio.is_finite() { format!("{ratio:.3}") } else { "-".into() };
        table.add_row([figure.what.replace(", bytes)", ")"), show(figure.a), show(figure.b), ratio]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

fn write_steps(comparison: &Comparison, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "\nsteps in both: {}", comparison.common)?;
    for (run, steps) in [("A", &comparison.only_a), ("B", &comparison.only_b)] {
        if let [first, .., last] | [first @ last] = steps.as_slice() {
            writeln!(out, "steps only in {run}: {} ({first} to {last})", steps.len())?;
        }
    }
    for (what, difference) in [("losses", comparison.loss), ("gradient norms", comparison.norm)] {
        match difference {
            None => {}
            Some((0.0, _)) => writeln!(out, "{what}: equal")?,
            Some((part, step)) => writeln!(out, "{what}: differ by at most {part:.2e} (relative), at step {step}")?,
        }
    }
    let state = match (&comparison.state_hash.0, &comparison.state_hash.1) {
        (a, b) if a.is_empty() || b.is_empty() => "unknown: a run has no summary with a state hash",
        (a, b) if a == b => "equal",
        _ => "different",
    };
    writeln!(out, "final state: {state}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use zf_core::record::{METRICS, MetricsWriter, SUMMARY, StepRecord, Summary};

    use super::*;

    fn folder(root: &Path, name: &str, loss: f64) -> std::path::PathBuf {
        let folder = root.join(name);
        std::fs::create_dir(&folder).unwrap();
        let mut metrics = MetricsWriter::create(&folder.join(METRICS)).unwrap();
        let records: Vec<StepRecord> =
            (0..3).map(|step| StepRecord { step, loss: loss + step as f64, ..StepRecord::default() }).collect();
        records.iter().for_each(|record| metrics.write(record).unwrap());
        Summary::from_records(&records).write(&folder.join(SUMMARY)).unwrap();
        folder
    }

    #[test]
    fn says_where_runs_differ() {
        let root = tempfile::tempdir().unwrap();
        let (a, b) = (folder(root.path(), "a", 1.0), folder(root.path(), "b", 1.5));
        let mut out = Vec::new();
        let error = run(&a, &b, Mode::Tolerance(0.25), &mut out).unwrap_err().to_string();
        assert_eq!(error, "the runs differ more than allowed, first at step 0: loss: 1 and 1.5 (1 difference in all)");
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("losses: differ by at most 3.33e-1 (relative), at step 0"), "{text}");
        assert!(text.contains("steps in both: 3"), "{text}");
        run(&a, &b, Mode::Report, &mut Vec::new()).unwrap();
        for senseless in [f64::NAN, -1.0, f64::INFINITY] {
            let error = run(&a, &b, Mode::Tolerance(senseless), &mut Vec::new()).unwrap_err().to_string();
            assert!(error.starts_with("--tolerance must be 0 or more"), "{error}");
        }
        run(&a, &a, Mode::Equal, &mut Vec::new()).unwrap();
    }

    #[test]
    fn no_run_folder_is_an_input_error() {
        let root = tempfile::tempdir().unwrap();
        let a = folder(root.path(), "a", 1.0);
        let error = run(&a, &root.path().join("none"), Mode::Equal, &mut Vec::new()).unwrap_err();
        assert_eq!(error.downcast_ref::<zf_core::Error>().unwrap().exit_code(), 2);
    }
}
