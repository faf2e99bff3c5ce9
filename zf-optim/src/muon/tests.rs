use half::{bf16, f16};

use super::*;
use crate::samples::{back, bits, uniform};

fn rule() -> Muon {
    MuonConfig::default().rule().unwrap()
}

fn hyper(count: u64) -> Hyper {
    Hyper { lr: 0.02, weight_decay: 0.1, count, grad_scale: 0.5 }
}

#[derive(Debug, Clone)]
struct State {
    p: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl State {
    fn new(p: &[f32]) -> Self {
        Self { p: p.to_vec(), m: vec![0.0; p.len()], v: vec![0.0; p.len()] }
    }

    fn step(&mut self, rule: &Muon, level: Level, grad: &[f32], out: Out<'_>, shape: &[i64], count: u64) {
        let state = vec![&mut self.m[..], &mut self.v[..]];
        let mut slice = HostSlice { master: &mut self.p, grad, state, out, sums: &[], shape };
        rule.apply_at(level, &mut slice, &hyper(count)).unwrap();
    }

    fn bits(&self) -> [Vec<u32>; 3] {
        [&self.p, &self.m, &self.v].map(|x| bits(x))
    }
}

#[test]
fn levels_outputs_places_and_device_form_give_the_same_bits() {
    tch::set_num_threads(1);
    // Matrices of both forms, thin ones and one large enough for every path of the products; then AdamW's share.
    let shapes: [&[i64]; 12] =
        [&[3, 5], &[5, 3], &[1, 9], &[9, 1], &[1, 1], &[64, 100], &[257, 131], &[], &[7], &[2, 3, 4], &[0, 4], &[0]];
    for shape in shapes {
        let n = shape.iter().product::<i64>() as usize;
        let mut expected = State::new(&uniform(n, 1));
        for count in 1..4 {
            expected.step(&rule(), Level::Portable, &uniform(n, 7 + count), Out::None, shape, count);
        }
        assert!(expected.p.iter().all(|x| x.is_finite()), "{shape:?}");
        assert!(n == 0 || expected.bits()[0] != bits(&uniform(n, 1)), "{shape:?} moved");
        let rounded: Vec<bf16> = expected.p.iter().map(|&x| bf16::from_f32(x)).collect();
        let halves: Vec<f16> = expected.p.iter().map(|&x| f16::from_f32(x)).collect();
        for &level in Level::available() {
            let (mut a, mut b) = (State::new(&uniform(n, 1)), State::new(&uniform(n, 1)));
            let (mut wide, mut half) = (vec![bf16::NAN; n], vec![f16::NAN; n]);
            for count in 1..4 {
                // Gradients that begin anywhere.
                let mut grad = vec![9.0; count as usize];
                grad.extend(uniform(n, 7 + count));
                let grad = &grad[count as usize..];
                a.step(&rule(), level, grad, Out::Bf16(&mut wide), shape, count);
                b.step(&rule(), level, grad, Out::F16(&mut half), shape, count);
            }
            assert_eq!([a.bits(), b.bits()], [expected.bits(), expected.bits()], "{level:?} {shape:?}");
            assert_eq!((wide, half), (rounded.clone(), halves.clone()), "{level:?} {shape:?}");
        }
        // The tensors are parts of flat buffers, at odd places.
        let flat = Tensor::zeros([3 * n as i64 + 3], tch::kind::FLOAT_CPU);
        let part = |i: i64| flat.narrow(0, i + 1 + i * n as i64, n as i64);
        let (mut p, state) = (part(0), [part(1), part(2)]);
        p.copy_(&Tensor::from_slice(&uniform(n, 1)));
        let out = Tensor::zeros([n as i64], (Kind::BFloat16, tch::Device::Cpu));
        for count in 1..4 {
            let grad = Tensor::from_slice(&uniform(n, 7 + count));
            let slice = TensorSlice { master: &p, grad: &grad, state: &state, out: Some(&out), sums: &[], shape };
            rule().apply_tensor(&slice, &hyper(count)).unwrap();
            // The gradient belongs to the engine.
            assert_eq!(bits(&back(&grad)), bits(&uniform(n, 7 + count)));
        }
        let device = State { p: back(&p), m: back(&state[0]), v: back(&state[1]) };
        assert_eq!(device.bits(), expected.bits(), "device {shape:?}");
        let wide: Vec<f32> = rounded.iter().map(|x| x.to_f32()).collect();
        assert_eq!(back(&out.to_kind(Kind::Float)), wide, "device {shape:?}");
    }
}

/// Three steps, computed with the formulas of the authors' code in float64 by another program.
#[test]
fn follows_the_authors_code() {
    const START: [f32; 6] = [0.1, -0.2, 0.3, 0.4, -0.5, 0.6];
    const GRADS: [[f32; 6]; 3] =
        [[1.0, 0.5, -0.25, 2.0, 0.75, -1.5], [-0.5, 0.25, 1.5, 1.0, 0.125, -2.0], [0.3, -0.7, 0.2, 0.9, -1.1, 0.4]];
    let transpose = |x: [f32; 6]| [x[0], x[2], x[4], x[1], x[3], x[5]];
    let run = |scale, shape: &[i64], turn: &dyn Fn([f32; 6]) -> [f32; 6], expected: [f32; 6]| {
        let rule = MuonConfig { scale, ..Default::default() }.rule().unwrap();
        let mut state = State::new(&turn(START));
        for (count, grad) in (1..).zip(GRADS) {
            state.step(&rule, Level::detect(), &turn(grad).map(|g| g * 2.0), Out::None, shape, count);
        }
        assert!(state.p.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-6), "{:?} {expected:?}", state.p);
        let m = turn([0.036375, -0.0005625, 0.0699688, 0.18275, -0.0152188, -0.1426875]);
        assert!(state.m.iter().zip(m).all(|(a, b)| (a - b).abs() < 1e-6), "{:?} {m:?}", state.m);
        assert_eq!(state.v, [0.0; 6]);
    };
    let tall = [0.0614349, -0.2014724, 0.2720668, 0.3605287, -0.5130732, 0.6264611];
    run(MuonScale::Spectral, &[3, 2], &|x| x, tall);
    // A wide matrix is not scaled by its form.
    let wide = [0.0684019, 0.276863, -0.5101248, -0.2009825, 0.3673323, 0.6209461];
    run(MuonScale::Spectral, &[2, 3], &transpose, wide);
    let rms = [0.0886627, -0.1995576, 0.290811, 0.3871181, -0.5015505, 0.6049077];
    run(MuonScale::Rms, &[3, 2], &|x| x, rms);
    run(MuonScale::Rms, &[2, 3], &transpose, transpose(rms));
}

