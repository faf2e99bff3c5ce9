//! What states off the device cost: bytes in each tier, and bytes on the link.
//!
//! k is the part of the columns that the selector keeps on the device, S the updates in a window. A rank that owns M elements
//! of optimizer states, each with `a` float32 arrays (master and states of the rule; AdamW: 3), holds 4 a k M bytes of states on
//! the device and 4 a M with the host. Gradients of (1 - k) M elements go up, in every step or, where they are added up on the
//! device, once in S; their parameters come down once in S (Ren et al., "ZeRO-Offload", 2021: k = 0, S = 1; Ren et al., "ZenFlow",
//! 2025, section 3).
//!
//! How many columns of a weight are chosen is asked of the selector itself, which columns is not known before a run. A shard may
//! hold an element more or less of one column than of another, so that figures of sharded states are the mean over all choices,
//! with the farthest that a choice can be off in [`Slack`]. Summed over the ranks they are exact.

use std::sync::Arc;

use serde::Serialize;

use super::parts::share;
use super::{PlanOptions, RankPlan, bytes};
use crate::Result;
use crate::engine::{OffloadStages, Shape};
use crate::layout::{DType, Flat, Layout, Slot};
use crate::stage::{
    AccumulateOn, Candidates, Every, Interval, Keeps, Offload, OffloadPolicy, ParametersOn, Promotion, ScoreReduction,
    Selector, TierBytes, Wire,
};

/// The turnover of a choice that [`LinkPlan::moves_estimate`] assumes where the selector does not name one: that at which
/// columns are chosen again by default.
const TURNOVER: f64 = 0.3;

/// What leaves the device, by the stages that decide it.
#[derive(Debug, Clone)]
pub struct OffloadCosts {
    offload: Arc<dyn Offload>,
    policy: OffloadPolicy,
    selector: Option<Arc<dyn Selector>>,
    memory: Option<u64>,
}

impl OffloadCosts {
    /// Those of an offload; none where everything stays. `memory` are the bytes of an emulated device, by which
    /// [`AccumulateOn::Auto`] decides.
    pub fn of(stages: &OffloadStages, memory: Option<u64>) -> Option<Self> {
        let policy = stages.offload.policy()?;
        let selector = (policy.keeps == Keeps::Chosen).then(|| Arc::clone(&stages.selector));
        Some(Self { offload: Arc::clone(&stages.offload), policy, selector, memory })
    }

    /// What the engine has to know of it.
    pub fn policy(&self) -> &OffloadPolicy {
        &self.policy
    }

    /// Refuses what an engine with this layout would.
    pub(super) fn suit(&self, layout: &Layout, exact: bool) -> Result<()> {
        self.policy.suits(layout)?;
        self.policy.check(self.selector.as_ref().map(|selector| selector.every()), exact)?;
        let Some(selector) = &self.selector else { return Ok(()) };
        let slots = layout.flats.iter().filter(|flat| flat.trainable).flat_map(|flat| &flat.slots);
        let shapes = slots.map(|slot| (slot, Shape::of(slot, selector.axis(), self.policy.fold)));
        let weights = shapes.filter(|(_, shape)| shape.has_columns());
        selector
            .clone_box()
            .check(&weights.map(|(slot, shape)| (slot.name.as_str(), shape.count(slot.numel))).collect())
    }

    /// How a parameter is split.
    fn split(&self, slot: &Slot) -> Result<Chosen> {
        let Some(selector) = &self.selector else {
            return Ok(Chosen { shape: Shape::Whole, numel: slot.numel, columns: 1, count: 0, least: 0, most: 0 });
        };
        let shape = Shape::of(slot, selector.axis(), self.policy.fold);
        let columns = shape.count(slot.numel);
        let all = Chosen { shape, numel: slot.numel, columns, count: columns, least: columns, most: columns };
        if !shape.has_columns() {
            return Ok(all);
        }
        // Equal scores, and one that stands out: between them lies the count of a selector that looks at the scores.
        let mut scores = if selector.score().is_some() { vec![1.0; columns] } else { Vec::new() };
        let choose = |scores: &[f64]| {
            let weight = Candidates { name: &slot.name, columns, scores, previous: &[], update: 0 };
            selector.clone_box().choose(&weight).map(|chosen| chosen.len())
        };
        let count = choose(&scores)?;
        scores.iter_mut().skip(1).for_each(|score| *score = 0.0);
        let other = choose(&scores)?;
        Ok(Chosen { count, least: count.min(other), most: count.max(other), ..all })
    }
}

