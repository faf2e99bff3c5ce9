//! Gradients of the host's elements: they leave or are added up over a window, and a window that is complete is submitted.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zf_sys::heap::{Category, tag};

use super::arrivals::Expected;
use super::columns;
use super::device_part::gradients;
use super::outbox::{Errand, Source};
use super::{Offloading, Part, Step};
use crate::Result;
use crate::engine::core::Core;
use crate::engine::flat::{FlatState, narrow};
use crate::engine::update::SlotHyper;
use crate::stage::{HostPart, HostUpdate, Hyper, Keeps, Promotion};
use crate::trace::Trace;

/// The numbers of an update that was submitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Submitted {
    /// By flat and slot: whether it is part of it.
    pub(super) touched: Vec<Vec<bool>>,
    /// By flat and slot.
    pub(super) hypers: Vec<Vec<SlotHyper>>,
    /// The schedule's factor.
    pub(super) lr: f64,
    /// The factor on the gradient.
    pub(super) scale: f32,
}

impl Submitted {
    /// The numbers for one column.
    pub(super) fn hyper(&self, flat: usize, slot: usize, count: u64) -> Hyper {
        let SlotHyper { lr, weight_decay } = self.hypers[flat][slot];
        Hyper { lr: lr * self.lr, weight_decay, count, grad_scale: self.scale }
    }
}

impl Offloading {
    /// Whether gradients leave as soon as they are summed, before the norm is known.
    pub(super) fn early(&self) -> bool {
        self.policy.keeps == Keeps::Nothing
    }

    /// The gradients of a flat buffer are about to be overwritten.
    pub(crate) fn release_gradients(&mut self, flat: usize, trace: &Trace) -> Result<()> {
        self.outbox.pack_all_of(Some(flat), &mut *self.pool, &self.link, trace)
    }

    /// No gradient is to wait any longer for a staging buffer.
    pub(crate) fn release_all_gradients(&mut self, trace: &Trace) -> Result<()> {
        self.outbox.pack_all_of(None, &mut *self.pool, &self.link, trace)
    }

    /// The gradient of a flat buffer is complete on this rank; whether it leaves.
    pub(crate) fn offer(&mut self, index: usize, flat: &FlatState, arrived: &[bool]) -> Result<bool> {
        if self.early() {
            self.send(index, flat, &|slot| arrived[slot], 1.0, true)?;
            self.pump()?;
        }
        Ok(self.early())
    }

