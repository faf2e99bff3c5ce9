//! States off the device by logical element, and what a checkpoint keeps of an offload.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::slice;

use super::clock::Clock;
use super::columns::{Block, total};
use super::pack::{gather, scatter};
use super::{Offloading, Part, SlotHyper, Submitted};
use crate::engine::core::Core;
use crate::engine::flat::{FlatState, int, narrow};
use crate::stage::{Axis, HostPart, HostPool, HostUpdate, Keeps};
use crate::{Error, Result};

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
    last_lr: f64,
    /// Whether a window takes the mean of the schedule's factors.
    #[serde(default)]
    mean_lr: bool,
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
    lr_sum: f64,
    oldest: u64,
    selector: serde_json::Value,
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

/// Copies elements `range` (of the flat buffer, within one block) of a rule's state into a tensor of the host, float32.
pub(super) fn rows(
    pool: &mut dyn HostPool,
    part: &Part,
    index: usize,
    state: usize,
    range: &Range<usize>,
) -> Result<Tensor> {
    let (at, block) = block_of(part, range)?;
    let mut values = vec![0f32; block.range.len()];
    pool.read(index, 1 + state, block.first..block.first + block.range.len(), &mut values)?;
    read_rows(part, at, 1 + state, values, range)
}

/// The block that holds elements `range` of the flat buffer.
fn block_of<'a>(part: &'a Part, range: &Range<usize>) -> Result<(usize, &'a Block)> {
    let mut blocks = part.split.columns.blocks.iter().enumerate();
    blocks
        .find(|(_, block)| block.range.start <= range.start && range.end <= block.range.end)
        .ok_or_else(|| Error::Engine(format!("elements {range:?} are not owned here")))
}

/// Elements in the flat buffer's order from the host's values of a whole block in column order, with what is on the device in
/// its place.
fn read_rows(part: &Part, at: usize, array: usize, values: Vec<f32>, range: &Range<usize>) -> Result<Tensor> {
    let block = &part.split.columns.blocks[at];
    let whole = block.first..block.first + block.range.len();
    let mut values = Tensor::f_from_slice(&values)?;
    let here: Vec<Range<usize>> = within(&part.split.device, &whole);
    let device = part.device.array(&part.split, &here, array)?.f_to_device(tch::Device::Cpu)?;
    let mut from = 0;
    for range in &here {
        let place = range.start - whole.start..range.end - whole.start;
        narrow(&values, place)?.f_copy_(&narrow(&device, from..from + range.len())?)?;
        from += range.len();
    }
    if !block.in_order() {
        let rows = Tensor::f_empty([int(block.range.len())?], (Kind::Float, tch::Device::Cpu))?;
        scatter(&part.split.columns, &[whole], &values, &|_| Ok(rows.shallow_clone()))?;
        values = rows;
    }
    narrow(&values, range.start - block.range.start..range.end - block.range.start)
}

/// The parts of `ranges` within `whole`.
fn within(ranges: &[Range<usize>], whole: &Range<usize>) -> Vec<Range<usize>> {
    let first = ranges.partition_point(|range| range.end <= whole.start);
    let parts = ranges[first..].iter().take_while(|range| range.start < whole.end);
    parts.map(|range| range.start.max(whole.start)..range.end.min(whole.end)).collect()
}

impl Offloading {
    /// Whether the states of a flat buffer are here rather than with the flat buffer.
    pub(crate) fn holds(&self, flat: usize) -> bool {
        self.parts[flat].is_some()
    }

    /// The rule's states.
    pub(crate) fn states(&self) -> usize {
        self.optimizer.state().len()
    }

    /// Elements `range` of an array (0: masters, then the states) in the flat buffer's order, in host memory.
    pub(crate) fn read(&mut self, index: usize, array: usize, range: &Range<usize>) -> Result<Tensor> {
        let part = self.parts[index].as_ref().ok_or_else(|| Error::Engine("a frozen buffer has no states".into()))?;
        let (at, block) = block_of(part, range)?;
        let mut values = vec![0f32; block.range.len()];
        self.pool.read(index, array, block.first..block.first + block.range.len(), &mut values)?;
        read_rows(part, at, array, values, range)
    }

