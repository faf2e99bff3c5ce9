//! Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024).

mod orthogonal;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use zf_core::norm::{Kernel, Level};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{GroupRule, HostSlice, Hyper, Needs, Optimizer, OptimizerBase, Out, TensorSlice};
use zf_core::{Error, Result};
use zf_sys::storage;

use crate::checks::{self, RATE, rate, require};
use crate::round::Round;
use crate::{AdamW, AdamWConfig};
use orthogonal::orthogonal;

/// How long the step of a matrix is, beside lr. An orthogonal matrix has singular values of 1, whatever its shape.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MuonScale {
    /// Times `max(1, rows / cols)^0.5`, as the authors' code: lr is a spectral norm.
    #[default]
    Spectral,
    /// Times `0.2 max(rows, cols)^0.5`, so that an element's step is about as large as AdamW's, and lr and weight_decay of
    /// AdamW serve (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).
    Rms,
}

impl MuonScale {
    fn factor(self, rows: i64, cols: i64) -> f64 {
        let (rows, cols) = (rows as f64, cols as f64);
        match self {
            Self::Spectral => (rows / cols).max(1.0).sqrt(),
            Self::Rms => 0.2 * rows.max(cols).sqrt(),
        }
    }
}

/// Settings of Muon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// Learning rate of matrices, before the schedule.
    pub lr: f64,
    /// Nesterov momentum of matrices, in [0, 1).
    pub momentum: f64,
    /// Length of a matrix's step.
    pub scale: MuonScale,
    /// Weight decay of parameters with two or more dimensions, unless groups say otherwise; times lr, apart from the
    /// gradient.
    pub weight_decay: f64,
    /// Learning rate of all other parameters, to which AdamW is applied, as a multiple of that of matrices (also where a
    /// group sets lr). Without it 0.015 with `scale = "spectral"` (3e-4 beside 0.02), 1 with `"rms"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scalar_lr: Option<f64>,
    /// AdamW's decay rates for all other parameters, each in [0, 1).
    pub betas: [f64; 2],
    /// AdamW's addition to the denominator.
    pub eps: f64,
    /// Other settings for some parameters; the first group that matches a name applies.
    pub groups: Vec<GroupRule>,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            lr: 0.02,
            momentum: 0.95,
            scale: MuonScale::default(),
            weight_decay: 0.01,
            scalar_lr: None,
            betas: [0.9, 0.95],
            eps: 1e-10,
            groups: Vec::new(),
        }
    }
}

impl MuonConfig {
    /// The rule.
    ///
    /// # Errors
    /// The first setting out of range, with its key.
    pub fn rule(self) -> anyhow::Result<Muon> {
        checks::base(self.lr, self.weight_decay, &self.groups)?;
        require((0.0..1.0).contains(&self.momentum), "momentum", "from 0 to below 1", self.momentum)?;
        let scalar_lr = self.scalar_lr.unwrap_or(match self.scale {
            MuonScale::Spectral => 0.015,
            MuonScale::Rms => 1.0,
        });
        require(rate(scalar_lr), "scalar_lr", RATE, scalar_lr)?;
        let others = AdamWConfig { betas: self.betas, eps: self.eps, ..Default::default() }.rule()?;
        Ok(Muon {
            base: OptimizerBase { lr: self.lr, weight_decay: self.weight_decay, groups: self.groups },
            momentum: self.momentum,
            scale: self.scale,
            scalar_lr,
            others,
        })
    }
}

impl Build<slots::Optim> for MuonConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Optimizer>> {
        Ok(Arc::new(self.rule()?))
    }
}

zf_core::register!(
    slots::Optim,
    "muon",
    MuonConfig,
    "Muon: orthogonalised momentum for matrices, AdamW for other parameters",
    "lr = 0.02\nmomentum = 0.95\nscale = \"spectral\"\nscalar_lr = 0.015"
);

/// Muon. States: `momentum_buffer` (m) and `exp_avg_sq`, which matrices do not use.
///
/// A parameter of two dimensions is a matrix, whatever its name: embeddings and output heads too, which the authors leave
/// to AdamW. Per matrix, with the scalars computed in float64 and rounded once to float32:
///
/// ```text
/// g = grad * grad_scale
/// m = m + (g - m) * (1 - momentum)
/// u = m + (g - m) * (1 - momentum)                    Nesterov: the mean as it would be after g once more
/// X = u / (|u| + 1e-7)                                Frobenius norm
/// five times:  A = X X^T,  X = (3.4445 I - 4.7750 A + 2.0315 A A) X        X^T X from the right where rows > cols
/// p = p * (1 - lr wd) - X * (lr scale)                see MuonScale
/// ```
///
/// All in float32. The iteration brings every singular value of u near 1 (0.68 to 1.21; those below a five-hundredth
/// of |u| less far); a gradient of zero gives a step of zero. It consists of libtorch's matrix products on the
/// whole matrix, with the operator threads of the calling thread: their number must be the same for the same bits. Beside
/// the matrix it takes memory for two of its size and two of (smaller side)^2. Host and device form share it, so that
/// they give the same bits on the CPU; on other devices the products round in another order.
///
/// Parameters of other dimensions are updated by [`AdamW`] with lr `scalar_lr`, whose `exp_avg` is `momentum_buffer`. They
/// may be given in parts; a matrix must be whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Muon {
    base: OptimizerBase,
    momentum: f64,
    scale: MuonScale,
    scalar_lr: f64,
    others: AdamW,
}

