//! The host forms of all update rules side by side, one thread: 4 Mi parameters, for Muon as one matrix of 2048 x 2048.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use zf_core::norm::square_sum;
use zf_core::stage::{HostSlice, Hyper, Optimizer, Out, SquareSums};
use zf_optim::{AdamWConfig, LambConfig, LionConfig, MuonConfig, SgdConfig};

const SIDE: i64 = 2048;

/// Sums without regard to how a tensor is cut.
struct Fast([f64; 2]);

impl SquareSums for Fast {
    fn add(&mut self, index: usize, values: &[f32]) {
        self.0[index] += square_sum(values).sum;
    }
}

fn rules(c: &mut Criterion) {
    tch::set_num_threads(1);
    let n = (SIDE * SIDE) as usize;
    let rules: [(&str, Box<dyn Optimizer>); 5] = [
        ("adamw", Box::new(AdamWConfig::default().rule().expect("the defaults are valid"))),
        ("sgd", Box::new(SgdConfig::default().rule().expect("the defaults are valid"))),
        ("lion", Box::new(LionConfig::default().rule().expect("the defaults are valid"))),
        ("lamb", Box::new(LambConfig::default().rule().expect("the defaults are valid"))),
        ("muon", Box::new(MuonConfig::default().rule().expect("the defaults are valid"))),
    ];
    let hyper = Hyper { lr: 1e-3, weight_decay: 0.1, count: 1000, grad_scale: 1.0 };
    let grad: Vec<f32> = (0..n).map(|i| (i % 1013) as f32 * 1e-3 - 0.5).collect();
    let mut group = c.benchmark_group("rules");
    group.sample_size(10).throughput(Throughput::Elements(n as u64));
    for (name, rule) in rules {
        let mut master = grad.clone();
        let mut states = vec![vec![1e-3f32; n]; rule.state().len()];
        group.bench_function(name, |b| {
            b.iter(|| {
                let state = states.iter_mut().map(Vec::as_mut_slice).collect();
                let shape = &[SIDE, SIDE];
                let mut slice = HostSlice { master: &mut master, grad: &grad, state, out: Out::None, sums: &[], shape };
                let mut sums = Fast([0.0; 2]);
                rule.partial(&slice, &hyper, &mut sums).expect("equal lengths");
                slice.sums = &sums.0;
                rule.apply(&mut slice, &hyper).expect("equal lengths");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, rules);
criterion_main!(benches);
