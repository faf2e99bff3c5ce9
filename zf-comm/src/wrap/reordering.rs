//! A transport on which collectives of different groups overtake each other.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::random::{Stream, uniform_into};
use zf_core::registry::{Build, BuildContext, Wrap};
use zf_core::slots;
use zf_core::stage::{Request, Ticket, Transport};

use super::deferring::Deferring;
use super::wrap;

/// Settings of the wrapper `reordering`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReorderingConfig {
    /// Which order.
    pub seed: u64,
    /// How long a collective is held back at most: `"2ms"`.
    #[serde(with = "zf_core::duration")]
    #[schemars(with = "String")]
    pub window: Duration,
}

impl Default for ReorderingConfig {
    fn default() -> Self {
        Self { seed: 1, window: Duration::from_millis(2) }
    }
}

impl Build<slots::TransportWrap> for ReorderingConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Transport>> {
        Ok(Box::new(move |fabric| Ok(wrap(fabric, move |_, inner| Box::new(Reordering::new(inner, &self))))))
    }
}

zf_core::register!(
    slots::TransportWrap,
    "reordering",
    ReorderingConfig,
    "completes collectives of different groups and channels in another order than they were completed",
    "[transport]\nwrap = [{ kind = \"reordering\", seed = 1, window = \"2ms\" }]"
);

/// Holds back every collective for a time between 0 and the window, which follows from the seed, the rank and the number of
/// the collective: so those of different groups and channels complete in another order than within, another one on each rank.
/// Those of one group keep theirs, as every transport promises. Exchanges are held back too.
///
/// A result that changes with the seed depends on who comes first, which none may.
pub struct Reordering {
    inner: Deferring,
    stream: Stream,
    window: Duration,
    issued: u64,
}

impl Reordering {
    /// Reorders what `inner` completes.
    pub fn new(inner: Box<dyn Transport>, config: &ReorderingConfig) -> Self {
        let stream = Stream::named(config.seed, "reordering").child(inner.rank() as u64);
        Self { inner: Deferring::new(inner), stream, window: config.window, issued: 0 }
    }
}

impl Transport for Reordering {
    pass_on!();

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let mut part = [0.0];
        uniform_into(&mut part, self.stream, self.issued, 0.0, 1.0);
        self.issued += 1;
        let held = self.window.mul_f32(part[0]);
        self.inner.defer(request, move |completed| completed + held)
    }
}
