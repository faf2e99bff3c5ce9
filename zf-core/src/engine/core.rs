//! What the hooks of a rank reach: its buffers, its transport, and the reduction in flight.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;
use zf_sys::heap::{Category, tag};

use super::buckets::{self, Bucket};
use super::flat::{FlatState, int, narrow};
use super::grads::{GradPlan, store};
use crate::layout::Layout;
use crate::stage::{Collective, Group, Reduce, Request, Ticket, Transport};
use crate::trace::Trace;
use crate::{Error, Result};

/// The per-rank lock. Hooks take it during backward, when the rank's thread does not hold it.
pub(crate) type Shared = Arc<Mutex<Core>>;

/// Takes the lock; a panic of an earlier holder has already ended the step with an error.
pub(crate) fn lock(shared: &Shared) -> MutexGuard<'_, Core> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State of one rank that hooks, forward and update share.
pub(crate) struct Core {
    pub(crate) layout: Layout,
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) flats: Vec<FlatState>,
    pub(crate) trace: Trace,
    /// All-gathers of parameters in flight, by unit.
    pub(crate) publishing: Vec<Vec<Ticket>>,
    plan: GradPlan,
    bucket_bytes: usize,
    group: Group,
    /// Units in the order in which their gradients are reduced: backward order, root units last.
    order: Vec<usize>,
    /// Position in `order` of the next unit to reduce in this micro-batch.
    next: usize,
    /// Whether this micro-batch reduces.
    reducing: bool,
    /// Slots of each unit whose gradient has not arrived in this micro-batch.
    missing: Vec<usize>,
    /// By flat and slot: arrived in this micro-batch.
    arrived: Vec<Vec<bool>>,
    /// By flat and slot: arrived in this step.
    pub(crate) present: Vec<Vec<bool>>,
    /// By flat: gradients of one micro-batch in the model's type, where each is reduced at once.
    scratch: Vec<Option<Tensor>>,
    /// Reductions in flight with the scratch they read.
    in_flight: Vec<(Ticket, Option<Tensor>)>,
    /// Scratch that no reduction reads any more.
    pool: Vec<Tensor>,
}

impl Core {
    pub(crate) fn new(
        layout: Layout,
        transport: Box<dyn Transport>,
        flats: Vec<FlatState>,
        plan: GradPlan,
        bucket_bytes: usize,
        trace: Trace,
    ) -> Self {
        let units = layout.units.len();
        let mut order: Vec<usize> = (0..units).rev().collect();
        order.sort_by_key(|&unit| layout.units[unit].root);
        let flags = || flats.iter().map(|flat| vec![false; flat.spec.slots.len()]).collect::<Vec<_>>();
        Self {
            group: Group::world(transport.world()),
            publishing: (0..units).map(|_| Vec::new()).collect(),
            plan,
            bucket_bytes,
            order,
            next: 0,
            reducing: false,
            missing: vec![0; units],
            arrived: flags(),
            present: flags(),
            scratch: flats.iter().map(|_| None).collect(),
            in_flight: Vec::new(),
            pool: Vec::new(),
            layout,
            transport,
            flats,
            trace,
        }
    }

    /// A new step begins: forgets which gradients were seen and empties the accumulators that micro-batches add into.
    pub(crate) fn begin_step(&mut self) -> Result<()> {
        self.present.iter_mut().flatten().for_each(|seen| *seen = false);
        let each = self.plan.is_each();
        self.flats.iter_mut().flat_map(|flat| &mut flat.grads).try_for_each(|grads| grads.begin_step(each))
    }

    /// The step is over: gives memory back that only gradients needed.
    pub(crate) fn end_step(&mut self) {
        self.flats.iter_mut().flat_map(|flat| &mut flat.grads).for_each(|grads| grads.end_step());
    }

    /// A new micro-batch begins; `last` says whether it ends the step.
    pub(crate) fn begin_micro_batch(&mut self, last: bool) {
        self.next = 0;
        self.reducing = last || self.plan.is_each();
        self.arrived.iter_mut().flatten().for_each(|seen| *seen = false);
        self.missing.fill(0);
        for flat in self.flats.iter().filter(|flat| flat.spec.trainable) {
            self.missing[flat.spec.unit] += flat.spec.slots.len();
        }
    }

