//! `zf timeline`: runs as pictures.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use zf_core::Error;
use zf_core::files::write_atomic;
use zf_core::record::timeline::{TIMELINE, Timeline, draw};

/// What `zf ablate` leaves in its folder.
const ABLATION: &str = "ablation.json";

/// Draws `rank` of each of the run folders `runs`, one above the other, into `file`. A folder of an ablation stands for
/// its cases, in their order, of which those without a trace are left out with a note.
///
/// # Errors
/// Folders without a whole trace, steps that a trace lacks, a file that cannot be written.
pub fn run(
    runs: &[PathBuf],
    steps: Option<Range<u64>>,
    rank: usize,
    file: Option<&Path>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut timelines = Vec::new();
    for folder in runs {
        if !folder.join(ABLATION).is_file() {
            timelines.push(Timeline::read(folder, rank)?);
            continue;
        }
        let before = timelines.len();
        for (name, case) in cases(folder)? {
            match Timeline::read(&case, rank) {
                Ok(mut timeline) => {
                    timeline.title = name;
                    timelines.push(timeline);
                }
                Err(error) => writeln!(out, "{name} is left out: {error}")?,
            }
        }
        if timelines.len() == before {
            return Err(Error::Input(format!("{}: no case in it can be drawn", folder.display())).into());
        }
    }
    let picture = draw(&timelines, steps)?;
    let first = runs.first().map_or(Path::new("."), PathBuf::as_path);
    let file = file.map_or_else(|| first.join(TIMELINE), Path::to_path_buf);
    write_atomic(&file, picture.as_bytes())?;
    let count = timelines.len();
    writeln!(out, "{}: {count} run{}", file.display(), if count == 1 { "" } else { "s" })?;
    Ok(())
}

/// Reads `A..B`: the steps A to B-1.
///
/// # Errors
/// What was expected, with an example.
pub fn steps(text: &str) -> Result<Range<u64>, String> {
    let range = text.split_once("..").and_then(|(a, b)| Some(a.trim().parse().ok()?..b.trim().parse().ok()?));
    range
        .filter(|range| !range.is_empty())
        .ok_or_else(|| "expected A..B with A < B, such as 100..104 for four steps".into())
}

/// The part of `ablation.json` that says where the cases are.
#[derive(Deserialize)]
struct Ablation {
    #[serde(default)]
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    folder: Option<PathBuf>,
}

/// Names and folders of an ablation's cases: those that it lists, else the folders in `cases/` by name.
fn cases(folder: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let list = folder.join(ABLATION);
    let wrong = |what: String| Error::Input(format!("{}: expected the cases of an ablation: {what}", list.display()));
    let text = fs::read(&list).map_err(|e| wrong(e.to_string()))?;
    let ablation: Ablation = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
    let place = |case: Case| {
        let own = case.folder.unwrap_or_else(|| Path::new("cases").join(&case.name));
        (case.name, folder.join(own))
    };
    let listed: Vec<(String, PathBuf)> = ablation.cases.into_iter().map(place).collect();
    if !listed.is_empty() {
        return Ok(listed);
    }
    let root = folder.join("cases");
    let mut found = Vec::new();
    for entry in fs::read_dir(&root).map_err(|e| wrong(format!("none listed, and {}: {e}", root.display())))? {
        let entry = entry.map_err(|e| Error::io(&root, e))?;
        if entry.path().is_dir() {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use zf_core::trace::{Lane, Trace, write_traces};

    use super::*;

    fn traced(folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        let trace = Trace::new(0, 100);
        for number in 0..6 {
            trace.step(number);
            let start = Instant::now();
            std::thread::sleep(Duration::from_millis(1));
            trace.record(Lane::Compute, "forward", None, start, Instant::now());
        }
        write_traces(&folder.join("trace.json"), &[trace]).unwrap();
    }

    /// The titles of the drawn runs, and what was said.
    fn drawn(runs: &[PathBuf], file: &Path) -> (Vec<String>, String) {
        let mut out = Vec::new();
        run(runs, Some(2..4), 0, Some(file), &mut out).unwrap();
        let svg = fs::read_to_string(file).unwrap();
        let titles = svg.split("font-weight=\"bold\">").skip(1).map(|rest| rest.split('<').next().unwrap().to_owned());
        (titles.collect(), String::from_utf8(out).unwrap())
    }

    #[test]
    fn an_ablation_stands_for_its_cases() {
        let root = tempfile::tempdir().unwrap();
        let (sweep, alone, file) = (root.path().join("sweep"), root.path().join("alone"), root.path().join("t.svg"));
        for name in ["zeta", "alpha"] {
            traced(&sweep.join("cases").join(name));
        }
        traced(&alone);
        let both = [sweep.clone(), alone.clone()];
        let list =
            r#"{"cases": [{"name": "z", "folder": "cases/zeta"}, {"name": "failed"}, {"name": "alpha"}], "more": 1}"#;
        fs::write(sweep.join(ABLATION), list).unwrap();
        let (titles, said) = drawn(&both, &file);
        assert_eq!(titles, ["z", "alpha", "alone"]);
        assert!(said.starts_with("failed is left out: ") && said.ends_with("t.svg: 3 runs\n"), "{said}");
        fs::write(sweep.join(ABLATION), "{}").unwrap();
        assert_eq!(drawn(&both, &file).0, ["alpha", "zeta", "alone"]);
        fs::write(sweep.join(ABLATION), "{\"cases\": [").unwrap();
        let error = run(&both, None, 0, None, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("ablation.json: expected the cases of an ablation: EOF"), "{error}");
        fs::write(sweep.join(ABLATION), r#"{"cases": [{"name": "failed"}]}"#).unwrap();
        let error = run(&both, None, 0, None, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.ends_with("sweep: no case in it can be drawn"), "{error}");
        assert!(!sweep.join(TIMELINE).exists());
        run(std::slice::from_ref(&alone), None, 0, None, &mut Vec::new()).unwrap();
        assert!(fs::read_to_string(alone.join(TIMELINE)).unwrap().ends_with("</svg>\n"));
    }

    #[test]
    fn steps_are_a_range() {
        assert_eq!(steps("3..7"), Ok(3..7));
        for text in ["", "3", "..", "3..", "7..3", "3..3", "-1..2", "3..=7", "1..99999999999999999999"] {
            assert!(steps(text).unwrap_err().starts_with("expected A..B with A < B"), "{text}");
        }
    }
}
