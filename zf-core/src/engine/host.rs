//! The host side of one rank's device: its memory, and the link to it.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use tch::{Kind, Tensor};
use zf_sys::heap::{Category, Heap, tag};

use super::options::{EngineOptions, Stages};
use crate::layout::{Flat, Layout};
use crate::stage::{Arrived, Keeps, Link, OffloadPolicy, ParametersOn, Transfer, Transport, Way};
use crate::{Error, Result};

/// How long the link may take for the parameters of one unit.
const PATIENCE: Duration = Duration::from_secs(600);

/// Host memory of one rank.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) link: Arc<dyn Link>,
    /// In which host memory is booked.
    pub(crate) heap: Heap,
    /// Where parameters lie.
    pub(crate) parameters: ParametersOn,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("parameters", &self.parameters).finish_non_exhaustive()
    }
}

impl Host {
    /// The host side, where anything is kept there.
    pub(crate) fn open(stages: &Stages, options: &EngineOptions, transport: &dyn Transport) -> Result<Option<Self>> {
        let (Some(offload), Some(policy)) = (&stages.offload, stages.offload_policy()) else { return Ok(None) };
        let rank = transport.rank();
        let link = offload.links.open(rank, options.device, &options.host_cores, &options.trace)?;
        let heap = Heap::new(format!("host of rank {rank}"))?;
        Ok(Some(Self { link, heap, parameters: policy.parameters }))
    }

    /// Zeros in host memory, `[numel]`, from which the link is fast.
    pub(crate) fn zeros(&self, category: Category, numel: usize, kind: Kind) -> Result<Tensor> {
        let _host = self.heap.enter();
        let _tag = tag(category);
        Ok(self.link.host_memory(numel, kind)?.f_zero_()?)
    }

    /// Starts to copy `from` in host memory to `to` on the device.
    pub(crate) fn fetch(&self, from: Tensor, to: Tensor) -> Result<Fetch> {
        let (sender, done) = bounded(1);
        // Whoever waits may have given up.
        let inform = Box::new(move |result: Result<Arrived>| drop(sender.send(result.map(drop))));
        let label = "parameters".into();
        self.link.issue(Transfer { way: Way::ToDevice, from, to, label, moves: false, done: inform })?;
        Ok(Fetch { done })
    }
}

impl OffloadPolicy {
    /// Refuses layouts whose parameters cannot lie where this wants them.
    ///
    /// # Errors
    /// [`Error::Config`]: parameters in host memory that are updated on the device, or by another rank.
    pub fn suits(&self, layout: &Layout) -> Result<()> {
        if self.parameters == ParametersOn::Device {
            return Ok(());
        }
        if self.keeps != Keeps::Nothing {
            return Err(Error::Config(
                "`offload`: with columns that are updated on the device, parameters have to lie there too".into(),
            ));
        }
        let apart = |flat: &&Flat| flat.trainable && flat.params.group() < flat.optim.group();
        match layout.flats.iter().find(apart) {
            None => Ok(()),
            Some(flat) => Err(Error::Config(format!(
                "`offload.parameters = \"host\"`: states are split over {} ranks and parameters over {}, so that updated \
                 parameters would have to go from host to host; split both alike, with `partition.stage = 3` without \
                 `persist_below`, or `partition.stage = 0`",
                flat.optim.group(),
                flat.params.group()
            ))),
        }
    }
}

/// Values on their way from host memory.
pub(crate) struct Fetch {
    done: Receiver<Result<()>>,
}

impl Fetch {
    /// Whether they are there, or will not come.
    pub(crate) fn is_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Waits for them.
    pub(crate) fn wait(self) -> Result<()> {
        self.done
            .recv_timeout(PATIENCE)
            .map_err(|_| Error::Engine(format!("the link did not bring parameters within {} s", PATIENCE.as_secs())))?
    }
}
