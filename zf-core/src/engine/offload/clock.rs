//! Where a run stands in its windows: pure counting.
//!
//! A *window* is S updates of the device's part, after which the host's part is updated once. Warm-up is windows of one
//! update. `update` counts from the end of warm-up.

use serde::{Deserialize, Serialize};

use crate::stage::{Decision, Every, Interval, OffloadPolicy};
use crate::{Error, Result};

/// The state of the count, saved with checkpoints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Clock {
    /// Warm-up updates that are left.
    pub(crate) warmup: u64,
    /// Updates since the end of warm-up.
    pub(crate) update: u64,
    /// Updates made in the present window.
    pub(crate) position: u64,
    /// Updates in the present window when it is complete (S).
    pub(crate) interval: u64,
    /// Number of the present window, warm-up included.
    pub(crate) window: u64,
    /// Updates since columns were last chosen; none before the first time.
    pub(crate) since_choice: Option<u64>,
    /// The interval from the next window on, where a run was resumed with another one within a window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<u64>,
}

impl Clock {
    pub(crate) fn new(policy: &OffloadPolicy) -> Self {
        Self {
            warmup: policy.warmup,
            update: 0,
            position: 0,
            interval: policy.first_interval(),
            window: 0,
            since_choice: None,
            next: None,
        }
    }

    /// Goes on from `saved`. A window that has begun keeps its length; the next one has that of `policy`, if it is a fixed one.
    pub(crate) fn resume(&mut self, saved: &Self, policy: &OffloadPolicy) {
        let window = self.window;
        self.clone_from(saved);
        // Windows are numbered upwards, also where a run goes back.
        self.window = if window == 0 { saved.window } else { saved.window.max(window + 1) };
        self.next = None;
        match policy.interval {
            Interval::Fixed(interval) if self.begins() => self.interval = interval,
            Interval::Fixed(interval) if self.interval != interval => self.next = Some(interval),
            _ => {}
        }
    }

    /// Begins after `updates` updates that were made without windows: warm-up is of the whole run.
    pub(crate) fn begin_after(&mut self, updates: u64) {
        self.warmup = self.warmup.saturating_sub(updates);
    }

    /// Whether the present update belongs to warm-up.
    pub(crate) fn warming_up(&self) -> bool {
        self.warmup > 0
    }

    /// Updates of the present window when it is complete.
    pub(crate) fn length(&self) -> u64 {
        if self.warming_up() { 1 } else { self.interval }
    }

    /// Whether a window begins with the present update.
    pub(crate) fn begins(&self) -> bool {
        self.position == 0
    }

    /// Whether columns may be chosen at the present update, and whether they are, whatever the candidates.
    pub(crate) fn choosing(&self, every: Every) -> (bool, bool) {
        let may = !self.warming_up() && self.begins();
        match (self.since_choice, every) {
            (None, _) => (may, may),
            (Some(since), Every::Updates(updates)) => (may && since >= updates, may && since >= updates),
            (Some(_), Every::Turnover(_)) => (may, false),
        }
    }

    /// Books that columns were chosen.
    pub(crate) fn chose(&mut self) {
        self.since_choice = Some(0);
    }

    /// Books the present update; whether it ends its window.
    pub(crate) fn advance(&mut self) -> bool {
        let length = self.length();
        self.position += 1;
        if self.warmup > 0 {
            self.warmup -= 1;
        } else {
            self.update += 1;
            self.since_choice = self.since_choice.map(|since| since + 1);
        }
        let ends = self.position >= length;
        if ends {
            self.cut();
        }
        ends
    }

    /// Ends the present window; its updates.
    pub(crate) fn cut(&mut self) -> u64 {
        self.window += 1;
        self.interval = self.next.take().unwrap_or(self.interval);
        std::mem::take(&mut self.position)
    }
}

impl OffloadPolicy {
    /// Checks what it and a selector, which chooses `every` so many updates, ask for together.
    ///
    /// # Errors
    /// [`Error::Config`]: lengths that do not fit, with the rule.
    pub fn check(&self, every: Option<Every>, exact: bool) -> Result<()> {
        let refuse = |message: String| Err(Error::Config(message));
        match &self.interval {
            Interval::Fixed(0) => return refuse("`offload.update_interval`: at least 1, found 0".into()),
            Interval::Auto { .. } if exact => {
                return refuse(
                    "`offload.update_interval = \"auto\"` decides by measured times, which exact mode cannot repeat; give a number, or \
                     { replay = \"FILE\" } of an earlier run"
                        .into(),
                );
            }
            Interval::Replay(decisions) => check_replay(decisions)?,
            _ => {}
        }
        match (every, &self.interval) {
            (Some(Every::Updates(every)), Interval::Fixed(interval)) if every == 0 || !every.is_multiple_of(*interval) => {
                refuse(format!(
                    "`select.every` = {every} is no multiple of `offload.update_interval` = {interval}: columns are chosen where a \
                     window begins"
                ))
            }
            (Some(Every::Turnover(_)), Interval::Fixed(_)) if exact => refuse(
                "`select.every = \"auto\"`: exact mode takes a number of updates, or the decisions of an earlier run with \
                 `offload.update_interval = { replay = \"FILE\" }`"
                    .into(),
            ),
            _ => Ok(()),
        }
    }
}

fn check_replay(decisions: &[Decision]) -> Result<()> {
    let sorted = decisions.windows(2).all(|pair| pair[0].update < pair[1].update);
    if decisions.first().is_none_or(|first| first.update != 0) || !sorted || decisions.iter().any(|d| d.interval == 0) {
        return Err(Error::Config(
            "`offload.update_interval`: the decisions to replay must begin with update 0, ascend, and have intervals of at \
             least 1"
                .into(),
        ));
    }
    for pair in decisions.windows(2) {
        if !(pair[1].update - pair[0].update).is_multiple_of(pair[0].interval) {
            return Err(Error::Config(format!(
                "`offload.update_interval`: the decision for update {} lies within a window of {} that began at {}",
                pair[1].update, pair[0].interval, pair[0].update
            )));
        }
    }
    Ok(())
}
