//! A transport without overlap.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::registry::{Build, BuildContext, Wrap};
use zf_core::slots;
use zf_core::stage::{Collective, Request, Ticket, TicketState, Transport};

use super::wrap;

/// Settings of the wrapper `blocking`: none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockingConfig {}

impl Build<slots::TransportWrap> for BlockingConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Transport>> {
        Ok(Box::new(|fabric| Ok(wrap(fabric, |_, inner| Box::new(Blocking::new(inner))))))
    }
}

zf_core::register!(
    slots::TransportWrap,
    "blocking",
    BlockingConfig,
    "completes every collective of tensors before the rank goes on: no overlap of communication and computation",
    "[transport]\nwrap = [{ kind = \"blocking\" }]"
);

/// Completes every collective of tensors before `issue` returns. Exchanges of a few bytes pass as they are.
///
/// Ranks may issue collectives of different groups or channels in different orders, and a transport completes them all the
/// same. This one does not: two ranks of which each waits for what the other has yet to issue end with the timeout.
pub struct Blocking {
    inner: Box<dyn Transport>,
}

impl Blocking {
    /// Waits for what `inner` is asked for.
    pub fn new(inner: Box<dyn Transport>) -> Self {
        Self { inner }
    }
}

impl Transport for Blocking {
    pass_on!();

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let small = matches!(request.collective, Collective::Exchange { .. });
        let ticket = self.inner.issue(request)?;
        if small { Ok(ticket) } else { Ok(Ticket::new(Box::new(Complete(ticket.bytes()?)))) }
    }
}

/// A collective that was complete when its ticket was made.
struct Complete(Vec<Vec<u8>>);

impl TicketState for Complete {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        Ok(self.0)
    }

    fn is_done(&self) -> bool {
        true
    }
}