    /// Replaces elements `range`, which are all that this rank owns of a parameter in one piece.
    pub(crate) fn write(&mut self, index: usize, array: usize, range: &Range<usize>, values: &Tensor) -> Result<()> {
        let part = self.parts[index].as_ref().ok_or_else(|| Error::Engine("a frozen buffer has no states".into()))?;
        let (at, block) = block_of(part, range)?;
        if block.range != *range {
            return Err(Error::Engine(format!("elements {range:?} are not all of {:?}", block.range)));
        }
        let ordered = in_column_order(part, at, values)?;
        let whole = block.first..block.first + block.range.len();
        for here in within(&part.split.device, &whole) {
            let place = part.split.places(std::slice::from_ref(&here)).next().unwrap_or(0..0);
            let values = narrow(&ordered, here.start - whole.start..here.end - whole.start)?;
            narrow(&part.device.arrays[array], place)?.f_copy_(&values)?;
        }
        self.pool.write(index, array, whole, slice::<f32>(&ordered)?)
    }

    /// Waits until what was submitted is made, without making it visible.
    pub(crate) fn settle(&mut self, trace: &crate::trace::Trace) -> Result<()> {
        self.outbox.pack_all_of(None, &mut *self.pool, &self.link, trace)?;
        self.pool.settle()
    }

    /// By name, the updates of each column, where they differ; and of every parameter the most.
    pub(crate) fn counts(&self, flats: &[FlatState]) -> (BTreeMap<String, u64>, BTreeMap<String, Vec<u64>>) {
        let (mut most, mut each) = (BTreeMap::new(), BTreeMap::new());
        for (part, flat) in self.parts.iter().zip(flats) {
            let Some(part) = part else { continue };
            for (slot, counts) in flat.spec.slots.iter().zip(&part.split.counts) {
                most.insert(slot.name.clone(), counts.iter().copied().max().unwrap_or(0));
                if counts.windows(2).any(|pair| pair[0] != pair[1]) {
                    each.insert(slot.name.clone(), counts.clone());
                }
            }
        }
        (most, each)
    }

    /// Sets the updates of all columns of a parameter.
    pub(crate) fn set_count(&mut self, flat: usize, slot: usize, count: u64) {
        if let Some(part) = &mut self.parts[flat] {
            part.split.counts[slot].fill(count);
        }
    }

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