/// How many columns of a parameter are on the device.
#[derive(Debug, Clone, Copy)]
struct Chosen {
    shape: Shape,
    numel: usize,
    columns: usize,
    count: usize,
    least: usize,
    most: usize,
}

/// Elements of a shard that are with the host: the mean over all choices, and the ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Between {
    mean: usize,
    least: usize,
    most: usize,
}

impl Between {
    fn add(&mut self, other: Self) {
        self.mean += other.mean;
        self.least += other.least;
        self.most += other.most;
    }

    /// The farthest from the mean.
    fn slack(self) -> usize {
        (self.mean.saturating_sub(self.least)).max(self.most.saturating_sub(self.mean))
    }
}

impl Chosen {
    /// Of elements `from..to` of the parameter those with the host.
    fn with_host(&self, from: usize, to: usize) -> Between {
        let len = to - from;
        // Shares of parts add up to that of the whole.
        let chosen = |at: usize| (at as u128 * self.count as u128 / self.columns.max(1) as u128) as usize;
        let mean = len - (chosen(to) - chosen(from)).min(len);
        Between { mean, least: len - self.most_of(len, self.most), most: len - self.least_of(len, self.least) }
    }

    /// The most elements that `count` columns can have of `len` elements in a row.
    fn most_of(&self, len: usize, count: usize) -> usize {
        match self.shape {
            // Each column has as many as the next, or one more.
            Shape::Strided { count: columns } => len / columns * count + count.min(len % columns),
            _ => len.min(count * (self.numel / self.columns.max(1))),
        }
    }

    fn least_of(&self, len: usize, count: usize) -> usize {
        len - self.most_of(len, self.columns.saturating_sub(count))
    }
}

/// What crosses the link of one rank, and how that is decided. All zero without an offload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LinkPlan {
    /// Bytes of gradients each time that they leave: in every step, or once a window if they are added up on the device.
    pub gradients: u64,
    /// Bytes of parameters that one update of the host's part sends back.
    pub parameters: u64,
    /// Bytes of parameters that the passes of a step fetch, where parameters lie with the host.
    pub fetched: u64,
    /// Bytes to the host in a step, the mean over a window.
    pub to_host: u64,
    /// Bytes to the device in a step, the mean over a window.
    pub to_device: u64,
    /// An estimate of the bytes of columns that change their tier in a step, both ways, as if each choice exchanged the part of
    /// them that corresponds to a turnover of 0.3, or to the one at which the selector chooses again.
    pub moves_estimate: u64,
    /// Bytes of states that the first choice takes to the device.
    pub first_moves: u64,
    /// Whether a window's gradients are added up on the device.
    pub sums_on_device: bool,
    /// How far off these can be.
    pub slack: Slack,
    /// Bytes of parameters that a validation micro-batch fetches.
    #[serde(skip)]
    pub(super) fetched_to_validate: u64,
    /// The first two while warm-up leaves all columns to the host.
    #[serde(skip)]
    pub(super) warmup: [u64; 2],
    /// Elements of the host's part.
    #[serde(skip)]
    pub(super) elements: u64,
}

/// How far figures of one rank can be off, since it is not known before a run which columns are chosen. All zero where the rank
/// has whole columns of all weights, as on one rank or under stage 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Slack {
    /// Bytes of masters and states on the device.
    pub optimizer: u64,
    /// Of [`LinkPlan::gradients`].
    pub gradients: u64,
    /// Of [`LinkPlan::parameters`].
    pub parameters: u64,
}

/// One flat buffer of one rank.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    /// Elements of states, without padding.
    owned: usize,
    /// Of these, those of weights with columns, which are with the host until columns are first chosen.
    columned: usize,
    host: Between,
    /// Bytes of an element of gradient and of parameter on the link.
    wire: usize,
    out: usize,
}

/// Books what leaves the device, buffer by buffer.
pub(super) struct Booking<'a> {
    costs: &'a OffloadCosts,
    options: &'a PlanOptions,
    /// By rank and buffer.
    parts: Vec<Vec<Part>>,
    /// Columns of all weights.
    columns: usize,
}

impl<'a> Booking<'a> {
    pub(super) fn new(costs: &'a OffloadCosts, options: &'a PlanOptions, ranks: usize) -> Self {
        Self { costs, options, parts: vec![Vec::new(); ranks], columns: 0 }
    }

