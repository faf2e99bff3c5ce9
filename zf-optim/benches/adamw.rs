//! The AdamW update beside libtorch's fused one and a plain copy, one thread, 16 Mi parameters.
//!
//! An update reads four and writes three arrays (28 bytes a parameter; 30 with a bfloat16 copy), so memory sets the pace.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use tch::Tensor;
use zf_core::norm::{ExactSum, square_sum};
use zf_core::stage::{HostSlice, Hyper, Optimizer, Out};
use zf_optim::AdamWConfig;

const N: usize = 1 << 24;

fn adamw(c: &mut Criterion) {
    tch::set_num_threads(1);
    let rule = AdamWConfig::default().rule().expect("the defaults are valid");
    let hyper = Hyper { lr: 1e-3, weight_decay: 0.1, count: 1000, grad_scale: 1.0 };
    let grad: Vec<f32> = (0..N).map(|i| (i % 1013) as f32 * 1e-3 - 0.5).collect();
    let (mut p, mut m, mut v) = (grad.clone(), vec![1e-3f32; N], vec![1e-3f32; N]);
    let mut out = vec![bf16::ZERO; N];

    let mut group = c.benchmark_group("adamw");
    group.sample_size(10).throughput(Throughput::Bytes(28 * N as u64));
    group.bench_function("host", |b| {
        b.iter(|| {
            let state = vec![&mut m[..], &mut v[..]];
            let mut slice = HostSlice { master: &mut p, grad: &grad, state, out: Out::None, sums: &[], shape: &[] };
            rule.apply(&mut slice, &hyper).expect("equal lengths");
        });
    });
    group.bench_function("host_bf16", |b| {
        b.iter(|| {
            let state = vec![&mut m[..], &mut v[..]];
            let mut slice =
                HostSlice { master: &mut p, grad: &grad, state, out: Out::Bf16(&mut out), sums: &[], shape: &[] };
            rule.apply(&mut slice, &hyper).expect("equal lengths");
        });
    });
    let one = |x: &[f32]| [Tensor::from_slice(x)];
    let tensors = (one(&p), one(&grad), one(&m), one(&v), [Tensor::from(1000f32)]);
    group.bench_function("libtorch_fused", |b| {
        b.iter(|| {
            let (p, g, m, v, steps) = &tensors;
            zf_sys::fused::adamw(p, g, m, v, steps, 1e-3, 0.9, 0.95, 0.1, 1e-8).expect("equal lengths");
        });
    });
    // 7/2 copies move the same bytes.
    group.throughput(Throughput::Bytes(8 * N as u64));
    group.bench_function("copy", |b| b.iter(|| black_box(&mut p).copy_from_slice(black_box(&grad))));
    group.finish();

    let mut group = c.benchmark_group("squares");
    group.sample_size(10).throughput(Throughput::Elements(N as u64));
    group.bench_function("square_sum", |b| b.iter(|| square_sum(black_box(&grad))));
    group.bench_function("exact_sum", |b| {
        b.iter(|| {
            let mut sum = ExactSum::new();
            sum.add_squares(black_box(&grad));
            sum
        });
    });
    group.finish();
}

criterion_group!(benches, adamw);
criterion_main!(benches);
