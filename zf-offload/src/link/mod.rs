//! Links between a device and its host: [`DirectLink`], [`EmulatedLink`] and [`CudaLink`], with the factories that
//! `device.link` of a run file builds.
//!
//! [`Transfer::done`] is called exactly once for every transfer that was given to a link, also when `issue` refuses it (the
//! error of `issue` and that of `done` say the same), when the link fails and when it is dropped. No lock is held
//! meanwhile. A panic in it is caught and makes the link fail: what comes after gets errors.

mod carrier;
mod check;
mod config;
mod counts;
mod cuda;
mod direct;
mod emulated;
mod finish;
mod pace;

pub use config::{CudaConfig, DirectConfig, EmulatedConfig};
pub use cuda::CudaLink;
pub use direct::DirectLink;
pub use emulated::EmulatedLink;

/// The link of a device where none is asked for: pinned copies beside the computation for CUDA, else copies that take the time
/// they take.
pub fn natural() -> std::sync::Arc<dyn zf_core::stage::Links> {
    std::sync::Arc::new(config::Natural)
}

#[cfg(doc)]
use zf_core::stage::Transfer;

#[cfg(test)]
mod tests;