impl Optimizer for Muon {
    fn base(&self) -> &OptimizerBase {
        &self.base
    }

    fn needs(&self) -> Needs {
        Needs::Matrices
    }

    fn state(&self) -> &'static [&'static str] {
        &["momentum_buffer", "exp_avg_sq"]
    }

    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.apply_at(Level::detect(), slice, hyper)
    }

    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        let &[rows, cols] = slice.shape else {
            return self.others.update_tensor("muon", slice, &self.other(hyper));
        };
        whole(rows, cols, checks::tensors::<2>("muon", slice)?)?;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let c = self.scalars(rows, cols, hyper);
        let scalar = |x: f32| tch::Scalar::from(f64::from(x));
        let _guard = tch::no_grad_guard();
        let (mut p, mut m) = (slice.master.shallow_clone(), slice.state[0].shallow_clone());
        let g = slice.grad.f_mul_scalar(scalar(c.grad_scale))?;
        let mut u = g.f_sub(&m)?;
        let _ = u.f_mul_scalar_(scalar(c.fresh))?;
        let _ = m.f_add_(&u)?;
        let mut u = g.f_sub_out(&u, &m)?;
        drop(g);
        let _ = u.f_mul_scalar_(scalar(c.fresh))?;
        let _ = u.f_add_(&m)?;
        let mut step = orthogonal(u.f_view([rows, cols])?)?;
        let _ = step.f_mul_scalar_(scalar(c.step))?;
        let _ = p.f_mul_scalar_(scalar(c.decay))?;
        let _ = p.f_sub_(&step.f_view([-1])?)?;
        if let Some(out) = slice.out {
            out.shallow_clone().f_copy_(&p)?;
        }
        Ok(())
    }
}

impl Muon {
    /// [`Optimizer::apply`] with a given instruction set.
    fn apply_at(&self, level: Level, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        let &[rows, cols] = slice.shape else {
            return self.others.update_host("muon", level, slice, &self.other(hyper));
        };
        let (master, grad, [m, _], out) = checks::host::<2>("muon", slice)?;
        whole(rows, cols, master.len() as i64)?;
        if master.is_empty() {
            return Ok(());
        }
        let scalars = self.scalars(rows, cols, hyper);
        // libtorch's own memory is aligned, whereas a slice may start anywhere; products of matrices may depend on that.
        let u = Tensor::f_empty([rows, cols], (Kind::Float, tch::Device::Cpu))?;
        // SAFETY: nothing else has a handle of the new tensor.
        level.run(Momentum { grad, m, u: unsafe { storage::slice_mut(&u)? }, scalars });
        let step = orthogonal(u)?;
        let step: &[f32] = storage::slice(&step)?;
        let mut none = vec![(); master.len()];
        macro_rules! update {
            ($out:expr) => {
                level.run(Step { master, step, out: $out, scalars })
            };
        }
        match out {
            Out::None => update!(&mut none[..]),
            Out::Bf16(out) => update!(out),
            Out::F16(out) => update!(out),
        }
        Ok(())
    }

    /// The numbers for a parameter that is not a matrix.
    fn other(&self, hyper: &Hyper) -> Hyper {
        Hyper { lr: hyper.lr * self.scalar_lr, ..*hyper }
    }

    fn scalars(&self, rows: i64, cols: i64, hyper: &Hyper) -> Scalars {
        Scalars {
            grad_scale: hyper.grad_scale,
            fresh: (1.0 - self.momentum) as f32,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            step: (hyper.lr * self.scale.factor(rows, cols)) as f32,
        }
    }
}

/// Refuses a slice that is not the whole matrix.
fn whole(rows: i64, cols: i64, found: i64) -> Result<()> {
    if rows.checked_mul(cols) == Some(found) && rows >= 0 {
        return Ok(());
    }
    Err(Error::Engine(format!(
        "muon needs all elements of the {rows} x {cols} matrix at once, found {found}; give whole matrices to a rank"
    )))
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    /// Weight of the gradient in the momentum.
    fresh: f32,
    decay: f32,
    step: f32,
}

/// The new momentum, and Nesterov's direction.
struct Momentum<'a> {
    grad: &'a [f32],
    m: &'a mut [f32],
    u: &'a mut [f32],
    scalars: Scalars,
}

impl Kernel for Momentum<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        momentum(self.grad, self.m, self.u, self.scalars);
    }
}

/// The loop. As arguments the slices are known not to overlap, which as fields they are not.
#[inline(always)]
fn momentum(grad: &[f32], m: &mut [f32], u: &mut [f32], c: Scalars) {
    let n = u.len();
    let (grad, m) = (&grad[..n], &mut m[..n]);
    for i in 0..n {
        let g = grad[i] * c.grad_scale;
        m[i] += (g - m[i]) * c.fresh;
        u[i] = (g - m[i]) * c.fresh + m[i];
    }
}

/// The step along the orthogonal matrix.
struct Step<'a, R> {
    master: &'a mut [f32],
    step: &'a [f32],
    out: &'a mut [R],
    scalars: Scalars,
}

impl<R: Round> Kernel for Step<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        step(self.master, self.step, self.out, self.scalars);
    }
}

#[inline(always)]
fn step<R: Round>(master: &mut [f32], step: &[f32], out: &mut [R], c: Scalars) {
    let n = master.len();
    let (step, out) = (&step[..n], &mut out[..n]);
    for i in 0..n {
        let p = master[i] * c.decay - step[i] * c.step;
        master[i] = p;
        out[i] = R::round(p);
    }
}

#[cfg(test)]
mod tests;
