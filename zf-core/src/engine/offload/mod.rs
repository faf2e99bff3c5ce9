//! States off the device: which columns stay, what leaves, and when it comes back.
//!
//! Ren et al., "ZenFlow", 2025, and "ZeRO-Offload", 2021, are two settings of the same mechanism. Columns that a selector chooses
//! are updated here in every step. The gradients of the others cross the link ([`outbox`]), are added up over a window of S
//! updates, and are applied once by the host pool, whose results come back before the forward pass that is to see them
//! ([`arrivals`]). Without a selector and with S = 1 this is ZeRO-Offload.

mod absorb;
mod arrivals;
mod choice;
mod clock;
mod columns;
mod device_part;
mod drain;
mod moves;
mod outbox;
mod pace;
mod pack;
mod score;
mod split;
mod states;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use zf_sys::heap::{Category, Heap, tag};

pub(crate) use self::absorb::Absorbed;
pub(crate) use self::clock::Clock;
use self::clock::check;
use self::columns::total;
use self::device_part::{DevicePart, gradients};
use self::outbox::{Errand, Outbox, Source};
use self::pace::Pace;
use self::split::Split;
pub use self::states::Saved;
use super::core::Core;
use super::flat::{FlatState, int, narrow};
use super::options::{EngineOptions, OffloadStages, Stages};
use super::update::SlotHyper;
use crate::layout::{DType, Layout};
use crate::stage::{
    AccumulateOn, Decision, HostPart, HostPool, HostUpdate, HostWork, Hyper, Interval, Keeps, Link, Needs,
    OffloadPolicy, Optimizer, Promotion, Selector, Site, Traffic, Transport, Wire,
};
use crate::trace::{Lane, Trace};
use crate::{Error, Result};

/// What one rank keeps off its device, and what is on the way.
pub(crate) struct Offloading {
    policy: OffloadPolicy,
    optimizer: Arc<dyn Optimizer>,
    pool: Box<dyn HostPool>,
    link: Arc<dyn Link>,
    selector: Option<Box<dyn Selector>>,
    heap: Heap,
    clock: Clock,
    outbox: Outbox,
    /// By flat buffer; none where it is frozen.
    parts: Vec<Option<Part>>,
    /// The update that was submitted and is not visible.
    pending: Option<Expected>,
    /// What of the visible update has not arrived.
    arriving: Expected,
    /// Type of gradients on the link, by flat.
    wire: Vec<Kind>,
    /// Whether windows are added up on the device.
    on_device: bool,
    waited: Duration,
    turnover: Option<f64>,
    oldest: u64,
    /// The numbers of the last step, for a window that ends early.
    last: Submitted,
    /// The last update that was submitted.
    submitted: Option<Submitted>,
    /// The schedule's factors of the present window, added up.
    lr_sum: f64,
    pace: Pace,
    /// Sum and number of the absolute gradients of chosen elements in this step.
    chosen_sum: (f64, usize),
    /// What was decided in this step.
    decision: Option<Decision>,
    /// Whether the pending update waits for the next choice of columns.
    held: bool,
    /// The window of the newest update that is to arrive: its gradients leave before anybody waits for it.
    awaited: u64,
}

/// What of an update is to come, by flat.
#[derive(Debug, Clone, Default)]
struct Expected {
    /// Elements of this rank.
    elements: Vec<usize>,
    /// Whether any rank has some. It decides when the flat is sent on to the others, at which all ranks take part.
    anywhere: Vec<bool>,
}

impl Expected {
    fn nothing(flats: usize) -> Self {
        Self { elements: vec![0; flats], anywhere: vec![false; flats] }
    }

    fn add(&mut self, more: &Self) {
        self.elements.iter_mut().zip(&more.elements).for_each(|(sum, more)| *sum += more);
        self.anywhere.iter_mut().zip(&more.anywhere).for_each(|(any, more)| *any |= more);
    }
}

/// One flat buffer's part.
struct Part {
    split: Split,
    device: DevicePart,
    /// By slot: whether the present window has a gradient of it.
    touched: Vec<bool>,
    /// By slot: whether the gradient of this step has left already.
    left: Vec<bool>,
    /// The window's gradients of the host's elements, where they are added up on the device.
    sums: Option<Tensor>,
    /// Updates that will become visible for columns that moved to the device meanwhile.
    late: Vec<Late>,
}

/// A pending update of columns that are on the device by now.
struct Late {
    /// By slot and column: whether it is one of them; the same on all ranks.
    columns: Vec<Vec<bool>>,
    /// This rank's elements of them, in column order.
    ranges: Vec<Range<usize>>,
    /// Their summed gradients.
    grads: Option<Tensor>,
    /// The numbers of the update, of this flat alone.
    numbers: Submitted,
}

