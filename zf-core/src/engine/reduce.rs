//! Sums gradients over ranks while backward goes on.

use std::time::Duration;

use tch::Tensor;
use zf_sys::heap::{Category, tag};

use super::buckets;
use super::core::{Core, piece, pieces};
use super::flat::{FlatState, int, narrow};
use super::grads::{GradPlan, store};
use super::reduction::Hop;
use crate::layout::Layout;
use crate::stage::{Collective, Reduce, Ticket};
use crate::{Error, Result};

/// Which gradients have come, and which sums are in flight.
pub(crate) struct Reducing {
    plan: GradPlan,
    /// Units in the order in which their gradients are reduced: backward order, root units last.
    order: Vec<usize>,
    /// Position in `order` of the next unit to reduce in this micro-batch.
    next: usize,
    /// Whether this micro-batch reduces.
    active: bool,
    /// Micro-batches begun in this step.
    begun: usize,
    /// Slots of each unit whose gradient has not arrived in this micro-batch.
    missing: Vec<usize>,
    /// By flat and slot: arrived in this micro-batch.
    arrived: Vec<Vec<bool>>,
    /// By flat and slot: arrived in this step.
    pub(crate) present: Vec<Vec<bool>>,
    /// By flat: gradients of one micro-batch in the model's type, where each is reduced at once.
    scratch: Vec<Option<Tensor>>,
    /// Reductions in flight, in the order of issue.
    in_flight: Vec<Flight>,
    /// Whether this micro-batch ends the step.
    is_last: bool,
    /// Scratch that no reduction reads any more.
    pool: Vec<Tensor>,
}

/// A reduction in flight.
struct Flight {
    ticket: Ticket,
    /// What it reads and nobody needs afterwards.
    scratch: Option<Tensor>,
    flat: usize,
    /// Whether it is the last of its flat buffer's hop.
    last: bool,
}

impl Reducing {
    pub(crate) fn new(layout: &Layout, plan: GradPlan) -> Self {
        let units = layout.units.len();
        let mut order: Vec<usize> = (0..units).rev().collect();
        order.sort_by_key(|&unit| layout.units[unit].root);
        let flags: Vec<_> = layout.flats.iter().map(|flat| vec![false; flat.slots.len()]).collect();
        Self {
            plan,
            order,
            next: 0,
            active: false,
            begun: 0,
            missing: vec![0; units],
            arrived: flags.clone(),
            present: flags,
            scratch: layout.flats.iter().map(|_| None).collect(),
            in_flight: Vec::new(),
            is_last: false,
            pool: Vec::new(),
        }
    }

    /// The next unit to reduce, while there is one.
    fn upcoming(&self) -> Option<usize> {
        self.order.get(self.next).copied().filter(|_| self.active)
    }
}

impl Core {
    /// A new step begins: forgets which gradients were seen.
    pub(crate) fn begin_step(&mut self) {
        self.reducing.begun = 0;
        self.reducing.present.iter_mut().flatten().for_each(|seen| *seen = false);
        self.flats.iter_mut().flat_map(|flat| &mut flat.grads).for_each(|grads| grads.clear());
    }

    /// The step is over: gives memory back that only gradients needed. Returns the seconds that its update waited.
    pub(crate) fn end_step(&mut self) -> f64 {
        self.flats.iter_mut().flat_map(|flat| &mut flat.grads).for_each(|grads| grads.clear());
        let Some(offload) = &mut self.offload else { return 0.0 };
        offload.end_step();
        offload.take_waited().as_secs_f64()
    }

    /// The backward pass of a micro-batch begins; `last` says whether it ends the step.
    pub(crate) fn begin_micro_batch(&mut self, last: bool) {
        let reducing = &mut self.reducing;
        reducing.next = 0;
        reducing.begun += 1;
        reducing.is_last = last;
        reducing.active = last || reducing.plan.is_each();
        reducing.arrived.iter_mut().flatten().for_each(|seen| *seen = false);
        reducing.missing.fill(0);
        for flat in self.flats.iter().filter(|flat| flat.spec.trainable) {
            reducing.missing[flat.spec.unit] += flat.spec.slots.len();
        }
    }

