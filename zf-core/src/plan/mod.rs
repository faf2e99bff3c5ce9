//! The planner: what each rank will hold and move, to the byte, from a layout and closed formulas. No tensor is made.
//!
//! [`plan`] reads a [`Layout`] of any scopes; [`formula`] needs sizes alone and gives the tables of the ZeRO paper. Both
//! describe model states and traffic. Activations are not planned: how much of a forward pass autograd keeps is known
//! to the operators alone.
//!
//! Figures of states and traffic are exact, but for one rounding: where the ranks of an all-reduce do not divide its
//! bucket, members send an element more or less than the others. Buffers are the least that the strategy needs: gathered
//! units and the gradients of one unit on their way. What is in flight beyond that depends on time. What an offload costs is in
//! [`OffloadCosts`].
//!
//! # Example
//!
//! ```
//! use zf_core::layout::{DType, Layout, Placement};
//! use zf_core::mesh::Mesh;
//! use zf_core::model::{Init, ParamSpec, UnitSpec};
//! use zf_core::plan::{PlanOptions, plan};
//!
//! # fn main() -> zf_core::Result<()> {
//! let unit = UnitSpec { name: "layer".into(), params: vec![ParamSpec::new("w", &[10, 4], Init::Ones)], root: false };
//! let stage_1 = |numel| Ok([Placement::replicated(numel), Placement::replicated(numel), Placement::even(numel, 2)?]);
//! let layout = Layout::pack(&[unit], DType::Bfloat16, &Mesh::data(2)?, 2, |_, numel| stage_1(numel))?;
//! let plan = plan(&layout, &PlanOptions::new(2))?; // AdamW: two states
//! let rank = plan.worst();
//! assert_eq!((rank.device.parameters, rank.device.gradients), (2 * 40, 4 * 40));
//! assert_eq!(rank.device.optimizer, 12 * 40 / 2);
//! assert_eq!(rank.traffic.total().reduce_scatter, 4 * 40 / 2);
//! # Ok(())
//! # }
//! ```

mod beside;
mod buffers;
pub mod formula;
mod offload;
mod parts;
mod scopes;
#[cfg(test)]
mod tests;
mod traffic;
mod windows;

pub(crate) use beside::{Holds, Moved, Predictor};
pub use offload::{LinkPlan, OffloadCosts, Slack};
pub use scopes::{STAGES, Sizes, at_stage, with_frozen};
pub use traffic::Traffic;

use serde::Serialize;

use self::offload::Booking;
use self::parts::Parts;
use self::traffic::Movements;
use crate::config::{Accumulate, ReduceWhen};
use crate::engine::EngineOptions;
use crate::layout::{Flat, Layout};
use crate::stage::{CommBytes, Keeps, ParametersOn, Transfers};
use crate::{Error, Result};

/// How the planned run runs, as far as it shows in bytes.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// Fixed order of additions.
    pub exact: bool,
    /// When gradients are summed over ranks.
    pub reduce_when: ReduceWhen,
    /// Type of accumulated gradients.
    pub accumulate: Accumulate,
    /// Micro-batches that a rank runs in a step.
    pub micro_batches: usize,
    /// States of the update rule beside the master, each float32 (AdamW: 2).
    pub states: usize,
    /// How tensors travel.
    pub transfers: Transfers,
    /// What leaves the device.
    pub offload: Option<OffloadCosts>,
}

impl PlanOptions {
    /// The defaults of a run file, for an update rule with so many states.
    pub fn new(states: usize) -> Self {
        Self {
            exact: false,
            reduce_when: ReduceWhen::Auto,
            accumulate: Accumulate::Float32,
            micro_batches: 1,
            states,
            transfers: Transfers::default(),
            offload: None,
        }
    }

    /// Those of an engine.
    pub fn of(options: &EngineOptions, states: usize, transfers: Transfers) -> Self {
        Self {
            exact: options.exact,
            reduce_when: options.reduce_when,
            accumulate: options.accumulate,
            micro_batches: options.accumulation,
            states,
            transfers,
            offload: None,
        }
    }

    /// Whether gradients leave the device, and are freed, while the only backward of a step goes on.
    fn leave_in_backward(&self, summation: Summation) -> bool {
        let nothing = self.offload.as_ref().is_some_and(|costs| costs.policy().keeps == Keeps::Nothing);
        nothing && summation == Summation::Loose && self.micro_batches == 1
    }

