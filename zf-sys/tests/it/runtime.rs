use tch::{Device, Tensor};
use zf_sys::{device, fused, rng, threads};

use crate::{F32, assert_same_bits, values};

#[test]
fn the_generator_goes_back_to_a_saved_state() {
    tch::manual_seed(7);
    let _ = Tensor::rand([3], F32);
    let state = rng::cpu_state().unwrap();
    let first = Tensor::randn([37], F32);
    assert_ne!(Tensor::randn([37], F32), first);
    rng::set_cpu_state(&state).unwrap();
    assert_same_bits(&Tensor::randn([37], F32), &first, "the same numbers again");
    assert!(rng::set_cpu_state(&state[1..]).is_err());
    assert!(rng::set_cpu_state(&[]).is_err());
}

#[test]
fn fused_adamw_follows_the_formula() {
    let (lr, b1, b2, wd, eps) = (0.01, 0.9, 0.99, 0.1, 1e-8);
    let shapes: [&[i64]; 2] = [&[7], &[3, 5]];
    let params: Vec<_> = shapes.iter().map(|shape| values(shape, 0.0)).collect();
    let grads: Vec<_> = shapes.iter().map(|shape| values(shape, 0.5)).collect();
    let (m, v): (Vec<_>, Vec<_>) = params.iter().map(|p| (p.zeros_like(), p.zeros_like())).unzip();
    let start: Vec<_> = params.iter().map(Tensor::copy).collect();
    for step in 1..=2 {
        let steps: Vec<_> = params.iter().map(|_| Tensor::from(step as f32)).collect();
        fused::adamw(&params, &grads, &m, &v, &steps, lr, b1, b2, wd, eps).unwrap();
    }
    // With a constant gradient both corrected moments are g and g^2 at every step.
    for ((param, start), g) in params.iter().zip(&start).zip(&grads) {
        let update = g / (g.abs() + eps) * lr;
        let expected = (start * (1.0 - lr * wd) - &update) * (1.0 - lr * wd) - &update;
        assert!(param.allclose(&expected, 1e-5, 1e-6, false), "{param}\n{expected}");
    }
    let error = fused::adamw(&params, &grads[..1], &m, &v, &[], lr, b1, b2, wd, eps).unwrap_err().to_string();
    assert!(error.contains("2 params but 1 grads"), "{error}");
    fused::adamw(&[], &[], &[], &[], &[], lr, b1, b2, wd, eps).unwrap();
}

#[test]
fn operator_threads_belong_to_the_calling_thread() {
    threads::set_operator_threads(1).unwrap();
    std::thread::spawn(|| {
        threads::set_operator_threads(2).unwrap();
        assert_eq!(threads::operator_threads().unwrap(), 2);
    })
    .join()
    .unwrap();
    assert_eq!(threads::operator_threads().unwrap(), 1);
    assert!(threads::set_operator_threads(0).is_err());
    assert!(threads::set_operator_threads(usize::MAX).is_err());
}

#[test]
fn the_device_functions_agree_with_tch() {
    device::synchronize(Device::Cpu).unwrap();
    assert!(device::synchronize(Device::Cuda(999)).is_err());
    assert!(device::synchronize(Device::Mps).is_err());
    assert_eq!(device::cuda_available(), tch::Cuda::is_available());
    assert!(device::has_cuda_build() || !device::cuda_available());
    assert!(device::libtorch_version().starts_with("2."));
    assert!(!device::cpu_capability().is_empty());
}

#[test]
fn a_side_stream_copies_what_autograd_does_not_see() {
    use tch::{Kind, no_grad};
    use zf_sys::autograd::version;
    use zf_sys::stream::{Stream, pinned};

    let stream = Stream::beside(Device::Cpu).unwrap();
    let (from, to) = (values(&[100], 0.0), Tensor::zeros([100], F32).set_requires_grad(true));
    let before = version(&to).unwrap();
    let copy = stream.copy(&to, &from).unwrap();
    assert_eq!(copy.query().unwrap(), Some(0.0));
    assert_eq!(version(&to).unwrap(), before);
    no_grad(|| assert_same_bits(&to.detach(), &from, "the copy"));
    assert!(stream.copy(&to, &values(&[99], 0.0)).is_err());
    assert!(Stream::beside(Device::Mps).is_err());
    assert!(pinned(1, Kind::ComplexFloat).is_err());
    if device::cuda_available() {
        let (stream, host) = (Stream::beside(Device::Cuda(0)).unwrap(), pinned(100, Kind::Float).unwrap());
        let copy = stream.copy(&host, &from.to_device(Device::Cuda(0))).unwrap();
        device::synchronize(Device::Cuda(0)).unwrap();
        assert!(copy.query().unwrap().is_some());
        assert_same_bits(&host, &from, "the copy from the device");
    } else {
        assert!(Stream::beside(Device::Cuda(0)).is_err());
        assert!(pinned(1, Kind::Float).is_err());
    }
}
