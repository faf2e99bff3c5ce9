//! Update rules and learning-rate schedules of zenflow-rs.
//!
//! [`AdamW`] and [`Sgd`] update float32 masters on the host ([`Optimizer::apply`], vector code chosen at run time) and on
//! any device of libtorch ([`Optimizer::apply_tensor`]); both forms are the same sequence of single IEEE operations and
//! give the same bits. Schedules ([`Constant`], [`Linear`], [`Cosine`], [`Wsd`]) are pure functions of the number of
//! updates made.
//!
//! # Limitations
//!
//! Both rules see one element at a time; rules over whole tensors (LAMB, Muon) are not here. SGD has neither dampening nor
//! Nesterov's form. A NaN keeps being NaN through every update, but its sign and payload are not promised.
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
mod checks;
mod round;
mod schedule;
mod sgd;

pub use adamw::{AdamW, AdamWConfig};
pub use schedule::{
    Constant, ConstantConfig, Cosine, CosineConfig, Decay, DecayShape, Linear, LinearConfig, Wsd, WsdConfig,
};
pub use sgd::{Sgd, SgdConfig};