    /// Whether parameters lie with the host.
    fn fetches(&self) -> bool {
        self.offload.as_ref().is_some_and(|costs| costs.policy().parameters == ParametersOn::Host)
    }

    /// Bytes of an element of an accumulated gradient of `flat`.
    fn accumulated(&self, flat: &Flat) -> usize {
        match self.accumulate {
            Accumulate::Float32 => 4,
            Accumulate::Model => flat.dtype.size(),
        }
    }
}

/// How gradients are summed over ranks, for all buffers alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Summation {
    /// There is one rank: gradients stay where autograd makes them and are given back after the update.
    Loose,
    /// Once a step; every rank holds full-size gradients until then.
    Boundary,
    /// Each micro-batch, into the accumulators of the owners of gradients.
    MicroBatch,
    /// Each micro-batch, into one accumulator an element, in the order of ranks.
    InOrder,
}

impl Summation {
    fn of(layout: &Layout, options: &PlanOptions) -> Self {
        let split = layout.flats.iter().any(|flat| flat.grads.group() > 1);
        let each = match options.reduce_when {
            ReduceWhen::Auto => options.exact || split,
            ReduceWhen::MicroBatch => true,
            ReduceWhen::Boundary => false,
        };
        match each {
            false if layout.mesh.world() == 1 => Self::Loose,
            false => Self::Boundary,
            true if split && !options.exact => Self::MicroBatch,
            true => Self::InOrder,
        }
    }
}

/// Bytes of model states on one tier of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct States {
    /// Parameters, in the model's type.
    pub parameters: u64,
    /// Accumulated gradients when they are complete, at the end of a step's last backward; where they leave during it, those of
    /// the largest unit, the least that this needs.
    pub gradients: u64,
    /// Masters and states of the update rule, float32.
    pub optimizer: u64,
    /// Gathered units, and gradients on their way to their owners: the least that the strategy needs.
    pub buffers: u64,
}

impl States {
    /// All categories.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer + self.buffers
    }

    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.gradients += other.gradients;
        self.optimizer += other.optimizer;
        self.buffers += other.buffers;
    }
}

/// What one rank holds, and moves in a step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// On the device.
    pub device: States,
    /// In the host's memory: masters and states, parameters that lie there, and the most that gradients and parameters on their
    /// way need. Nothing where no state is offloaded.
    pub host: States,
    /// In files.
    pub file: u64,
    /// Between device and host.
    pub link: LinkPlan,
    /// Of [`States::gradients`] what is still held between two steps: nothing on one rank that sums at the boundary.
    pub gradients_between_steps: u64,
    /// Bytes of a step that updates, the agreed message (`control`) apart.
    pub traffic: Traffic,
    /// Of [`RankPlan::traffic`] what a skipped step does not move: it updates nothing, so it has nothing to publish.
    pub of_update: CommBytes,
    /// Bytes of agreeing on the scores of columns, wherever columns are chosen; no part of [`RankPlan::traffic`].
    pub of_choice: CommBytes,
    /// Bytes of making an update of the host's part visible that no step did, at the end of a run.
    pub of_drain: CommBytes,
    /// Bytes of one validation micro-batch, which gathers sharded parameters once.
    pub validation: CommBytes,
}

/// The whole plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Parameters, tied ones once, without padding.
    pub parameters: usize,
    /// The same with padding.
    pub elements: usize,
    /// Consecutive ranks that share a machine.
    pub ranks_per_node: usize,
    /// How gradients are summed.
    pub summation: Summation,
    /// By rank.
    pub per_rank: Vec<RankPlan>,
}

impl Plan {
    /// The rank that holds most on its device, the first of several.
    pub fn worst(&self) -> &RankPlan {
        let order = |a: &&RankPlan, b: &&RankPlan| a.device.total().cmp(&b.device.total()).then(b.rank.cmp(&a.rank));
        self.per_rank.iter().max_by(order).expect("a mesh has at least one rank")
    }

    /// Bytes that all ranks hold together, on devices and hosts.
    pub fn held(&self) -> (States, States) {
        let mut sums = (States::default(), States::default());
        for rank in &self.per_rank {
            sums.0.add(&rank.device);
            sums.1.add(&rank.host);
        }
        sums
    }

    /// Bytes that all ranks move in a step together.
    pub fn moved(&self) -> Traffic {
        let mut sum = Traffic::default();
        self.per_rank.iter().for_each(|rank| sum.add(&rank.traffic));
        sum
    }