    /// Elements `range` of one of the tensors of [`Offloading::further`], in the flat buffer's order.
    pub(crate) fn read_further(
        &mut self,
        flat: &FlatState,
        index: usize,
        kind: &str,
        range: &Range<usize>,
    ) -> Result<Tensor> {
        if kind == VISIBLE {
            return Ok(flat.param(range)?.f_to_kind(Kind::Float)?);
        }
        let window = self.clock.window;
        let part = self.parts[index].as_ref().ok_or_else(|| Error::Engine("a frozen buffer has no window".into()))?;
        let (_, block) = block_of(part, range)?;
        let whole = block.first..block.first + block.range.len();
        let mut ordered = vec![0f32; whole.len()];
        let mut put = |range: &Range<usize>, values: &[f32]| {
            ordered[range.start - whole.start..range.end - whole.start].copy_from_slice(values);
        };
        if kind == PENDING && !self.held {
            for late in &part.late {
                let Some(grads) = &late.grads else { continue };
                let grads = grads.f_to_device(tch::Device::Cpu)?;
                copy_parts(&late.ranges, slice::<f32>(&grads)?, &whole, &mut put);
            }
        } else if let Some(sums) = part.sums.as_ref().filter(|_| kind == SUMS) {
            let sums = sums.f_to_device(tch::Device::Cpu)?;
            copy_parts(&part.split.host, slice::<f32>(&sums)?, &whole, &mut put);
        } else {
            let (window, landings) = if kind == SUMS { (window, self.outbox.pieces()) } else { (window - 1, 0) };
            let sums = self.pool.sums(window, landings, index)?;
            for range in within(&part.split.host, &whole) {
                put(&range, &sums[range.clone()]);
            }
        }
        let mut values = Tensor::f_from_slice(&ordered)?;
        if !block.in_order() {
            let rows = Tensor::f_empty([int(whole.len())?], (Kind::Float, tch::Device::Cpu))?;
            scatter(&part.split.columns, std::slice::from_ref(&whole), &values, &|_| Ok(rows.shallow_clone()))?;
            values = rows;
        }
        narrow(&values, range.start - block.range.start..range.end - block.range.start)
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

    /// Takes over what was saved, before states are written: which columns are here, and where the run stands. What it
    /// returns, a person should know.
    pub(crate) fn restore(&mut self, saved: &Saved, flats: &[FlatState]) -> Result<Vec<String>> {
        self.clock.resume(&saved.clock, &self.policy);
        (self.lr_sum, self.oldest) = (saved.lr_sum, saved.oldest);
        let hyper = |spec: &crate::layout::Slot| saved.hypers.get(&spec.name).copied();
        let none = SlotHyper { lr: 0.0, weight_decay: 0.0 };
        if !saved.hypers.is_empty() {
            let slots = flats.iter().map(|flat| &flat.spec.slots);
            let hypers = slots.map(|slots| slots.iter().map(|spec| hyper(spec).unwrap_or(none)).collect());
            let hypers = hypers.collect();
            self.last = Submitted { touched: Vec::new(), hypers, lr: saved.last_lr, scale: 1.0 };
        }
        let arrays = 1 + self.optimizer.state().len();
        let mut touched = Vec::new();
        for (part, flat) in self.parts.iter_mut().zip(flats) {
            let Some(part) = part else {
                touched.push(Vec::new());
                continue;
            };
            for (slot, spec) in flat.spec.slots.iter().enumerate() {
                if let Some(chosen) = saved.chosen.get(&spec.name).filter(|_| part.split.shapes[slot].has_columns()) {
                    let set = &mut part.split.chosen[slot];
                    set.fill(false);
                    for &column in chosen {
                        let place = set.get_mut(column as usize).ok_or_else(|| {
                            Error::Input(format!(
                                "the checkpoint has column {column} of `{}` on the device, which has {} columns along this \
                                 `select.axis`",
                                spec.name,
                                part.split.counts[slot].len()
                            ))
                        })?;
                        *place = true;
                    }
                }
                if let Some(counts) = saved.counts.get(&spec.name) {
                    if counts.len() == part.split.counts[slot].len() {
                        part.split.counts[slot].clone_from(counts);
                    } else {
                        part.split.counts[slot].fill(counts.iter().copied().max().unwrap_or(0));
                    }
                }
                part.touched[slot] = saved.touched.contains(&spec.name);
            }
            touched
                .push(flat.spec.slots.iter().map(|spec| saved.submitted.contains_key(&spec.name)).collect::<Vec<_>>());
            part.split.resolve();
            part.device = super::DevicePart::new(&part.split, arrays, flat.home.device())?;
        }
        if saved.pending {
            let hyper = |spec: &crate::layout::Slot| saved.submitted.get(&spec.name).copied();
            let hypers =
                flats.iter().map(|flat| flat.spec.slots.iter().map(|spec| hyper(spec).unwrap_or(none)).collect());
            self.submitted = Some(Submitted {
                touched,
                hypers: hypers.collect(),
                lr: saved.submitted_lr,
                scale: saved.submitted_scale,
            });
        }
        let mut notes = Vec::new();
        if let Some(selector) = &mut self.selector {
            let fresh = selector.clone_box();
            if let Err(error) = selector.restore(&saved.selector) {
                *selector = fresh;
                notes.push(format!("the selector begins anew: {error}"));
            }
        }
        Ok(notes)
    }

    /// Puts back what [`Offloading::further`] names, after the states: `read` gives elements of a flat buffer by kind.
    pub(crate) fn resume(
        &mut self,
        saved: &Saved,
        flats: &[FlatState],
        read: &dyn Fn(usize, &str, usize, &Range<usize>) -> Result<Tensor>,
    ) -> Result<()> {
        let late = !saved.late.is_empty();
        for (index, flat) in flats.iter().enumerate() {
            let Some(part) = &self.parts[index] else { continue };
            let ordered = |kind: &str| {
                let mut all = vec![0f32; part.split.columns.len];
                for (at, block) in part.split.columns.blocks.iter().enumerate() {
                    let values = in_column_order(part, at, &read(index, kind, block.slot, &block.range)?)?;
                    all[block.first..block.first + block.range.len()].copy_from_slice(slice::<f32>(&values)?);
                }
                Ok::<_, Error>(all)
            };
            let sums = (saved.clock.position > 0).then(|| ordered(SUMS)).transpose()?;
            let pending = (saved.held || late).then(|| ordered(PENDING)).transpose()?;
            if saved.pending {
                // Also where others own the masters.
                for segment in flat.segments(&flat.kept) {
                    flat.param(&segment.range)?.f_copy_(&read(index, VISIBLE, segment.slot, &segment.range)?)?;
                }
            }
            if let Some(sums) = sums {
                self.set_window(index, flat, sums)?;
            }
            if let Some(pending) = pending {
                self.set_pending(saved, index, flat, pending)?;
            }
        }
        if saved.pending {
            self.submit_again(saved.held)?;
        }
        Ok(())
    }

    /// Where updates are visible at once, one that a resumed run left pending becomes so before the first step.
    pub(crate) fn catch_up(&mut self, core: &mut Core) -> Result<()> {
        if self.policy.asynchronous {
            return Ok(());
        }
        if std::mem::take(&mut self.held) {
            self.pool.go()?;
        }
        self.show_pending(core)
    }

    fn set_window(&mut self, index: usize, flat: &FlatState, sums: Vec<f32>) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        if !self.on_device {
            return self.pool.set_sums(self.clock.window, index, sums);
        }
        let own: Vec<f32> = part.split.host.iter().flat_map(|range| sums[range.clone()].iter().copied()).collect();
        let _tag = tag(Category::Gradients);
        let sums = Tensor::f_empty([int(total(&part.split.host))?], (Kind::Float, flat.home.device()))?;
        sums.shallow_clone().f_copy_(&Tensor::f_from_slice(&own)?)?;
        part.sums = Some(sums);
        Ok(())
    }

