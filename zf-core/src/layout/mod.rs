//! The layout: which elements exist, where they lie in flat buffers, and who owns which.
//!
//! Integers and names only. Engine, optimizer, checkpoint, planner and reports all read it.

mod placement;

pub use placement::{Owner, Placement};

use serde::{Deserialize, Serialize};

use crate::mesh::Mesh;
use crate::model::{ParamSpec, UnitSpec};
use crate::{Error, Result};

/// Type of parameters and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE single.
    Float32,
    /// 8 bits of exponent, 7 of fraction.
    Bfloat16,
    /// IEEE half; trained with a loss scale.
    Float16,
}

impl DType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 | Self::Float16 => 2,
        }
    }

    /// libtorch's type.
    pub fn kind(self) -> tch::Kind {
        match self {
            Self::Float32 => tch::Kind::Float,
            Self::Bfloat16 => tch::Kind::BFloat16,
            Self::Float16 => tch::Kind::Half,
        }
    }
}

/// One parameter's place in a flat buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Full name.
    pub name: String,
    /// Tied names.
    pub aliases: Vec<String>,
    /// Shape of the unsharded parameter.
    pub shape: Vec<i64>,
    /// First element in the flat buffer.
    pub offset: usize,
    /// Number of elements.
    pub numel: usize,
    /// Dimension of input features, for 2-D weights.
    pub input_dim: Option<usize>,
    /// Position of the parameter in its unit's spec.
    pub index: usize,
}

/// One flat buffer: the parameters of one unit that share dtype and are all trained or all frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flat {
    /// Index of the unit.
    pub unit: usize,
    /// Type of the parameters.
    pub dtype: DType,
    /// Whether they are trained; frozen ones have neither gradient nor optimizer state.
    pub trainable: bool,
    /// The parameters in order, without gaps.
    pub slots: Vec<Slot>,
    /// Elements with padding, which follows the last slot and is always zero.
    pub numel: usize,
    /// Owners of parameters.
    pub params: Placement,
    /// Owners of accumulated gradients.
    pub grads: Placement,
    /// Owners of masters and optimizer states.
    pub optim: Placement,
}

impl Flat {
    /// Elements without padding.
    pub fn used(&self) -> usize {
        self.slots.last().map_or(0, |slot| slot.offset + slot.numel)
    }
}

/// A unit's flat buffers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Name.
    pub name: String,
    /// Kept for the whole step, reduced once after backward.
    pub root: bool,
    /// Indices in [`Layout::flats`].
    pub flats: Vec<usize>,
}

/// The whole description. Equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The mesh it was made for.
    pub mesh: Mesh,
    /// In forward order.
    pub units: Vec<Unit>,
    /// In forward order.
    pub flats: Vec<Flat>,
}

impl Layout {
    /// Packs `units` into flat buffers of `dtype` (or of a parameter's own type), each padded to a multiple of `multiple` elements, and asks `place`
    /// for the owners (parameters, gradients, optimizer states) of a buffer of a given padded size.
    ///
    /// # Errors
    /// Repeated names, negative dimensions, and what `place` returns.
    pub fn pack(
        units: &[UnitSpec],
        dtype: DType,
        mesh: &Mesh,
        multiple: usize,
        mut place: impl FnMut(&UnitSpec, usize) -> Result<[Placement; 3]>,
    ) -> Result<Self> {
        let mut seen = std::collections::BTreeSet::new();
        let mut layout = Self { mesh: mesh.clone(), units: Vec::new(), flats: Vec::new() };
        for (unit_index, unit) in units.iter().enumerate() {
            for name in unit.params.iter().flat_map(|p| std::iter::once(&p.name).chain(&p.aliases)) {
                if !seen.insert(name.clone()) {
                    return Err(Error::Engine(format!(
                        "parameter `{name}` appears twice (again in unit `{}`); tied weights are stored once, with aliases",
                        unit.name
                    )));
                }
            }
            let mut flats = Vec::new();
            let type_of = |spec: &ParamSpec| spec.dtype.unwrap_or(dtype);
            let mut kinds: Vec<(bool, DType)> = unit.params.iter().map(|p| (p.trainable, type_of(p))).collect();
            // Trained before frozen, types in the order of their first parameter.
            kinds.sort_by_key(|(trainable, _)| !trainable);
            let mut done = Vec::new();
            for (trainable, dtype) in kinds {
                if done.contains(&(trainable, dtype)) {
                    continue;
                }
                done.push((trainable, dtype));
                let mut slots = Vec::new();
                let mut offset = 0usize;
                let of_kind = |p: &ParamSpec| p.trainable == trainable && type_of(p) == dtype;
                for (index, spec) in unit.params.iter().enumerate().filter(|(_, p)| of_kind(p)) {
                    if spec.shape.iter().any(|&d| d < 0) {
                        return Err(Error::Engine(format!("parameter `{}` has shape {:?}", spec.name, spec.shape)));
                    }
                    slots.push(Slot {
                        name: spec.name.clone(),
                        aliases: spec.aliases.clone(),
                        shape: spec.shape.clone(),
                        offset,
                        numel: spec.numel(),
                        input_dim: spec.input_dim,
                        index,
                    });
                    offset += spec.numel();
                }
                let numel = offset.div_ceil(multiple.max(1)) * multiple.max(1);
                let [params, grads, optim] = place(unit, numel)?;
                flats.push(layout.flats.len());
                layout.flats.push(Flat { unit: unit_index, dtype, trainable, slots, numel, params, grads, optim });
            }
            layout.units.push(Unit { name: unit.name.clone(), root: unit.root, flats });
        }
        Ok(layout)
    }

    /// All slots with their flat, in forward order.
    pub fn slots(&self) -> impl Iterator<Item = (&Flat, &Slot)> {
        self.flats.iter().flat_map(|flat| flat.slots.iter().map(move |slot| (flat, slot)))
    }

    /// Number of parameters, without padding, tied ones once.
    pub fn parameters(&self) -> usize {
        self.flats.iter().map(Flat::used).sum()
    }
}
