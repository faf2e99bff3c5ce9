//! The nearest orthogonal matrix, by Newton and Schulz's iteration.

use tch::{Device, Tensor};
use zf_core::Result;
use zf_core::norm::square_sum;
use zf_sys::storage;

/// Coefficients of the odd polynomial of degree five that is applied to the singular values. They are chosen for the
/// largest slope at zero, and so do not converge to 1 but stay near it.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Applications of the polynomial.
const ITERATIONS: usize = 5;

/// Keeps the quotient by a norm of zero finite.
const EPS: f64 = 1e-7;

/// A contiguous float32 matrix with at least one element, with its singular values replaced by values near 1. Takes the
/// memory of `x` for its own use.
///
/// The products are written into two matrices of the larger size and two of the smaller in turn, and a tall matrix is
/// multiplied from the right instead of being transposed.
///
/// # Errors
/// Those of libtorch.
pub(super) fn orthogonal(mut x: Tensor) -> Result<Tensor> {
    let _guard = tch::no_grad_guard();
    let [a, b, c] = COEFFICIENTS;
    divide_by_norm(&mut x)?;
    let size = x.size();
    let wide = size[0] <= size[1];
    let small = size[0].min(size[1]);
    let mut gram = Tensor::f_empty([small, small], (x.kind(), x.device()))?;
    let mut polynomial = gram.f_empty_like()?;
    let mut next = x.f_empty_like()?;
    for _ in 0..ITERATIONS {
        let transposed = x.f_tr()?;
        let (left, right) = if wide { (&x, &transposed) } else { (&transposed, &x) };
        let _ = left.f_mm_out(&gram, right)?;
        let _ = gram.f_mm_out(&polynomial, &gram)?;
        let _ = polynomial.f_mul_scalar_(c)?;
        let _ = gram.f_mul_scalar_(b)?;
        let _ = polynomial.f_add_(&gram)?;
        let _ = polynomial.f_diagonal(0, 0, 1)?.f_add_scalar_(a)?;
        let (left, right) = if wide { (&polynomial, &x) } else { (&x, &polynomial) };
        let _ = left.f_mm_out(&next, right)?;
        std::mem::swap(&mut x, &mut next);
    }
    Ok(x)
}

/// Divides by the Frobenius norm, which no singular value exceeds.
fn divide_by_norm(x: &mut Tensor) -> Result<()> {
    if x.device() != Device::Cpu {
        let norm = x.f_norm()?.f_add_scalar(EPS)?;
        let _ = x.f_div_(&norm)?;
        return Ok(());
    }
    let sum = square_sum(storage::slice(x)?);
    // The sum leaves out what is not finite; the step must not.
    let norm = if sum.nonfinite == 0 { sum.sum.sqrt() } else { f64::NAN };
    let _ = x.f_mul_scalar_(1.0 / (norm + EPS))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::{Kind, kind};

    use super::*;

    /// A matrix whose singular values are `values`.
    fn matrix(rows: i64, cols: i64, values: &[f64]) -> Tensor {
        let (u, _) = Tensor::linalg_qr(&Tensor::randn([rows, rows], kind::DOUBLE_CPU), "reduced");
        let (v, _) = Tensor::linalg_qr(&Tensor::randn([cols, cols], kind::DOUBLE_CPU), "reduced");
        let n = values.len() as i64;
        let s = Tensor::from_slice(values).diag(0);
        u.narrow(1, 0, n).mm(&s).mm(&v.narrow(1, 0, n).tr()).to_kind(Kind::Float).contiguous()
    }

    fn singular(x: &Tensor) -> Vec<f64> {
        let (_, s, _) = x.to_kind(Kind::Double).svd(true, true);
        Vec::try_from(s).unwrap()
    }

    /// Five applications of the polynomial.
    fn polynomial(mut s: f64) -> f64 {
        for _ in 0..5 {
            s = 3.4445 * s - 4.7750 * s.powi(3) + 2.0315 * s.powi(5);
        }
        s
    }

    #[test]
    fn singular_values_become_those_of_the_polynomial() {
        tch::manual_seed(1);
        for (rows, cols) in [(4, 4), (4, 9), (9, 4), (1, 7), (7, 1), (1, 1), (30, 20)] {
            let n = rows.min(cols);
            let values: Vec<f64> = (1..=n).map(|i| i as f64 * 3.0).collect();
            let norm = values.iter().map(|s| s * s).sum::<f64>().sqrt();
            let found = singular(&orthogonal(matrix(rows, cols, &values)).unwrap());
            let mut expected: Vec<f64> = values.iter().map(|s| polynomial(s / norm)).collect();
            expected.sort_by(|a, b| b.total_cmp(a));
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-4, "{rows} x {cols}: {found} {expected}");
                assert!((0.6..1.3).contains(found), "{rows} x {cols}: {found}");
            }
        }
    }

    #[test]
    fn singular_vectors_stay() {
        // Of a matrix with equal singular values only the length changes.
        tch::manual_seed(2);
        for (rows, cols) in [(3, 5), (5, 3), (6, 6)] {
            let x = matrix(rows, cols, &vec![2.0; rows.min(cols) as usize]);
            let found = orthogonal(x.copy()).unwrap();
            let factor = polynomial(1.0 / (rows.min(cols) as f64).sqrt()) / 2.0;
            let difference = (found - x * factor).abs().max().double_value(&[]);
            assert!(difference < 1e-5, "{rows} x {cols}: {difference}");
        }
    }

    #[test]
    fn a_matrix_and_its_transpose_give_transposes() {
        tch::manual_seed(3);
        let x = Tensor::randn([12, 31], kind::FLOAT_CPU);
        let other = orthogonal(x.tr().contiguous()).unwrap().tr();
        let difference = (orthogonal(x).unwrap() - other).abs().max().double_value(&[]);
        assert!(difference < 1e-5, "{difference}");
    }

    #[test]
    fn the_length_of_the_input_does_not_matter() {
        tch::manual_seed(4);
        let x = Tensor::randn([5, 8], kind::FLOAT_CPU);
        let expected = orthogonal(x.copy()).unwrap();
        for scale in [1e-3, 1e20, 1e37] {
            let found = orthogonal(&x * scale).unwrap();
            let difference = (found - &expected).abs().max().double_value(&[]);
            assert!(difference < 1e-3, "{scale}: {difference}");
        }
    }

    #[test]
    fn zero_stays_zero_and_what_is_no_number_spreads() {
        let zero = orthogonal(Tensor::zeros([3, 4], kind::FLOAT_CPU)).unwrap();
        assert_eq!(zero.abs().max().double_value(&[]), 0.0);
        for bad in [f64::NAN, f64::INFINITY] {
            let x = Tensor::ones([3, 4], kind::FLOAT_CPU);
            let _ = x.narrow(1, 2, 1).fill_(bad);
            assert!(bool::try_from(orthogonal(x).unwrap().isnan().all()).unwrap());
        }
    }
}
