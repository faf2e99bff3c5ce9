//! A checkpoint of an open update window, read by a run that cannot go on with that window.
//!
//! Another kind of offload, or columns along another axis, has no place for gradients that were added up so far or for an
//! update that was not made. Here they are applied on reading, as draining would have done before the checkpoint: the pending
//! update, then the partial window with the mean over its own steps. Every rule that may be offloaded works element by
//! element, so that any part of a parameter can be read by itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::columns::Shape;
use super::saved::{PENDING, SUMS, Saved};
use crate::checkpoint::MASTER;
use crate::engine::flat::FlatState;
use crate::engine::state::StateSource;
use crate::engine::update::SlotHyper;
use crate::stage::{HostSlice, Hyper, Optimizer, Out};
use crate::{Error, Result};

/// The state as it is once everything that was open is applied.
pub(crate) struct Absorbed<'a> {
    source: &'a dyn StateSource,
    optimizer: Arc<dyn Optimizer>,
    open: BTreeMap<String, Open>,
    /// The most updates of a column, by parameter.
    counts: BTreeMap<String, u64>,
    /// Steps of the open window.
    steps: u64,
    /// Whether an update was not made.
    pending: bool,
    /// Parameters whose columns were updated differently often.
    uneven: usize,
}

/// What is open of one parameter: by column, the updates to make.
struct Open {
    shape: Shape,
    pending: Vec<Option<Hyper>>,
    window: Vec<Option<Hyper>>,
}

impl<'a> Absorbed<'a> {
    /// Reads `source`, of which `saved` says what is open.
    ///
    /// # Errors
    /// Columns that no parameter has; an open window whose learning rates were not saved.
    pub(crate) fn new(
        saved: &Saved,
        source: &'a dyn StateSource,
        optimizer: Arc<dyn Optimizer>,
        flats: &[FlatState],
    ) -> Result<Self> {
        let steps = saved.clock.position;
        let (mut open, mut counts, mut uneven) = (BTreeMap::new(), BTreeMap::new(), 0);
        let slots = flats.iter().flat_map(|flat| &flat.spec.slots);
        for spec in slots {
            let name = &spec.name;
            let Some(columns) = saved.chosen.get(name) else { continue };
            let shape = Shape::of(spec, saved.axis.unwrap_or_default(), saved.fold);
            let len = shape.count(spec.numel);
            let set = set(columns, len, name)?;
            let late = set_of(saved.late.get(name), len, name)?;
            let mut updates = match saved.counts.get(name) {
                Some(counts) if counts.len() == len => counts.clone(),
                Some(counts) => return Err(wrong(name, counts.len(), len)),
                None => vec![source.count(name); len],
            };
            let (mut pending, mut window) = (vec![None; len], vec![None; len]);
            for column in 0..len {
                let count = &mut updates[column];
                if let Some(hyper) = saved.submitted.get(name) {
                    // What is late is counted when it is made, what is held was counted when it was submitted.
                    *count += u64::from(late[column]);
                    if late[column] || saved.held && !set[column] {
                        pending[column] = Some(numbers(*hyper, saved.submitted_lr, saved.submitted_scale, *count));
                    }
                }
                if steps > 0 && !set[column] && saved.touched.contains(name) {
                    *count += 1;
                    let hyper = saved.hypers.get(name).ok_or_else(|| no_rates(name))?;
                    window[column] = Some(numbers(*hyper, saved.window_lr(), (1.0 / steps as f64) as f32, *count));
                }
            }
            uneven += usize::from(updates.windows(2).any(|pair| pair[0] != pair[1]));
            counts.insert(name.clone(), updates.iter().copied().max().unwrap_or(0));
            if pending.iter().chain(&window).any(Option::is_some) {
                open.insert(name.clone(), Open { shape, pending, window });
            }
        }
        Ok(Self { source, optimizer, open, counts, steps, pending: saved.pending, uneven })
    }