/// The numbers of an update that was submitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Submitted {
    /// By flat and slot: whether it is part of it.
    touched: Vec<Vec<bool>>,
    /// By flat and slot.
    hypers: Vec<Vec<SlotHyper>>,
    /// The schedule's factor.
    lr: f64,
    /// The factor on the gradient.
    scale: f32,
}

impl Submitted {
    fn hyper(&self, flat: usize, slot: usize, count: u64) -> Hyper {
        let SlotHyper { lr, weight_decay } = self.hypers[flat][slot];
        Hyper { lr: lr * self.lr, weight_decay, count, grad_scale: self.scale }
    }
}

/// One update that was not skipped.
pub(crate) struct Step<'a> {
    /// By flat and slot: whether it is updated.
    pub(crate) chosen: &'a [Vec<bool>],
    /// By flat and slot.
    pub(crate) hypers: &'a [Vec<SlotHyper>],
    /// The schedule's factor.
    pub(crate) lr: f64,
    /// Unscales and clips.
    pub(crate) grad_scale: f32,
}

/// What a step's line in the metrics says.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OffloadReport {
    /// Updates by which the oldest gradient that the parameters of this step had not seen is late.
    pub staleness: u64,
    /// Part of the chosen columns that changed, where columns were chosen.
    pub turnover: Option<f64>,
    /// Updates in the window of this step; 0 without an offload.
    pub interval: u64,
    /// What was decided in this step, where anything is decided while running.
    pub decision: Option<Decision>,
}

impl Offloading {
    /// Opens what `stages.offload` asks for; none where everything stays.
    pub(crate) fn open(
        stages: &Stages,
        options: &EngineOptions,
        layout: &Layout,
        flats: &[FlatState],
        transport: &dyn Transport,
    ) -> Result<Option<Self>> {
        let Some(OffloadStages { offload, selector, links }) = &stages.offload else { return Ok(None) };
        let Some(policy) = offload.policy() else { return Ok(None) };
        if stages.optimizer.needs() != Needs::Elements {
            return Err(Error::Config(
                "`offload`: this update rule looks at whole tensors, which an offload cuts; take adamw, sgd or lion"
                    .into(),
            ));
        }
        let selector = (policy.keeps == Keeps::Chosen).then(|| selector.clone_box());
        check(&policy, selector.as_ref().map(|selector| selector.every()), options.exact)?;
        if selector.as_ref().and_then(|selector| selector.score()).is_some_and(|score| score.needs().second_moment) {
            choice::second_moment(&*stages.optimizer)?;
        }
        let axis = selector.as_ref().map_or_else(Default::default, |selector| selector.axis());
        let arrays = 1 + stages.optimizer.state().len();
        let (rank, device) = (transport.rank(), options.device);
        let mut parts = Vec::new();
        for flat in flats {
            if !flat.spec.trainable {
                parts.push(None);
                continue;
            }
            let split = Split::new(flat, policy.keeps, axis, policy.fold);
            let device = DevicePart::new(&split, arrays, device)?;
            let none = vec![false; flat.spec.slots.len()];
            parts.push(Some(Part { split, device, touched: none.clone(), left: none, sums: None, late: Vec::new() }));
        }
        let lens: Vec<usize> =
            parts.iter().map(|part| part.as_ref().map_or(0, |part| part.split.columns.len)).collect();
        let wire = |dtype| match (policy.wire, dtype) {
            (Wire::Model, DType::Bfloat16 | DType::Float16) if !options.exact => Kind::BFloat16,
            _ => Kind::Float,
        };
        let wire: Vec<Kind> = layout.flats.iter().map(|flat| wire(flat.dtype)).collect();
        let bytes = policy.buffer_bytes.min(lens.iter().max().map_or(0, |len| len * 4)).max(64).next_multiple_of(8);
        let link = links.open(rank, device, &options.host_cores, &options.trace)?;
        let landing = {
            let _tag = tag(Category::Buffers);
            let buffer = |_| Ok::<_, Error>(Tensor::f_empty([int(bytes)?], (Kind::Uint8, device))?);
            (0..policy.buffers.max(2)).map(buffer).collect::<Result<Vec<_>>>()?
        };
        let heap = Heap::new(format!("host of rank {rank}"))?;
        let pool = offload.open(Site {
            rank,
            world: transport.world(),
            device,
            link: Arc::clone(&link),
            optimizer: Arc::clone(&stages.optimizer),
            host: options.host.clone(),
            cores: options.host_cores.clone(),
            folder: options.folder.clone(),
            measures: matches!(policy.interval, Interval::Auto { .. }),
            heap: heap.clone(),
            trace: options.trace.clone(),
            lens,
            out: layout.flats.iter().map(|flat| flat.dtype).collect(),
            landing,
            staging_bytes: bytes,
            wire: wire.clone(),
        })?;
        let outbox = Outbox::new(policy.buffers.max(2), bytes, device)?;
        let on_device = policy.keeps == Keeps::Chosen && sums_fit(&policy, &parts);
        Ok(Some(Self {
            clock: Clock::new(&policy),
            policy,
            optimizer: Arc::clone(&stages.optimizer),
            pool,
            link,
            selector,
            heap,
            outbox,
            arriving: Expected::nothing(parts.len()),
            parts,
            pending: None,
            wire,
            on_device,
            waited: Duration::ZERO,
            turnover: None,
            oldest: 0,
            last: Submitted { touched: Vec::new(), hypers: Vec::new(), lr: 0.0, scale: 1.0 },
            submitted: None,
            lr_sum: 0.0,
            pace: Pace::default(),
            chosen_sum: (0.0, 0),
            decision: None,
            held: false,
            awaited: 0,
        }))
    }

