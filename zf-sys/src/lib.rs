//! The C++ shim over libtorch that zenflow-rs stands on, with safe wrappers.
//!
//! `tch` offers tensors and operators. Training with partitioned state also needs what it does not expose: hooks that
//! run as gradients complete, gradients of another dtype than their parameter, storage that is released and refilled
//! under living views, recomputation in backward, and an allocator that says to the byte who holds what. Nearly all of
//! the project's `unsafe` is here.
//!
//! | module | holds |
//! |---|---|
//! | [`heap`] | a CPU allocator with live and peak bytes for each rank, by category; heaps of fixed size, placed first-fit |
//! | [`autograd`] | backward, gradients, hooks, recomputation ([`autograd::checkpoint`]) |
//! | [`storage`] | storage resize, typed slices of CPU tensors, 16-bit constructors |
//! | [`stream`] | copies on side streams, pinned memory |
//! | [`rng`] | the state of libtorch's default CPU generator |
//! | [`fused`] | libtorch's own fused AdamW |
//! | [`c10d`] | PyTorch's TCP store and process groups over Gloo (NCCL with the feature `nccl`) |
//! | [`threads`] | operator threads of the calling thread |
//! | [`device`] | synchronisation and what this libtorch can do |
//!
//! # Limitations
//!
//! * The heap counts blocks of the CPU allocator only. It follows a rank to the threads of autograd and of asynchronous
//!   collectives, but not to those between which one operator divides its work: their scratch is booked to no heap.
//! * Slices borrow a tensor handle, but other handles of the same memory may exist and be written through.
//! * Hooks and recomputed functions run while the autograd engine is at work. They must not wait for another thread that
//!   itself needs the engine of the same CUDA device.
//!
//! # Example
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use zf_sys::heap::{Category, Heap, tag};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let heap = Heap::new("rank 0")?;
//! let _inside = heap.enter();
//! let weights = {
//!     let _parameters = tag(Category::Parameters);
//!     Tensor::f_zeros([1000], (Kind::Float, Device::Cpu))?
//! };
//! assert_eq!(heap.stats().live[Category::Parameters], 4000);
//! drop(weights);
//! assert_eq!(heap.stats().live.total(), 0);
//! assert_eq!(heap.stats().peak, 4000);
//! # Ok(())
//! # }
//! ```

pub mod autograd;
pub mod c10d;
pub mod device;
mod error;
mod ffi;
pub mod fused;
pub mod heap;
pub mod rng;
pub mod storage;
pub mod stream;
pub mod threads;

pub use error::{Error, Result};
