//! Update rules and learning-rate schedules of zenflow-rs.
//!
//! | rule | sees | states |
//! | --- | --- | --- |
//! | [`AdamW`] | each element | 2 |
//! | [`Sgd`] | each element | 1, without momentum 0 |
//! | [`Lion`] | each element | 1 |
//! | [`Lamb`] | each element and two sums over its tensor | 2 |
//! | [`Muon`] | whole matrices; each element of other parameters | 2 |
//!
//! They update float32 masters on the host ([`Optimizer::apply`], vector code chosen at run time) and on any device of
//! libtorch ([`Optimizer::apply_tensor`]); both forms are the same sequence of single IEEE operations and give the same
//! bits (Muon's matrix products: on the CPU). Schedules ([`Constant`], [`Linear`], [`Cosine`], [`Wsd`]) are pure functions
//! of the number of updates made.
//!
//! # Limitations
//!
//! SGD has neither dampening nor Nesterov's form. LAMB's trust ratio has no bounds. Muon takes every parameter of two
//! dimensions for a matrix, embeddings and output heads too (groups cannot choose a rule yet), others, such as the kernels
//! of convolutions, for AdamW's; and it keeps a second state for matrices, which they do not use, because all parameters
//! have the same states. The sums of LAMB are taken in host memory. A NaN keeps being NaN through every update, but its
//! sign and payload are not promised.
//!
//! # Example
//!
//! ```
//! use zf_core::stage::{HostSlice, Hyper, Optimizer, Out, Schedule};
//! use zf_optim::{AdamWConfig, CosineConfig};
//!
//! # fn main() -> anyhow::Result<()> {
//! let rule = AdamWConfig { lr: 0.1, weight_decay: 0.0, ..Default::default() }.rule()?;
//! let schedule = CosineConfig { warmup: 2, ..Default::default() }.schedule()?;
//! let (mut master, mut m, mut v) = (vec![1.0f32; 100], vec![0.0; 100], vec![0.0; 100]);
//! for step in 0..10 {
//!     let grad = master.clone(); // of the loss |x|^2 / 2
//!     let hyper = Hyper {
//!         lr: rule.base().lr * schedule.factor(step, 10),
//!         weight_decay: 0.0,
//!         count: step + 1,
//!         grad_scale: 1.0,
//!     };
//!     let mut slice = HostSlice {
//!         master: &mut master,
//!         grad: &grad,
//!         state: vec![&mut m, &mut v],
//!         out: Out::None,
//!         sums: &[],
//!         shape: &[100],
//!     };
//!     rule.apply(&mut slice, &hyper)?;
//! }
//! assert!(master[0].abs() < 0.6);
//! # Ok(())
//! # }
//! ```
//!
//! [`Optimizer::apply`]: zf_core::stage::Optimizer::apply
//! [`Optimizer::apply_tensor`]: zf_core::stage::Optimizer::apply_tensor

mod adamw;
mod arithmetic;
mod checks;
mod lamb;
mod lion;
mod muon;
mod round;
#[cfg(test)]
mod samples;
mod schedule;
mod sgd;

pub use adamw::{AdamW, AdamWConfig};
pub use lamb::{Lamb, LambConfig};
pub use lion::{Lion, LionConfig};
pub use muon::{Muon, MuonConfig, MuonScale};
pub use schedule::{
    Constant, ConstantConfig, Cosine, CosineConfig, Decay, DecayShape, Linear, LinearConfig, Wsd, WsdConfig,
};
pub use sgd::{Sgd, SgdConfig};
