//! Which states leave the device, when they are updated, and when the update becomes visible.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};
use zf_sys::heap::Heap;

use super::{Hyper, Link, Optimizer, TierBytes};
use crate::Result;
use crate::config::HostSection;
use crate::layout::DType;
use crate::trace::Trace;

/// Which states stay on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// None: all masters and moments lie with the host (ZeRO-Offload).
    Nothing,
    /// Those of the columns that the selector chooses, and of parameters that have no columns (ZenFlow).
    Chosen,
}

/// When updates of the host's part are made and become visible. See [`OffloadPolicy`].
#[derive(Debug, Clone, PartialEq)]
pub enum Interval {
    /// After so many updates of the chosen part, at least 1 (S).
    Fixed(u64),
    /// Decided while running, from measured times; 4 at first.
    Auto {
        /// No longer than this.
        at_most: u64,
        /// Nor longer than the gradient rule allows: until the mean absolute accumulated gradient of what is not chosen reaches
        /// the running mean of what is, both per element.
        gradient_rule: bool,
    },
    /// Decisions of an earlier run.
    Replay(Vec<Decision>),
}

/// A decision about the interval, effective from an update on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Number of the update, from the end of warm-up: the first of a window.
    pub update: u64,
    /// Updates in a window from there on.
    pub interval: u64,
    /// Whether columns were chosen again at this update.
    pub choose: bool,
}

/// When a column that has a pending update and becomes chosen sees that update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Promotion {
    /// First of all.
    #[default]
    Flush,
    /// When it would have become visible.
    Late,
}

/// Where the gradients of a window are added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AccumulateOn {
    /// In host memory: gradients cross the link in every step.
    Host,
    /// On the device: they cross it once a window.
    Device,
    /// On the device where its memory is known to allow it.
    #[default]
    Auto,
}

/// Where the parameters lie that forward and backward read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ParametersOn {
    /// On the device.
    #[default]
    Device,
    /// In host memory: those of a unit cross the link before each of its passes and are freed after it.
    Host,
}

/// Type of gradients and parameters on the link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// Parameters in the model's type; gradients in bfloat16 where that has 16 bits, else float32.
    #[default]
    Model,
    /// float32, as exact mode needs.
    Float32,
}

/// What the engine has to know of an offload.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadPolicy {
    /// Which states stay.
    pub keeps: Keeps,
    /// How many updates of the chosen part make one of the host's part.
    pub interval: Interval,
    /// Whether an update becomes visible one window later, instead of at once.
    pub asynchronous: bool,
    /// What happens to pending updates of columns that become chosen.
    pub promotion: Promotion,
    /// Updates at the start in which everything goes the host's way, each visible at once.
    pub warmup: u64,
    /// Types on the link.
    pub wire: Wire,
    /// Where a window's gradients are added up.
    pub accumulate: AccumulateOn,
    /// Where parameters lie. Host memory needs [`Keeps::Nothing`].
    pub parameters: ParametersOn,
    /// Bytes of one staging buffer on the device.
    pub buffer_bytes: usize,
    /// Staging buffers in each direction, at least 2.
    pub buffers: usize,
    /// Whether the learning rate of an update is the mean over its window, instead of that of its last step.
    pub mean_lr: bool,
    /// Whether weights of three and more dimensions are taken as 2-D, with the first as output; else they stay on the device.
    pub fold: bool,
}

