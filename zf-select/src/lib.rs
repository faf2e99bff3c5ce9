//! Which columns of a weight are important: scores, selectors, and decorators of selectors.
//!
//! A *column* is what feeds from one input feature of a two-dimensional weight. An offload keeps the important ones on the
//! device and updates them at every step; the others are left to the host (Ren et al., "ZenFlow: Enabling Stall-Free
//! Offloading Training via Asynchronous Updates", 2025).
//!
//! | scores | of an element |
//! | --- | --- |
//! | [`L1`] | the size of the gradient |
//! | [`L2`] | its square |
//! | [`Adam`] | its size beside its usual size |
//! | [`WeightGradient`] | gradient times weight |
//!
//! | selectors | choose |
//! | --- | --- |
//! | [`TopK`] | a fixed part of the columns, those of the highest scores |
//! | [`Threshold`] | as many as hold a share of the whole score |
//! | [`Random`] | a fixed part, drawn |
//! | [`Fixed`] | what a file lists |
//! | [`AllColumns`], [`NoColumns`] | every one, none |
//!
//! | decorators | around a selector |
//! | --- | --- |
//! | [`Ema`] | smooth its scores over selections |
//! | [`Hysteresis`] | keep a present column until another is better by a margin |
//! | [`EveryN`] | choose again after a number of updates |
//!
//! A score maps elements and knows nothing of columns, shards or ranks; the engine adds up. A selector sees one number a
//! column and knows nothing of tensors. Both are pure but for a selector's own state, so that all ranks choose the same.
//!
//! # Limitations
//!
//! * Each weight is chosen from alone: no selector spends a budget over all weights.
//! * Scores are taken from one step's gradient; [`Ema`] smooths them over selections, not over the steps between them.
//! * [`Fixed`] does not report a name in its file that no weight has, since it never sees all names.
//! * [`Ema`] keeps eight bytes a column of every weight, and a checkpoint holds them as text.
//!
//! # Example
//!
//! ```
//! use zf_core::registry::BuildContext;
//! use zf_core::stage::{Candidates, Selector};
//! use zf_select::{HysteresisConfig, Interval, TopKConfig};
//!
//! # fn main() -> anyhow::Result<()> {
//! let top = TopKConfig { ratio: 0.5, every: Interval::Updates(16), ..Default::default() };
//! let mut selector = HysteresisConfig { margin: 0.2 }.around(Box::new(top.selector(&BuildContext::default())?))?;
//!
//! let weight = Candidates { name: "mlp.up", columns: 4, scores: &[1.0, 5.0, 3.0, 4.0], previous: &[], update: 0 };
//! let first = selector.choose(&weight)?;
//! assert_eq!(first, [1, 3]);
//! // Column 2 is better now, but not by a fifth.
//! let weight = Candidates { scores: &[1.0, 5.0, 4.5, 4.0], previous: &first, update: 16, ..weight };
//! assert_eq!(selector.choose(&weight)?, [1, 3]);
//! # Ok(())
//! # }
//! ```

mod all;
mod base;
mod checks;
mod fixed;
mod interval;
mod none;
mod random;
mod rank;
mod score;
mod threshold;
mod top_k;
mod wrap;

pub use all::{AllColumns, AllConfig};
pub use fixed::{Fixed, FixedConfig};
pub use interval::Interval;
pub use none::{NoColumns, NoneConfig};
pub use random::{Random, RandomConfig};
pub use rank::{capacity, highest};
pub use score::{Adam, AdamConfig, L1, L2, WeightGradient};
pub use threshold::{Threshold, ThresholdConfig};
pub use top_k::{TopK, TopKConfig};
pub use wrap::{Ema, EmaConfig, EveryConfig, EveryN, Hysteresis, HysteresisConfig};
