//! `metrics.jsonl`: one line a step, also readable while the run goes on.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::step::StepRecord;
use crate::files::write_atomic;
use crate::{Error, Result};

/// The file's name in the run folder.
pub const METRICS: &str = "metrics.jsonl";

/// Where lines go that a resumed run writes anew.
pub const METRICS_OLD: &str = "metrics.old.jsonl";

/// Appends lines.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// An empty file at `path`, replacing what was there.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn create(path: &Path) -> Result<Self> {
        write_atomic(path, b"")?;
        Self::append_to(path)
    }

    /// Goes on with the file at `path` (or a new one) at step `from_step`: lines from that step on move to
    /// `metrics.old.jsonl` beside it, a torn last line goes.
    ///
    /// # Errors
    /// [`Error::Input`] naming file and line that is no record; [`Error::Io`] naming the file.
    pub fn resume(path: &Path, from_step: u64) -> Result<Self> {
        let (mut kept, mut moved) = (String::new(), String::new());
        for (line, record) in read_lines(path)? {
            let text = if record.step < from_step { &mut kept } else { &mut moved };
            text.push_str(&line);
            text.push('\n');
        }
        if !moved.is_empty() {
            // Before the lines leave the one file they are safe in the other: a kill in between at worst doubles them.
            let old = path.with_file_name(METRICS_OLD);
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(&old)
                .and_then(|mut file| {
                    file.write_all(moved.as_bytes())?;
                    file.sync_all()
                })
                .map_err(|e| Error::io(&old, e))?;
        }
        write_atomic(path, kept.as_bytes())?;
        Self::append_to(path)
    }

    /// Appends one line, which readers see at once and whole.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn write(&mut self, record: &StepRecord) -> Result<()> {
        let line = serde_json::to_string(record).map_err(|e| Error::Engine(format!("{}: {e}", self.path.display())))?;
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(|e| Error::io(&self.path, e))
    }

    /// Makes all lines durable.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io(&self.path, e))
    }

    fn append_to(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().append(true).open(path).map_err(|e| Error::io(path, e))?;
        Ok(Self { path: path.to_path_buf(), file })
    }
}

/// All records of a file. The last line may be torn (a killed run) and is then left out.
///
/// # Errors
/// [`Error::Input`] naming file and line that is no record, or a file that is missing.
pub fn read_metrics(path: &Path) -> Result<Vec<StepRecord>> {
    if !path.exists() {
        return Err(Error::Input(format!("{}: no such file; expected the metrics of a run folder", path.display())));
    }
    Ok(read_lines(path)?.into_iter().map(|(_, r)| r).collect())
}

/// Lines with their records; none of a missing file.
fn read_lines(path: &Path) -> Result<Vec<(String, StepRecord)>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(path, e)),
    };
    let mut lines = Vec::new();
    let mut rest = bytes.as_slice();
    let mut number = 0;
    // Only what ends in a newline was written whole.
    while let Some(end) = rest.iter().position(|&b| b == b'\n') {
        let (line, more) = rest.split_at(end);
        rest = &more[1..];
        number += 1;
        if line.is_empty() {
            continue;
        }
        let record = serde_json::from_slice(line)
            .map_err(|e| Error::Input(format!("{}:{number}: expected the record of a step: {e}", path.display())))?;
        lines.push((String::from_utf8_lossy(line).into_owned(), record));
    }
    Ok(lines)
}
