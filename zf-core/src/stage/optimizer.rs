//! The update rule.

use half::{bf16, f16};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::Result;

/// What a rule must see at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Each element alone (AdamW, SGD, Lion).
    Elements,
    /// Each element, and this many sums over its whole tensor (LAMB).
    TensorSums(usize),
    /// Whole matrices (Muon).
    Matrices,
}

/// Settings of one parameter group, by name. The first rule that matches a parameter applies to it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupRule {
    /// Part of the parameter's name, or a pattern with `*` for any run of characters that must match the whole name.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Learning rate of the group, before the schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Weight decay of the group, whatever the dimensions of its parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Frozen parameters are not trained.
    #[serde(default)]
    pub frozen: bool,
}

/// What every rule has: base rate, decay, groups.
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerBase {
    /// Learning rate before the schedule.
    pub lr: f64,
    /// Weight decay of parameters with two or more dimensions, unless groups say otherwise.
    pub weight_decay: f64,
    /// Groups by name.
    pub groups: Vec<GroupRule>,
}

/// The numbers of one update of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// Learning rate, schedule included.
    pub lr: f64,
    /// Weight decay (decoupled where the rule decouples it).
    pub weight_decay: f64,
    /// Number of this update of the parameter, from 1 (bias correction).
    pub count: u64,
    /// The factor on the gradient: unscaling and clipping in one coefficient.
    pub grad_scale: f32,
}

/// Where the rounded parameter goes, beside the float32 master.
#[derive(Debug)]
pub enum Out<'a> {
    /// The master is the parameter.
    None,
    /// Rounded to nearest even.
    Bf16(&'a mut [bf16]),
    /// Rounded to nearest even.
    F16(&'a mut [f16]),
}

/// A range of one parameter in host memory. All slices have the same length.
#[derive(Debug)]
pub struct HostSlice<'a> {
    /// float32 masters, updated in place.
    pub master: &'a mut [f32],
    /// Accumulated gradient, to be multiplied by [`Hyper::grad_scale`].
    pub grad: &'a [f32],
    /// The rule's states in the order of [`Optimizer::state`], updated in place.
    pub state: Vec<&'a mut [f32]>,
    /// Receives the rounded master.
    pub out: Out<'a>,
    /// Sums over the whole tensor, for [`Needs::TensorSums`].
    pub sums: &'a [f64],
    /// Shape of the whole parameter, of which a rule with [`Needs::Matrices`] is given all elements.
    pub shape: &'a [i64],
}

/// The same range as 1-D float32 tensors of a device.
#[derive(Debug)]
pub struct TensorSlice<'a> {
    /// float32 masters, updated in place.
    pub master: &'a Tensor,
    /// Accumulated gradient, float32.
    pub grad: &'a Tensor,
    /// The rule's states in the order of [`Optimizer::state`], updated in place.
    pub state: &'a [Tensor],
    /// Receives the rounded master, where there is one.
    pub out: Option<&'a Tensor>,
    /// Sums over the whole tensor, for [`Needs::TensorSums`].
    pub sums: &'a [f64],
    /// Shape of the whole parameter, of which a rule with [`Needs::Matrices`] is given all elements.
    pub shape: &'a [i64],
}

/// One of the sums of [`Needs::TensorSums`], of which each rank adds the elements it owns.
pub trait SquareSums {
    /// Adds the squares of `values` to sum number `index`, without regard to where a range starts or ends: in exact mode
    /// the result does not depend on how a tensor is cut.
    fn add(&mut self, index: usize, values: &[f32]);
}

/// An update rule. It holds no state of its own: the engine owns masters and states and hands out ranges.
///
/// Host and device forms are the same sequence of single IEEE float32 operations (multiply, add, divide, square root;
/// no fused multiply-add), so that they give the same bits.
pub trait Optimizer: Send + Sync {
    /// Base rate, decay and groups.
    fn base(&self) -> &OptimizerBase;

    /// What it must see at once.
    fn needs(&self) -> Needs {
        Needs::Elements
    }

    /// Names of its states, each float32 of the parameter's shape, zero at the start (`exp_avg`, `exp_avg_sq`).
    fn state(&self) -> &'static [&'static str];

    /// Adds this range's part of the tensor sums, for [`Needs::TensorSums`]. Called before [`Optimizer::apply`] with the same
    /// slice, whose states it may not change: `apply` does, from the same values, once the sums of all ranges are known.
    ///
    /// # Errors
    /// Slices of unequal length.
    fn partial(&self, _slice: &HostSlice<'_>, _hyper: &Hyper, _sums: &mut dyn SquareSums) -> Result<()> {
        Ok(())
    }

    /// Updates a range in host memory.
    ///
    /// # Errors
    /// Slices of unequal length.
    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()>;

    /// Updates a range on a device.
    ///
    /// # Errors
    /// Those of libtorch.
    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()>;
}