    /// The gradient of a parameter is complete for this micro-batch: books it and reduces what became complete.
    pub(crate) fn gradient_ready(&mut self, flat: usize, slot: usize) -> Result<()> {
        let state = &self.flats[flat];
        let (unit, name) = (state.spec.unit, &state.spec.slots[slot].name);
        if self.reducing && self.order[..self.next].contains(&unit) {
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
        if self.plan.is_each() {
            let scratch = self.scratch(flat)?;
            store(&scratch, &self.flats[flat].spec, slot, &grad, self.arrived[flat][slot])?;
        } else {
            let FlatState { spec, grads, .. } = &mut self.flats[flat];
            let grads = grads.as_mut().ok_or_else(|| Error::Engine("a frozen parameter received a gradient".into()))?;
            grads.take(spec, slot, &grad, self.present[flat][slot], self.reducing)?;
        }
        self.present[flat][slot] = true;
        if !std::mem::replace(&mut self.arrived[flat][slot], true) {
            self.missing[unit] -= 1;
        }
        while self.reducing && self.next < self.order.len() && self.is_complete(self.order[self.next]) {
            self.reduce_next()?;
        }
        Ok(())
    }

    /// Backward is over: reduces the units that did not complete on their own (roots, unused parameters).
    pub(crate) fn end_micro_batch(&mut self) -> Result<()> {
        while self.reducing && self.next < self.order.len() {
            self.reduce_next()?;
        }
        Ok(())
    }

    /// Waits for all reductions in flight.
    pub(crate) fn finish_reductions(&mut self) -> Result<()> {
        for (ticket, scratch) in std::mem::take(&mut self.in_flight) {
            let _wait = (!ticket.is_done()).then(|| self.trace.wait("wait", "gradients to be reduced"));
            ticket.wait()?;
            self.pool.extend(scratch);
        }
        Ok(())
    }

    /// Gives every rank the whole sum where its optimizer needs more than the part it summed itself.
    pub(crate) fn gather_gradients(&mut self) -> Result<()> {
        if self.plan != (GradPlan::MicroBatch { full: true }) || self.group.size() == 1 {
            return Ok(());
        }
        let mut tickets = Vec::new();
        for index in 0..self.flats.len() {
            if !self.flats[index].spec.trainable {
                continue;
            }
            let buffer = self.flats[index].grads()?.buffer()?.shallow_clone();
            let placement = self.flats[index].reduction.clone();
            tickets.extend(self.all_gather(&buffer, &placement, index, "gradients")?);
        }
        let _wait = self.trace.wait("wait", "gradients to be gathered");
        tickets.into_iter().try_for_each(Ticket::wait)
    }

    /// Starts to send the parameters of a flat from the owners of their states to all ranks.
    pub(crate) fn publish(&mut self, index: usize) -> Result<()> {
        let spec = &self.flats[index].spec;
        if spec.optim.group() == 1 || !spec.trainable {
            return Ok(());
        }
        let (unit, placement) = (spec.unit, spec.optim.clone());
        let params = self.flats[index].params.shallow_clone();
        let tickets = self.all_gather(&params, &placement, index, "parameters")?;
        self.publishing[unit].extend(tickets);
        Ok(())
    }

    /// Waits until the parameters of `unit` are those of the last update. The time spent is the caller's stall.
    pub(crate) fn wait_published(&mut self, unit: usize) -> Result<()> {
        for ticket in std::mem::take(&mut self.publishing[unit]) {
            let _wait = (!ticket.is_done()).then(|| {
                let reason = format!("parameters of {} to be published", self.layout.units[unit].name);
                self.trace.wait("wait", reason)
            });
            ticket.wait()?;
        }
        Ok(())
    }

    /// Waits until all parameters are those of the last update.
    pub(crate) fn wait_all_published(&mut self) -> Result<()> {
        (0..self.publishing.len()).try_for_each(|unit| self.wait_published(unit))
    }

    fn is_complete(&self, unit: usize) -> bool {
        self.missing[unit] == 0 && !self.layout.units[unit].root
    }

    /// The scratch of a flat for this micro-batch, from the pool where one fits. Padding is zero.
    fn scratch(&mut self, flat: usize) -> Result<Tensor> {
        if let Some(scratch) = &self.scratch[flat] {
            return Ok(scratch.shallow_clone());
        }
        let spec = &self.flats[flat].spec;
        let size = int(spec.numel)?;
        let pooled = self.pool.iter().position(|t| t.size() == [size] && t.kind() == spec.dtype.kind());
        let scratch = match pooled {
            Some(position) => {
                let scratch = self.pool.swap_remove(position);
                let _ = narrow(&scratch, spec.used()..spec.numel)?.f_zero_()?;
                scratch
            }
            None => {
                let _tag = tag(Category::Buffers);
                Tensor::f_zeros([size], (spec.dtype.kind(), self.flats[flat].params.device()))?
            }
        };
        self.scratch[flat] = Some(scratch.shallow_clone());
        Ok(scratch)
    }

    /// Issues the reduction of the next unit in order.
    fn reduce_next(&mut self) -> Result<()> {
        let unit = self.order[self.next];
        self.next += 1;
        for index in self.layout.units[unit].flats.clone() {
            if self.flats[index].spec.trainable {
                match self.plan {
                    GradPlan::Loose(_) => {}
                    GradPlan::Boundary(_) => self.reduce_at_boundary(index)?,
                    GradPlan::MicroBatch { .. } => self.reduce_into_owner(index)?,
                }
            }
        }
        Ok(())
    }

    /// Sums the accumulated gradients over ranks: to all where all need them, else to the owner.
    fn reduce_at_boundary(&mut self, index: usize) -> Result<()> {
        let flat = &self.flats[index];
        let grads = flat.grads()?.buffer()?.shallow_clone();
        zero_absent(flat, &grads, &self.present[index])?;
        let elements = self.bucket_bytes / grads.kind().elt_size_in_bytes().max(1);
        if flat.spec.optim.group() == 1 {
            for range in buckets::split(0..flat.spec.numel, elements) {
                let collective = Collective::AllReduce { tensor: narrow(&grads, range)?, op: Reduce::Sum };
                self.issue_reduction(index, collective, None)?;
            }
        } else {
            for bucket in buckets::sharded(&flat.reduction.clone(), elements) {
                let inputs = pieces(&grads, &bucket)?;
                let output = inputs[self.group_index()?].shallow_clone();
                self.issue_reduction(index, Collective::ReduceScatter { inputs, output, accumulate: false }, None)?;
            }
        }
        Ok(())
    }

    /// Adds this micro-batch's gradients into the accumulators of their owners, in the order of ranks.
    fn reduce_into_owner(&mut self, index: usize) -> Result<()> {
        let scratch = self.scratch(index)?;
        self.scratch[index] = None;
        zero_absent(&self.flats[index], &scratch, &self.arrived[index])?;
        let elements = self.bucket_bytes / scratch.kind().elt_size_in_bytes().max(1);
        let member = self.group_index()?;
        let buckets = buckets::sharded(&self.flats[index].reduction, elements);
        let last = buckets.len().saturating_sub(1);
        for (k, bucket) in buckets.into_iter().enumerate() {
            let output = self.flats[index].grad(&bucket[member])?;
            let inputs = pieces(&scratch, &bucket)?;
            let keep = (k == last).then(|| scratch.shallow_clone());
            self.issue_reduction(index, Collective::ReduceScatter { inputs, output, accumulate: true }, keep)?;
        }
        Ok(())
    }

    fn issue_reduction(&mut self, index: usize, collective: Collective, scratch: Option<Tensor>) -> Result<()> {
        let ticket = self.issue(index, "gradients", collective)?;
        self.in_flight.push((ticket, scratch));
        Ok(())
    }

    /// Sends each owner's part of `buffer` to all ranks, in buckets.
    fn all_gather(
        &mut self,
        buffer: &Tensor,
        placement: &crate::layout::Placement,
        index: usize,
        what: &str,
    ) -> Result<Vec<Ticket>> {
        let elements = self.bucket_bytes / buffer.kind().elt_size_in_bytes().max(1);
        let member = self.group_index()?;
        buckets::sharded(placement, elements)
            .iter()
            .map(|bucket| {
                let outputs = pieces(buffer, bucket)?;
                let input = outputs[member].shallow_clone();
                self.issue(index, what, Collective::AllGather { input, outputs })
            })
            .collect()
    }

    fn issue(&mut self, index: usize, what: &str, collective: Collective) -> Result<Ticket> {
        let unit = &self.layout.units[self.flats[index].spec.unit].name;
        self.transport.issue(Request { group: self.group.clone(), label: format!("{unit} {what}"), collective })
    }

    fn group_index(&self) -> Result<usize> {
        let rank = self.transport.rank();
        self.group.index(rank).ok_or_else(|| Error::Engine(format!("rank {rank} is not in the data group")))
    }
}

/// The pieces of `buffer` that a bucket names.
fn pieces(buffer: &Tensor, bucket: &Bucket) -> Result<Vec<Tensor>> {
    bucket.iter().map(|range| narrow(buffer, range.clone())).collect()
}

/// Zeroes the slots of `buffer` whose gradient did not arrive, so that other ranks may add theirs.
fn zero_absent(flat: &FlatState, buffer: &Tensor, seen: &[bool]) -> Result<()> {
    for (slot, _) in flat.spec.slots.iter().zip(seen).filter(|(_, seen)| !**seen) {
        let _ = narrow(buffer, slot.offset..slot.offset + slot.numel)?.f_zero_()?;
    }
    Ok(())
}
