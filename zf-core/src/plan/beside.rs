//! The plan of a rank beside what the rank measures while it runs.

use zf_sys::heap::{ByCategory, Category};

use super::traffic::add;
use super::{PlanOptions, RankPlan, plan};
use crate::Result;
use crate::layout::Layout;
use crate::record::{Beside, PredictedComm, PredictedMemory, Prediction};
use crate::stage::CommBytes;

/// Predicts the bytes of one rank as its run goes on.
pub(crate) struct Predictor {
    plan: RankPlan,
    before: CommBytes,
    steps: u64,
    predicted: CommBytes,
}

impl Predictor {
    /// For `rank`, which has sent `before` so far.
    ///
    /// # Errors
    /// As [`plan`].
    pub(crate) fn new(layout: &Layout, options: &PlanOptions, rank: usize, before: CommBytes) -> Result<Self> {
        let plan = plan(layout, options)?.per_rank.swap_remove(rank);
        Ok(Self { plan, before, steps: 0, predicted: CommBytes::default() })
    }

    /// A step was taken, and `validated` validation micro-batches after it.
    pub(crate) fn step(&mut self, skipped: bool, validated: u64) {
        self.steps += 1;
        let whole = self.plan.traffic.total();
        add(&mut self.predicted, &if skipped { whole.since(&self.plan.of_update) } else { whole }, 1);
        add(&mut self.predicted, &self.plan.validation, validated);
    }

    /// Both sides, given what the rank holds and has sent, with nothing in flight.
    pub(crate) fn finish(&self, held: &ByCategory, sent: &CommBytes) -> Prediction {
        let held = |predicted, category| Beside::new(predicted, u64::try_from(held[category]).unwrap_or(0));
        let sent = sent.since(&self.before);
        let steps = self.steps.max(1);
        let mean = |of: fn(&CommBytes) -> u64| Beside::new(of(&self.predicted) / steps, of(&sent) / steps);
        Prediction {
            memory: PredictedMemory {
                parameters: held(self.plan.device.parameters, Category::Parameters),
                gradients: held(self.plan.gradients_between_steps, Category::Gradients),
                optimizer: held(self.plan.device.optimizer, Category::Optimizer),
            },
            comm_bytes: PredictedComm {
                all_reduce: mean(|bytes| bytes.all_reduce),
                reduce_scatter: mean(|bytes| bytes.reduce_scatter),
                all_gather: mean(|bytes| bytes.all_gather),
                all_to_all: mean(|bytes| bytes.all_to_all),
                broadcast: mean(|bytes| bytes.broadcast),
            },
        }
    }
}
