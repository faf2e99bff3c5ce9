//! Checks that the update rules share.

use std::fmt::Display;

use zf_core::registry::setting;
use zf_core::stage::{GroupRule, HostSlice, Hyper, Out, TensorSlice};
use zf_core::{Error, Result};

/// Refuses the setting `key` unless `holds`.
pub(crate) fn require(holds: bool, key: &str, rule: &str, found: impl Display) -> anyhow::Result<()> {
    if holds { Ok(()) } else { Err(setting(key, format!("must be {rule}, found {found}"))) }
}

/// Whether a learning rate or decay is usable.
pub(crate) fn rate(x: f64) -> bool {
    x >= 0.0 && x.is_finite()
}

/// What a rate must be.
pub(crate) const RATE: &str = "finite and at least 0";

/// Checks lr, weight_decay and groups.
pub(crate) fn base(lr: f64, weight_decay: f64, groups: &[GroupRule]) -> anyhow::Result<()> {
    require(rate(lr), "lr", RATE, lr)?;
    require(rate(weight_decay), "weight_decay", RATE, weight_decay)?;
    for (index, group) in groups.iter().enumerate() {
        // An empty pattern would be part of every name.
        if group.pattern.is_empty() {
            return Err(setting(
                "groups",
                format!("group {index} has an empty `match`; give a part of a name, or \"*\" for all"),
            ));
        }
        for (key, value) in [("lr", group.lr), ("weight_decay", group.weight_decay)] {
            let Some(value) = value else { continue };
            if !rate(value) {
                return Err(setting(
                    "groups",
                    format!("group {index} (\"{}\"): {key} must be {RATE}, found {value}", group.pattern),
                ));
            }
            if group.frozen {
                return Err(setting(
                    "groups",
                    format!(
                        "group {index} (\"{}\"): {key} has no effect on frozen parameters; remove one of the two",
                        group.pattern
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Checks decay rates of running means.
pub(crate) fn betas(betas: [f64; 2]) -> anyhow::Result<()> {
    betas.into_iter().try_for_each(|beta| require((0.0..1.0).contains(&beta), "betas", "each from 0 to below 1", beta))
}

/// Checks what is added to a denominator.
pub(crate) fn eps(eps: f64) -> anyhow::Result<()> {
    // Below the smallest float32 it would become 0, and 0 / 0 for a parameter that never had a gradient.
    require(
        eps >= f64::from(f32::MIN_POSITIVE) && eps.is_finite(),
        "eps",
        "finite and at least 1.2e-38 (the smallest normal float32)",
        eps,
    )
}

/// Master, gradient, states and output of a host slice.
pub(crate) type Parts<'a, const N: usize> = (&'a mut [f32], &'a [f32], [&'a mut [f32]; N], Out<'a>);

/// Checks that everything in a host slice has one length.
pub(crate) fn lengths<const N: usize>(rule: &str, slice: &HostSlice<'_>) -> Result<()> {
    let n = slice.master.len();
    let out = match &slice.out {
        Out::None => n,
        Out::Bf16(out) => out.len(),
        Out::F16(out) => out.len(),
    };
    states(rule, N, slice.state.len())?;
    let states = slice.state.iter().map(|s| ("state", s.len()));
    let parts = [("grad", slice.grad.len()), ("out", out)].into_iter().chain(states);
    for (what, len) in parts {
        equal(rule, what, n, len)?;
    }
    Ok(())
}

/// Checks a host slice as [`lengths`] does, and splits off its states.
pub(crate) fn host<'s, const N: usize>(rule: &str, slice: &'s mut HostSlice<'_>) -> Result<Parts<'s, N>> {
    lengths::<N>(rule, slice)?;
    let mut state = slice.state.iter_mut();
    let state = std::array::from_fn(|_| &mut **state.next().expect("their number was checked"));
    let out = match &mut slice.out {
        Out::None => Out::None,
        Out::Bf16(out) => Out::Bf16(out),
        Out::F16(out) => Out::F16(out),
    };
    Ok((slice.master, slice.grad, state, out))
}

/// Checks that the tensors of a slice are 1-D float32 of one length, which is returned.
pub(crate) fn tensors<const N: usize>(rule: &str, slice: &TensorSlice<'_>) -> Result<i64> {
    states(rule, N, slice.state.len())?;
    let n = slice.master.size();
    let tensors =
        [("master", slice.master), ("grad", slice.grad)].into_iter().chain(slice.state.iter().map(|s| ("state", s)));
    for (what, tensor) in tensors {
        if tensor.kind() != tch::Kind::Float || tensor.dim() != 1 {
            return Err(Error::Engine(format!(
                "{rule}: {what} must be a 1-D float32 tensor, found {:?} of shape {:?}",
                tensor.kind(),
                tensor.size()
            )));
        }
        equal(rule, what, n[0] as usize, tensor.size()[0] as usize)?;
    }
    if let Some(out) = slice.out {
        equal(rule, "out", n[0] as usize, out.numel())?;
    }
    Ok(n[0])
}

/// Checks the tensors of a slice as [`tensors`] does, and calls `update` for bounded pieces of it, so that what it
/// allocates is bounded too.
pub(crate) fn pieces<const N: usize>(
    rule: &str,
    slice: &TensorSlice<'_>,
    mut update: impl FnMut(&TensorSlice<'_>) -> Result<()>,
) -> Result<()> {
    // On the CPU a piece and its temporaries stay in the cache; elsewhere a piece must outweigh the launches of kernels.
    const HOST: i64 = 1 << 16;
    const DEVICE: i64 = 1 << 22;
    let n = tensors::<N>(rule, slice)?;
    let most = if slice.master.device() == tch::Device::Cpu { HOST } else { DEVICE };
    let mut start = 0;
    while start < n {
        let length = most.min(n - start);
        let piece = |t: &tch::Tensor| t.f_narrow(0, start, length);
        let (master, grad) = (piece(slice.master)?, piece(slice.grad)?);
        let state = slice.state.iter().map(piece).collect::<Result<Vec<_>, _>>()?;
        let out = slice.out.map(piece).transpose()?;
        update(&TensorSlice {
            master: &master,
            grad: &grad,
            state: &state,
            out: out.as_ref(),
            sums: slice.sums,
            shape: slice.shape,
        })?;
        start += length;
    }
    Ok(())
}

/// Checks the count of an update whose rule corrects bias.
pub(crate) fn count(rule: &str, hyper: &Hyper) -> Result<()> {
    if hyper.count == 0 {
        return Err(Error::Engine(format!("{rule}: updates count from 1, found 0")));
    }
    Ok(())
}

fn states(rule: &str, expected: usize, found: usize) -> Result<()> {
    if expected != found {
        return Err(Error::Engine(format!("{rule} has {expected} states, found {found}")));
    }
    Ok(())
}

fn equal(rule: &str, what: &str, master: usize, found: usize) -> Result<()> {
    if master != found {
        return Err(Error::Engine(format!("{rule}: master has {master} elements, {what} {found}")));
    }
    Ok(())
}
