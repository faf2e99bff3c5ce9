//! The slots of a run: what a run file chooses by name, each with the type that its stages build.
//!
//! A slot is a section of the run file. Stages for it are registered with [`crate::register!`], in this workspace or in
//! a crate of the user's own.

use std::sync::Arc;

use crate::registry::{DataBundle, ModelBundle, Slot, SlotInfo, Wrap};
use crate::stage;

/// Who owns which part of parameters, gradients and optimizer states: `[partition]`.
#[derive(Debug, Clone, Copy)]
pub enum Partition {}

impl Slot for Partition {
    const NAME: &'static str = "partition";
    const HELP: &'static str = "which rank owns which part of parameters, gradients and optimizer states";
    const DEFAULT: Option<&'static str> = Some("zero");
    type Stage = Arc<dyn stage::Partitioner>;
}

/// How ranks exchange tensors: `[transport]`.
#[derive(Debug, Clone, Copy)]
pub enum Transport {}

impl Slot for Transport {
    const NAME: &'static str = "transport";
    const HELP: &'static str = "how ranks exchange tensors";
    const DEFAULT: Option<&'static str> = Some("threads");
    const WRAP: Option<&'static str> = Some(TransportWrap::NAME);
    type Stage = Arc<dyn stage::Fabric>;
}

/// What goes around a transport: the list `wrap` of `[transport]`, from the inside out.
#[derive(Debug, Clone, Copy)]
pub enum TransportWrap {}

impl Slot for TransportWrap {
    const NAME: &'static str = "transport.wrap";
    const HELP: &'static str =
        "what goes around the transport, from the inside out, for tests of faults, orders and speeds";
    const DEFAULT: Option<&'static str> = None;
    type Stage = Wrap<Transport>;
}

/// The update rule: `[optim]`.
#[derive(Debug, Clone, Copy)]
pub enum Optim {}

impl Slot for Optim {
    const NAME: &'static str = "optim";
    const HELP: &'static str = "the update rule of the parameters";
    const DEFAULT: Option<&'static str> = Some("adamw");
    type Stage = Arc<dyn stage::Optimizer>;
}

/// The learning rate over time: `[schedule]`.
#[derive(Debug, Clone, Copy)]
pub enum Schedule {}

impl Slot for Schedule {
    const NAME: &'static str = "schedule";
    const HELP: &'static str = "the factor on the learning rate over time";
    const DEFAULT: Option<&'static str> = Some("constant");
    type Stage = Arc<dyn stage::Schedule>;
}

/// The model and where its initial values come from: `[model]`. Chosen by `arch`; without it a folder is read.
#[derive(Debug, Clone, Copy)]
pub enum Model {}

impl Slot for Model {
    const NAME: &'static str = "model";
    const HELP: &'static str = "the model and where its initial values come from";
    const KEY: &'static str = "arch";
    const DEFAULT: Option<&'static str> = Some("folder");
    type Stage = ModelBundle;
}

/// The sequences of tokens: `[data]`.
#[derive(Debug, Clone, Copy)]
pub enum Data {}

impl Slot for Data {
    const NAME: &'static str = "data";
    const HELP: &'static str = "the sequences of tokens to train on";
    const DEFAULT: Option<&'static str> = Some("text");
    type Stage = DataBundle;
}

/// Which columns of a weight are important: `[select]`.
#[derive(Debug, Clone, Copy)]
pub enum Select {}

impl Slot for Select {
    const NAME: &'static str = "select";
    const HELP: &'static str = "which columns of a weight are important, where an offload keeps those on the device";
    const DEFAULT: Option<&'static str> = Some("topk");
    const WRAP: Option<&'static str> = Some(SelectWrap::NAME);
    const IMPLIED: bool = false;
    const SERVES: Option<&'static str> = Some(Offload::NAME);
    type Stage = Box<dyn stage::Selector>;
}

/// What goes around a selector: the list `wrap` of `[select]`, from the inside out.
#[derive(Debug, Clone, Copy)]
pub enum SelectWrap {}

impl Slot for SelectWrap {
    const NAME: &'static str = "select.wrap";
    const HELP: &'static str = "what goes around the selector, from the inside out";
    const DEFAULT: Option<&'static str> = None;
    type Stage = Wrap<Select>;
}

/// How much an element matters: the key `score` of `[select]`.
#[derive(Debug, Clone, Copy)]
pub enum Score {}

impl Slot for Score {
    const NAME: &'static str = "select.score";
    const HELP: &'static str = "how much an element of a weight matters to a selector";
    const DEFAULT: Option<&'static str> = Some("l1");
    type Stage = Arc<dyn stage::Score>;
}

/// Which states leave the device, and when: `[offload]`.
#[derive(Debug, Clone, Copy)]
pub enum Offload {}

impl Slot for Offload {
    const NAME: &'static str = "offload";
    const HELP: &'static str = "which masters and optimizer states leave the device, and when they are updated";
    const DEFAULT: Option<&'static str> = Some("none");
    type Stage = Arc<dyn stage::Offload>;
}

/// The link between a device and its host: the key `link` of `[device]`.
#[derive(Debug, Clone, Copy)]
pub enum Link {}

impl Slot for Link {
    const NAME: &'static str = "device.link";
    const HELP: &'static str = "the link between a device and its host";
    const DEFAULT: Option<&'static str> = Some("emulated");
    type Stage = Arc<dyn stage::Links>;
}

/// Named fragments of run files, chosen by the key `preset`. Registered with [`crate::register_preset!`].
#[derive(Debug, Clone, Copy)]
pub enum Preset {}

impl Slot for Preset {
    const NAME: &'static str = "preset";
    const HELP: &'static str = "named sets of stages; any part can be overridden in the run file";
    const DEFAULT: Option<&'static str> = None;
    type Stage = toml::Table;
}

/// All slots of this version, in the order in which a run file lists them.
pub const ALL: &[SlotInfo] = &[
    SlotInfo::of::<Preset>(),
    SlotInfo::of::<Model>(),
    SlotInfo::of::<Data>(),
    SlotInfo::of::<Transport>(),
    SlotInfo::of::<TransportWrap>(),
    SlotInfo::of::<Partition>(),
    SlotInfo::of::<Select>(),
    SlotInfo::of::<SelectWrap>(),
    SlotInfo::of::<Score>(),
    SlotInfo::of::<Offload>(),
    SlotInfo::of::<Link>(),
    SlotInfo::of::<Optim>(),
    SlotInfo::of::<Schedule>(),
];
