//! States off the device: what a device's memory has no room for lies on its host or in files, and travels over a link.
//!
//! | module | holds |
//! |---|---|
//! | [`link`] | links between a device and its host: direct, emulated (of a given speed), CUDA |
//! | [`tier`] | masters and optimizer states in host memory or in files |
//! | [`worker`] | the thread that owns a rank's states: adds gradients up, updates, hands columns over |
//! | [`kinds`] | what `[offload]` chooses: `none`, `host` (ZeRO-Offload), `zenflow` |
//! | [`cores`] | which cores devices and host work use |
//! | [`throttle`] | work slowed down to a rate |
//!
//! An emulated device is a core with memory of limited size; its link really copies and really takes its time, so that
//! what overlaps on a real machine overlaps here.
//!
//! # Limitations
//!
//! * libtorch keeps pinned memory that is freed, in blocks rounded up to a power of two, and no heap counts it.
//! * An emulated link copies with a core of this machine: it is no faster than that, and takes memory bandwidth from
//!   whatever else runs.
//! * States in files are scratch: they are gone with the run. Checkpoints read them through the tier.
//! * Direct IO, core binding and reserved room are Linux's.
//!
//! # Example
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use zf_core::stage::{Link, Span, Tier, Transfer, Way};
//! use zf_core::trace::Trace;
//! use zf_offload::link::EmulatedLink;
//! use zf_offload::tier::MemoryTier;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A gradient goes to the host, at 1 GB/s ...
//! let link = EmulatedLink::new("1GB/s".parse()?, std::time::Duration::from_micros(10), &[], &Trace::new(0, 0))?;
//! let gradient = Tensor::f_full([1000], 0.5, (Kind::Float, Device::Cpu))?;
//! let (done, arrived) = std::sync::mpsc::channel();
//! link.issue(Transfer {
//!     way: Way::ToHost,
//!     from: gradient,
//!     to: link.host_memory(1000, Kind::Float)?,
//!     label: "gradient".into(),
//!     moves: false,
//!     done: Box::new(move |result| done.send(result).expect("the test waits")),
//! })?;
//! let gradient = arrived.recv()??.to;
//! assert_eq!(link.traffic().to_host, 4000);
//!
//! // ... where a master and one moment of each element lie.
//! let mut states = MemoryTier::new(&[1000], 2)?;
//! let gradient = zf_sys::storage::slice::<f32>(&gradient)?;
//! states.with(&Span { buffer: 0, range: 0..1000 }, &mut |arrays| {
//!     let [master, moment] = arrays else { unreachable!("two arrays were asked for") };
//!     for ((w, m), g) in master.iter_mut().zip(moment.iter_mut()).zip(gradient) {
//!         *m = 0.9 * *m + 0.1 * g;
//!         *w -= 0.01 * *m;
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```

pub use zf_core::cores;
pub mod kinds;
pub mod link;
mod precise;
pub mod throttle;
pub mod tier;
pub mod worker;