#[test]
fn other_parameters_are_updated_as_by_adamw_at_their_own_rate() {
    let (muon, n) = (MuonConfig { scalar_lr: Some(0.25), ..Default::default() }.rule().unwrap(), 100);
    let adamw = AdamWConfig { betas: [0.9, 0.95], eps: 1e-10, ..Default::default() }.rule().unwrap();
    let (mut found, mut expected) = (State::new(&uniform(n, 1)), State::new(&uniform(n, 1)));
    for count in 1..5 {
        let grad = uniform(n, 30 + count);
        // In two parts, as over two ranks.
        for range in [0..33, 33..n] {
            let state = vec![&mut found.m[range.clone()], &mut found.v[range.clone()]];
            let (master, grad) = (&mut found.p[range.clone()], &grad[range]);
            let mut slice = HostSlice { master, grad, state, out: Out::None, sums: &[], shape: &[100] };
            muon.apply(&mut slice, &hyper(count)).unwrap();
        }
        let state = vec![&mut expected.m[..], &mut expected.v[..]];
        let mut slice =
            HostSlice { master: &mut expected.p, grad: &grad, state, out: Out::None, sums: &[], shape: &[100] };
        adamw.apply(&mut slice, &Hyper { lr: 0.005, ..hyper(count) }).unwrap();
    }
    assert_eq!(found.bits(), expected.bits());
}

