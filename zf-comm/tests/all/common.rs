//! Ranks as threads, and tensors of all kinds.

use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};
use zf_comm::{Threads, ThreadsConfig};
use zf_core::Result;
use zf_core::stage::{Collective, Fabric, Group, Request, Ticket, Transport};

/// A world of `threads` ranks that gives up after `timeout`.
pub(crate) fn threads(ranks: usize, timeout: Duration) -> Arc<dyn Fabric> {
    let config = ThreadsConfig { ranks, timeout, ..ThreadsConfig::default() };
    Arc::new(Threads::new(&config).expect("at least one rank"))
}

/// A world with time enough.
pub(crate) fn world(ranks: usize) -> Arc<dyn Fabric> {
    threads(ranks, Duration::from_secs(30))
}

/// Runs `body` as each rank on a thread of its own; the results by rank. A panic of a rank is passed on.
pub(crate) fn run<R: Send>(fabric: &Arc<dyn Fabric>, body: impl Fn(usize, Box<dyn Transport>) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = fabric
            .local_ranks()
            .into_iter()
            .map(|rank| {
                let body = &body;
                scope.spawn(move || body(rank, fabric.connect(rank).expect("the seat is free")))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

pub(crate) fn issue(
    transport: &mut dyn Transport,
    group: &Group,
    label: &str,
    collective: Collective,
) -> Result<Ticket> {
    transport.issue(Request { group: group.clone(), label: label.into(), collective })
}

/// Issues and waits.
pub(crate) fn complete(
    transport: &mut dyn Transport,
    group: &Group,
    label: &str,
    collective: Collective,
) -> Result<()> {
    issue(transport, group, label, collective)?.wait()
}

pub(crate) fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

/// The bits of a tensor's elements.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

pub(crate) const KINDS: [Kind; 6] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double, Kind::Int64, Kind::Uint8];

/// Numbers that look random, the same for the same seed, with signs, ties and very different magnitudes.
pub(crate) fn noise(seed: u64, len: usize, kind: Kind) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let values: Vec<f64> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let fraction = (state >> 40) as f64 / f64::from(1 << 24) - 0.5;
            let exponent = ((state >> 20) & 7) as i32 - 3;
            fraction * 10_f64.powi(exponent)
        })
        .collect();
    let tensor = Tensor::from_slice(&values);
    match kind {
        Kind::Int64 => (tensor * 1e6).to_kind(kind),
        Kind::Uint8 => (tensor.abs() * 100.0).clamp(0.0, 255.0).to_kind(kind),
        _ => tensor.to_kind(kind),
    }
}
