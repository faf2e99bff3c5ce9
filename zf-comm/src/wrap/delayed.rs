//! A transport over a link of high latency.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::registry::{Build, BuildContext, Wrap};
use zf_core::slots;
use zf_core::stage::{Collective, Request, Ticket, Transport};

use super::deferring::Deferring;
use super::wrap;

/// Settings of the wrapper `delayed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DelayedConfig {
    /// How much later each collective of tensors completes: `"2ms"`, `"50us"`.
    #[serde(with = "zf_core::duration")]
    #[schemars(with = "String")]
    pub latency: Duration,
}

impl Build<slots::TransportWrap> for DelayedConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Transport>> {
        Ok(Box::new(move |fabric| Ok(wrap(fabric, move |_, inner| Box::new(Delayed::new(inner, self.latency))))))
    }
}

zf_core::register!(
    slots::TransportWrap,
    "delayed",
    DelayedConfig,
    "completes every collective of tensors later by a fixed time, without holding up the rank",
    "[transport]\nwrap = [{ kind = \"delayed\", latency = \"2ms\" }]"
);

/// Completes every collective of tensors `delay` later than the transport within: latency, not bandwidth, so that ten
/// collectives issued at once are all one delay late. Exchanges of a few bytes pass as they are.
pub struct Delayed {
    inner: Deferring,
    delay: Duration,
}

impl Delayed {
    /// Delays what `inner` completes.
    pub fn new(inner: Box<dyn Transport>, delay: Duration) -> Self {
        Self { inner: Deferring::new(inner), delay }
    }
}

impl Transport for Delayed {
    pass_on!();

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        if matches!(request.collective, Collective::Exchange { .. }) {
            return self.inner.issue(request);
        }
        let delay = self.delay;
        self.inner.defer(request, move |completed| completed + delay)
    }
}
