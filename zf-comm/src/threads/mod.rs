//! Ranks as threads of one process, exchanging tensors through shared memory without copies between.

mod hub;
mod meeting;
mod parts;
mod transport;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::stage::{Fabric, Transport};
use zf_core::{Error, Result};

use hub::Hub;
use transport::ThreadsTransport;
pub(crate) use transport::{Done, check_group, list, seconds};

/// Each rank has two threads.
const MOST_RANKS: usize = 1024;

/// Settings of the `threads` transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ThreadsConfig {
    /// Number of ranks, each a thread of this process.
    pub ranks: usize,
    /// How long a rank waits for a collective before the run ends with the name of the missing rank: `"60s"`,
    /// `"500ms"`, `"2m"`.
    #[serde(with = "zf_core::duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Consecutive ranks that the scope `"node"` and models of links take for one machine; must divide `ranks`. All, unless
    /// given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub ranks_per_node: Option<usize>,
}

impl Default for ThreadsConfig {
    fn default() -> Self {
        Self { ranks: 1, timeout: Duration::from_secs(60), ranks_per_node: None }
    }
}

impl ThreadsConfig {
    /// Whether the settings fit together.
    ///
    /// # Errors
    /// The key that is wrong and what was expected: between 1 and 1024 ranks, on machines of equally many.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let ranks = self.ranks;
        if !(1..=MOST_RANKS).contains(&ranks) {
            return Err(("ranks", format!("expected 1 to {MOST_RANKS} ranks in one process, found {ranks}")));
        }
        match self.ranks_per_node {
            Some(node) if node == 0 || !ranks.is_multiple_of(node) => {
                let message = format!("expected a number that divides ranks = {ranks}, found {node}");
                Err(("ranks_per_node", message))
            }
            _ => Ok(()),
        }
    }
}

/// All ranks of a run in one process. Cloning gives another handle of the same ranks.
///
/// A collective starts when the last member has issued it and the one before it in its group is complete. Each member's
/// part then runs on that rank's own thread (`comm-<rank>`), which reads the other members' tensors where they lie.
/// Groups do not wait for each other.
#[derive(Clone)]
pub struct Threads {
    hub: Arc<Hub>,
    ranks_per_node: usize,
}

impl Threads {
    /// Ranks that nobody has connected yet.
    ///
    /// # Errors
    /// [`Error::Config`]: settings that [`ThreadsConfig::check`] refuses.
    pub fn new(config: &ThreadsConfig) -> Result<Self> {
        config.check().map_err(|(key, message)| Error::Config(format!("transport.{key}: {message}")))?;
        let ranks_per_node = config.ranks_per_node.unwrap_or(config.ranks);
        Ok(Self { hub: Arc::new(Hub::new(config.ranks, config.timeout)), ranks_per_node })
    }
}

impl Fabric for Threads {
    fn world(&self) -> usize {
        self.hub.seats.len()
    }

    fn local_ranks(&self) -> Vec<usize> {
        (0..self.world()).collect()
    }

    fn connect(&self, rank: usize) -> Result<Box<dyn Transport>> {
        Ok(Box::new(ThreadsTransport::connect(Arc::clone(&self.hub), rank)?))
    }

    fn timeout(&self) -> Duration {
        self.hub.timeout
    }

    fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("ranks", &self.world()).field("timeout", &self.hub.timeout).finish()
    }
}
