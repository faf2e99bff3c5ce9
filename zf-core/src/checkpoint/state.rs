//! What a checkpoint holds: pieces of logical tensors, and the numbers beside them.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::layout::DType;
use crate::{Error, Result};

/// Kind of a float32 master.
pub const MASTER: &str = "master";

/// Kind of a parameter that has no master, because it is frozen; in its own dtype.
pub const PARAMETER: &str = "parameter";

/// What kinds begin with that are kept but are not part of the state hash.
pub const AUXILIARY: &str = "aux.";

/// Type of stored elements, by the names of safetensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DTypeName {
    /// IEEE single.
    F32,
    /// 8 bits of exponent, 7 of fraction.
    BF16,
    /// IEEE half.
    F16,
    /// IEEE double.
    F64,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 8 bits.
    U8,
}

impl DTypeName {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// The name in safetensors files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::BF16 => "BF16",
            Self::F16 => "F16",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U8 => "U8",
        }
    }

    pub(super) fn safetensors(self) -> safetensors::Dtype {
        match self {
            Self::F32 => safetensors::Dtype::F32,
            Self::BF16 => safetensors::Dtype::BF16,
            Self::F16 => safetensors::Dtype::F16,
            Self::F64 => safetensors::Dtype::F64,
            Self::I64 => safetensors::Dtype::I64,
            Self::U8 => safetensors::Dtype::U8,
        }
    }
}

impl From<DType> for DTypeName {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::Float32 => Self::F32,
            DType::Bfloat16 => Self::BF16,
            DType::Float16 => Self::F16,
        }
    }
}

/// A flat range of one logical tensor, copied to host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Full name of the parameter it belongs to.
    pub name: String,
    /// [`MASTER`], [`PARAMETER`], a state of the optimizer (`exp_avg`), or `aux.…`.
    pub kind: String,
    /// Shape of the logical tensor, not of the piece; zero-sized dimensions are legal.
    pub shape: Vec<i64>,
    /// Type of the elements.
    pub dtype: DTypeName,
    /// Which elements, in row-major order of the logical tensor.
    pub range: Range<usize>,
    /// Their bytes, little-endian.
    pub data: Vec<u8>,
}

impl Piece {
    /// A float32 piece.
    pub fn f32(
        name: impl Into<String>,
        kind: impl Into<String>,
        shape: &[i64],
        range: Range<usize>,
        values: &[f32],
    ) -> Self {
        Self {
            name: name.into(),
            kind: kind.into(),
            shape: shape.to_vec(),
            dtype: DTypeName::F32,
            range,
            data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// Checks that shape, range and data agree.
    pub(super) fn check(&self) -> Result<()> {
        let numel = numel(&self.shape).ok_or_else(|| {
            Error::Engine(format!(
                "checkpoint of `{}` ({}): shape {:?} is not a shape",
                self.name, self.kind, self.shape
            ))
        })?;
        if self.range.start > self.range.end || self.range.end > numel {
            return Err(Error::Engine(format!(
                "checkpoint of `{}` ({}): range {:?} lies outside its {numel} elements",
                self.name, self.kind, self.range
            )));
        }
        let expected = self.range.len() * self.dtype.size();
        if self.data.len() != expected {
            return Err(Error::Engine(format!(
                "checkpoint of `{}` ({}): range {:?} of {} takes {expected} bytes, found {}",
                self.name,
                self.kind,
                self.range,
                self.dtype.name(),
                self.data.len()
            )));
        }
        Ok(())
    }
}

/// What one rank contributes to the checkpoint of one step. Over all ranks the pieces of a logical tensor cover it
/// exactly: without gap or overlap. A rank without pieces is legal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankState {
    /// Steps done; the same on all ranks.
    pub step: u64,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// What it owns.
    pub pieces: Vec<Piece>,
}

/// The best validation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps done when it was measured.
    pub step: u64,
    /// Mean validation loss; finite.
    pub validation_loss: f64,
}

/// Everything of a run that is no tensor. Equal for all ranks; rank 0 hands it in.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// Steps done, skipped ones included; the next step has this number.
    pub step: u64,
    /// Updates made (skipped steps do not count): where the learning-rate schedule stands.
    pub updates: u64,
    /// Updates of each parameter, by name (bias correction).
    pub counts: BTreeMap<String, u64>,
    /// State of the loss scale.
    pub loss_scale: serde_json::Value,
    /// Training sequences consumed.
    pub data_position: u64,
    /// Identity of the dataset; must be equal on resume.
    pub data_identity: String,
    /// Identity of the model; must be equal on resume.
    pub model_identity: String,
    /// The run's seed; must be equal on resume.
    pub seed: u64,
    /// The resolved run, TOML.
    pub run: String,
    /// See [`super::StateHasher`]. When rank 0 hands in an empty one, the writer computes it from the written files.
    pub state_hash: String,
    /// The best validation so far; its checkpoint is never deleted.
    pub best: Option<Best>,
    /// Versions of the program and of libtorch, by name.
    pub versions: BTreeMap<String, String>,
    /// State of random generators that are not counter-based.
    pub random: serde_json::Value,
    /// What stages save beside their tensors.
    pub extra: serde_json::Value,
}

/// Number of elements; `None` for negative or overflowing shapes.
pub(super) fn numel(shape: &[i64]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &d| product.checked_mul(usize::try_from(d).ok()?))
}
