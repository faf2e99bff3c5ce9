use half::{bf16, f16};
use tch::Tensor;

use super::*;
use crate::samples::{back, bits, numbers};

fn rule() -> Lamb {
    LambConfig::default().rule().unwrap()
}

fn hyper(count: u64) -> Hyper {
    Hyper { lr: 1e-2, weight_decay: 0.1, count, grad_scale: 0.7 }
}

/// Keeps what it is given, and sums it.
#[derive(Debug, Default, PartialEq)]
struct Kept {
    values: [Vec<f32>; 2],
}

impl Kept {
    fn sums(&self) -> [f64; 2] {
        [0, 1].map(|i| self.values[i].iter().map(|&x| f64::from(x) * f64::from(x)).sum())
    }
}

impl SquareSums for Kept {
    fn add(&mut self, index: usize, values: &[f32]) {
        self.values[index].extend(values);
    }
}

#[derive(Debug, Clone, PartialEq)]
struct State {
    p: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl State {
    fn new(p: Vec<f32>) -> Self {
        let zeros = vec![0.0; p.len()];
        Self { p, m: zeros.clone(), v: zeros }
    }

    fn partial(&self, level: Level, grad: &[f32], hyper: &Hyper, range: std::ops::Range<usize>, kept: &mut Kept) {
        let mut copy = self.clone();
        let state = vec![&mut copy.m[range.clone()], &mut copy.v[range.clone()]];
        let (master, grad) = (&mut copy.p[range.clone()], &grad[range]);
        let slice = HostSlice { master, grad, state, out: Out::None, sums: &[], shape: &[] };
        rule().partial_at(level, &slice, hyper, kept).unwrap();
        assert_eq!(copy.bits(), self.bits(), "partial changes nothing");
    }

    fn apply(&mut self, level: Level, grad: &[f32], hyper: &Hyper, sums: &[f64], out: Out<'_>) {
        let state = vec![&mut self.m[..], &mut self.v[..]];
        let mut slice = HostSlice { master: &mut self.p, grad, state, out, sums, shape: &[] };
        rule().apply_at(level, &mut slice, hyper).unwrap();
    }

    fn bits(&self) -> [Vec<u32>; 3] {
        [&self.p, &self.m, &self.v].map(|x| bits(x))
    }
}

#[test]
fn levels_outputs_and_device_form_give_the_same_bits() {
    for n in (0..70).chain([70_001]) {
        let sums = [3.0, 0.7];
        let mut expected = State::new(numbers(n, 1));
        for count in 1..6 {
            expected.apply(Level::Portable, &numbers(n, 7 + count), &hyper(count), &sums, Out::None);
        }
        let rounded: Vec<u16> = expected.p.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        let halves: Vec<u16> = expected.p.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
        for &level in Level::available() {
            let (mut a, mut b) = (State::new(numbers(n, 1)), State::new(numbers(n, 1)));
            let (mut wide, mut half) = (vec![bf16::NAN; n], vec![f16::NAN; n]);
            for count in 1..6 {
                let grad = numbers(n, 7 + count);
                a.apply(level, &grad, &hyper(count), &sums, Out::Bf16(&mut wide));
                b.apply(level, &grad, &hyper(count), &sums, Out::F16(&mut half));
            }
            assert_eq!([a.bits(), b.bits()], [expected.bits(), expected.bits()], "{level:?} {n}");
            assert_eq!(wide.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), rounded, "{level:?} {n}");
            assert_eq!(half.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), halves, "{level:?} {n}");
        }
        let zeros = || Tensor::from_slice(&vec![0.0f32; n]);
        let (p, state) = (Tensor::from_slice(&numbers(n, 1)), [zeros(), zeros()]);
        let out = Tensor::zeros([n as i64], (tch::Kind::BFloat16, tch::Device::Cpu));
        for count in 1..6 {
            let grad = Tensor::from_slice(&numbers(n, 7 + count));
            let slice =
                TensorSlice { master: &p, grad: &grad, state: &state, out: Some(&out), sums: &sums, shape: &[] };
            rule().apply_tensor(&slice, &hyper(count)).unwrap();
            assert_eq!(bits(&back(&grad)), bits(&numbers(n, 7 + count)));
        }
        let device = State { p: back(&p), m: back(&state[0]), v: back(&state[1]) };
        assert_eq!(device.bits(), expected.bits(), "device {n}");
        let wide: Vec<f32> = rounded.iter().map(|&x| bf16::from_bits(x).to_f32()).collect();
        assert_eq!(bits(&back(&out.to_kind(tch::Kind::Float))), bits(&wide), "device {n}");
    }
}

#[test]
fn both_passes_see_the_same_direction() {
    // With lr and trust 1 the step is the direction itself.
    let hyper = |count| Hyper { lr: 1.0, ..hyper(count) };
    for &level in Level::available() {
        for n in [1, 5, 64, 1023, 1024, 1025, 5000] {
            let mut state = State::new(numbers(n, 3));
            for count in 1..4 {
                let grad = numbers(n, 20 + count);
                let mut kept = Kept::default();
                state.partial(level, &grad, &hyper(count), 0..n, &mut kept);
                let [p, u] = &kept.values;
                assert_eq!(bits(p), bits(&state.p));
                let expected: Vec<f32> = p.iter().zip(u).map(|(p, u)| p - u).collect();
                state.apply(level, &grad, &hyper(count), &[1.0, 1.0], Out::None);
                assert_eq!(bits(&state.p), bits(&expected), "{level:?} {n} {count}");
            }
        }
    }
}

