use zf_core::stage::{Score, ScoreInput};

use super::*;

fn adam() -> Adam {
    AdamConfig::default().score().expect("the default is valid")
}

fn values(score: &dyn Score, grad: &[f32], weight: &[f32], second_moment: &[f32]) -> Vec<f32> {
    // What the map must overwrite.
    let mut out = vec![f32::NAN; grad.len()];
    score.map(&ScoreInput { grad, weight, second_moment }, &mut out);
    out
}

#[test]
fn formulas() {
    let (g, w, v) = ([-3.0, 0.5, 0.0, 2.0], [2.0, -4.0, 9.0, 0.0], [4.0, 0.25, 1.0, 16.0]);
    assert_eq!(values(&L1::default(), &g, &[], &[]), [3.0, 0.5, 0.0, 2.0]);
    assert_eq!(values(&L2::default(), &g, &[], &[]), [9.0, 0.25, 0.0, 4.0]);
    assert_eq!(values(&WeightGradient::default(), &g, &w, &[]), [6.0, 2.0, 0.0, 0.0]);
    let one = AdamConfig { eps: 1.0 }.score().expect("valid");
    assert_eq!(values(&one, &g, &[], &v), [1.0, 0.5 / 1.5, 0.0, 0.4]);
}

#[test]
fn every_length_is_written_to_its_end() {
    for n in 0..70 {
        let g: Vec<f32> = (0..n).map(|i| -(i as f32)).collect();
        let expected: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let ones = vec![1.0; n];
        assert_eq!(values(&L1::default(), &g, &[], &[]), expected);
        assert_eq!(values(&WeightGradient::default(), &g, &ones, &[]), expected);
    }
}

#[test]
fn finite_elements_have_finite_values() {
    let extremes = [0.0, f32::MIN_POSITIVE, 1e-45, 1.0, f32::MAX, -f32::MAX, -0.0];
    for &g in &extremes {
        for &other in &extremes {
            let (grad, weight, second_moment) = ([g], [other], [other.abs()]);
            let all: [&dyn Score; 4] = [&L1::default(), &L2::default(), &WeightGradient::default(), &adam()];
            for score in all {
                let value = values(score, &grad, &weight, &second_moment)[0];
                assert!(value.is_finite() && 0.0 <= value, "{score:?} of {g}, {other}: {value}");
            }
        }
    }
    // A second moment of 0 is that of an element without a gradient so far.
    assert_eq!(values(&adam(), &[0.0, 1e-3], &[], &[0.0, 0.0]), [0.0, 1e-3 / 1e-8]);
}

#[test]
fn what_is_no_number_stays_none() {
    for score in [&L1::default() as &dyn Score, &L2::default(), &WeightGradient::default(), &adam()] {
        assert!(values(score, &[f32::NAN], &[1.0], &[1.0])[0].is_nan(), "{score:?}");
    }
}

#[test]
fn needs() {
    assert_eq!(L1::default().needs(), Default::default());
    assert_eq!(L2::default().needs(), Default::default());
    assert!(WeightGradient::default().needs().weight && !WeightGradient::default().needs().second_moment);
    assert!(adam().needs().second_moment && !adam().needs().weight);
}
