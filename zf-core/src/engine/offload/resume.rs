//! An offload goes on where a checkpoint was made.

use std::ops::Range;

use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::slice;

use super::columns::total;
use super::device_part::DevicePart;
use super::late::Late;
use super::saved::{PENDING, SUMS, Saved, VISIBLE};
use super::states::in_column_order;
use super::window::Submitted;
use super::{Offloading, SlotHyper};
use crate::engine::core::Core;
use crate::engine::flat::{FlatState, int};
use crate::stage::{HostPart, HostUpdate};
use crate::{Error, Result};

impl Offloading {
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
            part.device = DevicePart::new(&part.split, arrays, flat.device())?;
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
        let sums = Tensor::f_empty([int(total(&part.split.host))?], (Kind::Float, flat.device()))?;
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
        let grads = Tensor::f_from_slice(&own)?.f_to_device(flat.device())?;
        let Some(submitted) = &self.submitted else { return Ok(()) };
        let numbers = Submitted { touched: Vec::new(), hypers: vec![submitted.hypers[index].clone()], ..*submitted };
        let grads = (!own.is_empty()).then_some(grads);
        part.late.push(Late { columns, ranges, grads, numbers });
        Ok(())
    }

    /// Has the host send the parameters of the pending update once more; one that was held is yet to be made.
    fn submit_again(&mut self, held: bool) -> Result<()> {
        let Some(submitted) = self.submitted.clone() else { return Ok(()) };
        let window = self.clock.window.saturating_sub(1);
        let (mut parts, expected) = self.host_parts(window, &submitted);
        if !held {
            parts.iter_mut().for_each(|part: &mut HostPart| part.hyper = None);
        }
        self.pool.update(HostUpdate { window, parts, landings: 0, hold: held })?;
        self.held = held;
        self.pending = Some(expected);
        Ok(())
    }
}
