//! Partitioners of zenflow-rs: which rank owns which part of parameters, gradients and optimizer states.
//!
//! A partitioner is a pure function from parameter shapes and mesh to a [`zf_core::layout::Layout`]: integers and names,
//! no tensors. There is one, `zero`: ZeRO's stages (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
//! Parameter Models", 2020, section 5), FSDP, hybrid sharding, MiCS, hpZ, and every other choice of three [`Scopes`].
//!
//! # Limitations
//!
//! * Groups are consecutive ranks of the data axis, each size dividing the next larger.
//! * Shards are equal, so ranks of unequal memory are used as far as the smallest.
//!
//! # Example
//!
//! ```
//! use zf_core::layout::DType;
//! use zf_core::mesh::Mesh;
//! use zf_core::model::{Init, ParamSpec, UnitSpec};
//! use zf_core::stage::{Needs, Partitioner};
//! use zf_partition::ZeroConfig;
//!
//! # fn main() -> anyhow::Result<()> {
//! let weight = ParamSpec::new("layer.weight", &[10, 3], Init::Normal { std: 0.02 });
//! let unit = UnitSpec { name: "layer".into(), params: vec![weight], root: false };
//! let layout = ZeroConfig::stage(1).partitioner()?.layout(&[unit], DType::Bfloat16, &Mesh::data(2)?, Needs::Elements)?;
//! let flat = &layout.flats[0];
//! assert_eq!((flat.used(), flat.numel), (30, 32));
//! assert_eq!(flat.params.len(0), 32); // every rank holds all parameters,
//! assert_eq!(flat.optim.len(0), 16); // and half of the optimizer states
//! # Ok(())
//! # }
//! ```

mod bytes;
mod nest;
mod reshard;
mod scope;
mod zero;

pub use bytes::{ByteSize, ByteSizeError};
pub use reshard::ReshardAfterForward;
pub use scope::{Scope, Scopes, Sizes};
pub use zero::{Zero, ZeroConfig};
