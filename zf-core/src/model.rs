//! What the engine asks of a model: an ordered list of units, and a forward pass that runs each through a [`Context`].

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::Result;

/// How a parameter starts when no file gives its values. Values come from a counter-based generator keyed by seed,
/// name and global index, so that they do not depend on ranks or order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform in [-bound, bound).
    Uniform {
        /// Half the width.
        bound: f64,
    },
}

/// One parameter of a model, before anything is known of ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// The full name, as in the exported file (`model.layers.0.mlp.up_proj.weight`).
    pub name: String,
    /// Names of tied weights that share this parameter (`lm_head.weight`). Stored once.
    pub aliases: Vec<String>,
    /// Shape of the unsharded parameter; zero-sized dimensions are legal.
    pub shape: Vec<i64>,
    /// How it starts.
    pub init: Init,
    /// For a 2-D weight the dimension that holds input features (1 for `[out, in]`, 0 for GPT-2's `[in, out]`; the
    /// hidden dimension for embeddings and heads). `None` for everything else.
    pub input_dim: Option<usize>,
    /// Whether it is trained. Frozen parameters have no gradient, master or moments.
    pub trainable: bool,
    /// Its type, where that is not the run's (float32 adapters on a 16-bit model).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<crate::layout::DType>,
}

impl ParamSpec {
    /// A trainable parameter without aliases.
    pub fn new(name: impl Into<String>, shape: &[i64], init: Init) -> Self {
        let input_dim = (shape.len() == 2).then_some(1);
        Self {
            name: name.into(),
            aliases: Vec::new(),
            shape: shape.to_vec(),
            init,
            input_dim,
            trainable: true,
            dtype: None,
        }
    }

    /// The same with another input dimension.
    pub fn input_dim(mut self, dim: usize) -> Self {
        self.input_dim = Some(dim);
        self
    }

    /// The same with a tied name.
    pub fn alias(mut self, name: impl Into<String>) -> Self {
        self.aliases.push(name.into());
        self
    }

    /// The same in a type of its own.
    pub fn dtype(mut self, dtype: crate::layout::DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().map(|&d| usize::try_from(d).unwrap_or(0)).product()
    }
}

/// Parameters that are gathered, reduced and released together, for example one transformer block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnitSpec {
    /// Its name (`model.layers.0`).
    pub name: String,
    /// Its parameters in the model's order.
    pub params: Vec<ParamSpec>,
    /// A root unit may be run several times in one forward pass (tied weights): it is kept gathered for the whole step
    /// and reduced once, after the backward pass.
    pub root: bool,
}

/// One micro-batch of token sequences.
#[derive(Debug)]
pub struct Batch {
    /// Token ids, int64 `[sequences, length]`.
    pub inputs: Tensor,
    /// Target ids, int64 `[sequences, length]`; [`IGNORE`] does not count.
    pub targets: Tensor,
    /// For each sequence its index in the global batch of the step: the key of everything random that belongs to a
    /// sequence, independent of ranks.
    pub sequences: Vec<u64>,
    /// Number of targets that count.
    pub target_tokens: u64,
}

/// The target id that does not count in the loss.
pub const IGNORE: i64 = -100;

/// The loss of a micro-batch before any division.
#[derive(Debug)]
pub struct LossSum {
    /// Sum of the losses of all counting targets, float32 scalar, attached to the graph in training.
    pub sum: Tensor,
}

/// The parameters of one unit, as a unit's closure sees them while it runs.
#[derive(Debug)]
pub struct Params<'a> {
    names: &'a [String],
    tensors: &'a [Tensor],
}

impl<'a> Params<'a> {
    /// Pairs names (full names, in the order of the unit's spec) with tensors.
    pub fn new(names: &'a [String], tensors: &'a [Tensor]) -> Self {
        debug_assert_eq!(names.len(), tensors.len(), "the engine pairs each name with a tensor");
        Self { names, tensors }
    }

