//! AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2).

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::Result;
use zf_core::norm::{Kernel, Level};
use zf_core::registry::{Build, BuildContext};
use zf_core::slots;
use zf_core::stage::{GroupRule, HostSlice, Hyper, Optimizer, OptimizerBase, Out, TensorSlice};

use crate::arithmetic::{power, square_root};
use crate::checks;
use crate::round::Round;

/// Settings of AdamW.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Learning rate, before the schedule.
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of its square, each in [0, 1).
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay of parameters with two or more dimensions, unless groups say otherwise; times lr, apart from the
    /// gradient.
    pub weight_decay: f64,
    /// Other settings for some parameters; the first group that matches a name applies.
    pub groups: Vec<GroupRule>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, groups: Vec::new() }
    }
}

impl AdamWConfig {
    /// The rule.
    ///
    /// # Errors
    /// The first setting out of range, with its key.
    pub fn rule(self) -> anyhow::Result<AdamW> {
        checks::base(self.lr, self.weight_decay, &self.groups)?;
        checks::betas(self.betas)?;
        checks::eps(self.eps)?;
        Ok(AdamW {
            base: OptimizerBase { lr: self.lr, weight_decay: self.weight_decay, groups: self.groups },
            betas: self.betas,
            eps: self.eps,
        })
    }
}

impl Build<slots::Optim> for AdamWConfig {
    fn build(self, _: &BuildContext) -> anyhow::Result<Arc<dyn Optimizer>> {
        Ok(Arc::new(self.rule()?))
    }
}

zf_core::register!(
    slots::Optim,
    "adamw",
    AdamWConfig,
    "AdamW: Adam with decoupled weight decay",
    "lr = 1e-3\nbetas = [0.9, 0.95]\nweight_decay = 0.1\ngroups = [{ match = \"embed\", weight_decay = 0 }]"
);

/// AdamW. States: `exp_avg` (m), `exp_avg_sq` (v).
///
/// For update number n of an element, with the scalars computed in float64 and rounded once to float32, this sequence of
/// single float32 operations, none of them fused:
///
/// ```text
/// g = grad * grad_scale
/// p = p * (1 - lr wd)
/// m = m + (g - m) * (1 - b1)
/// v = v * b2 + (g * g) * (1 - b2)
/// d = sqrt(v) * (1 / sqrt(1 - b2^n)) + eps
/// p = p - (m * (lr / (1 - b1^n))) / d
/// ```
///
/// The bias correction of v is a product with a reciprocal because libtorch divides by a scalar in that way on CUDA.
/// `b^n` is computed by repeated squaring, so that it is the same on every machine.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    base: OptimizerBase,
    betas: [f64; 2],
    eps: f64,
}

impl Optimizer for AdamW {
    fn base(&self) -> &OptimizerBase {
        &self.base
    }

    fn state(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn apply(&self, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.update_host("adamw", Level::detect(), slice, hyper)
    }

    fn apply_tensor(&self, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        self.update_tensor("adamw", slice, hyper)
    }
}

impl AdamW {
    /// [`Optimizer::apply`] with a given instruction set, on behalf of the rule that errors name.
    pub(crate) fn update_host(&self, rule: &str, level: Level, slice: &mut HostSlice<'_>, hyper: &Hyper) -> Result<()> {
        let scalars = self.scalars(rule, hyper)?;
        let (master, grad, [m, v], out) = checks::host::<2>(rule, slice)?;
        // A vector of `()` takes no memory, and its loop writes nothing.
        let mut none = vec![(); master.len()];
        macro_rules! update {
            ($out:expr) => {
                level.run(Update { master, grad, m, v, out: $out, scalars })
            };
        }
        match out {
            Out::None => update!(&mut none[..]),
            Out::Bf16(out) => update!(out),
            Out::F16(out) => update!(out),
        }
        Ok(())
    }

    /// [`Optimizer::apply_tensor`], on behalf of the rule that errors name.
    pub(crate) fn update_tensor(&self, rule: &str, slice: &TensorSlice<'_>, hyper: &Hyper) -> Result<()> {
        let c = self.scalars(rule, hyper)?;
        checks::pieces::<2>(rule, slice, |slice| {
            let mut p = slice.master.shallow_clone();
            let (mut m, mut v) = (slice.state[0].shallow_clone(), slice.state[1].shallow_clone());
            let scalar = |x: f32| tch::Scalar::from(f64::from(x));
            let _guard = tch::no_grad_guard();
            let mut g = slice.grad.f_mul_scalar(scalar(c.grad_scale))?;
            let _ = p.f_mul_scalar_(scalar(c.decay))?;
            let mut t = g.f_sub(&m)?;
            let _ = t.f_mul_scalar_(scalar(c.one_minus_b1))?;
            let _ = m.f_add_(&t)?;
            let _ = v.f_mul_scalar_(scalar(c.b2))?;
            let _ = g.f_square_()?;
            let _ = g.f_mul_scalar_(scalar(c.one_minus_b2))?;
            let _ = v.f_add_(&g)?;
            let mut d = square_root(&v, &g)?;
            let _ = d.f_mul_scalar_(scalar(c.correction2))?;
            let _ = d.f_add_scalar_(scalar(c.eps))?;
            let mut u = m.f_mul_scalar_out(&t, scalar(c.step))?;
            let _ = u.f_div_(&d)?;
            let _ = p.f_sub_(&u)?;
            if let Some(out) = slice.out {
                out.shallow_clone().f_copy_(&p)?;
            }
            Ok(())
        })
    }

    fn scalars(&self, rule: &str, hyper: &Hyper) -> Result<Scalars> {
        checks::count(rule, hyper)?;
        let [b1, b2] = self.betas;
        Ok(Scalars {
            grad_scale: hyper.grad_scale,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            one_minus_b1: (1.0 - b1) as f32,
            b2: b2 as f32,
            one_minus_b2: (1.0 - b2) as f32,
            correction2: (1.0 / (1.0 - power(b2, hyper.count)).sqrt()) as f32,
            eps: self.eps as f32,
            step: (hyper.lr / (1.0 - power(b1, hyper.count))) as f32,
        })
    }
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    decay: f32,
    one_minus_b1: f32,
    b2: f32,
    one_minus_b2: f32,
    correction2: f32,
    eps: f32,
    step: f32,
}

struct Update<'a, R> {
    master: &'a mut [f32],
    grad: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    out: &'a mut [R],
    scalars: Scalars,
}

impl<R: Round> Kernel for Update<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        update(self.master, self.grad, self.m, self.v, self.out, self.scalars);
    }
}

/// The loop. As arguments the slices are known not to overlap, which as fields they are not.
#[inline(always)]
fn update<R: Round>(master: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], out: &mut [R], c: Scalars) {
    let n = master.len();
    let (grad, m, v, out) = (&grad[..n], &mut m[..n], &mut v[..n], &mut out[..n]);
    for i in 0..n {
        let g = grad[i] * c.grad_scale;
        let p = master[i] * c.decay;
        m[i] += (g - m[i]) * c.one_minus_b1;
        v[i] = v[i] * c.b2 + (g * g) * c.one_minus_b2;
        let d = v[i].sqrt() * c.correction2 + c.eps;
        let p = p - (m[i] * c.step) / d;
        master[i] = p;
        out[i] = R::round(p);
    }
}

#[cfg(test)]
mod tests;