/// Where one rank's host part is to live and work.
pub struct Site {
    /// The rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Its device.
    pub device: Device,
    /// The link of that device.
    pub link: Arc<dyn Link>,
    /// The rule.
    pub optimizer: Arc<dyn Optimizer>,
    /// `[host]`.
    pub host: HostSection,
    /// Cores for host work; empty: any.
    pub cores: Vec<usize>,
    /// Where files may be made.
    pub folder: PathBuf,
    /// Whether [`HostWork::absolute`] is wanted.
    pub measures: bool,
    /// Books host memory.
    pub heap: Heap,
    /// Records what workers do.
    pub trace: Trace,
    /// Elements of each buffer.
    pub lens: Vec<usize>,
    /// By buffer: type of updated parameters on the link.
    pub out: Vec<DType>,
    /// Memory in which updated parameters land, where they lie: tensors of `staging_bytes` bytes each.
    pub landing: Vec<Tensor>,
    /// Where parameters lie. In host memory they do not cross the link when they were updated.
    pub parameters: ParametersOn,
    /// Bytes of a staging buffer; a multiple of 8.
    pub staging_bytes: usize,
    /// By buffer: type of gradients on the link, float32 or bfloat16.
    pub wire: Vec<Kind>,
}

/// A part of a buffer whose elements are updated alike.
#[derive(Debug, Clone, PartialEq)]
pub struct HostPart {
    /// Which buffer.
    pub buffer: usize,
    /// Which of its elements.
    pub range: Range<usize>,
    /// The numbers of the update. None: the elements are sent as they are.
    pub hyper: Option<Hyper>,
}

/// An update of the host's part.
#[derive(Debug, Clone, PartialEq)]
pub struct HostUpdate {
    /// Its window; the gradients that landed with this number are its own.
    pub window: u64,
    /// What is updated, in the order in which the results are wanted.
    pub parts: Vec<HostPart>,
    /// How many [`Landing`]s there are of this window.
    pub landings: u64,
    /// Whether to wait for [`HostPool::go`] before it begins.
    pub hold: bool,
}

/// A piece of gradient that has arrived in host memory.
#[derive(Debug)]
pub struct Landing {
    /// The window to which it belongs.
    pub window: u64,
    /// Which buffer.
    pub buffer: usize,
    /// Which elements, one range after the other.
    pub ranges: Vec<Range<usize>>,
    /// Their values from the front, as raw bytes; there may be more room.
    pub values: Tensor,
    /// They are multiplied by this.
    pub scale: f32,
    /// Whether they replace what was added up, instead of being added.
    pub replace: bool,
}

/// Updated parameters that have arrived where parameters lie.
#[derive(Debug)]
pub struct Output {
    /// Which buffer.
    pub buffer: usize,
    /// Which elements, one range after the other.
    pub ranges: Vec<Range<usize>>,
    /// Their values from the front, as raw bytes; a tensor of [`Site::landing`], to be given back with [`HostPool::recycle`].
    pub values: Tensor,
}

/// Elements of one buffer that leave the host's part for the device.
#[derive(Debug)]
pub struct Take {
    /// Which buffer.
    pub buffer: usize,
    /// Which elements, in column order.
    pub ranges: Vec<Range<usize>>,
    /// Whether the gradients of a pending update come along instead of being applied first. That update must have been held, and
    /// has to stay so until the elements have arrived.
    pub late: bool,
    /// Device memory for what comes, float32, 1-D: an element has its master, its states, and its gradient if `late`.
    pub into: Tensor,
}

/// Elements that have left the host's part and arrived on the device.
#[derive(Debug)]
pub struct Taken {
    /// Which buffer.
    pub buffer: usize,
    /// [`Take::into`]: all masters, then all of the first state, and so on; last the pending gradients.
    pub values: Tensor,
    /// Elements of the pending update whose output will not come, since they were taken before it was made.
    pub withdrawn: usize,
}

/// What the host did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostWork {
    /// Seconds of updating.
    pub updating: f64,
    /// Seconds of adding gradients up.
    pub adding: f64,
    /// Elements updated.
    pub elements: u64,
    /// Sum of the absolute gradients, summed over their windows, of all elements updated.
    pub absolute: f64,
    /// Bytes that it holds.
    pub bytes: TierBytes,
}

