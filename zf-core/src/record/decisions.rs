//! `decisions.jsonl`: what an offload decided while running, to be replayed (`offload.update_interval = { replay = "FILE" }`).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use crate::files::write_atomic;
use crate::stage::Decision;
use crate::{Error, Result};

/// The file's name in the run folder.
pub const DECISIONS: &str = "decisions.jsonl";

/// Appends decisions, one a line; the file is made with the first.
#[derive(Debug)]
pub struct DecisionsWriter {
    path: PathBuf,
}

impl DecisionsWriter {
    /// Goes on with the file of a run that stands before update number `from`: later decisions are taken anew.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn open(path: PathBuf, from: u64) -> Result<Self> {
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self { path }),
            Err(error) => return Err(Error::io(&path, error)),
        };
        let earlier = |line: &&str| serde_json::from_str::<Decision>(line).is_ok_and(|decision| decision.update < from);
        let kept: String = text.lines().filter(earlier).flat_map(|line| [line, "\n"]).collect();
        write_atomic(&path, kept.as_bytes())?;
        Ok(Self { path })
    }

    /// Appends one.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn write(&self, decision: &Decision) -> Result<()> {
        let line = serde_json::to_string(decision).map_err(|error| Error::Engine(error.to_string()))?;
        let file = OpenOptions::new().create(true).append(true).open(&self.path);
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
            .map_err(|error| Error::io(&self.path, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_decides_anew_from_where_it_stands() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(DECISIONS);
        let decision = |update| Decision { update, interval: 4, choose: true };
        let writer = DecisionsWriter::open(path.clone(), 0).unwrap();
        assert!(!path.exists(), "a run that decides nothing leaves no file");
        [0, 4, 8].iter().for_each(|&update| writer.write(&decision(update)).unwrap());
        DecisionsWriter::open(path.clone(), 8).unwrap().write(&decision(8)).unwrap();
        let read: Vec<u64> = fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<Decision>(line).unwrap().update)
            .collect();
        assert_eq!(read, [0, 4, 8]);
    }
}
