//! Transports of zenflow-rs: how ranks exchange tensors.
//!
//! [`Threads`] connects ranks that are threads of one process. Collectives are true ones over shared memory: each rank
//! adds up or copies its own part, reading the others' tensors where they lie, and additions are always made in the
//! order of the group's members, so that every run gives the same bits. [`C10d`] makes each process a rank, on one machine
//! or several: it moves the same data over PyTorch's own process groups and adds with the same kernels, so that results and
//! counted bytes are those of threads. [`Counted`], [`Delayed`], [`Reordering`], [`Blocking`],
//! [`Failing`] and [`Modelled`] are transports around another one, and [`wrap`] puts them around every rank of a fabric.
//!
//! A collective that cannot complete ends with an error on every rank that waits for it: ranks that brought different
//! things, one that failed ([`Transport::abort`](zf_core::stage::Transport::abort)), left, panicked, or did not come
//! within the timeout.
//!
//! # Limitations
//!
//! * CPU tensors; 1-D, contiguous, of float32, float16, bfloat16, float64, int64 or uint8.
//! * Each rank brings memory of its own. Between issue and wait nobody may touch it, and nothing checks that.
//! * After a timeout, an abort or a panic the whole fabric is over; ranks connect once. Over processes so it is after
//!   collectives that do not fit, and a rank 0 that dies takes the store by which the others hear of each other with it.
//! * Gradients do not flow through collectives.
//!
//! # Example
//!
//! ```
//! use tch::Tensor;
//! use zf_comm::{Threads, ThreadsConfig};
//! use zf_core::stage::{Collective, Fabric, Group, Reduce, Request};
//!
//! # fn main() -> zf_core::Result<()> {
//! let fabric = Threads::new(&ThreadsConfig { ranks: 2, ..ThreadsConfig::default() })?;
//! let sum = |rank: usize| -> zf_core::Result<f64> {
//!     let mut transport = fabric.connect(rank)?;
//!     let tensor = Tensor::from_slice(&[rank as f32 + 1.0]);
//!     let ticket = transport.issue(Request {
//!         group: Group::world(2),
//!         label: "example".into(),
//!         collective: Collective::AllReduce { tensor: tensor.shallow_clone(), op: Reduce::Sum },
//!     })?;
//!     // Other work goes here, beside the exchange.
//!     ticket.wait()?;
//!     Ok(tensor.double_value(&[0]))
//! };
//! let sums = std::thread::scope(|scope| {
//!     let other = scope.spawn(|| sum(1));
//!     [sum(0), other.join().expect("the rank does not panic")]
//! });
//! for sum in sums {
//!     assert_eq!(sum?, 3.0);
//! }
//! # Ok(())
//! # }
//! ```

mod c10d;
mod counting;
mod kernel;
mod register;
mod span;
mod threads;
mod work;
mod wrap;

pub use c10d::{Backend, C10d, C10dConfig, Rendezvous};
pub use threads::{Threads, ThreadsConfig};
pub use wrap::{
    Blocking, BlockingConfig, Counted, Delayed, DelayedConfig, Failing, FailingConfig, How, Log, Modelled,
    ModelledConfig, Record, Reordering, ReorderingConfig, Tier, When, wrap,
};
pub use zf_core::bandwidth::{Bandwidth, BandwidthError};