    /// Whether gradients leave as soon as they are summed, before the norm is known.
    fn early(&self) -> bool {
        self.policy.keeps == Keeps::Nothing
    }

    /// Packs and sends what buffers are free for.
    pub(crate) fn pump(&mut self) -> Result<()> {
        self.outbox.pump(&mut *self.pool, &self.link)
    }

    /// The gradients of a flat buffer are about to be overwritten.
    pub(crate) fn release_gradients(&mut self, flat: usize, trace: &Trace) -> Result<()> {
        self.outbox.pack_all_of(Some(flat), &mut *self.pool, &self.link, trace)
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

    /// Adds this step's gradients of the host's elements to the window.
    fn collect(&mut self, index: usize, flat: &FlatState, step: &Step<'_>) -> Result<()> {
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
    fn end_window(&mut self, core: &Core, step: &Step<'_>, length: u64, asynchronous: bool) -> Result<()> {
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
        let (parts, expected) = self.host_parts(&submitted);
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
        self.awaited = if asynchronous { window.saturating_sub(1) } else { window };
        self.oldest = length;
        visible.iter().for_each(|expected| self.arriving.add(expected));
        Ok(())
    }

    /// What an update changes, and what will arrive of it.
    fn host_parts(&self, submitted: &Submitted) -> (Vec<HostPart>, Expected) {
        let (mut parts, mut expected) = (Vec::new(), Expected::nothing(self.parts.len()));
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
        let (ranges, alike) = split.device_alike(|slot| chosen[slot], hyper);
        let grads = gradients(flat, split, &ranges)?;
        if matches!(self.policy.interval, Interval::Auto { .. }) {
            let sum = grads.f_abs()?.f_sum(Kind::Double)?.f_double_value(&[])? * f64::from(step.grad_scale.abs());
            self.chosen_sum = (self.chosen_sum.0 + sum, self.chosen_sum.1 + grads.numel());
        }
        tch::no_grad(|| part.device.update(flat, split, &*self.optimizer, (&ranges, &alike), &grads))
    }

    /// Time spent waiting since the last call.
    pub(crate) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited) + self.outbox.take_waited()
    }

    /// What a person should know at the start.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.pool.notes()
    }

    /// Updates since the end of warm-up.
    pub(crate) fn updates(&self) -> u64 {
        self.clock.update
    }

    /// What crossed the link.
    pub(crate) fn traffic(&self) -> Traffic {
        self.link.traffic()
    }

    /// What the host did.
    pub(crate) fn work(&self) -> HostWork {
        self.pool.work()
    }

    /// The heap of host memory.
    pub(crate) fn heap(&self) -> &Heap {
        &self.heap
    }
}

/// Whether the device has room for the windows' sums: two copies of the host's elements in float32.
fn sums_fit(policy: &OffloadPolicy, parts: &[Option<Part>]) -> bool {
    match policy.accumulate {
        AccumulateOn::Device => true,
        AccumulateOn::Host => false,
        AccumulateOn::Auto => {
            let elements: usize = parts.iter().flatten().map(|part| total(&part.split.host)).sum();
            let room = Heap::current().and_then(|heap| heap.room());
            // Activations and gradients are not there yet: leave them three quarters.
            room.is_some_and(|room| (elements * 8) as i64 * 4 <= room.free)
        }
    }
}
