use half::bf16;
use tch::Tensor;

use super::*;
use crate::samples::uniform;

fn rule(momentum: f64) -> Sgd {
    SgdConfig { momentum, ..Default::default() }.rule().unwrap()
}

/// Runs five steps in host form at `level` and returns parameters and buffer.
fn host(level: Level, momentum: f64, decay: f64, n: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut p, mut buffer) = (uniform(n, 1), vec![0.0; n]);
    let mut out = vec![bf16::NAN; n];
    for count in 1..=5 {
        let grad = uniform(n, 50 + count);
        let state = if momentum == 0.0 { Vec::new() } else { vec![&mut buffer[..]] };
        let mut slice =
            HostSlice { master: &mut p, grad: &grad, state, out: Out::Bf16(&mut out), sums: &[], shape: &[] };
        rule(momentum).apply_at(level, &mut slice, &hyper(decay, count)).unwrap();
    }
    assert!(p.iter().zip(&out).all(|(p, o)| bf16::from_f32(*p) == *o));
    (p, buffer)
}

fn hyper(weight_decay: f64, count: u64) -> Hyper {
    Hyper { lr: 0.05, weight_decay, count, grad_scale: 0.3 }
}

#[test]
fn levels_and_device_form_give_the_same_bits() {
    for momentum in [0.0, 0.9] {
        for decay in [0.0, 0.1] {
            for n in (0..70).chain([70_001]) {
                let expected = host(Level::Portable, momentum, decay, n);
                for &level in Level::available() {
                    assert_eq!(host(level, momentum, decay, n), expected, "{level:?} {momentum} {decay} {n}");
                }
                let (p, buffer) = (Tensor::from_slice(&uniform(n, 1)), Tensor::from_slice(&vec![0.0f32; n]));
                let state = if momentum == 0.0 { vec![] } else { vec![buffer.shallow_clone()] };
                for count in 1..=5 {
                    let grad = Tensor::from_slice(&uniform(n, 50 + count));
                    let slice =
                        TensorSlice { master: &p, grad: &grad, state: &state, out: None, sums: &[], shape: &[] };
                    rule(momentum).apply_tensor(&slice, &hyper(decay, count)).unwrap();
                    // The gradient belongs to the engine.
                    assert_eq!(Vec::<f32>::try_from(&grad).unwrap(), uniform(n, 50 + count));
                }
                let back = |t: &Tensor| Vec::<f32>::try_from(t).unwrap();
                assert_eq!((back(&p), back(&buffer)), expected, "{momentum} {decay} {n}");
            }
        }
    }
}

#[test]
fn follows_the_formulas_in_float64() {
    let (mut p, mut buffer) = (vec![1.0f32], vec![0.0f32]);
    let (mut exact, mut exact_buffer) = (1.0f64, None);
    for count in 1..=100u64 {
        let g = exact + (count as f64 * 0.3).sin();
        let g32 = p[0] + (count as f64 * 0.3).sin() as f32;
        let decayed = g + 0.01 * exact;
        let b = exact_buffer.map_or(decayed, |b: f64| 0.9 * b + decayed);
        exact_buffer = Some(b);
        exact -= 0.05 * b;
        let mut slice =
            HostSlice { master: &mut p, grad: &[g32], state: vec![&mut buffer], out: Out::None, sums: &[], shape: &[] };
        rule(0.9).apply(&mut slice, &Hyper { grad_scale: 1.0, ..hyper(0.01, count) }).unwrap();
    }
    assert!((f64::from(p[0]) - exact).abs() < 1e-5, "{} {exact}", p[0]);
}

#[test]
fn the_first_buffer_is_the_gradient() {
    let (mut p, mut buffer) = ([0.0f32; 4], [0.0f32; 4]);
    let grad = [1.5f32, -2.25, 1e-40, 0.0];
    let mut slice =
        HostSlice { master: &mut p, grad: &grad, state: vec![&mut buffer], out: Out::None, sums: &[], shape: &[] };
    rule(0.9).apply(&mut slice, &Hyper { grad_scale: 1.0, ..hyper(0.0, 1) }).unwrap();
    assert_eq!(buffer, grad);
}

#[test]
fn what_is_not_a_number_stays_visible() {
    let (mut p, mut buffer) = ([1.0f32; 2], [0.0f32; 2]);
    let mut slice = HostSlice {
        master: &mut p,
        grad: &[f32::NAN, f32::INFINITY],
        state: vec![&mut buffer],
        out: Out::None,
        sums: &[],
        shape: &[],
    };
    rule(0.9).apply(&mut slice, &hyper(0.0, 1)).unwrap();
    assert!(p[0].is_nan() && p[1] == f32::NEG_INFINITY);
}

#[test]
fn without_momentum_there_is_no_state() {
    assert!(rule(0.0).state().is_empty());
    let (mut p, mut buffer) = ([0.0], [0.0]);
    let mut slice =
        HostSlice { master: &mut p, grad: &[0.0], state: vec![&mut buffer], out: Out::None, sums: &[], shape: &[] };
    let message = rule(0.0).apply(&mut slice, &hyper(0.0, 1)).unwrap_err().to_string();
    assert_eq!(message, "sgd has 0 states, found 1");
}

#[test]
fn settings_out_of_range_are_errors() {
    let message = SgdConfig { momentum: 1.0, ..Default::default() }.rule().unwrap_err().to_string();
    assert_eq!(message, "`momentum`: must be from 0 to below 1, found 1");
}
