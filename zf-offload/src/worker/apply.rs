//! The update of a few parts at once, on one thread or several.

use half::{bf16, f16};
use tch::Tensor;
use zf_core::layout::DType;
use zf_core::norm::{bf16_from_f32, f16_from_f32};
use zf_core::stage::{HostPart, HostSlice, Optimizer, Out, Span, Tier};
use zf_core::{Error, Result};
use zf_sys::storage::slice_mut;

/// One part with its memory.
struct Job<'a> {
    part: &'a HostPart,
    master: &'a mut [f32],
    states: Vec<&'a mut [f32]>,
    grad: &'a [f32],
    out: Target<'a>,
}

/// Where updated parameters go.
enum Target<'a> {
    None,
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl<'a> Target<'a> {
    /// The memory of `out`, a tensor of the type of the parameters.
    fn new(out: Option<(&'a Tensor, DType)>) -> Result<Self> {
        let Some((out, dtype)) = out else { return Ok(Self::None) };
        // SAFETY: the tensor belongs to the worker until it is sent.
        Ok(unsafe {
            match dtype {
                DType::Float32 => Self::F32(slice_mut(out)?),
                DType::Bfloat16 => Self::Bf16(slice_mut(out)?),
                DType::Float16 => Self::F16(slice_mut(out)?),
            }
        })
    }

    /// The first `len` elements, and the rest.
    fn split(self, len: usize) -> (Self, Self) {
        match self {
            Self::None => (Self::None, Self::None),
            Self::F32(out) => {
                let (a, b) = out.split_at_mut(len);
                (Self::F32(a), Self::F32(b))
            }
            Self::Bf16(out) => {
                let (a, b) = out.split_at_mut(len);
                (Self::Bf16(a), Self::Bf16(b))
            }
            Self::F16(out) => {
                let (a, b) = out.split_at_mut(len);
                (Self::F16(a), Self::F16(b))
            }
        }
    }
}

/// Updates `parts`, which are of one buffer, ascend and do not overlap, in `tier`; `grads` are those of all elements
/// from the first to the last. The
/// parameters go one part after the other into `out`, where there is one.
pub(super) fn update(
    tier: &mut dyn Tier,
    optimizer: &dyn Optimizer,
    parts: &[HostPart],
    grads: &[f32],
    out: Option<(&Tensor, DType)>,
    threads: usize,
) -> Result<()> {
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Ok(()) };
    let span = Span { buffer: first.buffer, range: first.range.start..last.range.end };
    tier.with(&span, &mut |arrays| {
        let mut target = Target::new(out)?;
        let mut rest: Vec<&mut [f32]> = arrays.iter_mut().map(|array| &mut **array).collect();
        let (mut jobs, mut at) = (Vec::with_capacity(parts.len()), span.range.start);
        for part in parts {
            let gap = part.range.start.checked_sub(at).ok_or_else(|| Error::Engine("parts must ascend".into()))?;
            let (mut own, mut after) = (Vec::with_capacity(rest.len()), Vec::with_capacity(rest.len()));
            for array in rest {
                let (here, more) = array.split_at_mut(gap + part.range.len());
                own.push(&mut here[gap..]);
                after.push(more);
            }
            (rest, at) = (after, part.range.end);
            let mut own = own.into_iter();
            let master = own.next().ok_or_else(|| Error::Engine("a tier without masters".into()))?;
            let (here, more) = target.split(part.range.len());
            target = more;
            let grad = &grads[part.range.start - span.range.start..part.range.end - span.range.start];
            jobs.push(Job { part, master, states: own.collect(), grad, out: here });
        }
        run(jobs, optimizer, threads)
    })
}

fn run(mut jobs: Vec<Job<'_>>, optimizer: &dyn Optimizer, threads: usize) -> Result<()> {
    if threads <= 1 || jobs.len() <= 1 {
        return jobs.into_iter().try_for_each(|job| one(job, optimizer));
    }
    let share = jobs.len().div_ceil(threads);
    let mut shares = Vec::new();
    while !jobs.is_empty() {
        let rest = jobs.split_off(share.min(jobs.len()));
        shares.push(std::mem::replace(&mut jobs, rest));
    }
    std::thread::scope(|scope| {
        let spawn = |jobs: Vec<Job<'_>>| jobs.into_iter().try_for_each(|job| one(job, optimizer));
        let threads: Vec<_> = shares.into_iter().map(|share| scope.spawn(move || spawn(share))).collect();
        threads.into_iter().try_for_each(|thread| {
            let panicked = |panic: Box<dyn std::any::Any + Send>| {
                Error::Engine(format!("one of its threads panicked: {}", super::panic_text(&*panic)))
            };
            thread.join().map_err(panicked)?
        })
    })
}

fn one(job: Job<'_>, optimizer: &dyn Optimizer) -> Result<()> {
    let Job { part, master, states, grad, out } = job;
    let Some(hyper) = &part.hyper else {
        round(master, out);
        return Ok(());
    };
    let (out, float) = match out {
        Target::None => (Out::None, None),
        Target::F32(out) => (Out::None, Some(out)),
        Target::Bf16(out) => (Out::Bf16(out), None),
        Target::F16(out) => (Out::F16(out), None),
    };
    let mut slice = HostSlice { master, grad, state: states, out, sums: &[], shape: &[] };
    optimizer.apply(&mut slice, hyper)?;
    if let Some(out) = float {
        out.copy_from_slice(slice.master);
    }
    Ok(())
}

/// The parameters as they are.
fn round(master: &[f32], out: Target<'_>) {
    match out {
        Target::None => {}
        Target::F32(out) => out.copy_from_slice(master),
        Target::Bf16(out) => out.iter_mut().zip(master).for_each(|(out, &x)| *out = bf16_from_f32(x)),
        Target::F16(out) => out.iter_mut().zip(master).for_each(|(out, &x)| *out = f16_from_f32(x)),
    }
}