    /// The gradient of a parameter is complete for this micro-batch: books it and reduces what became complete.
    pub(crate) fn gradient_ready(&mut self, flat: usize, slot: usize) -> Result<()> {
        let state = &self.flats[flat];
        let (unit, name) = (state.spec.unit, &state.spec.slots[slot].name);
        if self.reducing.active && self.reducing.order[..self.reducing.next].contains(&unit) {
            return Err(Error::Engine(format!(
                "`{name}` received a gradient after unit `{}` was reduced; a unit that runs more than once in a forward \
                 pass must be a root unit",
                self.layout.units[unit].name
            )));
        }
        let leaf = &state.leaves[slot];
        let grad = zf_sys::autograd::grad(leaf)
            .ok_or_else(|| Error::Engine(format!("the hook of `{name}` ran without a gradient")))?;
        let _no_grad = tch::no_grad_guard();
        zf_sys::autograd::set_grad(leaf, None)?;
        self.release_gradients(flat)?;
        if self.reducing.plan.is_each() {
            let scratch = self.scratch(flat)?;
            store(&scratch, &self.flats[flat].spec, slot, &grad, self.reducing.arrived[flat][slot])?;
        } else {
            let (again, last) = (self.reducing.present[flat][slot], self.reducing.active);
            let FlatState { spec, grads, .. } = &mut self.flats[flat];
            let grads = grads.as_mut().ok_or_else(|| Error::Engine("a frozen parameter received a gradient".into()))?;
            grads.take(spec, slot, &grad, again, last)?;
        }
        self.reducing.present[flat][slot] = true;
        if !std::mem::replace(&mut self.reducing.arrived[flat][slot], true) {
            self.reducing.missing[unit] -= 1;
        }
        while self.reducing.upcoming().is_some_and(|unit| self.is_complete(unit)) {
            self.reduce_next()?;
        }
        self.pump()
    }

    /// Lets the offload use the time: complete gradients leave, and staging buffers that came back are filled again.
    pub(crate) fn pump(&mut self) -> Result<()> {
        if self.offload.is_none() {
            return Ok(());
        }
        self.offer_reduced()?;
        self.with_offload(|offload, _| offload.pump()).map(drop)
    }

    /// Gradients that are to leave have to be packed before they are overwritten.
    fn release_gradients(&mut self, flat: usize) -> Result<()> {
        if self.reducing.plan != GradPlan::Loose {
            let waited = self.with_offload(|offload, core| {
                offload.release_gradients(flat, &core.trace)?;
                Ok(offload.take_waited())
            })?;
            self.residency.add_waited(waited.unwrap_or_default());
        }
        Ok(())
    }

    /// Offers the offload the gradients whose sums are complete by now.
    fn offer_reduced(&mut self) -> Result<()> {
        while self.reducing.in_flight.first().is_some_and(|flight| flight.ticket.is_done()) {
            let flight = self.reducing.in_flight.remove(0);
            self.land(flight)?;
        }
        Ok(())
    }

    /// Takes in a reduction that is over; the last one of a flat buffer completes its gradient on this rank.
    fn land(&mut self, flight: Flight) -> Result<()> {
        let Flight { ticket, scratch, flat, last } = flight;
        self.wait(vec![ticket], || "gradients to be reduced".into())?;
        self.reducing.pool.extend(scratch);
        if last && self.reducing.is_last && self.flats[flat].reduction.then.is_empty() {
            self.offer(flat)?;
        }
        Ok(())
    }

    /// The gradient of a flat buffer is complete on this rank.
    fn offer(&mut self, index: usize) -> Result<()> {
        let waited = self.with_offload(|offload, core| {
            // Where others may have added to a slot, it is there although nothing arrived here.
            let alone = core.reducing.plan == GradPlan::Loose;
            if alone {
                // Their memory goes with them: however slow the link is, those of one unit wait at most.
                offload.release_all_gradients(&core.trace)?;
            }
            let arrived: Vec<bool> = core.reducing.present[index].iter().map(|&seen| seen || !alone).collect();
            if offload.offer(index, &core.flats[index], &arrived)? {
                core.flats[index].grads.iter_mut().for_each(super::grads::Grads::depart);
            }
            // Others are offered where the step measures the wait itself.
            Ok(if alone { offload.take_waited() } else { Duration::ZERO })
        })?;
        self.residency.add_waited(waited.unwrap_or_default());
        Ok(())
    }