#[test]
fn defaults_of_the_other_rate_follow_the_scale() {
    let rate = |scale| MuonConfig { scale, ..Default::default() }.rule().unwrap().scalar_lr;
    assert_eq!((rate(MuonScale::Spectral), rate(MuonScale::Rms)), (0.015, 1.0));
}

#[test]
fn a_gradient_of_zero_only_decays() {
    for shape in [&[2i64, 3][..], &[6, 1], &[1, 6]] {
        let mut state = State::new(&[1.0; 6]);
        state.step(&rule(), Level::detect(), &[0.0; 6], Out::None, shape, 1);
        assert_eq!(state.p, [1.0 - 0.002; 6], "{shape:?}");
    }
}

#[test]
fn what_is_not_a_number_stays_visible() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut state = State::new(&[1.0; 6]);
        state.step(&rule(), Level::detect(), &[0.1, 0.2, bad, 0.0, 0.0, 1.0], Out::None, &[2, 3], 1);
        assert!(state.p.iter().all(|x| x.is_nan()), "{bad}: {:?}", state.p);
    }
}

#[test]
fn a_part_of_a_matrix_is_an_error_that_changes_nothing() {
    let expected = "muon needs all elements of the 2 x 3 matrix at once, found 4; give whole matrices to a rank";
    let (mut p, mut m, mut v) = ([1.0f32; 4], [0.5f32; 4], [0.5f32; 4]);
    let mut slice = HostSlice {
        master: &mut p,
        grad: &[1.0; 4],
        state: vec![&mut m, &mut v],
        out: Out::None,
        sums: &[],
        shape: &[2, 3],
    };
    assert_eq!(rule().apply(&mut slice, &hyper(1)).unwrap_err().to_string(), expected);
    slice.shape = &[i64::MAX, 3];
    assert!(rule().apply(&mut slice, &hyper(1)).unwrap_err().to_string().contains("found 4"));
    assert_eq!((p, m, v), ([1.0; 4], [0.5; 4], [0.5; 4]));
    let (p, state) = (Tensor::from_slice(&p), [Tensor::from_slice(&m), Tensor::from_slice(&v)]);
    let slice = TensorSlice { master: &p, grad: &p, state: &state, out: None, sums: &[], shape: &[2, 3] };
    assert_eq!(rule().apply_tensor(&slice, &hyper(1)).unwrap_err().to_string(), expected);
    assert_eq!(back(&state[0]), m);
    let slice = TensorSlice { state: &state[..1], ..slice };
    assert_eq!(rule().apply_tensor(&slice, &hyper(1)).unwrap_err().to_string(), "muon has 2 states, found 1");
    let slice = TensorSlice { state: &state, shape: &[9], ..slice };
    let message = rule().apply_tensor(&slice, &hyper(0)).unwrap_err().to_string();
    assert_eq!(message, "muon: updates count from 1, found 0");
}

#[test]
fn settings_out_of_range_are_errors_with_their_key() {
    let base = MuonConfig::default;
    for (config, expected) in [
        (MuonConfig { lr: f64::NAN, ..base() }, "`lr`: must be finite and at least 0, found NaN"),
        (MuonConfig { momentum: 1.0, ..base() }, "`momentum`: must be from 0 to below 1, found 1"),
        (MuonConfig { scalar_lr: Some(-0.5), ..base() }, "`scalar_lr`: must be finite and at least 0, found -0.5"),
        (MuonConfig { betas: [0.9, 2.0], ..base() }, "`betas`: must be each from 0 to below 1, found 2"),
        (MuonConfig { eps: 0.0, ..base() }, "`eps`: must be finite and at least 1.2e-38"),
        (MuonConfig { weight_decay: -1.0, ..base() }, "`weight_decay`: must be finite and at least 0, found -1"),
    ] {
        let message = config.rule().unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}
