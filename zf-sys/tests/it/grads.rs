use tch::{Kind, Tensor};
use zf_sys::autograd::{backward, grad, set_grad, variable_data, version};
use zf_sys::storage;

use crate::{F32, assert_same_bits, leaf, values};

#[test]
fn backward_takes_gradients_for_several_roots_and_adds_up() {
    let x = leaf(&[3], 0.0);
    let (y, z) = (&x * 2.0, &x * 5.0);
    let g = Tensor::from_slice(&[1.0_f32, 10.0, 100.0]);
    backward(&[y, z.sum(Kind::Float)], &[Some(g.shallow_clone()), None], false).unwrap();
    assert_same_bits(&x.grad(), &Tensor::from_slice(&[7.0_f32, 25.0, 205.0]), "first pass");
    backward(&[&x * 2.0], &[Some(g)], false).unwrap();
    assert_same_bits(&x.grad(), &Tensor::from_slice(&[9.0_f32, 45.0, 405.0]), "second pass adds");
}

#[test]
fn backward_refuses_what_cannot_be() {
    let x = leaf(&[3], 0.0);
    let error = backward(&[&x * 2.0], &[], false).unwrap_err().to_string();
    assert!(error.contains("1 roots but 0 gradients"), "{error}");
    let error = backward(&[&x * 2.0], &[None], false).unwrap_err().to_string();
    assert!(error.contains("scalar"), "{error}");
    let y = (&x * &x).sum(Kind::Float);
    backward(&[y.shallow_clone()], &[None], true).unwrap();
    backward(&[y.shallow_clone()], &[None], false).unwrap();
    let error = backward(&[y], &[None], false).unwrap_err().to_string();
    assert!(error.contains("second time"), "{error}");
}

#[test]
fn a_gradient_bound_to_a_flat_buffer_accumulates_there() {
    let flat = Tensor::zeros([10], F32);
    let (a, b) = (leaf(&[2, 2], 0.0), leaf(&[3], 0.1));
    set_grad(&a, Some(&flat.narrow(0, 1, 4).view([2, 2]))).unwrap();
    set_grad(&b, Some(&flat.narrow(0, 6, 3))).unwrap();
    for _ in 0..2 {
        let loss = (&a * 3.0).sum(Kind::Float) + (&b * 5.0).sum(Kind::Float);
        backward(&[loss], &[None], false).unwrap();
    }
    let expected = Tensor::from_slice(&[0.0_f32, 6.0, 6.0, 6.0, 6.0, 0.0, 10.0, 10.0, 10.0, 0.0]);
    assert_same_bits(&flat, &expected, "the flat buffer");
    assert_eq!(grad(&a).unwrap().data_ptr(), flat.narrow(0, 1, 1).data_ptr());
    set_grad(&a, None).unwrap();
    assert!(grad(&a).is_none());
}

/// 1 + 2^-9 has no bfloat16 form: a 16-bit sum would lose every one of the small addends.
fn check_wide_accumulation(kind: Kind) {
    let flat = Tensor::ones([6], F32);
    let view = flat.narrow(0, 1, 4).view([2, 2]);
    let param = Tensor::ones([2, 2], (kind, tch::Device::Cpu)).set_requires_grad(true);
    set_grad(&param, Some(&view)).unwrap();
    let small = 2.0_f64.powi(-12);
    for _ in 0..4 {
        // Used twice, so that the engine sums inside one pass, too.
        let y = &param * 1.0;
        let z = &param * small;
        let ones = Tensor::ones([2, 2], (kind, tch::Device::Cpu));
        backward(&[y, z], &[Some(ones.shallow_clone()), Some(ones)], false).unwrap();
    }
    let bound = grad(&param).unwrap();
    assert_eq!(bound.kind(), Kind::Float);
    assert_eq!(bound.data_ptr(), view.data_ptr());
    let inner = (1.0 + 4.0 + 4.0 * small) as f32;
    assert_same_bits(&flat, &Tensor::from_slice(&[1.0, inner, inner, inner, inner, 1.0]), "wide sums");
}

#[test]
fn float32_gradients_of_a_bfloat16_parameter() {
    check_wide_accumulation(Kind::BFloat16);
}

#[test]
fn float32_gradients_of_a_float16_parameter() {
    check_wide_accumulation(Kind::Half);
}

#[test]
fn a_wide_gradient_survives_a_matrix_product_and_can_be_made_narrow_again() {
    let w = values(&[8, 4], 0.0).to_kind(Kind::BFloat16).set_requires_grad(true);
    let x = values(&[5, 4], 0.1).to_kind(Kind::BFloat16);
    let wide = Tensor::zeros([8, 4], F32);
    set_grad(&w, Some(&wide)).unwrap();
    backward(&[x.linear(&w, None::<Tensor>).sum(Kind::Float)], &[None], false).unwrap();
    let expected = Tensor::ones([5, 8], (Kind::BFloat16, tch::Device::Cpu)).tr().matmul(&x).to_kind(Kind::Float);
    assert_same_bits(&wide, &expected, "wide gradient");
    let narrow = Tensor::zeros([8, 4], (Kind::BFloat16, tch::Device::Cpu));
    set_grad(&w, Some(&narrow)).unwrap();
    backward(&[x.linear(&w, None::<Tensor>).sum(Kind::Float)], &[None], false).unwrap();
    assert_eq!(grad(&w).unwrap().kind(), Kind::BFloat16);
    assert_same_bits(&narrow.to_kind(Kind::Float), &expected, "narrow gradient");

    // Without a gradient, the next one has the parameter's dtype again.
    set_grad(&w, Some(&wide)).unwrap();
    set_grad(&w, None).unwrap();
    backward(&[x.linear(&w, None::<Tensor>).sum(Kind::Float)], &[None], false).unwrap();
    assert_eq!(grad(&w).unwrap().kind(), Kind::BFloat16);
}

#[test]
fn a_wide_gradient_may_be_bound_before_the_parameter_requires_one() {
    let param = Tensor::ones([2], (Kind::BFloat16, tch::Device::Cpu));
    let wide = Tensor::ones([2], F32);
    set_grad(&param, Some(&wide)).unwrap();
    let param = param.set_requires_grad(true);
    backward(&[(&param * 2.0_f64.powi(-12)).sum(Kind::Float)], &[None], false).unwrap();
    assert_same_bits(&wide, &Tensor::from_slice(&[1.0 + 2.0_f32.powi(-12); 2]), "wide");
}

#[test]
fn set_grad_refuses_non_leaves_and_other_shapes() {
    let x = leaf(&[3], 0.0);
    let error = set_grad(&(&x * 2.0), Some(&values(&[3], 0.0))).unwrap_err().to_string();
    assert!(error.contains("leaf"), "{error}");
    let error = set_grad(&x, Some(&values(&[4], 0.0))).unwrap_err().to_string();
    assert!(error.contains("shape [4]") && error.contains("shape [3]"), "{error}");
    assert!(grad(&x).is_none());
}

#[test]
fn variable_data_has_its_own_version() {
    let x = values(&[3], 0.0);
    let alias = variable_data(&x).unwrap();
    let mut shared = x.detach();
    let before = version(&x).unwrap();
    let _ = alias.shallow_clone().fill_(7.0);
    assert_eq!(version(&x).unwrap(), before);
    assert_eq!(storage::slice::<f32>(&x).unwrap(), [7.0; 3]);
    let _ = shared.fill_(8.0);
    assert_eq!(version(&x).unwrap(), before + 1);
}
