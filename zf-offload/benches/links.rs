//! How fast each link is, one way and both ways at once: `cargo bench --profile release -p zf-offload --bench links`.
//!
//! For the emulated link `busy / set` is its measured busy time over bytes / bandwidth + latency, 1 if it is exact.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Link, Links, Transfer, Way};
use zf_core::trace::Trace;
use zf_offload::cores;
use zf_offload::link::{CudaConfig, DirectConfig, EmulatedConfig};

/// Bytes that each measurement moves each way.
const BYTES: usize = 256 << 20;

fn main() -> Result<()> {
    let trace = Trace::new(0, 0);
    let latency = Duration::from_micros(10);
    let emulated = EmulatedConfig { bandwidth: "4GB/s".parse().expect("a bandwidth"), latency };
    let host = cores::split(1)?.host;
    println!("{:>10} {:>10} {:>10} {:>10} {:>10} {:>10}", "link", "bytes", "ways", "GB/s each", "busy s", "busy / set");
    let mut cases: Vec<(&str, Box<dyn Links>, Device)> =
        vec![("direct", Box::new(DirectConfig {}), Device::Cpu), ("emulated", Box::new(emulated), Device::Cpu)];
    if zf_sys::device::cuda_available() {
        cases.push(("cuda", Box::new(CudaConfig {}), Device::Cuda(0)));
    }
    for (name, links, device) in cases {
        for numel in [1 << 14, 1 << 18, 1 << 22, 1 << 24] {
            for ways in [&[Way::ToHost][..], &[Way::ToHost, Way::ToDevice]] {
                let link = links.open(0, device, &host, &trace)?;
                let wall = measure(link.as_ref(), device, numel, ways)?;
                let traffic = link.traffic();
                let count = (BYTES / (numel * 4)) as f64;
                let set = link.bandwidth().map(|bandwidth| BYTES as f64 / bandwidth + count * latency.as_secs_f64());
                let ratio = set.map_or_else(|| "-".into(), |set| format!("{:.4}", traffic.busy_to_host / set));
                println!(
                    "{name:>10} {:>10} {:>10} {:>10.2} {:>10.4} {ratio:>10}",
                    numel * 4,
                    ways.len(),
                    BYTES as f64 / wall / 1e9,
                    traffic.busy_to_host
                );
            }
        }
    }
    Ok(())
}

/// Seconds until all transfers have arrived. Two pairs of buffers a way follow each other.
fn measure(link: &dyn Link, device: Device, numel: usize, ways: &[Way]) -> Result<f64> {
    let (sender, arrived) = channel();
    let sender = Arc::new(sender);
    let mut pairs = Vec::new();
    for &way in ways {
        for _ in 0..2 {
            let far = Tensor::f_ones([numel as i64], (Kind::Float, device))?;
            let near = link.host_memory(numel, Kind::Float)?;
            let _ = near.shallow_clone().f_fill_(0.0)?;
            pairs.push(if way == Way::ToHost { (way, far, near) } else { (way, near, far) });
        }
    }
    let issue = |(way, from, to): (Way, Tensor, Tensor)| {
        let sender = Arc::clone(&sender);
        let done = Box::new(move |result| {
            // The receiver lives until all have arrived.
            let _ = sender.send((way, result));
        });
        link.issue(Transfer { way, from, to, label: "bench".into(), moves: false, done })
    };
    let mut left = [(BYTES / (numel * 4)).saturating_sub(2); 2];
    let mut under_way = pairs.len();
    let start = Instant::now();
    pairs.into_iter().try_for_each(issue)?;
    while under_way > 0 {
        let (way, result) = arrived.recv().map_err(anyhow::Error::from)?;
        let pair = result?;
        under_way -= 1;
        let left = &mut left[way as usize];
        if *left > 0 {
            *left -= 1;
            under_way += 1;
            issue((way, pair.from, pair.to))?;
        }
    }
    Ok(start.elapsed().as_secs_f64())
}
