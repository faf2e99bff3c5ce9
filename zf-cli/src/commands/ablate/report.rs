//! Results for people and for programs: a table, `ablation.csv`, `ablation.json`.

use std::io::Write;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use zf_core::Error;
use zf_core::files::write_atomic;

use super::super::size::bytes;
use super::results::{Ablation, CaseResult, Figures, RunResult, Verdict};

/// One line a run.
const CSV: &str = "ablation.csv";

/// Everything.
const JSON: &str = "ablation.json";

/// Writes both files into `folder`.
pub(super) fn write_files(ablation: &Ablation, folder: &Path) -> Result<(), Error> {
    let path = folder.join(JSON);
    let mut text =
        serde_json::to_vec_pretty(ablation).map_err(|error| Error::Engine(format!("{}: {error}", path.display())))?;
    text.push(b'\n');
    write_atomic(&path, &text)?;
    write_atomic(&folder.join(CSV), csv(ablation).as_bytes())
}

/// Prints a table of cases, and what is wrong with which.
pub(super) fn print(ablation: &Ablation, folder: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let means = || ablation.cases.iter().filter_map(|case| case.mean);
    let validates = means().any(|mean| mean.validation_loss.is_some());
    let links = means().any(|mean| mean.link_bytes > 0.0);
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let mut header = vec!["case", "step (mean)", "(median)", "speed", "final loss"];
    header.extend(validates.then_some("validation"));
    header.extend(["losses differ", "stall", "device peak", "ranks / step"]);
    header.extend(links.then_some("link / step"));
    header.push("verdict");
    table.set_header(&header);
    for case in &ablation.cases {
        let mut row = vec![case.name.clone()];
        let figure = |show: &dyn Fn(&Figures) -> String| case.mean.as_ref().map_or_else(|| "-".to_owned(), show);
        row.push(figure(&|f| time(f.step_seconds)));
        row.push(figure(&|f| time(f.step_seconds_median)));
        row.push(case.speed.map_or_else(|| "-".to_owned(), |speed| format!("{speed:.2} x")));
        row.push(figure(&|f| format!("{:.4}", f.final_loss)));
        if validates {
            row.push(figure(&|f| f.validation_loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"))));
        }
        row.push(match case.loss_difference {
            None => "-".to_owned(),
            Some(0.0) => "0".to_owned(),
            Some(difference) => format!("{difference:.1e}"),
        });
        row.push(figure(&|f| format!("{:.1} %", 100.0 * f.stall_share)));
        row.push(figure(&|f| bytes(f.device_peak as u64)));
        row.push(figure(&|f| bytes(f.comm_bytes as u64)));
        if links {
            row.push(figure(&|f| bytes(f.link_bytes as u64)));
        }
        row.push(verdict(case));
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1).take(header.len() - 2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    writeln!(out, "{table}")?;
    for (case, run) in ablation.runs() {
        explain(case, run, out)?;
    }
    let [csv, json] = [CSV, JSON].map(|name| folder.join(name).display().to_string());
    writeln!(out, "results: {csv}, {json}")?;
    Ok(())
}

/// Why a run is not as it should be.
fn explain(case: &CaseResult, run: &RunResult, out: &mut dyn Write) -> std::io::Result<()> {
    let (name, folder) = (&run.name, run.folder.display());
    match (run.verdict, &run.error, &run.difference) {
        (Verdict::Failed, Some(error), _) => {
            let error = error.replace('\n', "\n    ");
            writeln!(out, "{name}: {error}\n    log: {folder}/log.txt")
        }
        (Verdict::Unmet, _, Some(difference)) => {
            writeln!(out, "{name}: expected {}, but {difference}", expected(case))
        }
        (Verdict::NoBaseline, ..) => writeln!(out, "{name}: its baseline `{}` has failed", case.baseline),
        _ => Ok(()),
    }
}

fn verdict(case: &CaseResult) -> String {
    let some = |verdict: Verdict| match case.runs.iter().filter(|run| run.verdict == verdict).count() {
        count if count == case.runs.len() => String::new(),
        count => format!(" ({count} of {})", case.runs.len()),
    };
    let asked = match &case.expect {
        serde_json::Value::String(text) => text.clone(),
        other => format!("within {}", other["tolerance"]),
    };
    match case.verdict {
        Verdict::Baseline => "baseline".to_owned(),
        Verdict::Compared => "-".to_owned(),
        Verdict::Met => asked,
        Verdict::Unmet => format!("NOT {asked}{}", some(Verdict::Unmet)),
        Verdict::NoBaseline => "no baseline".to_owned(),
        Verdict::Stopped => "not run".to_owned(),
        Verdict::Failed => format!("FAILED{}", some(Verdict::Failed)),
    }
}

fn expected(case: &CaseResult) -> String {
    match &case.expect {
        serde_json::Value::String(text) if text == "equal" => format!("the same as `{}`", case.baseline),
        serde_json::Value::String(_) => format!("something else than `{}`", case.baseline),
        other => format!("losses within {} of those of `{}`", other["tolerance"], case.baseline),
    }
}

/// One line a run, with a column for every key that some case sets.
fn csv(ablation: &Ablation) -> String {
    let mut keys: Vec<&String> = Vec::new();
    for key in ablation.cases.iter().flat_map(|case| case.settings.keys()) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let mut text = String::from("case,seed");
    for key in &keys {
        text.push(',');
        text.push_str(&quoted(key));
    }
    text.push_str(
        ",verdict,baseline,speed,loss_difference,state_equal,steps,final_loss,validation_loss,step_seconds,\
         step_seconds_median,stall_share,device_peak,comm_bytes,link_bytes,folder\n",
    );
    for (case, run) in ablation.runs() {
        let mut row = vec![case.name.clone(), run.seed.to_string()];
        row.extend(keys.iter().map(|key| match case.settings.get(*key) {
            None => String::new(),
            Some(serde_json::Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        }));
        let name = serde_json::to_value(run.verdict).ok();
        row.push(name.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned());
        row.push(case.baseline.clone());
        row.push(number(run.speed));
        row.push(number(run.difference.as_ref().map(|difference| difference.loss)));
        row.push(run.difference.as_ref().map_or_else(String::new, |difference| difference.state_equal.to_string()));
        let figures = run.figures.as_ref();
        row.extend([
            number(figures.map(|f| f.steps)),
            number(figures.map(|f| f.final_loss)),
            number(figures.and_then(|f| f.validation_loss)),
            number(figures.map(|f| f.step_seconds)),
            number(figures.map(|f| f.step_seconds_median)),
            number(figures.map(|f| f.stall_share)),
            number(figures.map(|f| f.device_peak)),
            number(figures.map(|f| f.comm_bytes)),
            number(figures.map(|f| f.link_bytes)),
        ]);
        row.push(run.folder.display().to_string());
        let row: Vec<String> = row.iter().map(|field| quoted(field)).collect();
        text.push_str(&row.join(","));
        text.push('\n');
    }
    text
}

/// The shortest text that reads back as the same number; nothing where it is unknown.
fn number(value: Option<f64>) -> String {
    value.filter(|value| !value.is_nan()).map_or_else(String::new, |value| value.to_string())
}

/// A field by RFC 4180.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.3} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_commas_and_quotes_are_quoted() {
        assert_eq!(quoted("plain"), "plain");
        assert_eq!(quoted("a,b=\"c\""), "\"a,b=\"\"c\"\"\"");
        assert_eq!(number(Some(0.1)), "0.1");
        assert_eq!(number(Some(f64::NAN)), "");
    }
}