    /// The parameter at position `index` of the unit's spec.
    ///
    /// # Errors
    /// When the unit has fewer parameters.
    pub fn at(&self, index: usize) -> anyhow::Result<&'a Tensor> {
        self.tensors
            .get(index)
            .ok_or_else(|| anyhow::anyhow!("unit has {} parameters, asked for number {index}", self.tensors.len()))
    }

    /// The parameter whose full name is `name` or ends in `.name`.
    ///
    /// # Errors
    /// When the unit has no such parameter; the message lists those it has.
    pub fn get(&self, name: &str) -> anyhow::Result<&'a Tensor> {
        let found = self
            .names
            .iter()
            .position(|full| full == name || full.strip_suffix(name).is_some_and(|head| head.ends_with('.')));
        found
            .map(|index| &self.tensors[index])
            .ok_or_else(|| anyhow::anyhow!("unit has no parameter `{name}`; it has {}", self.names.join(", ")))
    }

    /// Whether the unit has a parameter of that name.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_ok()
    }
}

/// What runs inside a unit: parameters and input tensors in, output tensors out. It may run a second time for
/// recomputation, so it must depend on nothing else and use [`Context::noise`] keys for randomness.
pub type UnitFn = Arc<dyn Fn(&Params<'_>, &[Tensor]) -> anyhow::Result<Vec<Tensor>> + Send + Sync>;

/// The engine as a model's forward pass sees it.
pub trait Context {
    /// Runs unit number `unit` (its index in [`Model::units`]) on `inputs`. Around it the engine gathers, releases,
    /// stashes, recomputes and installs hooks. Outputs reach autograd in training even when no input
    /// needs a gradient.
    ///
    /// # Errors
    /// What the closure returns; an unknown unit; a unit out of turn.
    fn run(&self, unit: usize, inputs: &[Tensor], f: UnitFn) -> Result<Vec<Tensor>>;

    /// Says that this forward pass leaves `unit` out. All ranks run or skip the same units in the same order.
    ///
    /// # Errors
    /// An unknown unit, or one that already ran.
    fn skip(&self, unit: usize) -> Result<()>;

    /// Whether dropout and the like apply.
    fn training(&self) -> bool;

    /// The key of the counter-based generator for this step; combine it with unit, call site and global sequence
    /// index.
    fn noise(&self) -> Noise;

    /// Type of parameters and activations.
    fn dtype(&self) -> tch::Kind;

    /// Where parameters and activations live.
    fn device(&self) -> tch::Device;
}

/// Key of everything random in a step: the run's seed and the step. See [`crate::random`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Noise {
    /// The run's seed.
    pub seed: u64,
    /// The step, from 0.
    pub step: u64,
}

/// A model: an ordered list of units and a forward pass. It holds no parameters (the engine does), so that one
/// instance serves all ranks.
pub trait Model: Send + Sync {
    /// The units in the order in which the forward pass first uses them. Always the same.
    fn units(&self) -> Vec<UnitSpec>;

    /// Runs the forward pass of one micro-batch and returns the sum of its losses.
    ///
    /// # Errors
    /// Shapes that do not fit, ids beyond the vocabulary, errors of the context.
    fn loss(&self, cx: &dyn Context, batch: &Batch) -> anyhow::Result<LossSum>;

    /// Logits `[sequences, vocabulary]` (float32) for the token after the last of each sequence of int64
    /// `[sequences, length]`, for sampling.
    ///
    /// # Errors
    /// The default: the model cannot be sampled from.
    fn next_logits(&self, _cx: &dyn Context, _tokens: &Tensor) -> anyhow::Result<Tensor> {
        anyhow::bail!("this model does not implement `next_logits`, so text cannot be sampled from it")
    }

    /// Size of the vocabulary; token ids beyond it are refused before they reach the model.
    fn vocabulary(&self) -> usize;

    /// The longest sequence the model accepts, if it has a limit.
    fn max_length(&self) -> Option<usize> {
        None
    }

    /// Floating-point operations of forward and backward for one token of a sequence of `length` tokens: by default
    /// 6 for each parameter.
    fn flops_per_token(&self, _length: usize) -> f64 {
        let parameters: usize = self.units().iter().flat_map(|unit| &unit.params).map(ParamSpec::numel).sum();
        6.0 * parameters as f64
    }

    /// The files of a Hugging Face folder beside the weights, as (name, contents): `config.json` and so on. The
    /// default: none.
    fn export_files(&self) -> Vec<(String, Vec<u8>)> {
        Vec::new()
    }
}