    /// Books one flat buffer. `published` are the bytes that each rank sends on to others of its parameters.
    pub(super) fn flat(&mut self, flat: &Flat, ranks: &mut [RankPlan], published: impl Fn(usize) -> u64) -> Result<()> {
        let policy = &self.costs.policy;
        let (wire, out) = (policy.wire_bytes(flat.dtype, self.options.exact), flat.dtype.size());
        let group = flat.optim.group();
        let mut members = vec![Part { wire, out, ..Part::default() }; group];
        let mut any = false;
        for slot in flat.slots.iter().filter(|_| flat.trainable) {
            let chosen = self.costs.split(slot)?;
            any |= chosen.least < chosen.columns;
            let has_columns = self.costs.selector.is_some() && chosen.shape.has_columns();
            self.columns += if has_columns { chosen.columns } else { 0 };
            for owner in flat.optim.owners() {
                let (from, to) = (owner.start.max(slot.offset), owner.end.min(slot.offset + slot.numel));
                if from < to {
                    let part = &mut members[owner.member];
                    part.owned += to - from;
                    part.columned += if has_columns { to - from } else { 0 };
                    part.host.add(chosen.with_host(from - slot.offset, to - slot.offset));
                }
            }
        }
        for (index, rank) in ranks.iter_mut().enumerate() {
            self.parts[index].push(members[index % group]);
            rank.of_drain.all_gather += if any { published(index) } else { 0 };
        }
        Ok(())
    }

    /// Adds everything up.
    pub(super) fn finish(self, ranks: &mut [RankPlan]) {
        let world = ranks.len();
        for (rank, parts) in ranks.iter_mut().zip(&self.parts) {
            self.hold(rank, parts);
            self.carry(rank, parts);
            rank.of_choice.all_reduce = self.scores(rank.rank, world);
        }
    }

    fn arrays(&self) -> usize {
        1 + self.options.states
    }

    /// What the rank holds on its device and off it.
    fn hold(&self, rank: &mut RankPlan, parts: &[Part]) {
        let (policy, arrays) = (&self.costs.policy, self.arrays());
        let sum = |of: fn(&Part) -> usize| parts.iter().map(of).sum::<usize>();
        let host = sum(|part| part.host.mean);
        let lens: Vec<usize> = parts.iter().map(|part| part.owned).collect();
        let staging = policy.staging_bytes(&lens) as u64;
        let buffers = policy.buffers.max(2) as u64;
        rank.device.optimizer += bytes(sum(|part| part.owned) - host, 4 * arrays);
        // Gradients leave through some, updated parameters land in as many where they lie.
        let landing = buffers * staging;
        rank.device.buffers += buffers * staging;
        match policy.parameters {
            ParametersOn::Device => rank.device.buffers += landing,
            ParametersOn::Host => rank.host.buffers += landing,
        }
        rank.link.elements = host as u64;
        rank.link.slack.optimizer = bytes(sum(|part| part.host.slack()), 4 * arrays);
        rank.link.sums_on_device = self.sums_on_device(rank, sum(|part| part.columned), buffers * staging);
        let windows = if policy.asynchronous { 2 } else { 1 };
        if rank.link.sums_on_device {
            rank.device.gradients += bytes(host, 4);
            // Those of the last window, until they have left.
            rank.device.buffers += bytes(host, 4);
        } else if policy.longest() > 1 {
            let summed = parts.iter().filter(|part| part.host.mean > 0).map(|part| bytes(part.owned, 4)).sum::<u64>();
            rank.host.gradients += windows * summed;
        }
        let tier = self.costs.offload.tier_bytes(&lens, arrays);
        rank.host.optimizer += tier.host;
        rank.file += tier.file;
        let pieces = |of: fn(&Part) -> usize| {
            let count = |part: &Part| part.host.mean.div_ceil((staging as usize / of(part).max(1)).max(1));
            parts.iter().map(count).sum::<usize>() as u64
        };
        // Gradients as they landed, of the window that grows and of the one that is being applied; parameters on their way back.
        let on_their_way = windows * pieces(|part| part.wire) + pieces(|part| part.out);
        rank.host.buffers += (2 * buffers + on_their_way) * staging;
    }

    /// Whether a window's gradients are added up on the device: as the engine decides, from what its device has free at the start.
    fn sums_on_device(&self, rank: &RankPlan, columned: usize, staging: u64) -> bool {
        let policy = &self.costs.policy;
        match policy.accumulate {
            _ if policy.keeps == Keeps::Nothing => false,
            AccumulateOn::Device => true,
            AccumulateOn::Host => false,
            AccumulateOn::Auto => self.costs.memory.is_some_and(|memory| {
                let held = rank.device.parameters + rank.gradients_between_steps + 2 * staging;
                bytes(columned, 32) <= memory.saturating_sub(held)
            }),
        }
    }

