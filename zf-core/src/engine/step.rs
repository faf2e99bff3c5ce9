//! One step, readable in one place.

use std::time::{Duration, Instant};

use zf_sys::heap::{Category, tag};

use super::Engine;
use super::agree::{Agreement, Message};
use super::context::Forward;
use super::core::lock;
use super::offload::{self, OffloadReport};
use super::tensor_sums::TensorSums;
use super::update::Update;
use crate::config::Unused;
use crate::model::{Batch, Noise};
use crate::norm::clip_coefficient;
use crate::record::Seconds;
use crate::trace::Lane;
use crate::{Error, Result};

/// After this many skipped steps in a row the run ends.
const SKIPPED_IN_A_ROW: u32 = 20;

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 0, skipped ones included.
    pub step: u64,
    /// Mean loss over the step's target tokens, before the update.
    pub loss: f64,
    /// Base learning rate times the schedule's factor.
    pub lr: f64,
    /// Global L2 norm of the gradient, unscaled, before clipping.
    pub grad_norm: f64,
    /// Target tokens of all ranks.
    pub tokens: u64,
    /// Whether the update was skipped because of non-finite gradients.
    pub skipped: bool,
    /// The loss scale used in this step's backward.
    pub loss_scale: f64,
    /// Whether any rank asked to stop after this step; see [`Engine::request_stop`].
    pub stop: bool,
    /// What the offload has to say.
    pub offload: OffloadReport,
    /// Where the time went.
    pub seconds: Seconds,
}

impl Engine {
    /// Runs one step: forward and backward of every micro-batch, which `batches` yields by turn, then the update.
    ///
    /// # Errors
    /// Those of the model, the stages and the transport, with rank and step; the other ranks are told.
    pub fn step(&mut self, batches: &mut dyn FnMut(usize) -> Result<Batch>) -> Result<StepReport> {
        let step = self.step;
        self.try_step(batches).map_err(|error| self.fail(step, error))
    }

    fn try_step(&mut self, batches: &mut dyn FnMut(usize) -> Result<Batch>) -> Result<StepReport> {
        let started = Instant::now();
        let mut seconds = Seconds::default();
        let scale = self.loss_scale();
        let (mut losses, mut tokens, mut trail) = (Vec::new(), 0, 0u64);

        self.options.trace.step(self.step);
        lock(&self.shared).begin_step();
        for turn in 0..self.options.accumulation {
            let batch = batches(turn)?;
            let last = turn + 1 == self.options.accumulation;
            let (loss, units) = self.micro_batch(&batch, scale, last, &mut seconds)?;
            losses.push(loss);
            tokens += batch.target_tokens;
            trail = trail.rotate_left(7) ^ units;
        }
        let mut clock = Instant::now();
        {
            let core = &mut *lock(&self.shared);
            core.finish_reductions()?;
            core.settle_reductions()?;
        }
        seconds.stall += lap(&mut clock);

        let agreed = self.agree(losses, tokens, trail, &mut seconds)?;
        let factor = self.options.micro_batch_tokens as f64 / (agreed.tokens.max(1) as f64 * scale);
        let grad_norm = agreed.squares.sqrt() * factor;
        let skipped = agreed.nonfinite > 0 || !grad_norm.is_finite() || agreed.tokens == 0;
        let lr = self.stages.schedule.factor(self.updates, self.options.total_steps);

        clock = Instant::now();
        let offload = match skipped {
            true => OffloadReport::default(),
            false => self.update(&agreed, lr, factor * clip_coefficient(grad_norm, self.options.clip))?,
        };
        let waited = lock(&self.shared).end_step();
        seconds.stall += waited;
        seconds.update -= waited;
        self.conclude(skipped, &agreed)?;
        seconds.update += lap(&mut clock);

        seconds.step = started.elapsed().as_secs_f64();
        let report = StepReport {
            step: self.step,
            loss: agreed.loss / agreed.tokens.max(1) as f64,
            lr: self.stages.optimizer.base().lr * lr,
            grad_norm,
            tokens: agreed.tokens,
            skipped,
            loss_scale: scale,
            stop: agreed.stop,
            offload,
            seconds,
        };
        self.step += 1;
        Ok(report)
    }

