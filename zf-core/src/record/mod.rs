//! What a run leaves in its folder: `metrics.jsonl`, `summary.json`, TensorBoard events; their comparison, and where the
//! time went.

mod budget;
mod compare;
mod decisions;
mod metrics;
mod prediction;
mod step;
mod summary;
mod tensorboard;
#[cfg(test)]
mod tests;
pub mod timeline;

pub use budget::{Budget, BudgetRow, LinkUse};
pub use compare::{Comparison, Difference, Figure, Mode, compare};
pub use decisions::{DECISIONS, DecisionsWriter};
pub use metrics::{METRICS, METRICS_OLD, MetricsWriter, read_metrics};
pub use prediction::{Beside, PredictedComm, PredictedLink, PredictedMemory, Prediction};
pub use step::{LinkBytes, Memory, Seconds, StepRecord};
pub use summary::{Medians, RankSummary, SUMMARY, Summary, Totals};
pub use tensorboard::EventWriter;
