use half::{bf16, f16};
use tch::{Kind, Tensor};
use zf_sys::autograd::{backward, grad, variable_data};
use zf_sys::heap::Heap;
use zf_sys::storage::{Scalar, nbytes, resize_bytes, slice, slice_mut, tensor_from};

use crate::{F32, assert_same_bits, values};

#[test]
fn a_released_parameter_is_refilled_under_the_views_that_autograd_saved() {
    let heap = Heap::new("rank").unwrap();
    let _inside = heap.enter();
    let (rows, columns) = (64, 32);
    let flat = values(&[rows * columns], 0.3);
    let kept = flat.copy();
    let mut weight = flat.view([rows, columns]).detach().set_requires_grad(true);
    let x = values(&[5, columns], 0.1).set_requires_grad(true);
    let bytes = nbytes(&flat).unwrap();
    let full = heap.stats().live.total();

    let y = x.linear(&weight, None::<Tensor>);
    let with_output = heap.stats().live.total();
    resize_bytes(&flat, 0).unwrap();
    assert_eq!(nbytes(&weight).unwrap(), 0);
    assert_eq!(with_output - heap.stats().live.total(), rows * columns * 4, "the memory is free");
    assert!(heap.stats().live.total() < full);
    let error = slice::<f32>(&flat).unwrap_err().to_string();
    assert!(error.contains("released"), "{error}");

    resize_bytes(&flat, bytes).unwrap();
    variable_data(&flat).unwrap().copy_(&kept);
    backward(&[y], &[Some(Tensor::ones([5, rows], F32))], false).unwrap();
    let expected = Tensor::ones([5, rows], F32).matmul(&kept.view([rows, columns]));
    assert_same_bits(&grad(&x).unwrap(), &expected, "the gradient reads the refilled values");
    assert_same_bits(&weight.detach(), &kept.view([rows, columns]), "the view sees them too");
    weight.zero_grad();
}

#[test]
fn refilling_through_detach_is_caught_by_autograd() {
    // The reason for `variable_data`: with a shared version counter backward refuses.
    let flat = values(&[12], 0.3);
    let weight = flat.view([3, 4]).set_requires_grad(true);
    let x = values(&[2, 4], 0.1).set_requires_grad(true);
    let y = x.linear(&weight, None::<Tensor>);
    flat.detach().copy_(&values(&[12], 0.3));
    let error = backward(&[y.sum(Kind::Float)], &[None], false).unwrap_err().to_string();
    assert!(error.contains("inplace"), "{error}");
}

#[test]
fn growing_and_shrinking_keep_the_common_front() {
    let tensor = tensor_from(&[1.0_f32, 2.0, 3.0], &[3]).unwrap();
    resize_bytes(&tensor, 100).unwrap();
    assert_eq!(slice::<f32>(&tensor).unwrap(), [1.0, 2.0, 3.0]);
    resize_bytes(&tensor, 8).unwrap();
    assert!(slice::<f32>(&tensor).is_err());
    assert_eq!(slice::<f32>(&tensor.narrow(0, 0, 2)).unwrap(), [1.0, 2.0]);
}

#[test]
fn a_refill_beyond_the_limit_leaves_the_storage_as_it_was() {
    let heap = Heap::with_limit("full", 4096).unwrap();
    let _inside = heap.enter();
    let tensor = tensor_from(&[5_u8; 600], &[600]).unwrap();
    let error = resize_bytes(&tensor, 4001).unwrap_err().to_string();
    assert!(error.contains("heap 'full'"), "{error}");
    assert_eq!(slice::<u8>(&tensor).unwrap(), [5; 600]);
}

#[test]
fn memory_from_outside_cannot_be_resized() {
    let outside = [1_u8; 8];
    // SAFETY: the array outlives the tensor.
    let tensor = unsafe { Tensor::f_from_blob(outside.as_ptr(), &[8], &[1], Kind::Uint8, tch::Device::Cpu).unwrap() };
    let error = resize_bytes(&tensor, 0).unwrap_err().to_string();
    assert!(error.contains("cannot be resized"), "{error}");
    assert!(resize_bytes(&Tensor::new(), 0).is_err());
    assert!(nbytes(&Tensor::new()).is_err());
}

fn round_trip<T: Scalar + PartialEq + std::fmt::Debug>(data: &[T]) {
    let tensor = tensor_from(data, &[2, 3]).unwrap();
    assert_eq!(tensor.kind(), T::KIND);
    assert_eq!(tensor.size(), [2, 3]);
    assert_eq!(slice::<T>(&tensor).unwrap(), data);
    // SAFETY: nobody else has this memory.
    let all = unsafe { slice_mut::<T>(&tensor).unwrap() };
    all[5] = data[0];
    assert_eq!(slice::<T>(&tensor).unwrap()[5], data[0]);
}

#[test]
fn every_scalar_goes_in_and_out_unchanged() {
    round_trip(&[1.5_f32, -0.0, 3.0e-38, 7.0, f32::MAX, 2.0]);
    round_trip(&[1.5_f64, -0.0, 3.0e-300, 7.0, f64::MAX, 2.0]);
    round_trip(&[i64::MIN, -1, 0, 1, 2, i64::MAX]);
    round_trip(&[i32::MIN, -1, 0, 1, 2, i32::MAX]);
    round_trip(&[i16::MIN, -1, 0, 1, 2, i16::MAX]);
    round_trip(&[0_u8, 1, 2, 3, 254, 255]);
    round_trip(&[1.5, -2.0, 0.25, 0.0, 1.0, 3.0].map(f16::from_f32));
    round_trip(&[1.5, -2.0, 0.25, 0.0, 1.0, 3.0].map(bf16::from_f32));
}

#[test]
fn bfloat16_means_the_same_to_libtorch() {
    let tensor = tensor_from(&[1.5, -384.0].map(bf16::from_f32), &[2]).unwrap();
    assert_eq!(tensor.kind(), Kind::BFloat16);
    assert_eq!(slice::<f32>(&tensor.to_kind(Kind::Float)).unwrap(), [1.5, -384.0]);
    let error = slice::<f16>(&tensor).unwrap_err().to_string();
    assert_eq!(error, "storage::slice: expected dtype Half, found BFloat16");
}

#[test]
fn slices_refuse_what_they_cannot_show() {
    let tensor = values(&[3, 4], 0.0);
    let error = slice::<f64>(&tensor).unwrap_err().to_string();
    assert_eq!(error, "storage::slice: expected dtype Double, found Float");
    assert!(slice::<f32>(&tensor.tr()).unwrap_err().to_string().contains("contiguous"));
    assert!(slice::<f32>(&tensor.narrow(1, 0, 2)).unwrap_err().to_string().contains("contiguous"));
    assert!(slice::<f32>(&Tensor::new()).is_err());
    assert_eq!(slice::<f32>(&tensor.narrow(0, 1, 2)).unwrap(), &slice::<f32>(&tensor).unwrap()[4..]);
    assert!(slice::<f32>(&tensor.narrow(0, 1, 0)).unwrap().is_empty());
    assert!(tensor_from(&[1.0_f32; 5], &[2, 3]).unwrap_err().to_string().contains("24 bytes but 20"));
    assert!(tensor_from(&[1.0_f32; 5], &[-5]).is_err());
    assert_eq!(tensor_from::<f32>(&[], &[0, 3]).unwrap().size(), [0, 3]);
    assert_eq!(tensor_from(&[2.0_f32], &[]).unwrap().double_value(&[]), 2.0);
}