    /// Forward and backward of one micro-batch. Gradients are reduced as they complete.
    fn micro_batch(&mut self, batch: &Batch, scale: f64, last: bool, seconds: &mut Seconds) -> Result<(f64, u64)> {
        let _tag = tag(Category::Activations);
        let mut clock = Instant::now();
        let noise = Noise { seed: self.options.seed, step: self.step };
        let kind = self.options.dtype.kind();
        let forward = Forward::new(&self.shared, &self.units, noise, kind, self.options.device, true);
        let span = self.options.trace.span(Lane::Compute, "forward");
        let loss = self.model.loss(&forward, batch)?.sum;
        drop(span);
        let (trail, waited) = forward.finish();
        // Of units that the model left out here.
        lock(&self.shared).receive_all()?;
        seconds.stall += waited.as_secs_f64();
        seconds.forward += lap(&mut clock) - waited.as_secs_f64();

        let value = loss.f_double_value(&[])?;
        let root = loss.f_mul_scalar(scale / self.options.micro_batch_tokens as f64)?;
        drop(loss);
        seconds.forward += lap(&mut clock);
        // The reductions of the micro-batch before went on during this forward pass.
        lock(&self.shared).finish_reductions()?;
        seconds.stall += lap(&mut clock);
        let _span = self.options.trace.span(Lane::Compute, "backward");
        {
            let core = &mut *lock(&self.shared);
            core.begin_micro_batch(last);
            core.begin_backward()?;
        }
        // A micro-batch may happen to use nothing that is trained.
        if root.requires_grad() {
            zf_sys::autograd::backward(&[root], &[None], false)?;
        }
        let core = &mut *lock(&self.shared);
        core.end_micro_batch()?;
        core.end_pass()?;
        let waited = core.residency.take_waited().as_secs_f64();
        seconds.stall += waited;
        seconds.backward += lap(&mut clock) - waited;
        Ok((value, trail))
    }

    /// The one message of the step.
    fn agree(&mut self, losses: Vec<f64>, tokens: u64, trail: u64, seconds: &mut Seconds) -> Result<Agreement> {
        let mut clock = Instant::now();
        let span = self.options.trace.span(Lane::Compute, "norm");
        let mut message = Message::of(&lock(&self.shared), losses, tokens, trail, self.options.exact)?;
        message.stop = self.stop_requested;
        drop(span);
        seconds.update += lap(&mut clock);
        let span = self.options.trace.wait("wait", "the other ranks to agree on the step");
        let answers = lock(&self.shared).transport.exchange("step agreement", message.to_bytes())?;
        drop(span);
        seconds.stall += lap(&mut clock);
        Agreement::combine(&answers, self.options.exact)
    }

    /// Updates what this rank owns, flat by flat in the order of the next forward pass, and publishes each at once.
    fn update(&mut self, agreed: &Agreement, lr: f64, coefficient: f64) -> Result<OffloadReport> {
        let _span = self.options.trace.span(Lane::Compute, "update");
        let core = &mut *lock(&self.shared);
        let optimizer = &*self.stages.optimizer;
        let (hypers, lr, grad_scale) = (&self.hypers, lr, coefficient as f32);
        let mut present = agreed.present.as_slice();
        let mut updates = Vec::new();
        let mut chosen_of: Vec<Vec<bool>> = core.flats.iter().map(|_| Vec::new()).collect();
        for (index, flat) in core.flats.iter_mut().enumerate().filter(|(_, flat)| flat.spec.trainable) {
            let (mine, rest) = present.split_at(flat.spec.slots.len());
            present = rest;
            let all = self.options.unused == Unused::Zeros;
            let chosen: Vec<bool> = mine.iter().map(|&seen| seen || all).collect();
            chosen_of[index].clone_from(&chosen);
            flat.count(&chosen);
            updates.push(Update { flat: index, chosen, hypers: &hypers[index], lr, grad_scale });
        }
        let step = offload::Step { chosen: &chosen_of, hypers, lr, grad_scale };
        if let Some(report) = core.with_offload(|offload, core| offload.update(core, &step))? {
            return Ok(report);
        }
        let sums = TensorSums::gather(core, optimizer, &updates, self.options.exact)?;
        for update in &updates {
            update.apply(&core.flats[update.flat], optimizer, &sums)?;
            core.publish(update.flat)?;
        }
        Ok(OffloadReport::default())
    }

