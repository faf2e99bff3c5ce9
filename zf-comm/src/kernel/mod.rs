//! Sums and maxima of several buffers, block by block in cache, always in the order given.

mod element;

use element::{Accumulator, Bf16, Element, F16};
use zf_core::stage::Reduce;

use crate::span::{DType, Span};

/// Elements of the accumulator, which with one block of an input stays in the first-level cache.
const BLOCK: usize = 2048;

/// Combines `inputs` element by element in their order, `((a0 + a1) + a2) + ...`, and writes the result to every one of
/// `outputs`. With `accumulate` the first output's own value comes first. 16-bit elements are combined in float32 and
/// rounded once, at the end. An output may be the same memory as an input.
///
/// # Safety
/// All spans have the same length and point to memory that lives during the call and that no other thread writes;
/// outputs are not read by other threads either. Spans are the same or disjoint. All inputs have one dtype and all
/// outputs have one dtype, which is that of the inputs, or float32 for 16-bit inputs.
pub(crate) unsafe fn combine(inputs: &[Span], outputs: &[Span], op: Reduce, accumulate: bool) {
    let (Some(first), Some(out)) = (inputs.first(), outputs.first()) else { return };
    // SAFETY: the caller's promises; the dtypes choose the element types.
    unsafe {
        match (first.dtype, out.dtype) {
            (DType::Float32, DType::Float32) => typed::<f32, f32>(inputs, outputs, op, accumulate),
            (DType::Float64, DType::Float64) => typed::<f64, f64>(inputs, outputs, op, accumulate),
            (DType::Int64, DType::Int64) => typed::<i64, i64>(inputs, outputs, op, accumulate),
            (DType::Uint8, DType::Uint8) => typed::<u8, u8>(inputs, outputs, op, accumulate),
            (DType::BFloat16, DType::BFloat16) => typed::<Bf16, Bf16>(inputs, outputs, op, accumulate),
            (DType::BFloat16, DType::Float32) => typed::<Bf16, f32>(inputs, outputs, op, accumulate),
            (DType::Float16, DType::Float16) => typed::<F16, F16>(inputs, outputs, op, accumulate),
            (DType::Float16, DType::Float32) => typed::<F16, f32>(inputs, outputs, op, accumulate),
            (from, to) => unreachable!("sums of {from} into {to} are refused when a collective is issued"),
        }
    }
}

/// # Safety
/// As [`combine`], and the spans hold elements of these types.
unsafe fn typed<I, O>(inputs: &[Span], outputs: &[Span], op: Reduce, accumulate: bool)
where
    I: Element,
    O: Element<Acc = I::Acc>,
{
    let len = inputs[0].len;
    let sources: Vec<*const I> = inputs.iter().map(|span| span.data.cast::<I>().cast_const()).collect();
    let targets: Vec<*mut O> = outputs.iter().map(|span| span.data.cast::<O>()).collect();
    // SAFETY: passed on from the caller.
    unsafe {
        match op {
            Reduce::Sum => dispatch::<I, O, false>(&sources, &targets, len, accumulate),
            Reduce::Max => dispatch::<I, O, true>(&sources, &targets, len, accumulate),
        }
    }
}

/// # Safety
/// As [`blocks`].
unsafe fn dispatch<I, O, const MAX: bool>(inputs: &[*const I], outputs: &[*mut O], len: usize, accumulate: bool)
where
    I: Element,
    O: Element<Acc = I::Acc>,
{
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the features were found; the rest is passed on from the caller.
            return unsafe { blocks_avx512::<I, O, MAX>(inputs, outputs, len, accumulate) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { blocks_avx2::<I, O, MAX>(inputs, outputs, len, accumulate) };
        }
    }
    // SAFETY: passed on from the caller.
    unsafe { blocks::<I, O, MAX>(inputs, outputs, len, accumulate) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn blocks_avx512<I, O, const MAX: bool>(inputs: &[*const I], outputs: &[*mut O], len: usize, accumulate: bool)
where
    I: Element,
    O: Element<Acc = I::Acc>,
{
    // SAFETY: passed on from the caller.
    unsafe { blocks::<I, O, MAX>(inputs, outputs, len, accumulate) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn blocks_avx2<I, O, const MAX: bool>(inputs: &[*const I], outputs: &[*mut O], len: usize, accumulate: bool)
where
    I: Element,
    O: Element<Acc = I::Acc>,
{
    // SAFETY: passed on from the caller.
    unsafe { blocks::<I, O, MAX>(inputs, outputs, len, accumulate) }
}

/// The one loop behind every instruction set. Additions are single IEEE operations, never fused or regrouped, so that
/// all of them give the same bits.
///
/// # Safety
/// Every pointer is valid for `len` elements, which nothing else writes meanwhile (outputs: nor reads).
#[inline(always)]
unsafe fn blocks<I, O, const MAX: bool>(inputs: &[*const I], outputs: &[*mut O], len: usize, accumulate: bool)
where
    I: Element,
    O: Element<Acc = I::Acc>,
{
    let mut space = [<I::Acc as Accumulator>::ZERO; BLOCK];
    let mut start = 0;
    while start < len {
        let acc = &mut space[..BLOCK.min(len - start)];
        // SAFETY: `start + acc.len()` is at most `len`. No slice of this block is alive while it is written: inputs are
        // read into `acc` first.
        unsafe {
            let rest = if accumulate {
                load(acc, outputs[0], start);
                inputs
            } else {
                load(acc, inputs[0], start);
                &inputs[1..]
            };
            for input in rest {
                let values = std::slice::from_raw_parts(input.add(start), acc.len());
                for (sum, value) in acc.iter_mut().zip(values) {
                    *sum = if MAX { sum.max(value.widen()) } else { sum.add(value.widen()) };
                }
            }
            for output in outputs {
                let values = std::slice::from_raw_parts_mut(output.add(start), acc.len());
                for (value, sum) in values.iter_mut().zip(acc.iter()) {
                    *value = O::narrow(*sum);
                }
            }
        }
        start += acc.len();
    }
}

/// # Safety
/// `from` is valid for reading `acc.len()` elements from `start` on.
#[inline(always)]
unsafe fn load<E: Element>(acc: &mut [E::Acc], from: *const E, start: usize) {
    // SAFETY: passed on from the caller.
    let values = unsafe { std::slice::from_raw_parts(from.add(start), acc.len()) };
    for (sum, value) in acc.iter_mut().zip(values) {
        *sum = value.widen();
    }
}
