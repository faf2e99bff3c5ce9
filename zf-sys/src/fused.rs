//! libtorch's own fused optimizer, for comparison.

use tch::Tensor;

use crate::{Error, Result, ffi};

/// One AdamW step on lists of tensors, in place (`at::_fused_adamw_`; Loshchilov and Hutter, "Decoupled Weight Decay
/// Regularization", 2019).
///
/// The lists have one entry a parameter, all of one shape and dtype there. `steps` holds scalar float32 tensors with the
/// number of this step, counted from one: the kernel reads them and does not increment them.
///
/// # Errors
///
/// If the lists differ in length, or libtorch refuses shapes or dtypes.
#[expect(clippy::too_many_arguments, reason = "the operator's own list")]
pub fn adamw(
    params: &[Tensor],
    grads: &[Tensor],
    exp_avgs: &[Tensor],
    exp_avg_sqs: &[Tensor],
    steps: &[Tensor],
    lr: f64,
    b1: f64,
    b2: f64,
    wd: f64,
    eps: f64,
) -> Result<()> {
    const CALL: &str = "fused::adamw";
    let count = params.len();
    let lists = [("grads", grads), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs), ("steps", steps)];
    for (name, list) in lists {
        if list.len() != count {
            let message = format!("{count} params but {} {name}; give one a parameter", list.len());
            return Err(Error::Argument { call: CALL, message });
        }
    }
    if count == 0 {
        return Ok(());
    }
    let params = ffi::raws(params);
    let [grads, exp_avgs, exp_avg_sqs, steps] = lists.map(|(_, list)| ffi::raws(list));
    // SAFETY: all five arrays have `count` entries and live during the call.
    let message = unsafe {
        ffi::zf_fused_adamw(
            params.as_ptr(),
            grads.as_ptr(),
            exp_avgs.as_ptr(),
            exp_avg_sqs.as_ptr(),
            steps.as_ptr(),
            count,
            lr,
            b1,
            b2,
            wd,
            eps,
        )
    };
    ffi::check(CALL, message)
}
