//! Tests of the shim, one process each under nextest.

mod arena;
mod arena_model;
mod checkpoint;
mod grads;
mod heap;
mod heap_model;
mod heap_threads;
mod hooks;
mod runtime;
mod storage;

use tch::{Device, Kind, Tensor};

/// Float32 on the CPU.
const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A smooth, deterministic tensor that needs no generator; `salt` makes it differ from others.
fn values(shape: &[i64], salt: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, F32) * (0.37 + salt)).sin().reshape(shape)
}

/// A leaf that requires a gradient.
fn leaf(shape: &[i64], salt: f64) -> Tensor {
    values(shape, salt).set_requires_grad(true)
}

/// Both tensors hold the same bits.
#[track_caller]
fn assert_same_bits(left: &Tensor, right: &Tensor, what: &str) {
    let bits = |tensor: &Tensor| -> Vec<u32> {
        let tensor = tensor.detach().contiguous();
        zf_sys::storage::slice::<f32>(&tensor).unwrap().iter().map(|value| value.to_bits()).collect()
    };
    assert_eq!(left.size(), right.size(), "{what}: shapes differ");
    assert!(bits(left) == bits(right), "{what}: bits differ:\n{left}\n{right}");
}