    /// Puts the gradients of the host's elements of the wanted slots into the outbox.
    fn send(
        &mut self,
        index: usize,
        flat: &FlatState,
        wanted: &dyn Fn(usize) -> bool,
        scale: f32,
        replace: bool,
    ) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        let (split, left) = (&part.split, &mut part.left);
        let ranges = split.host_of(|slot| wanted(slot) && !left[slot]);
        if !ranges.is_empty() {
            let block = |block: &columns::Block| wanted(block.slot).then(|| flat.grad(&block.range)).transpose();
            let blocks = split.columns.blocks.iter().map(block).collect::<Result<Vec<_>>>()?;
            let source = Source::Rows { columns: Arc::clone(&split.columns), blocks };
            let errand = Errand { window: self.clock.window, buffer: index, wire: self.wire[index], scale, replace };
            self.outbox.put(errand, &ranges, &source);
        }
        left.iter_mut().enumerate().filter(|(slot, _)| wanted(*slot)).for_each(|(_, left)| *left = true);
        Ok(())
    }

    /// A step ends, skipped or not: what leaves next is of another one.
    pub(crate) fn end_step(&mut self) {
        self.parts.iter_mut().flatten().for_each(|part| part.left.fill(false));
    }

    /// Adds this step's gradients of the host's elements to the window.
    pub(super) fn collect(&mut self, index: usize, flat: &FlatState, step: &Step<'_>) -> Result<()> {
        let early = self.early();
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        let chosen = &step.chosen[index];
        if early {
            // What did not leave during backward: gradients that take further hops, and zeros for what nothing used.
            part.touched.clone_from(chosen);
            return self.send(index, flat, &|slot| chosen[slot], 1.0, true);
        }
        let first = part.touched.clone();
        part.touched.iter_mut().zip(chosen).for_each(|(touched, chosen)| *touched |= chosen);
        if self.on_device {
            return self.collect_here(index, flat, step, &first);
        }
        self.send(index, flat, &|slot| chosen[slot] && !first[slot], step.grad_scale, true)?;
        self.send(index, flat, &|slot| chosen[slot] && first[slot], step.grad_scale, false)
    }

    /// The same on the device: `sum = grad * scale`, then `sum + grad * scale`, each product rounded.
    fn collect_here(&mut self, index: usize, flat: &FlatState, step: &Step<'_>, first: &[bool]) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        let begins = !first.iter().any(|&touched| touched);
        let chosen = &step.chosen[index];
        let all = chosen.iter().all(|&chosen| chosen);
        let (split, scale) = (&part.split, f64::from(step.grad_scale));
        tch::no_grad(|| {
            let ranges = &split.host;
            let mut grads = {
                let _tag = tag(Category::Gradients);
                let grads = gradients(flat, split, ranges)?;
                zf_sys::heap::retag(&grads, Category::Gradients)?;
                grads
            };
            if !all {
                // A slot that nothing used adds nothing.
                let mut at = 0;
                for (block, range) in split.columns.by_block(ranges) {
                    if !chosen[split.columns.blocks[block].slot] {
                        let _ = narrow(&grads, at..at + range.len())?.f_zero_()?;
                    }
                    at += range.len();
                }
            }
            let _ = grads.f_mul_scalar_(scale)?;
            match part.sums.as_ref().filter(|_| !begins) {
                Some(sums) => drop(sums.shallow_clone().f_add_(&grads)?),
                None => part.sums = Some(grads),
            }
            Ok(())
        })
    }

    /// The window is complete: its update is submitted, and one becomes visible.
    pub(super) fn end_window(&mut self, core: &Core, step: &Step<'_>, length: u64, asynchronous: bool) -> Result<()> {
        let window = self.clock.window - 1;
        let scale = if self.early() { step.grad_scale } else { (1.0 / length as f64) as f32 };
        let touched =
            self.parts.iter().map(|part| part.as_ref().map_or_else(Vec::new, |part| part.touched.clone())).collect();
        let submitted = Submitted { touched, hypers: step.hypers.to_vec(), lr: self.lr(step, length), scale };
        for (index, part) in self.parts.iter_mut().enumerate() {
            let Some(Part { split, touched, sums, .. }) = part else { continue };
            if let Some(sums) = sums.take() {
                let errand = Errand { window, buffer: index, wire: self.wire[index], scale: 1.0, replace: true };
                self.outbox.put(errand, &split.host, &Source::Packed(sums));
            }
            split.count(false, |slot| touched[slot]);
            touched.fill(false);
        }
        let (parts, expected) = self.host_parts(window, &submitted);
        let hold = asynchronous && self.policy.promotion == Promotion::Late;
        let update = HostUpdate { window, parts, landings: self.outbox.end_window(), hold };
        if !asynchronous {
            // Everything has to be underway before anybody waits for it.
            self.outbox.pack_all_of(None, &mut *self.pool, &self.link, &core.trace)?;
        }
        self.pool.update(update)?;
        // Sums of the device begin to cross the link at once.
        self.pump()?;
        (self.held, self.submitted) = (hold, Some(submitted));
        let elements = expected.elements.iter().sum();
        self.pace.end_window(length, elements, self.on_device, self.pool.work(), self.link.traffic());
        let visible = if asynchronous { self.pending.replace(expected) } else { Some(expected) };
        self.oldest = length;
        visible.iter().for_each(|expected| self.arriving.add(expected));
        Ok(())
    }

    /// What the update of a window changes, and what will arrive of it.
    pub(super) fn host_parts(&self, window: u64, submitted: &Submitted) -> (Vec<HostPart>, Expected) {
        let (mut parts, mut expected) = (Vec::new(), Expected::nothing(self.parts.len()));
        expected.window = window;
        for (index, part) in self.parts.iter().enumerate() {
            let Some(part) = part else { continue };
            let wanted = |slot: usize| submitted.touched[index][slot];
            expected.anywhere[index] = part.split.any_with_host(wanted);
            for (range, hyper) in part.split.host_alike(wanted, |slot, count| submitted.hyper(index, slot, count)) {
                expected.elements[index] += range.len();
                parts.push(HostPart { buffer: index, range, hyper: Some(hyper) });
            }
        }
        (parts, expected)
    }

    /// The schedule's factor of a window that ends with `step`.
    fn lr(&mut self, step: &Step<'_>, length: u64) -> f64 {
        let sum = std::mem::take(&mut self.lr_sum);
        if self.policy.mean_lr { sum / length as f64 } else { step.lr }
    }
}
