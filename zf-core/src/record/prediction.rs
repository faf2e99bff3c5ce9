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
}

impl Beside {
    /// Both.
    pub fn new(predicted: u64, measured: u64) -> Self {
        Self { predicted, measured }
    }

    /// Whether they are the same.
    pub fn agrees(&self) -> bool {
        self.predicted == self.measured
    }
}

impl Prediction {
    /// All figures with their names, `memory.parameters` and so on.
    pub fn figures(&self) -> [(&'static str, Beside); 8] {
        let Self { memory, comm_bytes: comm } = self;
        [
            ("memory.parameters", memory.parameters),
            ("memory.gradients", memory.gradients),
            ("memory.optimizer", memory.optimizer),
            ("comm_bytes.all_reduce", comm.all_reduce),
            ("comm_bytes.reduce_scatter", comm.reduce_scatter),
            ("comm_bytes.all_gather", comm.all_gather),
            ("comm_bytes.all_to_all", comm.all_to_all),
            ("comm_bytes.broadcast", comm.broadcast),
        ]
    }
}
