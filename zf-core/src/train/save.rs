//! Writing checkpoints beside the training.

use std::time::Duration;

use serde_json::json;

use super::Training;
use super::rank::Loop;
use crate::checkpoint::{AsyncWriter, Best, Meta, Options, RankState, Writer};
use crate::{Error, Result};

/// One rank's writer of checkpoints.
pub(crate) struct Saver {
    writer: AsyncWriter,
    wait: bool,
    last: Option<u64>,
}

impl Saver {
    pub(crate) fn new(training: &Training, rank: usize, attempt: &str) -> Result<Self> {
        let policy = &training.run.checkpoint;
        let options = Options { keep: policy.keep, attempt: attempt.to_string(), timeout: Duration::from_secs(300) };
        let writer = Writer::new(&training.folder.join("checkpoints"), rank, options)?;
        Ok(Self { writer: AsyncWriter::new(writer)?, wait: !policy.asynchronous, last: None })
    }

    /// The step of the last checkpoint handed in.
    pub(crate) fn last(&self) -> Option<u64> {
        self.last
    }

    /// Copies this rank's state and hands it to the writer.
    pub(crate) fn save(&mut self, run: &mut Loop<'_>, best: Option<Best>) -> Result<()> {
        // The last one must be on disk before the next copy is made: one snapshot at a time.
        self.writer.flush()?;
        let step = run.engine.steps();
        let pieces = match run.engine.export() {
            Ok(pieces) => pieces,
            Err(error) => {
                // It is this error that counts.
                let _ = self.writer.give_up(step, run.world, error.to_string());
                return Err(error);
            }
        };
        let meta = (run.rank == 0).then(|| meta(run, best)).transpose()?;
        self.writer.submit(RankState { step, rank: run.rank, world: run.world, pieces }, meta)?;
        self.last = Some(step);
        if self.wait { self.writer.flush() } else { Ok(()) }
    }

    /// Waits until everything is on disk.
    pub(crate) fn finish(&self) -> Result<()> {
        self.writer.flush()
    }
}

fn meta(run: &Loop<'_>, best: Option<Best>) -> Result<Meta> {
    let progress = run.engine.progress();
    let training = run.training;
    Ok(Meta {
        step: progress.step,
        updates: progress.updates,
        counts: run.engine.counts(),
        loss_scale: encode(&progress.loss_scale)?,
        data_position: progress.step * training.run.global_batch as u64,
        data_identity: training.data.dataset.identity(),
        model_identity: run.model_identity.clone(),
        seed: training.run.seed,
        run: training.resolved.clone(),
        best,
        versions: super::measure::versions(),
        extra: json!({
            "progress": encode(&progress)?,
            "batch": { "global": training.run.global_batch, "micro": training.run.micro_batch },
        }),
        ..Meta::default()
    })
}

fn encode(value: &impl serde::Serialize) -> Result<serde_json::Value> {
    serde_json::to_value(value).map_err(|error| Error::Engine(format!("cannot encode the progress: {error}")))
}
