//! Speed of an all-reduce between two ranks against that of a memory copy, in the same run.
//!
//! Prints 64 MiB / time of both and their ratio, which must be at least a quarter.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use tch::{Device, Kind, Tensor};
use zf_comm::{Threads, ThreadsConfig};
use zf_core::stage::{Collective, Fabric, Group, Reduce, Request, Transport};

const BYTES: usize = 64 << 20;
const RANKS: usize = 2;
const REQUIRED: f64 = 0.25;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(12)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args();
    let mut copy = f64::INFINITY;
    let mut all_reduce = f64::INFINITY;
    let mut group = criterion.benchmark_group("64 MiB float32");
    group.throughput(Throughput::Bytes(BYTES as u64));
    group.bench_function("memory copy", |b| {
        let from = vec![1.0_f32; BYTES / 4];
        let mut to = vec![0.0_f32; BYTES / 4];
        b.iter_custom(|iterations| {
            let start = Instant::now();
            for _ in 0..iterations {
                to.copy_from_slice(black_box(&from));
                black_box(&mut to);
            }
            let time = start.elapsed();
            copy = copy.min(time.as_secs_f64() / iterations as f64);
            time
        });
    });
    group.bench_function("all-reduce of two ranks", |b| {
        b.iter_custom(|iterations| {
            let time = run(iterations);
            all_reduce = all_reduce.min(time.as_secs_f64() / iterations as f64);
            time
        });
    });
    group.finish();
    if copy.is_finite() && all_reduce.is_finite() {
        let speed = |seconds: f64| BYTES as f64 / seconds / 1e9;
        let ratio = copy / all_reduce;
        println!(
            "all-reduce {:.2} GB/s, memory copy {:.2} GB/s: ratio {ratio:.2} (required: {REQUIRED})",
            speed(all_reduce),
            speed(copy)
        );
        if ratio < REQUIRED {
            eprintln!("the all-reduce is too slow");
            std::process::exit(1);
        }
    }
}

/// The time that `iterations` all-reduces take, from the first issue to the last completion of rank 0.
fn run(iterations: u64) -> Duration {
    let config = ThreadsConfig { ranks: RANKS, ..ThreadsConfig::default() };
    let fabric = Threads::new(&config).expect("the settings are right");
    let barrier = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (fabric, barrier) = (&fabric, &barrier);
                scope.spawn(move || {
                    let mut transport = fabric.connect(rank).expect("the seat is free");
                    let tensor = Tensor::zeros([(BYTES / 4) as i64], (Kind::Float, Device::Cpu));
                    all_reduce(&mut *transport, &tensor);
                    barrier.wait();
                    let start = Instant::now();
                    for _ in 0..iterations {
                        all_reduce(&mut *transport, &tensor);
                    }
                    start.elapsed()
                })
            })
            .collect();
        let times = ranks.into_iter().map(|rank| rank.join().expect("no rank panics"));
        times.max().expect("there are ranks")
    })
}

fn all_reduce(transport: &mut dyn Transport, tensor: &Tensor) {
    let request = Request {
        group: Group::world(RANKS),
        label: "benchmark".into(),
        collective: Collective::AllReduce { tensor: tensor.shallow_clone(), op: Reduce::Sum },
    };
    transport.issue(request).and_then(|ticket| ticket.wait()).expect("both ranks take part");
}
