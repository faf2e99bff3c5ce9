//! Going on from a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::Training;
use crate::checkpoint::{Checkpoint, Meta};
use crate::engine::{Progress, StateSource};
use crate::{Error, Result};

/// What an offload has open in a checkpoint made in mid-run, in words: its masters are without that. None where all is applied.
pub fn open_window(meta: &Meta) -> Option<String> {
    let progress: Progress = serde_json::from_value(meta.extra["progress"].clone()).ok()?;
    progress.offload?.open_window()
}

/// A checkpoint to go on from.
#[derive(Debug)]
pub struct Resume {
    checkpoint: Checkpoint,
}

impl Resume {
    /// Takes an opened checkpoint whose files were verified.
    ///
    /// # Errors
    /// Damaged files.
    pub fn new(checkpoint: Checkpoint) -> Result<Self> {
        checkpoint.verify()?;
        Ok(Self { checkpoint })
    }

    /// What the checkpoint keeps beside tensors.
    pub fn meta(&self) -> &Meta {
        self.checkpoint.meta()
    }

    /// Where the engine stood.
    pub(crate) fn progress(&self) -> Result<Progress> {
        let extra = &self.meta().extra["progress"];
        serde_json::from_value(extra.clone()).map_err(|error| {
            Error::Input(format!(
                "{}: the progress it stores cannot be read: {error}",
                self.checkpoint.path().display()
            ))
        })
    }

    /// Checks that model, data, seed and batches are those of the checkpoint.
    pub(crate) fn check(&self, training: &Training, model_identity: &str) -> Result<()> {
        let meta = self.meta();
        let path = self.checkpoint.path().display();
        let refuse = |what: &str, saved: &str, now: &str| {
            Err(Error::Config(format!(
                "cannot resume from {path}: {what} differs: the checkpoint has {saved}, this run has {now}"
            )))
        };
        if meta.model_identity != model_identity {
            return refuse("the model", &meta.model_identity, model_identity);
        }
        let data = training.data.dataset.identity();
        if meta.data_identity != data {
            return refuse("the data", &meta.data_identity, &data);
        }
        if meta.seed != training.run.seed {
            return refuse("`run.seed`", &meta.seed.to_string(), &training.run.seed.to_string());
        }
        let batch = (training.run.global_batch, training.run.micro_batch);
        let saved = &meta.extra["batch"];
        if saved["global"] != batch.0 || saved["micro"] != batch.1 {
            let now = format!("{} in micro-batches of {}", batch.0, batch.1);
            return refuse("the batch", &format!("{} in micro-batches of {}", saved["global"], saved["micro"]), &now);
        }
        Ok(())
    }
}

impl Resume {
    /// The settings of `resolved` (TOML) that are not those of the checkpoint, a line each.
    pub(crate) fn changes(&self, resolved: &str) -> Vec<String> {
        let (before, now) = (settings(&self.meta().run), settings(resolved));
        let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
        let shown = |of: &BTreeMap<String, String>, key| of.get(key).map_or("unset".into(), String::clone);
        keys.into_iter()
            .filter(|key| before.get(*key) != now.get(*key))
            .map(|key| format!("resumed with {key} = {}, before {}", shown(&now, key), shown(&before, key)))
            .collect()
    }
}

/// Values by dotted key; none of a text that is no TOML.
fn settings(text: &str) -> BTreeMap<String, String> {
    fn flatten(prefix: &str, table: &toml::Table, into: &mut BTreeMap<String, String>) {
        for (key, value) in table {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                toml::Value::Table(table) => flatten(&key, table, into),
                value => drop(into.insert(key, value.to_string())),
            }
        }
    }
    let mut all = BTreeMap::new();
    flatten("", &text.parse().unwrap_or_default(), &mut all);
    all
}

impl StateSource for Resume {
    fn read(&self, name: &str, kind: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.checkpoint.read_f32(name, kind, range, out)
    }

    fn has(&self, name: &str, kind: &str) -> bool {
        self.checkpoint.tensor(name, kind).is_some()
    }

    fn count(&self, name: &str) -> u64 {
        self.meta().counts.get(name).copied().unwrap_or(0)
    }
}