    /// The gradients of an update that was not made: with the host where that was held, on the device for late columns.
    fn set_pending(&mut self, saved: &Saved, index: usize, flat: &FlatState, pending: Vec<f32>) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        if saved.held {
            return self.pool.set_sums(self.clock.window - 1, index, pending);
        }
        let slots = flat.spec.slots.iter().zip(&part.split.counts);
        let column = |name: &str, column: usize| {
            saved.late.get(name).is_some_and(|late| late.iter().any(|&late| late as usize == column))
        };
        let columns: Vec<Vec<bool>> =
            slots.map(|(spec, counts)| (0..counts.len()).map(|c| column(&spec.name, c)).collect()).collect();
        let ranges = part.split.columns.ranges(|slot, column| columns[slot][column]);
        let own: Vec<f32> = ranges.iter().flat_map(|range| pending[range.clone()].iter().copied()).collect();
        let grads = Tensor::f_from_slice(&own)?.f_to_device(flat.home.device())?;
        let Some(submitted) = &self.submitted else { return Ok(()) };
        let numbers = Submitted { touched: Vec::new(), hypers: vec![submitted.hypers[index].clone()], ..*submitted };
        let grads = (!own.is_empty()).then_some(grads);
        part.late.push(super::Late { columns, ranges, grads, numbers });
        Ok(())
    }

    /// Has the host send the parameters of the pending update once more; one that was held is yet to be made.
    fn submit_again(&mut self, held: bool) -> Result<()> {
        let Some(submitted) = self.submitted.clone() else { return Ok(()) };
        let (mut parts, expected) = self.host_parts(&submitted);
        if !held {
            parts.iter_mut().for_each(|part: &mut HostPart| part.hyper = None);
        }
        let window = self.clock.window.saturating_sub(1);
        self.pool.update(HostUpdate { window, parts, landings: 0, hold: held })?;
        self.held = held;
        self.pending = Some(expected);
        Ok(())
    }
}

/// Calls `put` with the parts of packed values that lie within `whole`.
fn copy_parts(
    ranges: &[Range<usize>],
    values: &[f32],
    whole: &Range<usize>,
    put: &mut dyn FnMut(&Range<usize>, &[f32]),
) {
    let mut at = 0;
    for range in ranges {
        let part = range.start.max(whole.start)..range.end.min(whole.end);
        if !part.is_empty() {
            let from = at + part.start - range.start;
            put(&part, &values[from..from + part.len()]);
        }
        at += range.len();
    }
}

/// Values of a whole block, from the flat buffer's order into column order, in host memory.
fn in_column_order(part: &Part, at: usize, values: &Tensor) -> Result<Tensor> {
    let block = &part.split.columns.blocks[at];
    let values = values.f_to_device(tch::Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
    let ordered = Tensor::f_empty([int(block.range.len())?], (Kind::Float, tch::Device::Cpu))?;
    let whole = block.first..block.first + block.range.len();
    gather(&part.split.columns, &[whole], &|_| Ok(values.shallow_clone()), &ordered)?;
    Ok(ordered)
}
