use half::{bf16, f16};
use tch::Tensor;

use super::*;
use crate::samples::{back, bits, numbers};

fn rule() -> Lion {
    LionConfig::default().rule().unwrap()
}

fn hyper() -> Hyper {
    Hyper { lr: 1e-2, weight_decay: 0.1, count: 1, grad_scale: 0.7 }
}

fn step(level: Level, p: &mut [f32], grad: &[f32], m: &mut [f32], out: Out<'_>, hyper: &Hyper) {
    let mut slice = HostSlice { master: p, grad, state: vec![m], out, sums: &[], shape: &[] };
    rule().apply_at(level, &mut slice, hyper).unwrap();
}

#[test]
fn levels_outputs_and_device_form_give_the_same_bits() {
    for n in (0..70).chain([70_001]) {
        let (mut p, mut m) = (numbers(n, 1), vec![0.0; n]);
        for count in 1..6 {
            step(Level::Portable, &mut p, &numbers(n, 7 + count), &mut m, Out::None, &hyper());
        }
        let rounded: Vec<u16> = p.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        let halves: Vec<u16> = p.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
        for &level in Level::available() {
            let ((mut p2, mut m2), (mut p3, mut m3)) = ((numbers(n, 1), vec![0.0; n]), (numbers(n, 1), vec![0.0; n]));
            let (mut wide, mut half) = (vec![bf16::NAN; n], vec![f16::NAN; n]);
            for count in 1..6 {
                let grad = numbers(n, 7 + count);
                step(level, &mut p2, &grad, &mut m2, Out::Bf16(&mut wide), &hyper());
                step(level, &mut p3, &grad, &mut m3, Out::F16(&mut half), &hyper());
            }
            for found in [[&p2, &m2], [&p3, &m3]] {
                assert_eq!(found.map(|x| bits(x)), [bits(&p), bits(&m)], "{level:?} {n}");
            }
            assert_eq!(wide.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), rounded, "{level:?} {n}");
            assert_eq!(half.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), halves, "{level:?} {n}");
        }
        let (p4, m4) = (Tensor::from_slice(&numbers(n, 1)), Tensor::from_slice(&vec![0.0f32; n]));
        let out = Tensor::zeros([n as i64], (tch::Kind::BFloat16, tch::Device::Cpu));
        for count in 1..6 {
            let (grad, state) = (Tensor::from_slice(&numbers(n, 7 + count)), [m4.shallow_clone()]);
            let slice = TensorSlice { master: &p4, grad: &grad, state: &state, out: Some(&out), sums: &[], shape: &[] };
            rule().apply_tensor(&slice, &hyper()).unwrap();
            // The gradient belongs to the engine.
            assert_eq!(bits(&back(&grad)), bits(&numbers(n, 7 + count)));
        }
        assert_eq!([&p4, &m4].map(|x| bits(&back(x))), [bits(&p), bits(&m)], "device {n}");
        let wide: Vec<f32> = rounded.iter().map(|&x| bf16::from_bits(x).to_f32()).collect();
        assert_eq!(bits(&back(&out.to_kind(tch::Kind::Float))), bits(&wide), "device {n}");
    }
}

/// Four steps, computed with the paper's formulas in float64 by another program.
#[test]
fn follows_the_paper() {
    let (mut p, mut m) = ([1.0, -0.5, 0.25], [0.0; 3]);
    for grad in [[0.5, -1.0, 0.0], [-2.0, 0.1, 0.0], [-0.001, 0.2, 0.75], [0.3, 0.001, -4.0]] {
        // A scale of the gradient, which the rule takes back.
        let scaled = grad.map(|g: f32| g * 8.0);
        let hyper = Hyper { grad_scale: 0.125, ..hyper() };
        step(Level::detect(), &mut p, &scaled, &mut m, Out::None, &hyper);
    }
    for (found, expected) in p.iter().zip([0.996006, -0.498003, 0.2490115]) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
    for (found, expected) in m.iter().zip([-0.0117604, -0.0067329, -0.032575]) {
        assert!((found - expected).abs() < 1e-7, "{found} {expected}");
    }
}

#[test]
fn every_step_is_as_long_as_the_rate_and_none_where_nothing_pulls() {
    let (mut p, mut m) = ([0.0; 4], [0.0; 4]);
    let hyper = Hyper { lr: 0.5, weight_decay: 0.0, count: 1, grad_scale: 1.0 };
    step(Level::detect(), &mut p, &[1e30, -1e-30, 0.0, -0.0], &mut m, Out::None, &hyper);
    assert_eq!(p, [-0.5, 0.5, 0.0, 0.0]);
}

#[test]
fn what_is_not_a_number_stays_visible() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut p, mut m, mut grad) = (vec![1.0; 40], vec![0.0; 40], vec![0.1; 40]);
        grad[17] = bad;
        let (p2, m2) = (Tensor::from_slice(&p), [Tensor::from_slice(&m)]);
        let tensor = Tensor::from_slice(&grad);
        step(Level::detect(), &mut p, &grad, &mut m, Out::None, &hyper());
        let slice = TensorSlice { master: &p2, grad: &tensor, state: &m2, out: None, sums: &[], shape: &[] };
        rule().apply_tensor(&slice, &hyper()).unwrap();
        for p in [p, back(&p2)] {
            assert!(p.iter().enumerate().all(|(i, x)| x.is_nan() == (i == 17)), "{bad}: {p:?}");
        }
    }
}

#[test]
fn bad_slices_and_settings_are_errors() {
    let mut slice =
        HostSlice { master: &mut [0.0; 3], grad: &[0.0; 3], state: vec![], out: Out::None, sums: &[], shape: &[] };
    assert_eq!(rule().apply(&mut slice, &hyper()).unwrap_err().to_string(), "lion has 1 states, found 0");
    for (config, expected) in [
        (LionConfig { betas: [0.9, 1.0], ..Default::default() }, "`betas`: must be each from 0 to below 1, found 1"),
        (LionConfig { lr: -1.0, ..Default::default() }, "`lr`: must be finite and at least 0, found -1"),
    ] {
        assert_eq!(config.rule().unwrap_err().to_string(), expected);
    }
}
