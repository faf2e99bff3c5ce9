//! A transport that breaks at a chosen moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Signal, getpid, kill_process};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::registry::{Build, BuildContext, Wrap, setting};
use zf_core::slots;
use zf_core::stage::{Fabric, Request, Ticket, TicketState, Transport};
use zf_core::{Error, Result};

use super::wrap;

/// Settings of the wrapper `failing`: one rank, and one of `issue` and `wait`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FailingConfig {
    /// The rank that fails.
    #[serde(default)]
    pub rank: usize,
    /// Which collective it cannot issue, counted from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issue: Option<u64>,
    /// Which wait for a collective fails, counted from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<u64>,
    /// How it fails.
    #[serde(default)]
    pub how: How,
    /// What the error or panic says.
    #[serde(default = "message")]
    pub message: String,
}

/// How a rank fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// With an error.
    #[default]
    Error,
    /// With a panic.
    Panic,
    /// Its whole process is killed (SIGKILL), as by a system out of memory. Ranks that are threads cannot fail so.
    Kill,
    /// Its whole process is stopped (SIGSTOP), as a machine that hangs. Ranks that are threads cannot fail so.
    Stop,
}

impl How {
    /// Fails.
    fn now(self, message: &str) -> Error {
        let signal = match self {
            Self::Error => return Error::comm(message),
            Self::Panic => std::panic::panic_any(message.to_owned()),
            Self::Kill => Signal::KILL,
            Self::Stop => Signal::STOP,
        };
        match kill_process(getpid(), signal) {
            // A stopped process that is woken up goes on, and fails then.
            Ok(()) => Error::comm(message),
            Err(error) => Error::comm(format!("{message}, and no signal could be sent: {error}")),
        }
    }
}

fn message() -> String {
    "the transport fails as it was told to".into()
}

impl FailingConfig {
    /// `fabric` with one rank that fails.
    ///
    /// # Errors
    /// Both or neither of `issue` and `wait`; a rank that does not exist.
    pub fn around(&self, fabric: Arc<dyn Fabric>) -> anyhow::Result<Arc<dyn Fabric>> {
        let when = match (self.issue, self.wait) {
            (Some(number), None) => When::Issue(number),
            (None, Some(number)) => When::Wait(number),
            (Some(_), Some(_)) => return Err(setting("wait", "a rank fails once; give one of `issue` and `wait`")),
            (None, None) => {
                return Err(setting("issue", "expected the number of a call; give one of `issue` and `wait`"));
            }
        };
        let (fails, world) = (self.rank, fabric.world());
        if fails >= world {
            return Err(setting("rank", format!("expected a rank below {world}, found {fails}")));
        }
        if matches!(self.how, How::Kill | How::Stop) && fabric.local_ranks().len() > 1 {
            return Err(setting(
                "how",
                "\"kill\" and \"stop\" end a whole process, and all ranks are in this one; use kind = \"c10d\"",
            ));
        }
        let (how, message) = (self.how, self.message.clone());
        Ok(wrap(fabric, move |rank, inner| match rank == fails {
            true => Box::new(Failing::new(inner, when, &message).by(how)),
            false => inner,
        }))
    }
}

impl Build<slots::TransportWrap> for FailingConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Transport>> {
        Ok(Box::new(move |fabric| self.around(fabric)))
    }
}

zf_core::register!(
    slots::TransportWrap,
    "failing",
    FailingConfig,
    "one rank fails at a chosen call, and the others must end with its name",
    "[transport]\nranks = 2\nwrap = [{ kind = \"failing\", rank = 1, issue = 5 }]"
);

/// The moment, counted from 0 over the life of the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// This call of `issue` fails, and the other ranks are left waiting.
    Issue(u64),
    /// This wait for a ticket fails, although the collective within completed.
    Wait(u64),
}

/// Fails once, with an error of a given message unless told otherwise. The other ranks learn nothing of it: telling them is up to the caller.
pub struct Failing {
    inner: Box<dyn Transport>,
    when: When,
    how: How,
    message: Arc<str>,
    issued: u64,
    waited: Arc<AtomicU64>,
}

impl Failing {
    /// Fails at `when` with `message`.
    pub fn new(inner: Box<dyn Transport>, when: When, message: &str) -> Self {
        Self { inner, when, how: How::Error, message: message.into(), issued: 0, waited: Arc::default() }
    }

    /// The same in another way.
    #[must_use]
    pub fn by(mut self, how: How) -> Self {
        self.how = how;
        self
    }
}

impl Transport for Failing {
    pass_on!();

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let number = self.issued;
        self.issued += 1;
        if self.when == When::Issue(number) {
            return Err(self.how.now(&self.message));
        }
        let ticket = self.inner.issue(request)?;
        Ok(match self.when {
            When::Issue(_) => ticket,
            When::Wait(fails) => Ticket::new(Box::new(Fragile {
                ticket,
                fails,
                waited: Arc::clone(&self.waited),
                how: self.how,
                message: Arc::clone(&self.message),
            })),
        })
    }
}

struct Fragile {
    ticket: Ticket,
    fails: u64,
    waited: Arc<AtomicU64>,
    how: How,
    message: Arc<str>,
}

impl TicketState for Fragile {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        let number = self.waited.fetch_add(1, Ordering::Relaxed);
        // Waits in any case: the tensors are in use until then.
        let result = self.ticket.bytes();
        if number == self.fails { Err(self.how.now(&self.message)) } else { result }
    }

    fn is_done(&self) -> bool {
        self.ticket.is_done()
    }
}