    /// Books the outcome: counts, and last of all the loss scale.
    fn conclude(&mut self, skipped: bool, agreed: &Agreement) -> Result<()> {
        if !skipped {
            self.skipped_in_a_row = 0;
            self.updates += 1;
        } else if agreed.tokens > 0 {
            self.skipped_in_a_row += 1;
        }
        if self.skipped_in_a_row >= SKIPPED_IN_A_ROW {
            return Err(Error::Engine(format!(
                "{SKIPPED_IN_A_ROW} steps in a row were skipped, the last with {} non-finite gradient elements, loss sum \
                 {} over {} target tokens and loss scale {}; lower the learning rate, or look for bad data",
                agreed.nonfinite,
                agreed.loss,
                agreed.tokens,
                self.loss_scale()
            )));
        }
        if let Some(scaler) = &mut self.scaler {
            // A step without target tokens says nothing about the scale.
            if agreed.tokens > 0 {
                scaler.update(skipped);
            }
        }
        Ok(())
    }

    /// Sum of losses and number of target tokens over the batches of all ranks, without gradients. Rank r yields the
    /// batches r, r + N, ... of the whole, so that the sum does not depend on the number of ranks.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn evaluate(&mut self, batches: &mut dyn FnMut(usize) -> Result<Option<Batch>>) -> Result<(f64, u64)> {
        let step = self.step;
        self.try_evaluate(batches).map_err(|error| self.fail(step, error))
    }

    /// Whether another round of validation batches begins. Where parameters are sharded, ranks without a batch have to
    /// take part in gathering them, and therefore ask.
    fn anyone_has(&mut self, one: bool) -> Result<bool> {
        let core = &mut *lock(&self.shared);
        if !core.residency.any_apart() {
            return Ok(one);
        }
        let answers = core.transport.exchange("validation round", vec![u8::from(one)])?;
        Ok(answers.iter().any(|answer| answer.first() == Some(&1)))
    }

    fn try_evaluate(&mut self, batches: &mut dyn FnMut(usize) -> Result<Option<Batch>>) -> Result<(f64, u64)> {
        let _tag = tag(Category::Activations);
        let _no_grad = tch::no_grad_guard();
        let mut message = Message::default();
        // A rank without a batch runs no unit that would receive them.
        lock(&self.shared).receive_all()?;
        for turn in 0.. {
            let batch = batches(turn)?;
            if !self.anyone_has(batch.is_some())? {
                break;
            }
            let Some(batch) = batch else {
                lock(&self.shared).walk()?;
                continue;
            };
            let noise = Noise { seed: self.options.seed, step: self.step };
            let kind = self.options.dtype.kind();
            let forward = Forward::new(&self.shared, &self.units, noise, kind, self.options.device, false);
            message.losses.push(self.model.loss(&forward, &batch)?.sum.f_double_value(&[])?);
            message.tokens += batch.target_tokens;
            lock(&self.shared).end_pass()?;
        }
        let answers = lock(&self.shared).transport.exchange("validation", message.to_bytes())?;
        let agreed = Agreement::combine(&answers, true)?;
        Ok((agreed.loss, agreed.tokens))
    }
}

/// Seconds since `clock`, which starts anew.
fn lap(clock: &mut Instant) -> f64 {
    let elapsed: Duration = clock.elapsed();
    *clock += elapsed;
    elapsed.as_secs_f64()
}
