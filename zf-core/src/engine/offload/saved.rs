//! What a checkpoint keeps of an offload beside masters and states.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::{Offloading, SlotHyper};
use crate::engine::flat::FlatState;
use crate::stage::{Axis, Keeps};

/// What of an offload is no tensor: saved with a checkpoint, by names, so that it serves other layouts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    pub(crate) clock: Clock,
    /// Columns on the device, by parameter, where a parameter has columns.
    pub(super) chosen: BTreeMap<String, Vec<u32>>,
    /// Along which dimension they were counted; none where nothing was chosen from.
    #[serde(default)]
    pub(super) axis: Option<Axis>,
    /// Whether weights of three and more dimensions had columns too.
    #[serde(default)]
    pub(super) fold: bool,
    /// Updates of each column, by parameter, where they differ.
    pub(crate) counts: BTreeMap<String, Vec<u64>>,
    /// Parameters of which the present window has gradients.
    pub(super) touched: BTreeSet<String>,
    /// The present window's numbers, by parameter.
    #[serde(default)]
    pub(super) hypers: BTreeMap<String, SlotHyper>,
    /// The schedule's factor of the last step.
    #[serde(default)]
    pub(super) last_lr: f64,
    /// Whether a window takes the mean of the schedule's factors.
    #[serde(default)]
    pub(super) mean_lr: bool,
    /// Whether an update was made that is not visible.
    pub(super) pending: bool,
    /// That update's numbers by parameter, where it was not made yet; and of columns whose part of it is on the device.
    pub(super) submitted: BTreeMap<String, SlotHyper>,
    pub(super) submitted_lr: f64,
    pub(super) submitted_scale: f32,
    /// Whether it was not made yet.
    pub(super) held: bool,
    /// Columns on the device that are yet to see it, by parameter.
    pub(super) late: BTreeMap<String, Vec<u32>>,
    pub(super) lr_sum: f64,
    pub(super) oldest: u64,
    pub(super) selector: serde_json::Value,
}

impl Saved {
    /// What is open, in words; none where a window has just ended and nothing is on its way.
    pub fn open_window(&self) -> Option<String> {
        let steps = self.clock.position;
        match (steps, self.pending) {
            (0, false) => None,
            (0, true) if self.held => Some("an update of the host's columns is not made yet".into()),
            // It is in the masters.
            (0, true) => Some("an update of the host's columns was made and is not visible yet".into()),
            _ => Some(format!("gradients of {steps} steps are not applied to the host's columns yet")),
        }
    }

    /// The schedule's factor of the open window, if it ended now.
    pub(super) fn window_lr(&self) -> f64 {
        if self.mean_lr { self.lr_sum / self.clock.position.max(1) as f64 } else { self.last_lr }
    }
}

/// Kind of the gradients of a window that were added up so far.
pub(crate) const SUMS: &str = "aux.window";

/// Kind of parameters as forward sees them while an update of them is pending.
pub(crate) const VISIBLE: &str = "aux.visible";

/// Kind of the gradients of an update that was not made yet.
pub(crate) const PENDING: &str = "aux.pending";

impl Offloading {
    /// What a checkpoint keeps beside tensors.
    pub(crate) fn save(&self, flats: &[FlatState]) -> Saved {
        let (mut chosen, mut touched, mut submitted) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        let (mut late, mut hypers) = (BTreeMap::new(), BTreeMap::new());
        for (index, (part, flat)) in self.parts.iter().zip(flats).enumerate() {
            let Some(part) = part else { continue };
            for (slot, spec) in flat.spec.slots.iter().enumerate() {
                if part.split.shapes[slot].has_columns() {
                    chosen.insert(spec.name.clone(), part.split.chosen_columns(slot));
                }
                if part.touched[slot] {
                    touched.insert(spec.name.clone());
                }
                if let Some(&hyper) = self.last.hypers.get(index).and_then(|hypers| hypers.get(slot)) {
                    hypers.insert(spec.name.clone(), hyper);
                }
                let numbers = self.submitted.as_ref().filter(|numbers| numbers.touched[index][slot]);
                if let Some(numbers) = numbers {
                    submitted.insert(spec.name.clone(), numbers.hypers[index][slot]);
                }
                let columns = part.late.iter().flat_map(|late| late.columns[slot].iter().enumerate());
                let columns: Vec<u32> =
                    columns.filter(|(_, late)| **late).filter_map(|(column, _)| u32::try_from(column).ok()).collect();
                if !columns.is_empty() {
                    late.insert(spec.name.clone(), columns);
                }
            }
        }
        let numbers = self.submitted.as_ref();
        Saved {
            clock: self.clock.clone(),
            chosen,
            axis: self.axis(),
            fold: self.policy.fold,
            counts: self.counts(flats).1,
            touched,
            hypers,
            last_lr: self.last.lr,
            mean_lr: self.policy.mean_lr,
            pending: self.pending.is_some(),
            submitted,
            submitted_lr: numbers.map_or(0.0, |numbers| numbers.lr),
            submitted_scale: numbers.map_or(0.0, |numbers| numbers.scale),
            held: self.held,
            late,
            lr_sum: self.lr_sum,
            oldest: self.oldest,
            selector: self.selector.as_ref().map_or(serde_json::Value::Null, |selector| selector.state()),
        }
    }

    /// Whether there is anything that only a checkpoint's further tensors hold, by kind.
    pub(crate) fn further(&self) -> Vec<&'static str> {
        let late = self.parts.iter().flatten().any(|part| !part.late.is_empty());
        let mut kinds = Vec::new();
        kinds.extend((self.clock.position > 0).then_some(SUMS));
        kinds.extend(self.pending.is_some().then_some(VISIBLE));
        kinds.extend((self.held || late).then_some(PENDING));
        kinds
    }

    /// Along which dimension columns are counted; none where nothing is chosen from.
    fn axis(&self) -> Option<Axis> {
        self.selector.as_ref().map(|selector| selector.axis())
    }

    /// Whether this can go on with the window that `saved` left open, and with its columns.
    pub(crate) fn continues(&self, saved: &Saved) -> bool {
        match self.policy.keeps {
            Keeps::Nothing => saved.axis.is_none(),
            Keeps::Chosen => saved.axis == self.axis() && saved.fold == self.policy.fold,
        }
    }

    /// Begins after `updates` updates of the run that were made otherwise.
    pub(crate) fn begin_after(&mut self, updates: u64) {
        self.clock.begin_after(updates);
    }
}