    /// The largest traffic of a rank in a step.
    pub fn busiest(&self) -> &RankPlan {
        let bytes = |rank: &RankPlan| traffic::sum(&rank.traffic.total());
        let order = |a: &&RankPlan, b: &&RankPlan| {
            let between = |rank: &RankPlan| traffic::sum(&rank.traffic.between_nodes);
            bytes(a).cmp(&bytes(b)).then(between(a).cmp(&between(b))).then(b.rank.cmp(&a.rank))
        };
        self.per_rank.iter().max_by(order).expect("a mesh has at least one rank")
    }
}

/// Plans a run on `layout`.
///
/// The formulas follow the engine: a flat buffer of `numel` elements (padding included) is kept by the P-owners, its
/// gradients by the G-owners (full size at the boundary; by the O-owners in order), masters (for 16-bit types) and states
/// by the O-owners. Frozen buffers have parameters only. Gradients of a micro-batch travel in the parameter's type,
/// those of the boundary in the accumulator's, parameters in their own.
///
/// # Errors
/// [`Error::Config`]: sizes that break size(O) >= size(G) >= size(P), each a multiple of the next and a divisor of the
/// ranks; a rank that owns more of a later one than of an earlier one. Those of
/// [`OffloadPolicy::suits`](crate::stage::OffloadPolicy::suits), and what the selector of an offload returns.
pub fn plan(layout: &Layout, options: &PlanOptions) -> Result<Plan> {
    if let Some(costs) = &options.offload {
        costs.suit(layout, options.exact)?;
    }
    let world = layout.mesh.world();
    let summation = Summation::of(layout, options);
    let mut per_rank: Vec<RankPlan> = (0..world).map(|rank| RankPlan { rank, ..RankPlan::default() }).collect();
    let mut booking = options.offload.as_ref().map(|costs| Booking::new(costs, options, world));
    for flat in &layout.flats {
        let parts = Parts::new(flat, world)?;
        let movements = Movements::new(layout, flat, &parts, options, summation);
        for rank in &mut per_rank {
            hold(rank, flat, &parts, options, summation);
            movements.book(rank);
        }
        if let Some(booking) = &mut booking {
            booking.flat(flat, &mut per_rank, |rank| movements.published(rank))?;
        }
    }
    if options.leave_in_backward(summation) {
        let gradients = buffers::largest_unit(layout, |flat| flat.used() * options.accumulated(flat));
        per_rank.iter_mut().for_each(|rank| rank.device.gradients = gradients);
    }
    let shared = buffers::gathered(layout, &options.transfers, options.fetches()) + buffers::scratch(layout, summation);
    for rank in &mut per_rank {
        rank.device.buffers = shared;
    }
    if let Some(booking) = booking {
        booking.finish(&mut per_rank);
    }
    Ok(Plan {
        parameters: layout.parameters(),
        elements: layout.flats.iter().map(|flat| flat.numel).sum(),
        ranks_per_node: layout.mesh.node(),
        summation,
        per_rank,
    })
}

/// Books what `rank` holds of one flat buffer.
fn hold(rank: &mut RankPlan, flat: &Flat, parts: &Parts, options: &PlanOptions, summation: Summation) {
    let own = parts.of(rank.rank);
    let tier = if options.fetches() { &mut rank.host } else { &mut rank.device };
    tier.parameters += bytes(own.params, flat.dtype.size());
    if !flat.trainable {
        return;
    }
    let (elements, stay) = match summation {
        Summation::Loose => (flat.used(), false),
        Summation::Boundary => (flat.numel, true),
        Summation::MicroBatch => (own.grads, true),
        Summation::InOrder => (own.optim, true),
    };
    let gradients = bytes(elements, options.accumulated(flat));
    rank.device.gradients += gradients;
    rank.gradients_between_steps += if stay { gradients } else { 0 };
    if options.offload.is_none() {
        let master = usize::from(flat.dtype.size() < 4);
        rank.device.optimizer += bytes(own.optim, 4 * (options.states + master));
    }
}

fn bytes(elements: usize, size: usize) -> u64 {
    elements as u64 * size as u64
}

fn refuse<T>(flat: &Flat, what: &str) -> Result<T> {
    let name = flat.slots.first().map_or("?", |slot| slot.name.as_str());
    Err(Error::Config(format!("the layout of the buffer of `{name}`: {what}")))
}