#[test]
fn sums_do_not_depend_on_how_a_tensor_is_cut() {
    let n = 3000;
    let grad = numbers(n, 4);
    let mut state = State::new(numbers(n, 3));
    state.apply(Level::detect(), &numbers(n, 5), &hyper(1), &[1.0, 1.0], Out::None);
    let mut whole = Kept::default();
    state.partial(Level::detect(), &grad, &hyper(2), 0..n, &mut whole);
    for cuts in [vec![0, 1500, n], vec![0, 1, 2, 1030, 1030, 2999, n]] {
        let mut parts = Kept::default();
        for range in cuts.windows(2) {
            state.partial(Level::detect(), &grad, &hyper(2), range[0]..range[1], &mut parts);
        }
        assert_eq!(parts.values.each_ref().map(|x| bits(x)), whole.values.each_ref().map(|x| bits(x)), "{cuts:?}");
    }
}

/// Four steps, computed with the paper's formulas in float64 by another program.
#[test]
fn follows_the_paper() {
    let mut state = State::new(vec![1.0, -0.5, 0.25]);
    let steps: [([f32; 3], [f64; 2]); 4] = [
        ([0.5, -1.0, 0.0], [1.3125, 2.3131185]),
        ([-2.0, 0.1, 0.0], [1.28805585, 0.62450942]),
        ([-0.001, 0.2, 0.75], [1.29204573, 0.69040725]),
        ([0.3, 0.001, -4.0], [1.29181483, 0.32897127]),
    ];
    for (count, (grad, expected)) in (1..).zip(steps) {
        let scaled = grad.map(|g| g * 8.0);
        let hyper = Hyper { grad_scale: 0.125, ..hyper(count) };
        let mut kept = Kept::default();
        state.partial(Level::detect(), &scaled, &hyper, 0..3, &mut kept);
        let sums = kept.sums();
        assert!(sums.iter().zip(expected).all(|(a, b)| (a - b).abs() < 3e-6), "{count}: {sums:?} {expected:?}");
        state.apply(Level::detect(), &scaled, &hyper, &sums, Out::None);
    }
    let close = |found: &[f32], expected: [f32; 3], limit: f32| {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < limit), "{found:?} {expected:?}");
    };
    close(&state.p, [1.006185, -0.4715705, 0.2493051], 1e-6);
    close(&state.m, [-0.09564, -0.0467, -0.3325], 1e-7);
    close(&state.v, [0.004331256, 0.001046944, 0.016561938], 1e-8);
}

#[test]
fn a_step_is_a_share_of_the_norm_and_plain_where_a_norm_is_zero() {
    let hyper = Hyper { lr: 0.25, weight_decay: 0.0, count: 1, grad_scale: 1.0 };
    let run = |start: f32, grad: f32| {
        let mut state = State::new(vec![start; 4]);
        let mut kept = Kept::default();
        state.partial(Level::detect(), &[grad; 4], &hyper, 0..4, &mut kept);
        state.apply(Level::detect(), &[grad; 4], &hyper, &kept.sums(), Out::None);
        state.p[0]
    };
    // Whatever the gradient's size, the norm changes by a quarter.
    for grad in [1e-2, 1.0, 1e4] {
        assert!((run(8.0, grad) - 6.0).abs() < 1e-5, "{grad}");
    }
    // A first Adam step is 1 for every element.
    assert!((run(0.0, 1.0) + 0.25).abs() < 1e-5);
    assert_eq!(run(8.0, 0.0), 8.0);
    assert_eq!(run(0.0, 0.0), 0.0);
}

#[test]
fn what_is_not_a_number_stays_visible() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut grad = vec![0.1; 40];
        grad[17] = bad;
        let mut state = State::new(vec![1.0; 40]);
        state.apply(Level::detect(), &grad, &hyper(1), &[1.0, 1.0], Out::None);
        assert!(state.p.iter().enumerate().all(|(i, x)| x.is_nan() == (i == 17)), "{bad}");
    }
    let mut state = State::new(vec![1.0; 3]);
    state.apply(Level::detect(), &[0.1; 3], &hyper(1), &[f64::NAN, 1.0], Out::None);
    assert!(state.p.iter().all(|x| x.is_nan()));
}

#[test]
fn bad_slices_and_settings_are_errors() {
    let mut zeros = [[0.0f32; 3]; 4];
    let [p, m, v, grad] = &mut zeros;
    let mut slice =
        HostSlice { master: p, grad: &grad[..2], state: vec![m, v], out: Out::None, sums: &[1.0], shape: &[] };
    let mut kept = Kept::default();
    let message = rule().partial(&slice, &hyper(1), &mut kept).unwrap_err().to_string();
    assert_eq!(message, "lamb: master has 3 elements, grad 2");
    assert_eq!(kept, Kept::default());
    let message = rule().apply(&mut slice, &hyper(1)).unwrap_err().to_string();
    assert_eq!(message, "lamb needs 2 sums over the whole tensor, found 1");
    slice.sums = &[1.0, 1.0];
    assert_eq!(rule().apply(&mut slice, &hyper(1)).unwrap_err().to_string(), "lamb: master has 3 elements, grad 2");
    slice.grad = grad;
    let message = rule().apply(&mut slice, &hyper(0)).unwrap_err().to_string();
    assert_eq!(message, "lamb: updates count from 1, found 0");
    for (config, expected) in [
        (
            LambConfig { betas: [-0.5, 0.9], ..Default::default() },
            "`betas`: must be each from 0 to below 1, found -0.5",
        ),
        (LambConfig { eps: 0.0, ..Default::default() }, "`eps`: must be finite and at least 1.2e-38"),
        (LambConfig { weight_decay: -1.0, ..Default::default() }, "`weight_decay`: must be finite and at least 0"),
    ] {
        let message = config.rule().unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}