    /// Backward is over: reduces the units that did not complete on their own (roots, unused parameters).
    pub(crate) fn end_micro_batch(&mut self) -> Result<()> {
        while self.reducing.upcoming().is_some() {
            self.reduce_next()?;
        }
        Ok(())
    }

    /// Waits for all reductions in flight.
    pub(crate) fn finish_reductions(&mut self) -> Result<()> {
        for flight in std::mem::take(&mut self.reducing.in_flight) {
            self.land(flight)?;
        }
        Ok(())
    }

    /// The last micro-batch is reduced: what remains until every owner of O has the sum over all ranks.
    pub(crate) fn settle_reductions(&mut self) -> Result<()> {
        let hops = self.flats.iter().map(|flat| flat.reduction.then.len()).max().unwrap_or(0);
        for hop in 0..hops {
            for index in 0..self.flats.len() {
                let flat = &self.flats[index];
                if let Some(next) = flat.reduction.then.get(hop).cloned().filter(|_| flat.spec.trainable) {
                    self.move_sums(index, &next)?;
                }
            }
            self.finish_reductions()?;
        }
        Ok(())
    }

    fn is_complete(&self, unit: usize) -> bool {
        self.reducing.missing[unit] == 0 && !self.layout.units[unit].root
    }

    /// The scratch of a flat for this micro-batch, from the pool where one fits. Padding is zero.
    fn scratch(&mut self, flat: usize) -> Result<Tensor> {
        if let Some(scratch) = &self.reducing.scratch[flat] {
            return Ok(scratch.shallow_clone());
        }
        let spec = &self.flats[flat].spec;
        let size = int(spec.numel)?;
        let pooled = self.reducing.pool.iter().position(|t| t.size() == [size] && t.kind() == spec.dtype.kind());
        let scratch = match pooled {
            Some(position) => {
                let scratch = self.reducing.pool.swap_remove(position);
                let _ = narrow(&scratch, spec.used()..spec.numel)?.f_zero_()?;
                scratch
            }
            None => {
                let _tag = tag(Category::Buffers);
                Tensor::f_zeros([size], (spec.dtype.kind(), self.flats[flat].device()))?
            }
        };
        self.reducing.scratch[flat] = Some(scratch.shallow_clone());
        Ok(scratch)
    }

    /// Starts the reduction of the next unit in order.
    fn reduce_next(&mut self) -> Result<()> {
        let Some(unit) = self.reducing.upcoming() else { return Ok(()) };
        self.reducing.next += 1;
        for index in self.layout.units[unit].flats.clone() {
            if self.flats[index].spec.trainable {
                self.release_gradients(index)?;
                match self.reducing.plan {
                    GradPlan::Loose => self.offer(index)?,
                    GradPlan::Boundary => self.reduce_at_boundary(index)?,
                    GradPlan::Each => self.reduce_micro_batch(index)?,
                }
            }
        }
        Ok(())
    }

    /// Sums the gradients that this rank accumulated over the step.
    fn reduce_at_boundary(&mut self, index: usize) -> Result<()> {
        let flat = &self.flats[index];
        zero_absent(flat, flat.grads()?.buffer()?, &self.reducing.present[index])?;
        match flat.reduction.first.clone() {
            Some(hop) => self.move_sums(index, &hop),
            None => self.offer(index),
        }
    }