    /// What a person should know.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.open.is_empty() || self.pending {
            notes.push(format!(
                "the checkpoint has an open update window ({} of its steps are done{}), which this `offload` cannot go on \
                 with; what it holds was applied at once",
                self.steps,
                if self.pending { ", and the update before it is on its way" } else { "" }
            ));
        }
        if self.uneven > 0 {
            notes.push(format!(
                "columns of {} parameters were updated differently often; this `offload` keeps one count a parameter, and \
                 takes the largest",
                self.uneven
            ));
        }
        notes
    }

    /// Applies the updates of the elements `range` of a parameter to all its arrays, masters first.
    fn values(&self, name: &str, open: &Open, range: &Range<usize>) -> Result<Vec<Vec<f32>>> {
        let read = |kind: &str| {
            let mut values = vec![0f32; range.len()];
            if kind == MASTER || self.source.has(name, kind) {
                self.source.read(name, kind, range.clone(), &mut values)?;
            }
            Ok::<_, Error>(values)
        };
        let mut arrays = vec![read(MASTER)?];
        for kind in self.optimizer.state() {
            arrays.push(read(kind)?);
        }
        for (kind, hypers) in [(PENDING, &open.pending), (SUMS, &open.window)] {
            if hypers.iter().any(Option::is_some) {
                self.apply(&mut arrays, &read(kind)?, open.shape, hypers, range.start)?;
            }
        }
        Ok(arrays)
    }

    /// Applies the rule to runs of elements that are updated alike. The first of them is element `first` of the parameter.
    fn apply(
        &self,
        arrays: &mut [Vec<f32>],
        grads: &[f32],
        shape: Shape,
        hypers: &[Option<Hyper>],
        first: usize,
    ) -> Result<()> {
        let of = |at: usize| hypers.get(shape.column_of(first + at)).and_then(Option::as_ref);
        let mut start = 0;
        while start < grads.len() {
            let hyper = of(start);
            let end = (start + 1..grads.len()).find(|&at| of(at) != hyper).unwrap_or(grads.len());
            if let Some(hyper) = hyper {
                let mut parts = arrays.iter_mut().map(|array| &mut array[start..end]);
                let master = parts.next().ok_or_else(|| Error::Engine("there is no master".into()))?;
                let (grad, state) = (&grads[start..end], parts.collect());
                let mut slice = HostSlice { master, grad, state, out: Out::None, sums: &[], shape: &[] };
                self.optimizer.apply(&mut slice, hyper)?;
            }
            start = end;
        }
        Ok(())
    }
}

impl StateSource for Absorbed<'_> {
    fn read(&self, name: &str, kind: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let state = self.optimizer.state().iter().position(|state| *state == kind);
        let array = if kind == MASTER { Some(0) } else { state.map(|state| 1 + state) };
        match (self.open.get(name), array) {
            (Some(open), Some(array)) => {
                out.copy_from_slice(&self.values(name, open, &range)?[array]);
                Ok(())
            }
            _ => self.source.read(name, kind, range, out),
        }
    }

    fn has(&self, name: &str, kind: &str) -> bool {
        self.source.has(name, kind)
    }

    fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or_else(|| self.source.count(name))
    }
}

fn numbers(hyper: SlotHyper, lr: f64, grad_scale: f32, count: u64) -> Hyper {
    Hyper { lr: hyper.lr * lr, weight_decay: hyper.weight_decay, count, grad_scale }
}

/// By column: whether it is one of `columns`.
fn set(columns: &[u32], len: usize, name: &str) -> Result<Vec<bool>> {
    let mut set = vec![false; len];
    for &column in columns {
        *set.get_mut(column as usize).ok_or_else(|| wrong(name, column as usize + 1, len))? = true;
    }
    Ok(set)
}

fn set_of(columns: Option<&Vec<u32>>, len: usize, name: &str) -> Result<Vec<bool>> {
    columns.map_or_else(|| Ok(vec![false; len]), |columns| set(columns, len, name))
}

fn wrong(name: &str, found: usize, len: usize) -> Error {
    Error::Input(format!("the checkpoint names {found} columns of `{name}`, which has {len}"))
}

fn no_rates(name: &str) -> Error {
    Error::Input(format!(
        "the checkpoint has gradients of an open update window of `{name}`, and not its learning rate: an earlier version \
         wrote it; resume with the `offload` and `select` that it was written with"
    ))
}
