//! What watches a run: progress bars, plots, tests.

use crate::record::{StepRecord, Summary};

/// Told of a run's events on the thread of rank 0.
pub trait Observer: Send {
    /// The run starts at step `first` of `steps`; `notes` is what a person should know (parameters, data, stages).
    fn start(&mut self, _first: u64, _steps: u64, _notes: &[String]) {}

    /// A step is over.
    fn step(&mut self, _record: &StepRecord) {}

    /// A checkpoint of step `step` was handed to the writer.
    fn checkpoint(&mut self, _step: u64) {}

    /// Something a person should know.
    fn warn(&mut self, _message: &str) {}

    /// The run is over.
    fn end(&mut self, _summary: &Summary) {}
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {}
