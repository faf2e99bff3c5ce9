//! One update, in the order in which things happen.

use std::ops::Range;

use tch::Kind;

use super::device_part::gradients;
use super::{OffloadReport, Offloading, Step};
use crate::engine::core::Core;
use crate::engine::update::SlotHyper;
use crate::stage::{Hyper, Interval};
use crate::trace::Lane;
use crate::{Error, Result};

impl Offloading {
    /// One update: the device's part now, the host's part as the clock says.
    pub(crate) fn update(&mut self, core: &mut Core, step: &Step<'_>) -> Result<OffloadReport> {
        self.receive_all(core)?;
        let pending = if self.pending.is_some() { self.oldest } else { 0 };
        (self.turnover, self.decision) = (None, None);
        self.pace.step(core.trace.totals().seconds(Lane::Wait));
        let staleness = self.clock.position + pending;
        if self.selector.is_some() {
            self.choose(core, step)?;
        }
        for index in 0..self.parts.len() {
            self.collect(index, &core.flats[index], step)?;
        }
        self.lr_sum += step.lr;
        (self.last.hypers, self.last.lr) = (step.hypers.to_vec(), step.lr);
        self.pump()?;
        let (warming_up, length) = (self.clock.warming_up(), self.clock.length());
        let ends = self.clock.advance();
        if ends {
            self.end_window(core, step, length, !warming_up && self.policy.asynchronous)?;
        }
        for index in 0..self.parts.len() {
            self.update_device(index, core, step)?;
            if ends {
                self.apply_late(index, core)?;
            }
            if !self.arriving.anywhere[index] && self.parts[index].is_some() {
                core.publish(index)?;
            }
        }
        if let (sum, count @ 1..) = std::mem::take(&mut self.chosen_sum) {
            self.pace.chosen(sum / count as f64);
        }
        Ok(OffloadReport { staleness, turnover: self.turnover, interval: length, decision: self.decision })
    }

    /// Updates the columns on the device.
    fn update_device(&mut self, index: usize, core: &Core, step: &Step<'_>) -> Result<()> {
        let Some(part) = &mut self.parts[index] else { return Ok(()) };
        let (flat, chosen) = (&core.flats[index], &step.chosen[index]);
        let split = &mut part.split;
        if split.chosen.iter().flatten().any(|&chosen| chosen) {
            split.count(true, |slot| chosen[slot]);
        }
        if split.device.is_empty() {
            return Ok(());
        }
        let hyper = |slot: usize, count: u64| {
            let SlotHyper { lr, weight_decay } = step.hypers[index][slot];
            Hyper { lr: lr * step.lr, weight_decay, count, grad_scale: step.grad_scale }
        };
        let (measures, sum) = (matches!(self.policy.interval, Interval::Auto { .. }), &mut self.chosen_sum);
        let mut read = |ranges: &[Range<usize>]| {
            let grads = gradients(flat, split, ranges)?;
            if measures {
                let absolute = grads.f_abs()?.f_sum(Kind::Double)?.f_double_value(&[])?;
                *sum = (sum.0 + absolute * f64::from(step.grad_scale.abs()), sum.1 + grads.numel());
            }
            Ok::<_, Error>(grads)
        };
        let incoming = &mut part.incoming;
        if let Some(incoming) = incoming {
            let (ranges, alike) = split.device_alike(|slot| chosen[slot], |range| incoming.has(range), hyper);
            let grads = read(&ranges)?;
            incoming.put_off(ranges, alike, grads);
        }
        let here = |range: &Range<usize>| !incoming.as_ref().is_some_and(|incoming| incoming.has(range));
        let (ranges, alike) = split.device_alike(|slot| chosen[slot], here, hyper);
        let grads = read(&ranges)?;
        tch::no_grad(|| part.device.update(flat, split, &*self.optimizer, (&ranges, &alike), &grads))
    }
}