/// Masters and states of one rank that are not on its device, with those who update them. Buffers are in the order of the
/// engine's flat buffers; elements of a buffer are ordered column by column.
///
/// Every call that waits ends with an error when a worker has failed.
pub trait HostPool: Send {
    /// Takes landed gradients; to be called by links, from any thread.
    fn inlet(&self) -> Arc<dyn Fn(Result<Landing>) + Send + Sync>;

    /// Host memory for a landing, [`Site::staging_bytes`] bytes, if some is free; waits for it if `wait`.
    ///
    /// # Errors
    /// A worker that has failed.
    fn landing_memory(&mut self, wait: bool) -> Result<Option<Tensor>>;

    /// Starts an update, after those before it.
    ///
    /// # Errors
    /// A worker that has failed.
    fn update(&mut self, update: HostUpdate) -> Result<()>;

    /// Lets an update that was held begin.
    ///
    /// # Errors
    /// A worker that has failed.
    fn go(&mut self) -> Result<()>;

    /// Waits for the next output, in the order of the updates' parts.
    ///
    /// # Errors
    /// A worker or link that has failed.
    fn output(&mut self) -> Result<Output>;

    /// Gives the tensor of an output back.
    fn recycle(&mut self, values: Tensor);

    /// Has elements taken out and sent to the device; returns at once. The updates that were submitted before are applied to
    /// them first, the last one out of its turn, unless [`Take::late`].
    ///
    /// # Errors
    /// A worker that has failed.
    fn take(&mut self, take: Take) -> Result<()>;

    /// Waits for the next elements that were taken, in the order of the calls.
    ///
    /// # Errors
    /// A worker or link that has failed.
    fn taken(&mut self) -> Result<Taken>;

    /// Puts elements in, `values` as in [`Taken`] without gradients, once they have arrived; to be called before the update
    /// that follows. The returned function takes the values, from any thread.
    ///
    /// # Errors
    /// A worker that has failed.
    fn give(&mut self, elements: Vec<(usize, Vec<Range<usize>>)>) -> Result<Box<dyn FnOnce(Result<Tensor>) + Send>>;

    /// Waits until all updates that were not held are made.
    ///
    /// # Errors
    /// A worker that has failed.
    fn settle(&mut self) -> Result<()>;

    /// Copies `array` (0: masters, then the states) of a range into `out`.
    ///
    /// # Errors
    /// A worker that has failed.
    fn read(&mut self, buffer: usize, array: usize, range: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// Replaces `array` of a range.
    ///
    /// # Errors
    /// A worker that has failed.
    fn write(&mut self, buffer: usize, array: usize, range: Range<usize>, values: &[f32]) -> Result<()>;

    /// The gradients of `window` that were added up so far, of all elements of a buffer.
    ///
    /// # Errors
    /// A worker that has failed.
    fn sums(&mut self, window: u64, landings: u64, buffer: usize) -> Result<Vec<f32>>;

    /// Replaces them.
    ///
    /// # Errors
    /// A worker that has failed.
    fn set_sums(&mut self, window: u64, buffer: usize, values: Vec<f32>) -> Result<()>;

    /// What was done so far.
    fn work(&self) -> HostWork;

    /// What a person should know at the start, such as how files are read.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// What `[offload]` builds.
pub trait Offload: std::fmt::Debug + Send + Sync {
    /// What the engine has to know; none: everything stays on the device.
    fn policy(&self) -> Option<OffloadPolicy>;

    /// What [`Offload::open`] will take for `arrays` float32 arrays (master and states) of buffers with so many elements, gradients
    /// and parameters on their way apart. By default all of it is host memory.
    fn tier_bytes(&self, lens: &[usize], arrays: usize) -> TierBytes {
        TierBytes::in_memory(lens, arrays)
    }

    /// Opens the host part of one rank.
    ///
    /// # Errors
    /// No memory, no room for files, cores that do not exist.
    fn open(&self, site: Site) -> Result<Box<dyn HostPool>>;
}

impl std::fmt::Debug for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Site").field("rank", &self.rank).finish_non_exhaustive()
    }
}
