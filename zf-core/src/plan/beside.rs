//! The plan of a rank beside what the rank measures while it runs.

use zf_sys::heap::{ByCategory, Category};

use super::traffic::add;
use super::windows::Windows;
use super::{PlanOptions, RankPlan, plan};
use crate::Result;
use crate::engine::StepReport;
use crate::layout::Layout;
use crate::record::{Beside, PredictedComm, PredictedLink, PredictedMemory, Prediction};
use crate::stage::{CommBytes, TierBytes, Traffic};

/// Predicts the bytes of one rank as its run goes on.
pub(crate) struct Predictor {
    plan: RankPlan,
    before: Moved,
    steps: u64,
    predicted: CommBytes,
    windows: Option<Windows>,
}

/// What a rank has moved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    /// To other ranks.
    pub(crate) comm: CommBytes,
    /// Between its device and its host.
    pub(crate) link: Traffic,
}

/// What a rank holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holds {
    /// On the device.
    pub(crate) device: ByCategory,
    /// Masters and states elsewhere.
    pub(crate) tier: TierBytes,
}

impl Predictor {
    /// For `rank`, which has moved `before` and made `updates` updates so far.
    ///
    /// # Errors
    /// As [`plan`].
    pub(crate) fn new(
        layout: &Layout,
        options: &PlanOptions,
        rank: usize,
        before: Moved,
        updates: u64,
    ) -> Result<Self> {
        let plan = plan(layout, options)?.per_rank.swap_remove(rank);
        let windows = options.offload.as_ref().map(|costs| Windows::new(costs, options.states, plan.link, updates));
        Ok(Self { plan, before, steps: 0, predicted: CommBytes::default(), windows })
    }

    /// A step was taken, and `validated` validation micro-batches after it.
    pub(crate) fn step(&mut self, report: &StepReport, validated: u64) {
        self.steps += 1;
        let whole = self.plan.traffic.total();
        add(&mut self.predicted, &if report.skipped { whole.since(&self.plan.of_update) } else { whole }, 1);
        add(&mut self.predicted, &self.plan.validation, validated);
        if report.offload.turnover.is_some() || report.offload.decision.is_some() {
            add(&mut self.predicted, &self.plan.of_choice, 1);
        }
        if let Some(windows) = &mut self.windows {
            windows.step(report.skipped, &report.offload);
            windows.validate(validated);
        }
    }

    /// Both sides, given what the rank holds and has moved, with nothing in flight. `ended`: the run has come to its end.
    pub(crate) fn finish(&mut self, holds: &Holds, moved: &Moved, ended: bool) -> Prediction {
        if let Some(windows) = self.windows.as_mut().filter(|_| ended) {
            let drained = windows.drain();
            add(&mut self.predicted, &self.plan.of_drain, drained);
        }
        let held = |predicted, category| Beside::new(predicted, u64::try_from(holds.device[category]).unwrap_or(0));
        let sent = moved.comm.since(&self.before.comm);
        let steps = self.steps.max(1);
        let mean = |of: fn(&CommBytes) -> u64| Beside::new(of(&self.predicted) / steps, of(&sent) / steps);
        let (here, sums, slack) = match &self.windows {
            Some(windows) => (windows.not_chosen_yet(), windows.sums(), windows.slack()),
            None => (0, 0, 0),
        };
        let optimizer = self.plan.device.optimizer.saturating_sub(here);
        Prediction {
            memory: PredictedMemory {
                parameters: held(self.plan.device.parameters, Category::Parameters),
                gradients: held(self.plan.gradients_between_steps + sums, Category::Gradients),
                optimizer: held(optimizer, Category::Optimizer).within(slack),
                host: Beside::new(self.plan.host.optimizer, holds.tier.host),
                file: Beside::new(self.plan.file, holds.tier.file),
            },
            comm_bytes: PredictedComm {
                all_reduce: mean(|bytes| bytes.all_reduce),
                reduce_scatter: mean(|bytes| bytes.reduce_scatter),
                all_gather: mean(|bytes| bytes.all_gather),
                all_to_all: mean(|bytes| bytes.all_to_all),
                broadcast: mean(|bytes| bytes.broadcast),
            },
            link_bytes: self.link(&moved.link, steps),
        }
    }

    fn link(&self, moved: &Traffic, steps: u64) -> PredictedLink {
        let carried = self.windows.as_ref().map(|windows| windows.carried).unwrap_or_default();
        let before = &self.before.link;
        let mean = |predicted: u64, now: u64, before: u64, slack: u64| {
            Beside::new(predicted / steps, now.saturating_sub(before) / steps).within(slack.div_ceil(steps))
        };
        PredictedLink {
            to_host: mean(carried.to_host, moved.to_host, before.to_host, carried.slack_to_host),
            to_device: mean(carried.to_device, moved.to_device, before.to_device, carried.slack_to_device),
            moves_estimate: mean(carried.moves, moved.moves, before.moves, 0),
        }
    }
}