    /// What crosses its link.
    fn carry(&self, rank: &mut RankPlan, parts: &[Part]) {
        let (policy, link) = (&self.costs.policy, &mut rank.link);
        let sum = |of: &dyn Fn(&Part) -> u64| parts.iter().map(of).sum::<u64>();
        link.gradients = sum(&|part| bytes(part.host.mean, part.wire));
        // Those that lie with the host are updated where they are.
        let comes_back = u64::from(policy.parameters == ParametersOn::Device);
        link.parameters = comes_back * sum(&|part| bytes(part.host.mean, part.out));
        link.slack.gradients = sum(&|part| bytes(part.host.slack(), part.wire));
        link.slack.parameters = sum(&|part| bytes(part.host.slack(), part.out));
        link.warmup = [sum(&|part| bytes(part.columned, part.wire)), sum(&|part| bytes(part.columned, part.out))];
        let interval = policy.first_interval();
        link.to_host = link.gradients.div_ceil(if link.sums_on_device { interval } else { 1 });
        link.to_device = link.parameters.div_ceil(interval) + link.fetched;
        if let Some(selector) = &self.costs.selector {
            let columned: usize = parts.iter().map(|part| part.columned).sum();
            let chosen = columned as u64 - link.elements.min(columned as u64);
            link.first_moves = chosen * 4 * self.arrays() as u64;
            let (every, turnover) = match selector.every() {
                Every::Updates(updates) => (updates.max(interval), TURNOVER),
                Every::Turnover(limit) => (interval, limit),
            };
            link.moves_estimate = self.moves(link, turnover) / every;
        }
    }

    /// An estimate of the bytes of columns that move in a choice.
    fn moves(&self, link: &LinkPlan, turnover: f64) -> u64 {
        moves(link.first_moves, turnover, &self.costs.policy, self.arrays())
    }

    /// Bytes that agreeing on the columns' scores sends: a 64-bit sum for each column of each weight.
    fn scores(&self, rank: usize, world: usize) -> u64 {
        let score = self.costs.selector.as_ref().and_then(|selector| selector.score());
        match score.map(|score| score.reduction()) {
            Some(ScoreReduction::Sum) if world > 1 => 2 * bytes(self.columns - share(self.columns, rank, world), 8),
            _ => 0,
        }
    }
}

/// An estimate of the bytes of states that move in a choice with this turnover (1 - both / either), where `chosen` are those of
/// all columns on the device: as many go up as come down, and those that come down may bring a pending gradient along.
pub(super) fn moves(chosen: u64, turnover: f64, policy: &OffloadPolicy, arrays: usize) -> u64 {
    let changed = turnover / (2.0 - turnover);
    let late = policy.asynchronous && policy.promotion == Promotion::Late;
    let ways = if late { 2.0 + 1.0 / arrays as f64 } else { 2.0 };
    (chosen as f64 * changed * ways) as u64
}

impl TierBytes {
    /// What `arrays` float32 arrays for each of `lens` elements take in host memory.
    pub fn in_memory(lens: &[usize], arrays: usize) -> Self {
        Self { host: lens.iter().map(|&len| bytes(len, 4 * arrays)).sum(), file: 0 }
    }
}

impl OffloadPolicy {
    /// Bytes of a staging buffer of a rank whose buffers have so many elements: those that were asked for, if its largest
    /// buffer's gradient in float32 is not smaller.
    pub fn staging_bytes(&self, lens: &[usize]) -> usize {
        let largest = lens.iter().max().map_or(0, |len| len * 4);
        self.buffer_bytes.min(largest).max(64).next_multiple_of(8)
    }

    /// Bytes of an element of a gradient on the link, of a parameter of `dtype`.
    pub fn wire_bytes(&self, dtype: DType, exact: bool) -> usize {
        match (self.wire, dtype) {
            (Wire::Model, DType::Bfloat16 | DType::Float16) if !exact => 2,
            _ => 4,
        }
    }

    /// Updates in the first window after warm-up, by which a plan goes where it is decided while running.
    pub fn first_interval(&self) -> u64 {
        match &self.interval {
            Interval::Fixed(interval) => *interval,
            Interval::Auto { at_most, .. } => 4.min(*at_most),
            Interval::Replay(decisions) => decisions.first().map_or(1, |first| first.interval),
        }
        .max(1)
    }

    /// The most updates in a window.
    pub fn longest(&self) -> u64 {
        match &self.interval {
            Interval::Fixed(interval) => *interval,
            Interval::Auto { at_most, .. } => *at_most,
            Interval::Replay(decisions) => decisions.iter().map(|decision| decision.interval).max().unwrap_or(1),
        }
    }
}

#[cfg(test)]
mod tests;
