//! Transports around another transport: what they add is seen by the layer above, and the layer below knows nothing.
//!
//! All but [`Counted`] can be listed in a run file, `[transport] wrap = [{ kind = "delayed", latency = "2ms" }]`, from the
//! inside out, around any transport.

/// The methods of a [`Transport`] that a wrapper with a field `inner` passes on: all but `issue`.
macro_rules! pass_on {
    () => {
        fn rank(&self) -> usize {
            self.inner.rank()
        }

        fn world(&self) -> usize {
            self.inner.world()
        }

        fn bytes(&self) -> zf_core::stage::CommBytes {
            self.inner.bytes()
        }

        fn record(&mut self, trace: &zf_core::trace::Trace) {
            self.inner.record(trace);
        }

        fn abort(&self, reason: &str) {
            self.inner.abort(reason);
        }
    };
}

mod blocking;
mod counted;
mod deferring;
mod delayed;
mod failing;
mod modelled;
mod reordering;

use std::sync::Arc;
use std::time::Duration;

use zf_core::Result;
use zf_core::stage::{Fabric, Transport};

pub use blocking::{Blocking, BlockingConfig};
pub use counted::{Counted, Log, Record};
pub use delayed::{Delayed, DelayedConfig};
pub use failing::{Failing, FailingConfig, How, When};
pub use modelled::{Modelled, ModelledConfig, Tier};
pub use reordering::{Reordering, ReorderingConfig};

/// A fabric whose ranks are connected through `with`, which gets the rank and its connection.
pub fn wrap(
    fabric: Arc<dyn Fabric>,
    with: impl Fn(usize, Box<dyn Transport>) -> Box<dyn Transport> + Send + Sync + 'static,
) -> Arc<dyn Fabric> {
    let ranks_per_node = fabric.ranks_per_node();
    Arc::new(Wrapped { fabric, ranks_per_node, with })
}

struct Wrapped<F> {
    fabric: Arc<dyn Fabric>,
    ranks_per_node: usize,
    with: F,
}

impl<F> Fabric for Wrapped<F>
where
    F: Fn(usize, Box<dyn Transport>) -> Box<dyn Transport> + Send + Sync,
{
    fn world(&self) -> usize {
        self.fabric.world()
    }

    fn local_ranks(&self) -> Vec<usize> {
        self.fabric.local_ranks()
    }

    fn connect(&self, rank: usize) -> Result<Box<dyn Transport>> {
        Ok((self.with)(rank, self.fabric.connect(rank)?))
    }

    fn timeout(&self) -> Duration {
        self.fabric.timeout()
    }

    fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }

    fn agree(&self, said: Vec<u8>) -> Result<Vec<u8>> {
        self.fabric.agree(said)
    }
}