    /// Adds this micro-batch's gradients into the accumulators of those who hold them, in the order of ranks. The first
    /// micro-batch of a step replaces what is there, which is the same sum without a pass that writes zeros.
    fn reduce_micro_batch(&mut self, index: usize) -> Result<()> {
        let scratch = self.scratch(index)?;
        self.reducing.scratch[index] = None;
        let flat = &self.flats[index];
        zero_absent(flat, &scratch, &self.reducing.arrived[index])?;
        let accumulate = self.reducing.begun > 1;
        let everything = Vec::from_iter(Some(0..flat.spec.numel));
        let Some(first) = flat.reduction.first.clone() else {
            for range in &flat.reduction.held {
                let (mut sum, addend) = (flat.grad(range)?, narrow(&scratch, range.clone())?);
                if accumulate {
                    let _ = sum.f_add_(&addend)?;
                } else {
                    sum.f_copy_(&addend)?;
                }
            }
            self.reducing.pool.push(scratch);
            return if self.reducing.is_last { self.offer(index) } else { Ok(()) };
        };
        let Hop::Scatter(party) = first else {
            return Err(Error::Engine("a micro-batch is reduced by a reduce-scatter".into()));
        };
        let member = self.member(&party.group)?;
        let buckets = self.buckets(&party, &scratch);
        let last = buckets.len().saturating_sub(1);
        for (k, bucket) in buckets.into_iter().enumerate() {
            let output = self.flats[index].grad(&bucket[member])?;
            let inputs = pieces(&scratch, &everything, &bucket)?;
            let collective = Collective::ReduceScatter { inputs, output, accumulate };
            let ticket = self.issue(&party.group, index, "gradients", collective)?;
            let scratch = (k == last).then(|| scratch.shallow_clone());
            self.reducing.in_flight.push(Flight { ticket, scratch, flat: index, last: k == last });
        }
        Ok(())
    }

    /// One hop of sums that lie in this rank's accumulators, in place.
    fn move_sums(&mut self, index: usize, hop: &Hop) -> Result<()> {
        let flat = &self.flats[index];
        let held = flat.reduction.held.clone();
        let sums = flat.grads()?.held()?.shallow_clone();
        match hop {
            Hop::Gather(party) => {
                let tickets = self.all_gather(party, index, "gradients", (&sums, &held), (&sums, &held))?;
                self.in_flight(index, tickets);
            }
            Hop::Scatter(party) => {
                let member = self.member(&party.group)?;
                let mut tickets = Vec::new();
                for bucket in self.buckets(party, &sums) {
                    let inputs = pieces(&sums, &held, &bucket)?;
                    let output = inputs[member].shallow_clone();
                    let collective = Collective::ReduceScatter { inputs, output, accumulate: false };
                    tickets.push(self.issue(&party.group, index, "gradients", collective)?);
                }
                self.in_flight(index, tickets);
            }
            Hop::Sum(party) => {
                let member = self.member(&party.group)?;
                let elements = self.transfers.bucket_bytes / sums.kind().elt_size_in_bytes().max(1);
                let mut tickets = Vec::new();
                for range in party.pieces[member].iter().flat_map(|own| buckets::split(own.clone(), elements)) {
                    let collective = Collective::AllReduce { tensor: piece(&sums, &held, &range)?, op: Reduce::Sum };
                    tickets.push(self.issue(&party.group, index, "gradients", collective)?);
                }
                self.in_flight(index, tickets);
            }
        }
        Ok(())
    }

    /// Books the tickets of one hop of a flat buffer.
    fn in_flight(&mut self, flat: usize, tickets: Vec<Ticket>) {
        let last = tickets.len().saturating_sub(1);
        let flights = tickets.into_iter().enumerate();
        self.reducing.in_flight.extend(flights.map(|(k, ticket)| Flight {
            ticket,
            scratch: None,
            flat,
            last: k == last,
        }));
    }
}

/// Zeroes the slots of `buffer` whose gradient did not arrive, so that other ranks may add theirs.
fn zero_absent(flat: &FlatState, buffer: &Tensor, seen: &[bool]) -> Result<()> {
    for (slot, _) in flat.spec.slots.iter().zip(seen).filter(|(_, seen)| !**seen) {
        let _ = narrow(buffer, slot.offset..slot.offset + slot.numel)?.f_zero_()?;
    }
    Ok(())
}
