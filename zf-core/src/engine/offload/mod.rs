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
mod incoming;
mod late;
mod moves;
mod outbox;
mod pace;
mod pack;
mod resume;
mod saved;
mod score;
mod split;
mod states;
mod update;
mod window;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};
use zf_sys::heap::{Category, Heap, tag};

pub(crate) use self::absorb::Absorbed;
use self::arrivals::Expected;
pub(crate) use self::clock::Clock;
pub(crate) use self::columns::Shape;
use self::columns::total;
use self::device_part::DevicePart;
use self::incoming::Incoming;
use self::late::Late;
use self::outbox::Outbox;
use self::pace::Pace;
pub use self::saved::Saved;
use self::split::Split;
use self::window::Submitted;
use super::flat::{FlatState, int};
use super::host::Host;
use super::options::{EngineOptions, OffloadStages, Stages};
use super::update::SlotHyper;
use crate::layout::Layout;
use crate::stage::{
    AccumulateOn, Decision, HostPool, HostWork, Interval, Keeps, Link, Needs, OffloadPolicy, Optimizer, ParametersOn,
    Selector, Site, Traffic, Transport,
};
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
    /// Columns that became chosen in the last step and whose states are not here.
    incoming: Option<Incoming>,
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
        host: Option<Host>,
        stages: &Stages,
        options: &EngineOptions,
        layout: &Layout,
        flats: &[FlatState],
        transport: &dyn Transport,
    ) -> Result<Option<Self>> {
        let (Some(host), Some(OffloadStages { offload, selector, .. })) = (host, &stages.offload) else {
            return Ok(None);
        };
        let Some(policy) = offload.policy() else { return Ok(None) };
        if stages.optimizer.needs() != Needs::Elements {
            return Err(Error::Config(
                "`offload`: this update rule looks at whole tensors, which an offload cuts; take adamw, sgd or lion"
                    .into(),
            ));
        }
        let selector = (policy.keeps == Keeps::Chosen).then(|| selector.clone_box());
        policy.check(selector.as_ref().map(|selector| selector.every()), options.exact)?;
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
            parts.push(Some(Part {
                split,
                device,
                touched: none.clone(),
                left: none,
                sums: None,
                late: Vec::new(),
                incoming: None,
            }));
        }
        if let Some(selector) = &selector {
            selector.check(&weights(flats, &parts))?;
        }
        let lens: Vec<usize> =
            parts.iter().map(|part| part.as_ref().map_or(0, |part| part.split.columns.len)).collect();
        let wire = |dtype| match policy.wire_bytes(dtype, options.exact) {
            2 => Kind::BFloat16,
            _ => Kind::Float,
        };
        let wire: Vec<Kind> = layout.flats.iter().map(|flat| wire(flat.dtype)).collect();
        let bytes = policy.staging_bytes(&lens);
        let landing = {
            let _tag = tag(Category::Buffers);
            let buffer = |_| match policy.parameters {
                ParametersOn::Device => Ok(Tensor::f_empty([int(bytes)?], (Kind::Uint8, device))?),
                ParametersOn::Host => host.zeros(Category::Buffers, bytes, Kind::Uint8),
            };
            (0..policy.buffers.max(2)).map(buffer).collect::<Result<Vec<_>>>()?
        };
        let Host { link, heap, .. } = host;
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
            parameters: policy.parameters,
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
        }))
    }

    /// Packs and sends what buffers are free for.
    pub(crate) fn pump(&mut self) -> Result<()> {
        self.outbox.pump(&mut *self.pool, &self.link)
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

/// The weights that are chosen from, by name, with their numbers of columns.
fn weights<'a>(flats: &'a [FlatState], parts: &[Option<Part>]) -> BTreeMap<&'a str, usize> {
    let both = flats.iter().zip(parts).filter_map(|(flat, part)| Some((flat, part.as_ref()?)));
    let slots = both.flat_map(|(flat, part)| flat.spec.slots.iter().zip(&part.split.shapes));
    let with_columns = slots.filter(|(_, shape)| shape.has_columns());
    with_columns.map(|(slot, shape)| (slot.name.as_str(), shape.count(slot.numel))).collect()
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
