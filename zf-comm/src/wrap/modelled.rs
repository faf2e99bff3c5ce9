//! A transport that takes as long as a network of machines would.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::bandwidth::Bandwidth;
use zf_core::registry::{Build, BuildContext, Wrap, setting};
use zf_core::slots;
use zf_core::stage::{Collective, Fabric, Group, Request, Ticket, Transport};

use super::Wrapped;
use super::deferring::Deferring;
use crate::counting::ring_bytes;

/// Settings of the wrapper `modelled`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelledConfig {
    /// Links between ranks of one node.
    pub intra: Tier,
    /// Links between nodes.
    pub inter: Tier,
    /// Consecutive ranks that make a node, in place of what the transport says (`transport.ranks_per_node`); also what the
    /// scope `"node"` means then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub ranks_per_node: Option<usize>,
}

/// One kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// Bytes a second in each direction: `"50GB/s"`.
    pub bandwidth: Bandwidth,
    /// The time until the first byte arrives: `"5us"`.
    #[serde(with = "zf_core::duration")]
    #[schemars(with = "String")]
    pub latency: Duration,
}

impl ModelledConfig {
    /// `fabric` with the speed of the model.
    ///
    /// # Errors
    /// A number of ranks per node that does not divide the world.
    pub fn around(&self, fabric: Arc<dyn Fabric>) -> anyhow::Result<Arc<dyn Fabric>> {
        let (world, node) = (fabric.world(), self.ranks_per_node.unwrap_or(fabric.ranks_per_node()));
        if node == 0 || !world.is_multiple_of(node) {
            let message = format!("expected a number that divides the {world} ranks, found {node}");
            return Err(setting("ranks_per_node", message));
        }
        let tiers = [self.intra, self.inter];
        let with = move |_, inner| Box::new(Modelled::new(inner, tiers, node)) as Box<dyn Transport>;
        Ok(Arc::new(Wrapped { fabric, ranks_per_node: node, with }))
    }
}

impl Build<slots::TransportWrap> for ModelledConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Transport>> {
        Ok(Box::new(move |fabric| self.around(fabric)))
    }
}

zf_core::register!(
    slots::TransportWrap,
    "modelled",
    ModelledConfig,
    "takes as long as links of a given latency and bandwidth inside and between nodes would",
    "[transport]\nranks = 4\nwrap = [{ kind = \"modelled\", ranks_per_node = 2, \
     intra = { bandwidth = \"50GB/s\", latency = \"5us\" }, inter = { bandwidth = \"12.5GB/s\", latency = \"20us\" } }]"
);

/// Completes every collective no earlier than a ring over modelled links would, so that large worlds are tested on one
/// machine.
///
/// The members of a group form a ring in their order. A collective takes, on each tier that a link of its ring belongs to,
/// latency + bytes / bandwidth, with the bytes of the member that sends most ([`CommBytes`](zf_core::stage::CommBytes) has the
/// formulas); the slowest tier counts. A rank has one link a tier, on which its collectives queue behind each other;
/// latencies overlap. What the transport within takes comes on top where it is longer. It is a bound, not a simulation:
/// latency is paid once and not at each of a ring's steps, and ranks of one node do not share the link to others.
pub struct Modelled {
    inner: Deferring,
    tiers: [Tier; 2],
    ranks_per_node: usize,
    /// Until when this rank's links are taken, by tier.
    taken: Arc<Mutex<[Option<Instant>; 2]>>,
}

impl Modelled {
    /// Slows `inner` down to links inside and between nodes of so many consecutive ranks, at least 1.
    pub fn new(inner: Box<dyn Transport>, [intra, inter]: [Tier; 2], ranks_per_node: usize) -> Self {
        let ranks_per_node = ranks_per_node.max(1);
        Self { inner: Deferring::new(inner), tiers: [intra, inter], ranks_per_node, taken: Arc::default() }
    }

    /// Whether the ring of `group` has links inside nodes, and between nodes.
    fn used(&self, group: &Group) -> [bool; 2] {
        let node = |rank: &usize| rank / self.ranks_per_node;
        let (ranks, mut used) = (group.ranks(), [false; 2]);
        for (from, to) in ranks.iter().zip(ranks.iter().cycle().skip(1)).filter(|(from, to)| from != to) {
            used[usize::from(node(from) != node(to))] = true;
        }
        used
    }
}

impl Transport for Modelled {
    pass_on!();

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let used = self.used(&request.group);
        if used == [false; 2] {
            return self.inner.issue(request);
        }
        let bytes = busiest(&request, self.inner.rank());
        let (tiers, taken) = (self.tiers, Arc::clone(&self.taken));
        self.inner.defer(request, move |completed| {
            let mut taken = taken.lock();
            let mut end = completed;
            for (tier, taken) in tiers.iter().zip(taken.iter_mut()).zip(used).filter(|(_, used)| *used).map(|(t, _)| t)
            {
                let start = taken.map_or(completed, |taken| taken.max(completed));
                let sent = start + tier.bandwidth.time(bytes);
                *taken = Some(sent);
                end = end.max(sent + tier.latency);
            }
            end
        })
    }
}

/// The bytes of the member of a ring that sends most, as far as `rank` knows them: what others bring to an all-to-all or an
/// exchange it does not.
fn busiest(request: &Request, rank: usize) -> u64 {
    let size = request.group.size();
    let bytes = |member| ring_bytes(&request.collective, member, size);
    match &request.collective {
        Collective::AllToAll { .. } | Collective::Exchange { .. } => request.group.index(rank).map_or(0, bytes),
        _ => (0..size).map(bytes).max().unwrap_or(0),
    }
}
