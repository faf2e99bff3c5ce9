//! What crosses the link of a rank while a run goes on, step by step.

use super::offload::{LinkPlan, OffloadCosts, moves};
use crate::engine::OffloadReport;
use crate::stage::{Keeps, OffloadPolicy};

/// Counts windows as the engine does, and the bytes that they carry.
pub(super) struct Windows {
    policy: OffloadPolicy,
    arrays: usize,
    link: LinkPlan,
    /// Updates of warm-up that are left.
    warmup: u64,
    /// Updates in the present window.
    position: u64,
    /// Whether columns were chosen.
    chosen: bool,
    /// Whether an update was made that is not visible.
    pending: bool,
    pub(super) carried: Carried,
}

/// Bytes so far, and how far off they can be.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Carried {
    pub(super) to_host: u64,
    pub(super) to_device: u64,
    pub(super) moves: u64,
    pub(super) slack_to_host: u64,
    pub(super) slack_to_device: u64,
}

impl Windows {
    /// After `updates` updates of the run.
    pub(super) fn new(costs: &OffloadCosts, states: usize, link: LinkPlan, updates: u64) -> Self {
        let policy = costs.policy().clone();
        let (warmup, after) = (policy.warmup.saturating_sub(updates), updates.saturating_sub(policy.warmup));
        let interval = policy.first_interval();
        Self {
            arrays: 1 + states,
            link,
            warmup,
            position: after % interval,
            chosen: after > 0,
            pending: policy.asynchronous && after >= interval,
            carried: Carried::default(),
            policy,
        }
    }

    /// A step was taken.
    pub(super) fn step(&mut self, skipped: bool, report: &OffloadReport) {
        self.carried.to_device += self.link.fetched;
        if skipped {
            // Where all states are with the host, gradients may leave before it is known whether they are used.
            if self.policy.keeps == Keeps::Nothing {
                self.carried.to_host += self.link.gradients;
                self.carried.slack_to_host += self.link.gradients;
            }
            return;
        }
        if let Some(turnover) = report.turnover {
            self.choose(turnover);
        }
        let (warming_up, on_device) = (self.warmup > 0, self.link.sums_on_device);
        self.warmup = self.warmup.saturating_sub(1);
        self.position += 1;
        let ends = warming_up || self.position >= report.interval;
        if !on_device || ends {
            self.gradients(warming_up);
        }
        if ends {
            self.parameters(warming_up);
            self.position = 0;
            self.pending = self.policy.asynchronous && !warming_up;
        }
    }

    /// So many validation micro-batches were run.
    pub(super) fn validate(&mut self, micro_batches: u64) {
        self.carried.to_device += micro_batches * self.link.fetched_to_validate;
    }

    /// The run has come to its end: what was open becomes visible. How many updates that were.
    pub(super) fn drain(&mut self) -> u64 {
        let open = self.position > 0;
        if open {
            if self.link.sums_on_device {
                self.gradients(false);
            }
            self.parameters(false);
        }
        self.position = 0;
        u64::from(std::mem::take(&mut self.pending)) + u64::from(open)
    }

    /// Bytes of states on the device that are with the host as long as no column was chosen.
    pub(super) fn not_chosen_yet(&self) -> u64 {
        if self.chosen { 0 } else { self.link.first_moves }
    }

    /// Bytes of sums on the device.
    pub(super) fn sums(&self) -> u64 {
        if self.link.sums_on_device && self.position > 0 { 4 * self.link.elements } else { 0 }
    }

    /// How far off the bytes of states on the device can be.
    pub(super) fn slack(&self) -> u64 {
        if self.chosen { self.link.slack.optimizer } else { 0 }
    }

    fn choose(&mut self, turnover: f64) {
        let first = self.link.first_moves;
        if !std::mem::replace(&mut self.chosen, true) {
            self.carried.moves += first;
            return;
        }
        self.carried.moves += moves(first, turnover, &self.policy, self.arrays);
        if self.pending && turnover > 0.0 {
            // Parameters of a pending update come with the states, if the host had not made them.
            let elements = first / (4 * self.arrays as u64);
            self.carried.slack_to_device += elements * self.link.parameters.div_ceil(self.link.elements.max(1));
        }
    }

    fn gradients(&mut self, warming_up: bool) {
        let LinkPlan { gradients, warmup, slack, .. } = self.link;
        self.carried.to_host += if warming_up { warmup[0] } else { gradients };
        self.carried.slack_to_host += if warming_up { 0 } else { slack.gradients };
    }

    fn parameters(&mut self, warming_up: bool) {
        let LinkPlan { parameters, warmup, slack, .. } = self.link;
        self.carried.to_device += if warming_up { warmup[1] } else { parameters };
        self.carried.slack_to_device += if warming_up { 0 } else { slack.parameters };
    }
}
