//! Predicted figures beside measured ones.

use serde::{Deserialize, Serialize};

/// What the formulas of [`crate::plan`] say, beside what a rank measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prediction {
    /// Bytes of model states held between two steps.
    pub memory: PredictedMemory,
    /// Bytes sent, the mean over the steps of this run, rounded down; skipped steps and validation included on both sides,
    /// small agreed messages (`control`) on neither.
    pub comm_bytes: PredictedComm,
    /// Bytes between device and host, the mean over the steps of this run, rounded down. Exact as far as [`Beside::within`] says for
    /// a run that was not resumed and came to its end.
    pub link_bytes: PredictedLink,
}

/// Bytes of model states held between two steps, from the allocator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PredictedMemory {
    /// Parameters.
    pub parameters: Beside,
    /// Accumulated gradients. One rank gives them back after each update.
    pub gradients: Beside,
    /// Masters and states of the update rule.
    pub optimizer: Beside,
    /// Masters and states in host memory; of states in files the memory that reads and writes them, at least.
    pub host: Beside,
    /// Masters and states in files.
    pub file: Beside,
}

/// Bytes between device and host in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PredictedLink {
    /// Gradients.
    pub to_host: Beside,
    /// Parameters.
    pub to_device: Beside,
    /// Columns that changed their tier, both ways: an estimate from how many changed, which is no part of
    /// [`Prediction::figures`].
    pub moves_estimate: Beside,
}

/// Bytes sent in a step, by collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PredictedComm {
    /// See [`crate::stage::CommBytes::all_reduce`].
    pub all_reduce: Beside,
    /// See [`crate::stage::CommBytes::reduce_scatter`].
    pub reduce_scatter: Beside,
    /// See [`crate::stage::CommBytes::all_gather`].
    pub all_gather: Beside,
    /// See [`crate::stage::CommBytes::all_to_all`].
    pub all_to_all: Beside,
    /// See [`crate::stage::CommBytes::broadcast`].
    pub broadcast: Beside,
}

/// Two figures of the same thing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Beside {
    /// By the formulas.
    pub predicted: u64,
    /// In the run.
    pub measured: u64,
    /// How far apart the two may be, where ranks have different numbers of elements of the columns that are chosen, or where parameters
    /// of columns that become chosen come back with their states or before.
    #[serde(skip_serializing_if = "is_zero")]
    pub within: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl Beside {
    /// Both.
    pub fn new(predicted: u64, measured: u64) -> Self {
        Self { predicted, measured, within: 0 }
    }

    /// The same with room for a difference.
    #[must_use]
    pub fn within(self, within: u64) -> Self {
        Self { within, ..self }
    }

    /// Whether they are the same, as far as can be known.
    pub fn agrees(&self) -> bool {
        self.predicted.abs_diff(self.measured) <= self.within
    }
}

impl Prediction {
    /// All figures but estimates with their names, `memory.parameters` and so on.
    pub fn figures(&self) -> [(&'static str, Beside); 12] {
        let Self { memory, comm_bytes: comm, link_bytes: link } = self;
        [
            ("memory.parameters", memory.parameters),
            ("memory.gradients", memory.gradients),
            ("memory.optimizer", memory.optimizer),
            ("memory.host", memory.host),
            ("memory.file", memory.file),
            ("comm_bytes.all_reduce", comm.all_reduce),
            ("comm_bytes.reduce_scatter", comm.reduce_scatter),
            ("comm_bytes.all_gather", comm.all_gather),
            ("comm_bytes.all_to_all", comm.all_to_all),
            ("comm_bytes.broadcast", comm.broadcast),
            ("link_bytes.to_host", link.to_host),
            ("link_bytes.to_device", link.to_device),
        ]
    }
}
