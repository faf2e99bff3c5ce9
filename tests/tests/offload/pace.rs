//! Slow and irregular hosts, links and peers: nothing depends on who comes first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use zf_comm::{Reordering, ReorderingConfig, wrap};
use zf_core::Result;
use zf_core::bytes::ByteSize;
use zf_core::engine::OffloadStages;
use zf_core::layout::DType;
use zf_core::stage::{HostPool, Link, Links, Offload, OffloadPolicy, Site, Span, Tier, TierBytes, Traffic, Transfer};
use zf_core::trace::Trace;
use zf_offload::link::EmulatedConfig;
use zf_offload::tier::MemoryTier;
use zf_offload::worker::Worker;

use super::{Zenflow, drained, expect, host};
use crate::lab::Lab;
use crate::random::Dice;

const STEPS: usize = 8;

/// Sleeps for up to half a millisecond in about every second call; how long follows from a seed and the number of the call.
#[derive(Debug, Clone)]
struct Moods {
    seed: u64,
    calls: Arc<AtomicU64>,
}

impl Moods {
    fn new(seed: u64) -> Self {
        Self { seed, calls: Arc::default() }
    }

    fn sleep(&self) {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut dice = Dice(self.seed ^ call << 20);
        if dice.percent(50) {
            std::thread::sleep(Duration::from_micros(dice.below(500) as u64));
        }
    }
}

/// Links that begin transfers late.
#[derive(Debug)]
struct Late {
    inner: Arc<dyn Links>,
    moods: Moods,
}

struct LateLink {
    inner: Arc<dyn Link>,
    moods: Moods,
}

impl Links for Late {
    fn open(&self, rank: usize, device: Device, cores: &[usize], trace: &Trace) -> Result<Arc<dyn Link>> {
        let inner = self.inner.open(rank, device, cores, trace)?;
        Ok(Arc::new(LateLink { inner, moods: self.moods.clone() }))
    }
}

impl Link for LateLink {
    fn issue(&self, transfer: Transfer) -> Result<()> {
        self.moods.sleep();
        self.inner.issue(transfer)
    }

    fn host_memory(&self, numel: usize, kind: Kind) -> Result<Tensor> {
        self.inner.host_memory(numel, kind)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

/// An offload whose states answer late.
#[derive(Debug)]
struct Sleepy {
    inner: Arc<dyn Offload>,
    moods: Moods,
}

struct SleepyTier {
    inner: MemoryTier,
    moods: Moods,
}

impl Offload for Sleepy {
    fn policy(&self) -> Option<OffloadPolicy> {
        self.inner.policy()
    }

    fn open(&self, site: Site) -> Result<Box<dyn HostPool>> {
        let inner = {
            let _host = site.heap.enter();
            MemoryTier::new(&site.lens, 1 + site.optimizer.state().len())?
        };
        let tier = SleepyTier { inner, moods: self.moods.clone() };
        Ok(Box::new(Worker::start(site, Box::new(tier), 3)?))
    }
}

impl Tier for SleepyTier {
    fn announce(&mut self, spans: &[Span]) -> Result<()> {
        self.inner.announce(spans)
    }

    fn with(&mut self, span: &Span, f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>) -> Result<()> {
        self.moods.sleep();
        self.inner.with(span, f)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn bytes(&self) -> TierBytes {
        self.inner.bytes()
    }
}

/// The same with every part in a mood: states, links and the transport between ranks.
fn moody(lab: &Lab, seed: u64) -> Lab {
    let OffloadStages { offload, selector, links } = lab.offload.clone().expect("an offload");
    lab.with(|lab| {
        let moods = Moods::new(seed);
        let offload = Arc::new(Sleepy { inner: offload, moods: moods.clone() });
        lab.offload = Some(OffloadStages { offload, selector, links: Arc::new(Late { inner: links, moods }) });
        let config = ReorderingConfig { seed, window: Duration::from_micros(300) };
        lab.wrap = Some(Arc::new(move |fabric| {
            let config = config.clone();
            wrap(fabric, move |_, inner| Box::new(Reordering::new(inner, &config)))
        }));
    })
}

fn emulated(bandwidth: &str) -> Arc<dyn Links> {
    let bandwidth = bandwidth.parse().expect("a bandwidth");
    Arc::new(EmulatedConfig { bandwidth, latency: Duration::from_micros(50) })
}

fn tiny(name: &str) -> Lab {
    Lab::tiny(name).on(2, 2).with(|lab| {
        (lab.global, lab.micro) = (2, 1);
        lab.options.dtype = DType::Bfloat16;
        lab.options.clip = 1.0;
    })
}

/// Small buffers, so that much is on its way at any time.
fn settings() -> [Zenflow; 3] {
    [Zenflow::new(0.2, 2, 2), Zenflow::new(0.2, 2, 4).late(), Zenflow::new(0.3, 3, 3).synchronous()]
        .map(|zenflow| zenflow.with(|z| (z.config.buffer, z.config.buffers) = (ByteSize(4 << 10), 3)))
}

#[test]
fn moods_change_no_bit() {
    for zenflow in settings() {
        let lab = zenflow.of(&tiny("tiny-gpt2"));
        let known = drained(&lab, STEPS);
        for seed in [1, 2] {
            expect(&format!("seed {seed}"), &known, &moody(&lab, seed), STEPS);
            let over_link = lab.with(|lab| {
                lab.offload.as_mut().expect("an offload").links = emulated("300MB/s");
            });
            expect(&format!("emulated, seed {seed}"), &known, &moody(&over_link, seed).on(1, 0), STEPS);
        }
    }
    let lab = tiny("tiny-gpt2");
    let known = drained(&lab, STEPS);
    let lab = host(&lab, |config| config.buffer = ByteSize(4 << 10));
    expect("ZeRO-Offload", &known, &moody(&lab, 3), STEPS);
}

/// A link and a host that are slower than the device by far.
#[test]
fn slow_hosts_and_links_change_no_bit() {
    for zenflow in settings() {
        let lab = zenflow.of(&tiny("tiny-llama"));
        let known = drained(&lab, STEPS);
        let slow_link = lab.with(|lab| lab.offload.as_mut().expect("an offload").links = emulated("40MB/s"));
        expect("slow link", &known, &slow_link, STEPS);
        let slow_host = lab.with(|lab| lab.options.host.bandwidth = Some("100MB/s".parse().expect("a bandwidth")));
        expect("slow host", &known, &slow_host, STEPS);
        let threads = lab.with(|lab| lab.options.host.threads = Some(3));
        expect("three threads", &known, &threads, STEPS);
    }
}
