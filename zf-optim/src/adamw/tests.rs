use half::{bf16, f16};
use tch::Tensor;

use super::*;
use crate::samples::numbers;

fn rule() -> AdamW {
    AdamWConfig::default().rule().unwrap()
}

fn hyper(count: u64) -> Hyper {
    Hyper { lr: 1e-3, weight_decay: 0.1, count, grad_scale: 0.7 }
}

#[derive(Clone)]
struct State {
    p: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl State {
    fn new(n: usize) -> Self {
        Self { p: numbers(n, 1), m: vec![0.0; n], v: vec![0.0; n] }
    }

    fn step(&mut self, level: Level, grad: &[f32], hyper: &Hyper, out: Out<'_>) -> Result<()> {
        let state = vec![&mut self.m[..], &mut self.v[..]];
        let mut slice = HostSlice { master: &mut self.p, grad, state, out, sums: &[], shape: &[] };
        rule().update_host("adamw", level, &mut slice, hyper)
    }

    fn bits(&self) -> Vec<u32> {
        [&self.p, &self.m, &self.v].into_iter().flatten().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn levels_and_outputs_give_the_same_bits_at_every_short_length() {
    for n in (0..70).chain([1000, 4099]) {
        let mut expected = State::new(n);
        for count in 1..4 {
            expected.step(Level::Portable, &numbers(n, 7 + count), &hyper(count), Out::None).unwrap();
        }
        let rounded: Vec<u16> = expected.p.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        let halves: Vec<u16> = expected.p.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
        for &level in Level::available() {
            let (mut a, mut b, mut c) = (State::new(n), State::new(n), State::new(n));
            let mut out_b = vec![bf16::NAN; n];
            let mut out_c = vec![f16::NAN; n];
            for count in 1..4 {
                let grad = numbers(n, 7 + count);
                a.step(level, &grad, &hyper(count), Out::None).unwrap();
                b.step(level, &grad, &hyper(count), Out::Bf16(&mut out_b)).unwrap();
                c.step(level, &grad, &hyper(count), Out::F16(&mut out_c)).unwrap();
            }
            for found in [&a, &b, &c] {
                assert_eq!(found.bits(), expected.bits(), "{level:?} {n}");
            }
            assert_eq!(out_b.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), rounded, "{level:?} {n}");
            assert_eq!(out_c.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), halves, "{level:?} {n}");
        }
    }
}

#[test]
fn device_form_gives_the_same_bits() {
    // More than one piece, and an odd rest.
    let n = (1 << 16) + 77;
    let mut host = State::new(n);
    let mut out = vec![bf16::ZERO; n];
    let start = State::new(n);
    let tensor = |x: &[f32]| Tensor::from_slice(x);
    let (p, state) = (tensor(&start.p), [tensor(&start.m), tensor(&start.v)]);
    let rounded = Tensor::zeros([n as i64], (tch::Kind::BFloat16, tch::Device::Cpu));
    for count in 1..6 {
        let grad = numbers(n, 90 + count);
        host.step(Level::detect(), &grad, &hyper(count), Out::Bf16(&mut out)).unwrap();
        let slice =
            TensorSlice { master: &p, grad: &tensor(&grad), state: &state, out: Some(&rounded), sums: &[], shape: &[] };
        rule().apply_tensor(&slice, &hyper(count)).unwrap();
    }
    let back = |t: &Tensor| Vec::<f32>::try_from(t).unwrap();
    let device = State { p: back(&p), m: back(&state[0]), v: back(&state[1]) };
    for (what, host, device) in [("v", &host.v, &device.v), ("m", &host.m, &device.m), ("p", &host.p, &device.p)] {
        let different: Vec<_> =
            host.iter().zip(device).enumerate().filter(|(_, (a, b))| a.to_bits() != b.to_bits()).collect();
        assert!(different.is_empty(), "{what}: {} differ, first {:?}", different.len(), &different[..1]);
    }
    let wide: Vec<f32> = out.iter().map(|x| x.to_f32()).collect();
    assert_eq!(wide, back(&rounded.to_kind(tch::Kind::Float)));
}

/// The formulas in float64.
fn reference(steps: u64, start: f64, gradient: impl Fn(u64, f64) -> f64) -> f64 {
    let (mut p, mut m, mut v) = (start, 0.0, 0.0);
    for n in 1..=steps {
        let g = gradient(n, p);
        p *= 1.0 - 1e-3 * 0.1;
        m = m + (1.0 - 0.9) * (g - m);
        v = 0.95 * v + (1.0 - 0.95) * g * g;
        let corrected = v.sqrt() / (1.0 - 0.95f64.powi(n as i32)).sqrt();
        p -= 1e-3 / (1.0 - 0.9f64.powi(n as i32)) * m / (corrected + 1e-8);
    }
    p
}

#[test]
fn follows_the_formulas_in_float64() {
    let gradient = |n: u64, p: f64| p + (n as f64 * 0.3).sin();
    for start in [1.0, -0.5, 1e-3] {
        let mut state = State { p: vec![start as f32], m: vec![0.0], v: vec![0.0] };
        for n in 1..=200 {
            let grad = [gradient(n, f64::from(state.p[0])) as f32];
            state.step(Level::detect(), &grad, &Hyper { grad_scale: 1.0, ..hyper(n) }, Out::None).unwrap();
        }
        let expected = reference(200, start, gradient);
        assert!((f64::from(state.p[0]) - expected).abs() < 1e-5, "{} {expected}", state.p[0]);
    }
}

#[test]
fn agrees_with_the_fused_update_of_libtorch() {
    let n = 5000;
    let values = |seed| numbers(n, seed).iter().map(|x| x.clamp(-10.0, 10.0)).collect::<Vec<f32>>();
    let mut host = State { p: values(1), ..State::new(n) };
    let tensors = [values(1), vec![0.0; n], vec![0.0; n]].map(|x| Tensor::from_slice(&x));
    let [p, m, v] = &tensors;
    for count in 1..=20u64 {
        let grad = values(count + 3);
        let hyper = Hyper { grad_scale: 1.0, ..hyper(count) };
        host.step(Level::detect(), &grad, &hyper, Out::None).unwrap();
        let steps = [Tensor::from(count as f32)];
        let one = |t: &Tensor| [t.shallow_clone()];
        zf_sys::fused::adamw(
            &one(p),
            &[Tensor::from_slice(&grad)],
            &one(m),
            &one(v),
            &steps,
            1e-3,
            0.9,
            0.95,
            0.1,
            1e-8,
        )
        .unwrap();
    }
    for (found, expected) in host.p.iter().zip(Vec::<f32>::try_from(p).unwrap()) {
        assert!((found - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{found} {expected}");
    }
}

#[test]
fn bias_correction_has_no_end() {
    // A constant gradient of 1 moves the parameter by lr at every step, whatever the count.
    for count in [1u64, 2, 255, 256, 257, 2999, 3000, 65535, 65536, 65537, u64::MAX] {
        let before = count - 1;
        let (m, v) = (1.0 - power(0.9, before), 1.0 - power(0.95, before));
        let mut state = State { p: vec![0.0], m: vec![m as f32], v: vec![v as f32] };
        let hyper = Hyper { lr: 0.5, weight_decay: 0.0, count, grad_scale: 1.0 };
        state.step(Level::detect(), &[1.0], &hyper, Out::None).unwrap();
        assert!((state.p[0] + 0.5).abs() < 1e-5, "{count}: {}", state.p[0]);
    }
    let mut state = State { p: vec![0.0], m: vec![0.0], v: vec![0.0] };
    for count in 1..=3000 {
        let before = state.p[0];
        let hyper = Hyper { lr: 1e-2, weight_decay: 0.0, count, grad_scale: 1.0 };
        state.step(Level::detect(), &[1.0], &hyper, Out::None).unwrap();
        assert!((before - state.p[0] - 1e-2).abs() < 1e-5, "{count}");
    }
}

#[test]
fn powers_are_those_of_repeated_products() {
    let mut product = 1.0;
    for n in 0..3000u64 {
        assert!((power(0.999, n) - product).abs() < 1e-12 * product, "{n}");
        product *= 0.999;
    }
    assert_eq!(power(0.9, u64::MAX), 0.0);
    assert_eq!(power(0.0, 1), 0.0);
}

#[test]
fn what_is_not_a_number_stays_visible() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut state = State { p: vec![1.0; 40], m: vec![0.0; 40], v: vec![0.0; 40] };
        let mut grad = vec![0.1; 40];
        grad[17] = bad;
        let mut out = vec![bf16::ZERO; 40];
        state.step(Level::detect(), &grad, &hyper(1), Out::Bf16(&mut out)).unwrap();
        assert!(state.p[17].is_nan() && out[17].is_nan(), "{bad}: {}", state.p[17]);
        assert!(state.p.iter().enumerate().all(|(i, x)| i == 17 || x.is_finite()));
    }
}

#[test]
fn a_gradient_of_zero_leaves_a_fresh_parameter_but_for_decay() {
    let mut state = State { p: vec![1.0, -0.0], m: vec![0.0; 2], v: vec![0.0; 2] };
    state.step(Level::detect(), &[0.0; 2], &Hyper { weight_decay: 0.0, ..hyper(1) }, Out::None).unwrap();
    assert_eq!(state.p[0], 1.0);
    state.step(Level::detect(), &[0.0; 2], &hyper(2), Out::None).unwrap();
    assert_eq!(state.p[0], 1.0 - 1e-4);
}

#[test]
fn slices_that_do_not_fit_are_errors() {
    let error = |grad: &[f32], state: Vec<&mut [f32]>, count| {
        let mut slice = HostSlice { master: &mut [0.0; 3], grad, state, out: Out::None, sums: &[], shape: &[] };
        rule().apply(&mut slice, &hyper(count)).unwrap_err().to_string()
    };
    let (mut a, mut b) = ([0.0; 3], [0.0; 2]);
    assert_eq!(error(&[0.0; 2], vec![&mut a, &mut [0.0; 3]], 1), "adamw: master has 3 elements, grad 2");
    assert_eq!(error(&[0.0; 3], vec![&mut a, &mut b], 1), "adamw: master has 3 elements, state 2");
    assert_eq!(error(&[0.0; 3], vec![&mut a], 1), "adamw has 2 states, found 1");
    assert_eq!(error(&[0.0; 3], vec![&mut a, &mut [0.0; 3]], 0), "adamw: updates count from 1, found 0");

    let (p, wrong) = (Tensor::zeros([3], tch::kind::FLOAT_CPU), Tensor::zeros([3], tch::kind::DOUBLE_CPU));
    let slice = TensorSlice {
        master: &p,
        grad: &wrong,
        state: &[p.zeros_like(), p.zeros_like()],
        out: None,
        sums: &[],
        shape: &[],
    };
    let message = rule().apply_tensor(&slice, &hyper(1)).unwrap_err().to_string();
    assert_eq!(message, "adamw: grad must be a 1-D float32 tensor, found Double of shape [3]");
}

#[test]
fn settings_out_of_range_are_errors_with_their_key() {
    let check = |change: fn(&mut AdamWConfig), expected: &str| {
        let mut config = AdamWConfig::default();
        change(&mut config);
        let message = config.rule().unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    };
    check(|c| c.lr = -1.0, "`lr`: must be finite and at least 0, found -1");
    check(|c| c.lr = f64::NAN, "`lr`: must be");
    check(|c| c.weight_decay = f64::INFINITY, "`weight_decay`: must be");
    check(|c| c.betas[0] = 1.0, "`betas`: must be each from 0 to below 1, found 1");
    check(|c| c.betas[1] = -0.1, "`betas`: must be");
    check(|c| c.eps = 0.0, "`eps`: must be");
    let group = |lr, frozen| GroupRule { pattern: "norm".into(), lr, weight_decay: None, frozen };
    let mut config = AdamWConfig { groups: vec![group(Some(-1.0), false)], ..Default::default() };
    let message = config.clone().rule().unwrap_err().to_string();
    assert_eq!(message, "`groups`: group 0 (\"norm\"): lr must be finite and at least 0, found -1");
    config.groups = vec![group(None, true), group(Some(1.0), true)];
    assert!(config.clone().rule().unwrap_err().to_string().contains("group 1 (\"norm\"): lr has no effect on frozen"));
    config.groups = vec![GroupRule::default()];
    assert!(config.rule().unwrap_err().to_string().contains("group 0 has an empty `match`"));
}
