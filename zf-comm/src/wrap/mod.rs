//! Transports around another transport: what they add is seen by the layer above, and the layer below knows nothing.

mod counted;
mod delayed;
mod failing;

use std::sync::Arc;
use std::time::Duration;

use zf_core::Result;
use zf_core::stage::{Fabric, Transport};

pub use counted::{Counted, Log, Record};
pub use delayed::Delayed;
pub use failing::{Failing, When};

/// A fabric whose ranks are connected through `with`, which gets the rank and its connection.
pub fn wrap(
    fabric: Arc<dyn Fabric>,
    with: impl Fn(usize, Box<dyn Transport>) -> Box<dyn Transport> + Send + Sync + 'static,
) -> Arc<dyn Fabric> {
    Arc::new(Wrapped { fabric, with })
}

struct Wrapped<F> {
    fabric: Arc<dyn Fabric>,
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
}
